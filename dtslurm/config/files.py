"""Reading of profile and project files, which refuses files that other users can have written."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path

from dtslurm.config.trust import trust_of
from dtslurm.errors import ProfileInvalid

_MAX_BYTES = 1_000_001


def label(path: Path, *, cwd: Path, home: Path | None, packaged: Path) -> str:
    """Return a file's name for messages: short if packaged, else relative to ``cwd`` or home, or absolute."""
    if path.parent == packaged:
        return path.name
    if path.is_relative_to(cwd):
        return str(path.relative_to(cwd))
    if home is not None and path.is_relative_to(home):
        return f"~/{path.relative_to(home)}"
    return str(path)


def user_folder(env: Mapping[str, str]) -> Path | None:
    """Return the folder of the user's own settings, None if the user has no home."""
    if env.get("XDG_CONFIG_HOME"):
        return Path(env["XDG_CONFIG_HOME"]) / "dtslurm"
    return Path(env["HOME"]) / ".config" / "dtslurm" if env.get("HOME") else None


def read(path: Path, source: str, *, packaged: bool = False, env: Mapping[str, str] | None = None) -> bytes:
    """Return a file's bytes, cut off slightly above the size limit of ``strict_yaml``.

    Jobs run commands from profiles, project files and templates. A file that belongs to another user, or that
    others can write, is therefore refused, unless the user has trusted it with this content.

    Args:
        source: the file's name in messages.
        packaged: whether the file is part of dtslurm; its permissions are then not checked.

    Raises:
        ProfileInvalid: the file cannot be read, is no regular file, or others may have written it.
    """
    variables = os.environ if env is None else env
    try:
        # O_NONBLOCK: opening a named pipe must not block before its type is checked.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            file_status = os.fstat(file.fileno())
            if not stat.S_ISREG(file_status.st_mode):
                raise ProfileInvalid([f"{source}:1: not a regular file"])
            data = file.read(_MAX_BYTES)
            reason = None if packaged else find_distrust_reason(file_status, variables)
            if reason and not trust_of(variables).pins(path, data):
                raise ProfileInvalid(
                    [f"{source}:1: {reason}, and its content runs in your jobs"],
                    hint=f"review the file, then run: {suggest_trust_command(file_status)} {path}",
                )
            return data
    except OSError as error:
        raise ProfileInvalid([f"{source}:1: cannot be read: {error.strerror or error}"]) from error


def find_distrust_reason(status: os.stat_result, env: Mapping[str, str]) -> str | None:
    """Return why a file is not trusted; None if only this user and root can have written it.

    As in git, the owner must be the user, root, or the user who became root with sudo. Group write permission
    is accepted if the group is the user's private group, as on systems that create one for each user.
    """
    trusted_uids = {0, os.geteuid()}
    if os.geteuid() == 0 and env.get("SUDO_UID", "").isdigit():
        trusted_uids.add(int(env["SUDO_UID"]))
    if status.st_uid not in trusted_uids:
        return f"this file belongs to {_user_name(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH:
        return "every user can write to this file"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, status.st_uid):
        return f"every member of the group {_group_name(status.st_gid)} can write to this file"
    return None


def suggest_trust_command(status: os.stat_result) -> str:
    """Return the command that makes a file trusted after the user has reviewed it."""
    if status.st_uid not in {0, os.geteuid()}:
        return "dtslurm trust"
    return f"chmod {'go' if status.st_mode & stat.S_IWGRP else 'o'}-w"


def _is_private_group(group: int, user: int) -> bool:
    """Return whether a group is private to a user: it has the user's name and no other members."""
    if group == 0:
        return True
    try:
        entry = grp.getgrgid(group)
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        return False
    return entry.gr_name == name and not set(entry.gr_mem) - {name}


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"the user with uid {number}"


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return f"with number {number}"
