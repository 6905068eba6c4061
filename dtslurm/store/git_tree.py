"""What git says of a work tree: its files, its commit, what differs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from dtslurm.errors import TransportError
from dtslurm.model.values import dataclass
from dtslurm.store.ignore_rules import SECRET_FOLDERS, SECRETS
from dtslurm.transport.base import Completed, Transport

DIFF_LIMIT = 1 << 20
_TIMEOUT_S = 120.0
# A hook's or a prompt's variables must not send git elsewhere; nor shall it run what a repository configures:
# no hook, no monitor, no transport (git fetches what a partial clone lacks), no repository without a `.git`.
_GIT = (
    "env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE", "-u", "GIT_PREFIX",
    "-u", "GIT_CONFIG_COUNT", "-u", "GIT_EXTERNAL_DIFF", "GIT_ALLOW_PROTOCOL=none", "GIT_NO_LAZY_FETCH=1",
    "git", "--no-optional-locks", "-c", "core.fsmonitor=", "-c", "core.hooksPath=/dev/null",
    "-c", "core.quotePath=false", "-c", "safe.bareRepository=explicit",
)  # fmt: skip
# What is within a submodule is asked of its own work tree, without the programs that it configures.
_NO_SUBMODULES = "--ignore-submodules=dirty"


@dataclass(frozen=True)
class GitState:
    """Where a work tree stands.

    Attributes:
        commit: None before the first.
        branch: None if detached.
        dirty: whether tracked files differ from the commit.
        diff: the difference as ``git diff HEAD`` prints it, without files that hold secrets; at most 1 MiB.
        diff_cut: whether it was cut off.
    """

    commit: str | None
    branch: str | None
    dirty: bool
    diff: bytes = b""
    diff_cut: bool = False


class GitFailed(Exception):
    """git is there and the folder is in a work tree, but git does not serve; says why."""


class GitMissing(GitFailed):
    """There is no git on this machine."""


class GitTree:
    """One work tree, asked through git's own commands."""

    def __init__(self, transport: Transport, root: Path) -> None:
        self._transport = transport
        self.root = root
        self._no_filters: list[str] | None = None

    @classmethod
    def around(cls, transport: Transport, folder: Path) -> GitTree | None:
        """Return the work tree that ``folder`` is part of; None outside git, or if the tree ignores it.

        Raises:
            GitFailed: there is one, but git cannot be used.
        """
        if not any((above / ".git").exists() for above in (folder, *folder.parents)):
            return None  # GIT_DIR is not followed: what counts is where the files are
        found = _git(transport, folder, "rev-parse", "--show-toplevel")
        if not found.ok:
            raise GitFailed((found.stderr.strip() or f"git ended with code {found.code}").splitlines()[0])
        root = Path(found.stdout.removesuffix("\n"))
        if root != folder and _git(transport, folder, "check-ignore", "-q", "--", str(folder)).ok:
            return None
        return cls(transport, root)

    def listing(self, *, ignored: bool = False) -> list[str]:
        """Return what is tracked, and untracked but not ignored (or what is ignored), relative to the root.

        A path may be gone by now, lie beyond a link, or be a folder: a repository of its own (see `nested`).

        Raises:
            GitFailed: git said no.
        """
        found = _git(self._transport, self.root, *_ls_files(ignored=ignored))
        if not found.ok:
            raise GitFailed((found.stderr.strip() or "git ls-files failed").splitlines()[-1])
        return [path for path in dict.fromkeys(found.stdout.split("\0")) if path]

    def ignored(self) -> list[str]:
        """Return what is ignored, relative to the root: files, and folders (without their content) as ``x/``.

        Raises:
            GitFailed: git said no.
        """
        found = _git(self._transport, self.root, *_ls_files(ignored=True), "--directory")
        if not found.ok:
            raise GitFailed((found.stderr.strip() or "git ls-files failed").splitlines()[-1])
        return [path for path in found.stdout.split("\0") if path]

    def nested(self, path: str) -> GitTree | None:
        """Return the work tree in a folder that `listing` names: a submodule, or a repository cloned there.

        None for a submodule that was not fetched, and for one that ``git worktree`` made.
        """
        mark = self.root / path / ".git"
        try:
            if mark.is_file() and b"/worktrees/" in mark.read_bytes():
                return None
        except OSError:
            return None
        return GitTree(self._transport, self.root / path) if mark.exists() else None

    def state(self, hidden: Sequence[str] = ()) -> GitState:
        """Return commit, branch and the difference; ``hidden`` files, too, are kept out of it."""
        words = ["status", "--porcelain=v2", "--branch", "--untracked-files=no", _NO_SUBMODULES]
        found = _git(self._transport, self.root, *self._without_filters(), *words)
        lines = found.stdout.splitlines()
        head = dict(
            line[2:].split(" ", 1) for line in lines if line.startswith("# branch.") and line.count(" ") > 1
        )
        commit, branch = head.get("branch.oid"), head.get("branch.head")
        dirty = any(not line.startswith("#") for line in lines)
        commit = None if commit == "(initial)" else commit
        diff, cut = self._diff(hidden) if dirty and commit else (b"", False)
        return GitState(commit, None if branch == "(detached)" else branch, dirty, diff, cut)

    def _diff(self, hidden: Sequence[str]) -> tuple[bytes, bool]:
        names = [f":(top,exclude,icase,glob)**/{name}" for name in SECRETS]
        names += [f":(top,exclude,icase,glob)**/{name}/**" for name in SECRET_FOLDERS]
        names += [f":(top,exclude,literal){path}" for path in hidden]
        words = ["diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", _NO_SUBMODULES]
        words = [*self._without_filters(), *words, "--", ":/", *names]
        diff = b""
        with (
            contextlib.suppress(TransportError),
            self._transport.stream([*_GIT, "-C", str(self.root), *words]) as chunks,
        ):
            for chunk in chunks:
                diff += chunk
                if len(diff) > DIFF_LIMIT:
                    return diff[:DIFF_LIMIT], True
        return diff, False

    def _without_filters(self) -> list[str]:
        """Return options that take away the filters that the repository, not its user, configures.

        git runs a filter on each file that may have changed.

        Raises:
            GitFailed: one has a name that cannot be taken away.
        """
        if self._no_filters is None:
            asked = ("--null", "--name-only", "--get-regexp", r"^filter\.")
            found = _git(self._transport, self.root, "config", "--show-scope", *asked)
            listed = found.stdout.split("\0")
            keys = [key for scope, key in zip(listed[::2], listed[1::2], strict=False) if scope not in _USERS]
            if found.code == _UNKNOWN_OPTION:  # before 2.26 nothing tells whose a filter is
                found = _git(self._transport, self.root, "config", *asked)
                keys = [key for key in found.stdout.split("\0") if key]
            if odd := [key for key in keys if "=" in key]:
                raise GitFailed(f"the repository configures a filter with a = in its name: {odd[0]}")
            self._no_filters = [word for key in dict.fromkeys(keys) for word in ("-c", f"{key}=")]
        return self._no_filters


# Whose configuration it is: the scopes of which no repository takes part.
_USERS = frozenset({"system", "global", "command"})
_UNKNOWN_OPTION = 129


def _ls_files(*, ignored: bool) -> list[str]:
    kinds = ["--others", "--ignored"] if ignored else ["--cached", "--others"]
    return ["ls-files", "-z", *kinds, "--exclude-standard"]


def _git(transport: Transport, folder: Path, *words: str) -> Completed:
    try:
        found = transport.run([*_GIT, "-C", str(folder), *words], timeout=_TIMEOUT_S)
    except TransportError as error:
        raise GitFailed(error.message) from error
    if found.code == 127:  # env's word
        raise GitMissing("git is not installed here")
    return found
