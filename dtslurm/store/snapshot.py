"""A snapshot of a job's code at its submission: the digest of every file's content."""

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
from dtslurm.presentation.quantities import format_bytes
from dtslurm.store.git_tree import GitFailed, GitMissing, GitState, GitTree
from dtslurm.store.hash_cache import HashCache, Stamp, stamp
from dtslurm.store.ignore_rules import (
    GENERATED_FOLDERS,
    PRIVATE_KEY,
    RunFolders,
    is_made,
    is_secret,
    literal_patterns,
    matcher,
)
from dtslurm.transport.base import Transport

# 128 bits of SHA-256: a collision needs 2**64 files made on purpose, and whoever can put files here already
# runs code as this user. The short digest halves the size of a list of 10,000 files on the wire.
DIGEST_LENGTH = 32
LARGE = 50_000_000
# (files, bytes) above which a snapshot is refused as a mistake: outside git, and in a work tree.
LIMIT_OUTSIDE = (20_000, 2_000_000_000)
LIMIT_IN_GIT = (500_000, 20_000_000_000)

_CHUNK = 1 << 20
_TRIES = 3
_READERS = 4
_NAMES_SHOWN = 5
_SECRETS = "skipped, because they look like secrets"
_RUNS = "skipped, because they are run directories (--code-include adds files of them)"
_PRIVATE_KEY_MARK = "!"  # prefix of the cached digest of a file that begins like a private key


class SnapshotFile(NamedTuple):
    """A file or symbolic link of a snapshot.

    Attributes:
        path: relative to the root, with ``/``; bytes that are not UTF-8 are surrogate-escaped.
        executable: whether its owner may execute it; always false for links.
        size: bytes; 0 for links.
        digest: first 128 bits of the content's SHA-256 in hex; empty for links.
        target: the target of a link: relative inside the tree, absolute outside; None for files.
    """

    path: str
    executable: bool = False
    size: int = 0
    digest: str = ""
    target: str | None = None

    @property
    def key(self) -> str:
        """The name of the content in the objects folder."""
        return self.digest + "x" if self.executable else self.digest


