"""A git work tree as git reports it: its files, its commit, and its differences."""

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
# Variables of a git hook or a shell prompt must not redirect git. git must not run programs that the
# repository configures: no hooks, no file system monitor, no transport (git would fetch the missing objects
# of a partial clone), no repository without a `.git`.
_GIT_COMMAND = (
    "env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE", "-u", "GIT_PREFIX",
    "-u", "GIT_CONFIG_COUNT", "-u", "GIT_EXTERNAL_DIFF", "GIT_ALLOW_PROTOCOL=none", "GIT_NO_LAZY_FETCH=1",
    "git", "--no-optional-locks", "-c", "core.fsmonitor=", "-c", "core.hooksPath=/dev/null",
    "-c", "core.quotePath=false", "-c", "safe.bareRepository=explicit",
)  # fmt: skip
# Changes within a submodule are read from its own work tree, without the programs that it configures.
_NO_SUBMODULES = "--ignore-submodules=dirty"


@dataclass(frozen=True)
class GitState:
    """The state of a work tree.

    Attributes:
        commit: None before the first commit.
        branch: None if HEAD is detached.
        dirty: whether tracked files differ from the commit.
        diff: the output of ``git diff HEAD`` without files that hold secrets; at most 1 MiB.
        diff_cut: whether ``diff`` was truncated.
    """

    commit: str | None
    branch: str | None
    dirty: bool
    diff: bytes = b""
    diff_cut: bool = False


class GitFailed(Exception):
    """git is installed and the folder is in a work tree, but git failed; the message gives the reason."""


class GitMissing(GitFailed):
    """git is not installed on this machine."""


