"""What a job's code is at the moment of its submission: every file by the digest of its content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

from dtslurm.model.values import dataclass
from dtslurm.store.git_tree import GitFailed, GitMissing, GitState, GitTree
from dtslurm.store.hash_cache import HashCache, Stamp, stamp
from dtslurm.store.ignore_rules import (
    MADE_FOLDERS,
    PRIVATE_KEY,
    RunFolders,
    is_made,
    is_secret,
    matcher,
    named_outright,
)
from dtslurm.transport.base import Transport
from dtslurm.transport.disk import size as bytes_in_words

# 128 bits of SHA-256: 2**64 files would have to be made on purpose for two to collide, and who can put files
# here runs code as this user anyway; it halves what a list of 10,000 files costs on the wire.
DIGEST_LENGTH = 32
LARGE = 50_000_000
# (files, bytes) above which a snapshot is a mistake rather than code: outside git, and in a work tree.
LIMIT_OUTSIDE = (20_000, 2_000_000_000)
LIMIT_IN_GIT = (500_000, 20_000_000_000)

_CHUNK = 1 << 20
_TRIES = 3
_READERS = 4
_NAMES_SHOWN = 5
_SECRETS = "left out, they look like secrets"
_RUNS = "left out, they are run directories (--code-include takes files of them along)"
_KEY_INSIDE = "!"  # before the remembered digest of a file that begins as private keys do


class SnapshotFile(NamedTuple):
    """One file or symbolic link.

    Attributes:
        path: relative to the root, with ``/``; bytes that are not UTF-8 are surrogate-escaped.
        executable: whether its user may execute it; always false for links.
        size: bytes; 0 for links.
        digest: first 128 bits of the content's SHA-256 in hex; empty for links.
        target: where a link leads: relative inside the tree, absolute outside; None for files.
    """

    path: str
    executable: bool = False
    size: int = 0
    digest: str = ""
    target: str | None = None

    @property
    def key(self) -> str:
        """The name of its content among the objects."""
        return self.digest + "x" if self.executable else self.digest


@dataclass(frozen=True)
class Snapshot:
    """A tree of files as it was when it was read.

    Attributes:
        root: top of the git work tree, or the folder itself outside git.
        inside: the folder relative to ``root``, empty for ``root`` itself; a job works in ``code/<inside>``.
        files: sorted by path.
        git: None outside git.
        runs: run directories that were left out, relative to ``root``.
        notices: what the user should know, one line each.
        problems: why it must not be sent, one line each; ``files`` may be incomplete then.
    """

    root: Path
    inside: str
    files: tuple[SnapshotFile, ...]
    git: GitState | None = None
    runs: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.files)

    def holds(self, path: Path) -> bool:
        """Return whether a file (absolute, or relative to the folder) is part of it."""
        full = os.path.normpath(self.root / self.inside / path)
        return any(os.path.join(self.root, one.path) == full for one in self.files)


def take(
    transport_here: Transport,
    folder: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    hash_cache: Path,
) -> Snapshot:
    """Return what ``folder``'s tree holds now.

    In a git work tree that is all of what git tracks plus what it neither tracks nor ignores, submodules and
    repositories cloned into it included. Outside git it is everything below the folder but what
    `left_out.MADE_FOLDERS` and `MADE_FILES` list. Files that look like secrets are left out of both, and
    so are run directories below the folder or beside it.

    Args:
        transport_here: this machine, for git.
        include: patterns as in ``.gitignore`` of files to take although they are ignored; a secret is taken
            only if a pattern without wildcards names it.
        exclude: patterns of files to leave out; they win.
        hash_cache: folder for remembered digests (see `HashCache`).
    """
    folder = folder.resolve()
    notes = _Notes()
    try:
        tree = GitTree.around(transport_here, folder)
    except GitMissing:
        tree = None
        notes.say("git is not installed here: what it ignores is part of the snapshot")
    except GitFailed as error:
        return Snapshot(folder, "", (), problems=(f"git cannot list {folder}: {error}",))
    root = tree.root if tree else folder
    inside = folder.relative_to(root).as_posix() if folder != root else ""
    runs = RunFolders(root, inside)
    sieve = _FileSelector(include, exclude, notes, runs, in_git=tree is not None)
    limit = LIMIT_IN_GIT if tree else LIMIT_OUTSIDE
    try:
        listed = _of_git(tree, "", sieve) if tree else _below(root, sieve, notes, limit[0])
        found, total = _look(root, listed, notes, _Repositories(tree, sieve))
        if len(found) > limit[0] or total > limit[1]:
            too_much = _too_much(root, found, total, tree)
            return Snapshot(root, inside, (), notices=notes.lines(), problems=(too_much,))
        files = _digests(root, found, HashCache(hash_cache, root), notes, sieve)
        state = tree.state(notes.named(_SECRETS)) if tree else None
    except GitFailed as error:
        return Snapshot(root, inside, (), problems=(f"git cannot list {root}: {error}",))
    problems = notes.problems if files else [*notes.problems, f"there is nothing to take along in {root}"]
    left = tuple(notes.named(_RUNS))
    return Snapshot(root, inside, tuple(files), state, left, notes.lines(), tuple(problems))


def _too_much(root: Path, found: list[_Found], total: int, tree: GitTree | None) -> str:
    amount = (
        f"{bytes_in_words(total)} in {len(found)} files" if total else f"more than {len(found) - 1} files"
    )
    by_top: dict[str, int] = {}
    for one in found:
        top = one.path.partition("/")[0]
        by_top[top] = by_top.get(top, 0) + one.stamp[0]
    largest = sorted(by_top, key=lambda top: by_top[top], reverse=True)[:3]
    shown = ", ".join(f"{top} ({bytes_in_words(by_top[top])})" for top in largest)
    why = "" if tree else ", which is not in git"
    return (
        f"a snapshot of {root}{why}, would take along {amount}, most in {shown}: "
        "exclude what the job does not need, or switch the snapshot off"
    )


@dataclass
class _Notes:
    """What the user should know, gathered by kind so that a thousand files make one line."""

    problems: list[str] = field(default_factory=list)
    _lines: list[str] = field(default_factory=list)
    _named: dict[str, list[str]] = field(default_factory=dict)

    def say(self, line: str) -> None:
        self._lines.append(line)

    def name(self, kind: str, path: str) -> None:
        self._named.setdefault(kind, []).append(path)

    def named(self, kind: str) -> list[str]:
        return self._named.get(kind, [])

    def lines(self) -> tuple[str, ...]:
        grouped = []
        for kind, paths in self._named.items():
            more = f" and {len(paths) - _NAMES_SHOWN} more" if len(paths) > _NAMES_SHOWN else ""
            grouped.append(f"{kind}: {', '.join(_printable(path) for path in paths[:_NAMES_SHOWN])}{more}")
        return (*self._lines, *grouped)


def _printable(path: str) -> str:
    return path if path.isprintable() else ascii(path)


class _FileSelector:
    """Decides by name what is taken."""

    def __init__(
        self,
        include: Sequence[str],
        exclude: Sequence[str],
        notes: _Notes,
        runs: RunFolders,
        *,
        in_git: bool,
    ) -> None:
        self.wants_ignored = bool(include)
        self.included = matcher(include)
        self._excluded = matcher(exclude)
        self._meant = named_outright(include)
        self._notes = notes
        self._runs = runs
        self._left_runs: set[str] = set()
        self._in_git = in_git

    def takes(self, path: str) -> bool:
        """Return whether a file of that name is taken; a secret or run left out is noted."""
        if self._excluded(path) or (not self._in_git and is_made(path) and not self.included(path)):
            return False
        if (is_secret(path) or self._runs.is_secret(path)) and not self.is_meant(path):
            self._notes.name(_SECRETS, path)
            return False
        return self.included(path) or not self._is_left_run(path.rpartition("/")[0])

    def _is_left_run(self, folder: str) -> bool:
        run = self._runs.around(folder)
        if run and run not in self._left_runs:
            self._left_runs.add(run)
            self._notes.name(_RUNS, run)
        return bool(run)

    def is_meant(self, path: str) -> bool:
        """Return whether the user asked for just this file."""
        return path in self._meant

    def enters(self, folder: str) -> bool:
        """Return whether anything below a folder may be taken."""
        name = folder.rpartition("/")[2]
        if name == ".git" or self._excluded(f"{folder}/"):
            return False
        return self.wants_ignored or (name not in MADE_FOLDERS and not self._is_left_run(folder))


def _of_git(tree: GitTree, prefix: str, sieve: _FileSelector) -> list[str]:
    """Return the paths to take of one work tree, which lies at ``prefix`` of the snapshot."""
    listed = tree.listing()
    if sieve.wants_ignored:
        listed += [one for one in tree.listing(ignored=True) if sieve.included(prefix + one)]
    return [path for path in (prefix + one for one in listed) if sieve.takes(path)]


class _Repositories:
    """Lists the repositories inside a work tree, which git names as if they were files."""

    def __init__(self, tree: GitTree | None, sieve: _FileSelector) -> None:
        self._trees = {"": tree} if tree else {}
        self._sieve = sieve

    def listing(self, path: str) -> list[str]:
        """Return the paths to take of the repository in a folder, none if it is not one."""
        outer = next((above for above in (*_above(path), "") if above in self._trees), None)
        if outer is None or path in self._trees or not self._sieve.enters(path):
            return []
        nested = self._trees[outer].nested(path[len(outer) :].lstrip("/"))
        if nested is None:
            return []
        self._trees[path] = nested
        return _of_git(nested, f"{path}/", self._sieve)


def _below(root: Path, sieve: _FileSelector, notes: _Notes, most: int) -> list[str]:
    """Return the paths to take of a folder outside git; links are not followed, so no loop is endless."""
    taken: list[str] = []
    folders = [""]
    while folders and len(taken) <= most:
        folder = folders.pop()
        try:
            entries = list(os.scandir(root / folder))
        except OSError:
            notes.name("left out, they cannot be read", folder or ".")
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                if sieve.enters(path):
                    folders.append(path)
            elif sieve.takes(path):
                taken.append(path)
    return taken


class _Found(NamedTuple):
    """A file or link as it was when it was looked at."""

    path: str
    stamp: Stamp
    executable: bool
    target: str | None = None


def _look(
    root: Path, listed: Sequence[str], notes: _Notes, repositories: _Repositories
) -> tuple[list[_Found], int]:
    """Look at every path; what is gone, beyond a link, or neither file nor link is left out."""
    found: dict[str, _Found] = {}
    waiting = [path.rstrip("/") for path in reversed(listed)]
    top = f"{root}/"
    while waiting:
        path = waiting.pop()
        try:
            now = os.lstat(top + path)
            if stat.S_ISREG(now.st_mode):
                found[path] = _Found(path, stamp(now), bool(now.st_mode & stat.S_IXUSR))
            elif stat.S_ISLNK(now.st_mode):
                found[path] = _link(root, path, notes)
            elif stat.S_ISDIR(now.st_mode):
                waiting += repositories.listing(path)
            else:
                notes.name("left out, neither files nor links", path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # deleted though tracked, or replaced
        except OSError as error:
            notes.name(f"left out ({error.strerror})", path)
    links = {path for path, one in found.items() if one.target is not None}
    kept = [found[path] for path in sorted(found) if not links or links.isdisjoint(_above(path))]
    total = 0
    for path, (size, *_), _, _ in kept:
        total += size
        if size > LARGE:
            notes.name("large, and taken along", f"{path} ({bytes_in_words(size)})")
    return kept, total


def _above(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _link(root: Path, path: str, notes: _Notes) -> _Found:
    """Return a link that leads to the same place inside the snapshot, or to the real place outside."""
    target = os.readlink(f"{root}/{path}")
    base = os.path.join(root, os.path.dirname(path))
    full = os.path.normpath(os.path.join(base, target))
    inner = os.path.relpath(full, root)
    if inner == ".." or inner.startswith("../"):
        notes.name("links that lead out of the tree, where later changes are seen", f"{path} -> {full}")
        target = full
    elif os.path.isabs(target):
        target = os.path.relpath(full, base)
    return _Found(path, (0, 0, 0, 0), executable=False, target=target)


def _digests(
    root: Path, found: Sequence[_Found], cache: HashCache, notes: _Notes, sieve: _FileSelector
) -> list[SnapshotFile]:
    """Return the files with their digests; only what changed is read."""
    known = {path: cache.get(path, now) for path, now, _, target in found if target is None}
    unknown = [one for one in found if one.target is None and known[one.path] is None]
    fresh = {one.path: one for one in found}
    for one, result in _read_all(root, unknown):
        if isinstance(result, str):
            notes.name(result, one.path)
        elif result is not None:
            now, digest, read_at = result
            cache.put(one.path, now, digest, read_at)
            known[one.path] = digest
            fresh[one.path] = _Found(one.path, now, one.executable)
    cache.save()
    files = []
    for path, one in fresh.items():
        digest = known.get(path) or ""
        if one.target is not None:
            files.append(SnapshotFile(path, target=one.target))
        elif digest.startswith(_KEY_INSIDE) and not sieve.is_meant(path):
            notes.name(_SECRETS, path)
        elif digest:
            files.append(SnapshotFile(path, one.executable, one.stamp[0], digest.removeprefix(_KEY_INSIDE)))
    return files


_Read = tuple[Stamp, str, int]


def _read_all(root: Path, files: Sequence[_Found]) -> Iterator[tuple[_Found, _Read | str | None]]:
    read: Callable[[_Found], _Read | str | None] = lambda one: _read(f"{root}/{one.path}")  # noqa: E731
    if len(files) < 8:
        yield from ((one, read(one)) for one in files)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_READERS) as pool:
        yield from zip(files, pool.map(read, files), strict=True)


def _read(path: str) -> _Read | str | None:
    """Return (stamp, digest, time of reading); what to say of it if it cannot be read, None if it is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"left out ({error.strerror})"
    with contextlib.closing(os.fdopen(handle, "rb", buffering=0)) as file:
        for _ in range(_TRIES):
            read_at = time.time_ns()
            before = stamp(os.fstat(handle))
            file.seek(0)
            try:
                digest = _digest(file.read, before[0])
            except OSError as error:
                return f"left out ({error.strerror})"
            if stamp(os.fstat(handle)) == before:
                return before, digest, read_at
    return "left out, they change all the time"


def _digest(read: Callable[[int], bytes], size: int) -> str:
    first = read(min(_CHUNK, size + 1))
    digest = hashlib.sha256(first)
    part = first
    while part:
        part = read(_CHUNK)
        digest.update(part)
    mark = _KEY_INSIDE if PRIVATE_KEY.match(first) else ""
    return mark + digest.hexdigest()[:DIGEST_LENGTH]