@dataclass(frozen=True)
class Snapshot:
    """A tree of files at the time when it was read.

    Attributes:
        root: top of the git work tree, or the folder itself outside git.
        inside: the folder relative to ``root``, empty for ``root`` itself; a job works in ``code/<inside>``.
        files: sorted by path.
        git: the git state, None outside git.
        runs: the excluded run directories, relative to ``root``.
        notices: messages for the user, one line each.
        problems: reasons why the snapshot must not be sent, one line each; ``files`` may be incomplete then.
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
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)

    def holds(self, path: Path) -> bool:
        """Return whether a file (absolute, or relative to the folder) is part of the snapshot."""
        full_path = os.path.normpath(self.root / self.inside / path)
        return any(os.path.join(self.root, file.path) == full_path for file in self.files)


def take(
    transport_here: Transport,
    folder: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    hash_cache: Path,
) -> Snapshot:
    """Return a snapshot of the tree of ``folder``.

    In a git work tree it contains the tracked files, and the untracked files that are not ignored, including
    those of submodules and of repositories cloned into the tree. Outside git it contains all files below the
    folder except those in `ignore_rules.GENERATED_FOLDERS` and `GENERATED_FILES`. Both exclude files that
    look like secrets, and run directories below the folder or beside it.

    Args:
        transport_here: this machine, for git.
        include: ``.gitignore`` patterns of files to include although they are ignored; a secret is included
            only if a pattern without wildcards names it.
        exclude: patterns of files to exclude; they take precedence.
        hash_cache: folder for cached digests (see `HashCache`).
    """
    folder = folder.resolve()
    notes = _Notes()
    try:
        tree = GitTree.around(transport_here, folder)
    except GitMissing:
        tree = None
        notes.say(
            "git is not installed on this machine: the snapshot includes the files that git would ignore"
        )
    except GitFailed as error:
        return Snapshot(folder, "", (), problems=(f"git cannot list {folder}: {error}",))
    root = tree.root if tree else folder
    relative_folder = folder.relative_to(root).as_posix() if folder != root else ""
    runs = RunFolders(root, relative_folder)
    selector = _FileSelector(include, exclude, notes, runs, in_git=tree is not None)
    limit = LIMIT_IN_GIT if tree else LIMIT_OUTSIDE
    try:
        paths = (
            _list_git_files(tree, "", selector)
            if tree
            else _list_folder_files(root, selector, notes, limit[0])
        )
        entries, total = _stat_files(root, paths, notes, _Repositories(tree, selector))
        if len(entries) > limit[0] or total > limit[1]:
            problem = _too_large_problem(root, entries, total, tree)
            return Snapshot(root, relative_folder, (), notices=notes.lines(), problems=(problem,))
        files = _compute_digests(root, entries, HashCache(hash_cache, root), notes, selector)
        state = tree.state(notes.paths_of(_SECRETS)) if tree else None
    except GitFailed as error:
        return Snapshot(root, relative_folder, (), problems=(f"git cannot list {root}: {error}",))
    problems = notes.problems if files else [*notes.problems, f"{root} contains no files for the snapshot"]
    excluded_runs = tuple(notes.paths_of(_RUNS))
    return Snapshot(root, relative_folder, tuple(files), state, excluded_runs, notes.lines(), tuple(problems))


def _too_large_problem(root: Path, entries: list[_TreeEntry], total: int, tree: GitTree | None) -> str:
    size_text = (
        f"{format_bytes(total)} in {len(entries)} files" if total else f"more than {len(entries) - 1} files"
    )
    bytes_by_top: dict[str, int] = {}
    for entry in entries:
        top_folder = entry.path.partition("/")[0]
        bytes_by_top[top_folder] = bytes_by_top.get(top_folder, 0) + entry.stamp[0]
    largest = sorted(bytes_by_top, key=lambda top_folder: bytes_by_top[top_folder], reverse=True)[:3]
    largest_text = ", ".join(
        f"{top_folder} ({format_bytes(bytes_by_top[top_folder])})" for top_folder in largest
    )
    not_in_git = "" if tree else ", which is not in git"
    return (
        f"a snapshot of {root}{not_in_git}, would contain {size_text}, most of it in {largest_text}: "
        "exclude files that the job does not need, or switch the snapshot off"
    )


@dataclass
class _Notes:
    """Messages for the user, grouped by kind so that a thousand files give one line."""

    problems: list[str] = field(default_factory=list)
    _lines: list[str] = field(default_factory=list)
    _paths_by_kind: dict[str, list[str]] = field(default_factory=dict)

    def say(self, line: str) -> None:
        self._lines.append(line)

    def name(self, kind: str, path: str) -> None:
        self._paths_by_kind.setdefault(kind, []).append(path)

    def paths_of(self, kind: str) -> list[str]:
        return self._paths_by_kind.get(kind, [])

    def lines(self) -> tuple[str, ...]:
        grouped = []
        for kind, paths in self._paths_by_kind.items():
            remainder_text = f" and {len(paths) - _NAMES_SHOWN} more" if len(paths) > _NAMES_SHOWN else ""
            grouped.append(
                f"{kind}: {', '.join(_printable(path) for path in paths[:_NAMES_SHOWN])}{remainder_text}"
            )
        return (*self._lines, *grouped)


def _printable(path: str) -> str:
    return path if path.isprintable() else ascii(path)


class _FileSelector:
    """Selects the files of a snapshot by name."""

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
        self._explicit_paths = literal_patterns(include)
        self._notes = notes
        self._runs = runs
        self._excluded_runs: set[str] = set()
        self._in_git = in_git

    def takes(self, path: str) -> bool:
        """Return whether a file of that name is included; record a note for an excluded secret or run."""
        if self._excluded(path) or (not self._in_git and is_made(path) and not self.included(path)):
            return False
        if (is_secret(path) or self._runs.is_secret(path)) and not self.is_meant(path):
            self._notes.name(_SECRETS, path)
            return False
        return self.included(path) or not self._is_excluded_run(path.rpartition("/")[0])

    def _is_excluded_run(self, folder: str) -> bool:
        run = self._runs.around(folder)
        if run and run not in self._excluded_runs:
            self._excluded_runs.add(run)
            self._notes.name(_RUNS, run)
        return bool(run)

    def is_meant(self, path: str) -> bool:
        """Return whether the user named exactly this file."""
        return path in self._explicit_paths

    def enters(self, folder: str) -> bool:
        """Return whether files below a folder may be included."""
        name = folder.rpartition("/")[2]
        if name == ".git" or self._excluded(f"{folder}/"):
            return False
        return self.wants_ignored or (name not in GENERATED_FOLDERS and not self._is_excluded_run(folder))


def _list_git_files(tree: GitTree, prefix: str, selector: _FileSelector) -> list[str]:
    """Return the selected paths of one work tree, which is at ``prefix`` in the snapshot."""
    paths = tree.listing()
    if selector.wants_ignored:
        paths += [path for path in tree.listing(of_ignored=True) if selector.included(prefix + path)]
    return [path for path in (prefix + path for path in paths) if selector.takes(path)]


class _Repositories:
    """Lists the repositories nested in a work tree, which git reports like files."""

    def __init__(self, tree: GitTree | None, selector: _FileSelector) -> None:
        self._trees = {"": tree} if tree else {}
        self._selector = selector

    def listing(self, path: str) -> list[str]:
        """Return the selected paths of the repository in a folder; none if the folder is not a repository."""
        outer_folder = next(
            (parent for parent in (*_iterate_parents(path), "") if parent in self._trees), None
        )
        if outer_folder is None or path in self._trees or not self._selector.enters(path):
            return []
        nested_tree = self._trees[outer_folder].nested(path[len(outer_folder) :].lstrip("/"))
        if nested_tree is None:
            return []
        self._trees[path] = nested_tree
        return _list_git_files(nested_tree, f"{path}/", self._selector)


def _list_folder_files(root: Path, selector: _FileSelector, notes: _Notes, max_files: int) -> list[str]:
    """Return the selected paths of a folder outside git; links are not followed, so there are no loops."""
    selected_paths: list[str] = []
    folders = [""]
    while folders and len(selected_paths) <= max_files:
        folder = folders.pop()
        try:
            entries = list(os.scandir(root / folder))
        except OSError:
            notes.name("skipped, because they cannot be read", folder or ".")
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                if selector.enters(path):
                    folders.append(path)
            elif selector.takes(path):
                selected_paths.append(path)
    return selected_paths


class _TreeEntry(NamedTuple):
    """The lstat result of a file or link."""

    path: str
    stamp: Stamp
    executable: bool
    target: str | None = None


def _stat_files(
    root: Path, paths: Sequence[str], notes: _Notes, repositories: _Repositories
) -> tuple[list[_TreeEntry], int]:
    """Return the entries of all paths, and their total size in bytes.

    Deleted files, files beyond a link, and special files are excluded.
    """
    entries: dict[str, _TreeEntry] = {}
    pending = [path.rstrip("/") for path in reversed(paths)]
    root_prefix = f"{root}/"
    while pending:
        path = pending.pop()
        try:
            status = os.lstat(root_prefix + path)
            if stat.S_ISREG(status.st_mode):
                entries[path] = _TreeEntry(path, stamp(status), bool(status.st_mode & stat.S_IXUSR))
            elif stat.S_ISLNK(status.st_mode):
                entries[path] = _read_link(root, path, notes)
            elif stat.S_ISDIR(status.st_mode):
                pending += repositories.listing(path)
            else:
                notes.name("skipped, because they are neither files nor links", path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # a tracked file that was deleted or replaced
        except OSError as error:
            notes.name(f"skipped ({error.strerror})", path)
    links = {path for path, entry in entries.items() if entry.target is not None}
    included_entries = [
        entries[path] for path in sorted(entries) if not links or links.isdisjoint(_iterate_parents(path))
    ]
    total = 0
    for path, (size, *_), _, _ in included_entries:
        total += size
        if size > LARGE:
            notes.name("large, and included", f"{path} ({format_bytes(size)})")
    return included_entries, total


def _iterate_parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _read_link(root: Path, path: str, notes: _Notes) -> _TreeEntry:
    """Return a link that points to the same path inside the snapshot, or to the absolute path outside."""
    target = os.readlink(f"{root}/{path}")
    folder = os.path.join(root, os.path.dirname(path))
    full_target = os.path.normpath(os.path.join(folder, target))
    relative_target = os.path.relpath(full_target, root)
    if relative_target == ".." or relative_target.startswith("../"):
        notes.name("links to targets outside the tree, which are not frozen", f"{path} -> {full_target}")
        target = full_target
    elif os.path.isabs(target):
        target = os.path.relpath(full_target, folder)
    return _TreeEntry(path, (0, 0, 0, 0), executable=False, target=target)


def _compute_digests(
    root: Path, entries_found: Sequence[_TreeEntry], cache: HashCache, notes: _Notes, selector: _FileSelector
) -> list[SnapshotFile]:
    """Return the files with their digests; only changed files are read."""
    digests = {
        path: cache.get(path, file_stamp) for path, file_stamp, _, target in entries_found if target is None
    }
    to_read = [entry for entry in entries_found if entry.target is None and digests[entry.path] is None]
    entries = {entry.path: entry for entry in entries_found}
    for entry, reading in _read_all(root, to_read):
        if isinstance(reading, str):
            notes.name(reading, entry.path)
        elif reading is not None:
            file_stamp, digest, read_at = reading
            cache.put(entry.path, file_stamp, digest, read_at)
            digests[entry.path] = digest
            entries[entry.path] = _TreeEntry(entry.path, file_stamp, entry.executable)
    cache.save()
    files = []
    for path, entry in entries.items():
        digest = digests.get(path) or ""
        if entry.target is not None:
            files.append(SnapshotFile(path, target=entry.target))
        elif digest.startswith(_PRIVATE_KEY_MARK) and not selector.is_meant(path):
            notes.name(_SECRETS, path)
        elif digest:
            files.append(
                SnapshotFile(path, entry.executable, entry.stamp[0], digest.removeprefix(_PRIVATE_KEY_MARK))
            )
    return files


_Read = tuple[Stamp, str, int]


def _read_all(root: Path, files: Sequence[_TreeEntry]) -> Iterator[tuple[_TreeEntry, _Read | str | None]]:
    read_entry: Callable[[_TreeEntry], _Read | str | None] = lambda entry: _read(f"{root}/{entry.path}")  # noqa: E731
    if len(files) < 8:
        yield from ((entry, read_entry(entry)) for entry in files)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_READERS) as pool:
        yield from zip(files, pool.map(read_entry, files), strict=True)


def _read(path: str) -> _Read | str | None:
    """Return (stamp, digest, time of reading), None if the file is deleted, or why it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"skipped ({error.strerror})"
    with contextlib.closing(os.fdopen(fd, "rb", buffering=0)) as file:
        for _ in range(_TRIES):
            read_at = time.time_ns()
            file_stamp = stamp(os.fstat(fd))
            file.seek(0)
            try:
                digest = _digest(file.read, file_stamp[0])
            except OSError as error:
                return f"skipped ({error.strerror})"
            if stamp(os.fstat(fd)) == file_stamp:
                return file_stamp, digest, read_at
    return "skipped, because they change continuously"


def _digest(read_chunk: Callable[[int], bytes], size: int) -> str:
    first_chunk = read_chunk(min(_CHUNK, size + 1))
    digest = hashlib.sha256(first_chunk)
    chunk = first_chunk
    while chunk:
        chunk = read_chunk(_CHUNK)
        digest.update(chunk)
    prefix = _PRIVATE_KEY_MARK if PRIVATE_KEY.match(first_chunk) else ""
    return prefix + digest.hexdigest()[:DIGEST_LENGTH]