class GitTree:
    """A work tree, queried with git's commands."""

    def __init__(self, transport: Transport, root: Path) -> None:
        self._transport = transport
        self.root = root
        self._filter_options: list[str] | None = None

    @classmethod
    def around(cls, transport: Transport, folder: Path) -> GitTree | None:
        """Return the work tree that contains ``folder``; None outside git, or if the work tree ignores the
        folder.

        Raises:
            GitFailed: there is a work tree, but git failed.
        """
        if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
            return None  # GIT_DIR is ignored: the location of the files decides
        result = _run_git(transport, folder, "rev-parse", "--show-toplevel")
        if not result.ok:
            raise GitFailed((result.stderr.strip() or f"git ended with code {result.code}").splitlines()[0])
        root = Path(result.stdout.removesuffix("\n"))
        if root != folder and _run_git(transport, folder, "check-ignore", "-q", "--", str(folder)).ok:
            return None
        return cls(transport, root)

    def listing(self, *, of_ignored: bool = False) -> list[str]:
        """Return the tracked and the untracked files (or the ignored ones), relative to the root.

        A path may be deleted, be reached through a symbolic link, or be a folder: a nested repository (see
        `nested`).

        Raises:
            GitFailed: git failed.
        """
        result = _run_git(self._transport, self.root, *_ls_files_args(of_ignored=of_ignored))
        if not result.ok:
            raise GitFailed((result.stderr.strip() or "git ls-files failed").splitlines()[-1])
        return [path for path in dict.fromkeys(result.stdout.split("\0")) if path]

    def ignored(self) -> list[str]:
        """Return the ignored files, and ignored folders (without their content) as ``x/``.

        The paths are relative to the root.

        Raises:
            GitFailed: git failed.
        """
        result = _run_git(self._transport, self.root, *_ls_files_args(of_ignored=True), "--directory")
        if not result.ok:
            raise GitFailed((result.stderr.strip() or "git ls-files failed").splitlines()[-1])
        return [path for path in result.stdout.split("\0") if path]

    def nested(self, path: str) -> GitTree | None:
        """Return the work tree in a folder that `listing` returned: a submodule or a nested clone.

        Return None for a submodule that is not checked out, and for a work tree of ``git worktree``.
        """
        git_path = self.root / path / ".git"
        try:
            if git_path.is_file() and b"/worktrees/" in git_path.read_bytes():
                return None
        except OSError:
            return None
        return GitTree(self._transport, self.root / path) if git_path.exists() else None

    def state(self, hidden_paths: Sequence[str] = ()) -> GitState:
        """Return the commit, branch and diff; the diff excludes ``hidden_paths`` too."""
        command = ["status", "--porcelain=v2", "--branch", "--untracked-files=no", _NO_SUBMODULES]
        result = _run_git(self._transport, self.root, *self._disable_filters(), *command)
        lines = result.stdout.splitlines()
        branch_fields = dict(
            line[2:].split(" ", 1) for line in lines if line.startswith("# branch.") and line.count(" ") > 1
        )
        commit, branch = branch_fields.get("branch.oid"), branch_fields.get("branch.head")
        is_dirty = any(not line.startswith("#") for line in lines)
        commit = None if commit == "(initial)" else commit
        diff, is_truncated = self._read_diff(hidden_paths) if is_dirty and commit else (b"", False)
        return GitState(commit, None if branch == "(detached)" else branch, is_dirty, diff, is_truncated)

    def _read_diff(self, hidden_paths: Sequence[str]) -> tuple[bytes, bool]:
        pathspecs = [f":(top,exclude,icase,glob)**/{name}" for name in SECRETS]
        pathspecs += [f":(top,exclude,icase,glob)**/{name}/**" for name in SECRET_FOLDERS]
        pathspecs += [f":(top,exclude,literal){path}" for path in hidden_paths]
        command = ["diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", _NO_SUBMODULES]
        command = [*self._disable_filters(), *command, "--", ":/", *pathspecs]
        diff = b""
        with (
            contextlib.suppress(TransportError),
            self._transport.stream([*_GIT_COMMAND, "-C", str(self.root), *command]) as chunks,
        ):
            for chunk in chunks:
                diff += chunk
                if len(diff) > DIFF_LIMIT:
                    return diff[:DIFF_LIMIT], True
        return diff, False

    def _disable_filters(self) -> list[str]:
        """Return options that disable the filters of the repository's configuration, but not the user's.

        git runs a filter on each file that may have changed.

        Raises:
            GitFailed: a filter's name contains ``=``, so that no option can disable the filter.
        """
        if self._filter_options is None:
            query = ("--null", "--name-only", "--get-regexp", r"^filter\.")
            result = _run_git(self._transport, self.root, "config", "--show-scope", *query)
            fields = result.stdout.split("\0")
            keys = [
                key
                for scope, key in zip(fields[::2], fields[1::2], strict=False)
                if scope not in _TRUSTED_SCOPES
            ]
            if result.code == _UNKNOWN_OPTION_EXIT:  # git before 2.26 does not show the scope
                result = _run_git(self._transport, self.root, "config", *query)
                keys = [key for key in result.stdout.split("\0") if key]
            if unsupported_keys := [key for key in keys if "=" in key]:
                raise GitFailed(
                    f"the repository configures a filter with a = in its name: {unsupported_keys[0]}"
                )
            self._filter_options = [word for key in dict.fromkeys(keys) for word in ("-c", f"{key}=")]
        return self._filter_options


# The configuration scopes that no repository can change.
_TRUSTED_SCOPES = frozenset({"system", "global", "command"})
_UNKNOWN_OPTION_EXIT = 129


def _ls_files_args(*, of_ignored: bool) -> list[str]:
    selection = ["--others", "--ignored"] if of_ignored else ["--cached", "--others"]
    return ["ls-files", "-z", *selection, "--exclude-standard"]


def _run_git(transport: Transport, folder: Path, *args: str) -> Completed:
    try:
        result = transport.run([*_GIT_COMMAND, "-C", str(folder), *args], timeout=_TIMEOUT_S)
    except TransportError as error:
        raise GitFailed(error.message) from error
    if result.code == 127:  # `env` exits with 127 if it cannot find the program
        raise GitMissing("git is not installed on this machine")
    return result
