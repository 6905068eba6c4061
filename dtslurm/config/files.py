"""Reads the files that profiles and projects are kept in, wary of whose they are."""

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
    """Return the file's name in messages: short for packaged ones, else from here, from home or absolute."""
    if path.parent == packaged:
        return path.name
    if path.is_relative_to(cwd):
        return str(path.relative_to(cwd))
    if home is not None and path.is_relative_to(home):
        return f"~/{path.relative_to(home)}"
    return str(path)


def user_folder(env: Mapping[str, str]) -> Path | None:
    """Return the folder of the user's own settings, None for a user without a home."""
    if env.get("XDG_CONFIG_HOME"):
        return Path(env["XDG_CONFIG_HOME"]) / "dtslurm"
    return Path(env["HOME"]) / ".config" / "dtslurm" if env.get("HOME") else None


def read(path: Path, source: str, *, packaged: bool = False, env: Mapping[str, str] | None = None) -> bytes:
    """Return a file's bytes, cut off a little over the size that ``strict_yaml`` takes.

    What stands in a profile, a project file or a template is run in jobs, so one of another user, or one that
    others may write, is refused, unless the user has trusted it with this content.

    Args:
        source: the file's name in messages.
        packaged: it came with dtslurm, whose rights are the installation's business.

    Raises:
        ProfileInvalid: it cannot be read, is no regular file, or others may have written it.
    """
    variables = os.environ if env is None else env
    try:
        # O_NONBLOCK: a named pipe must not hold us up before we see what it is.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ProfileInvalid([f"{source}:1: not a regular file"])
            data = file.read(_MAX_BYTES)
            why = None if packaged else objection(found, variables)
            if why and not trust_of(variables).pins(path, data):
                raise ProfileInvalid(
                    [f"{source}:1: {why}, and what it says runs in your jobs"],
                    hint=f"look it through, then: {remedy(found)} {path}",
                )
            return data
    except OSError as error:
        raise ProfileInvalid([f"{source}:1: cannot be read: {error.strerror or error}"]) from error


def objection(found: os.stat_result, env: Mapping[str, str]) -> str | None:
    """Return why a file is not to be believed; None for one that only this user and root can have written.

    As git has it, a file belongs to the user, to root, or to who became root by sudo. The group may write to
    it where the group is the user's alone, as it is on systems that make one for each user.
    """
    mine = {0, os.geteuid()}
    if os.geteuid() == 0 and env.get("SUDO_UID", "").isdigit():
        mine.add(int(env["SUDO_UID"]))
    if found.st_uid not in mine:
        return f"this file belongs to {_user(found.st_uid)}"
    if found.st_mode & stat.S_IWOTH:
        return "every user here may write to this file"
    if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid, found.st_uid):
        return f"every member of the group {_group(found.st_gid)} may write to this file"
    return None


def remedy(found: os.stat_result) -> str:
    """Return the command after which a file that one has looked through is believed."""
    if found.st_uid not in {0, os.geteuid()}:
        return "dtslurm trust"
    return f"chmod {'go' if found.st_mode & stat.S_IWGRP else 'o'}-w"


def _is_private(group: int, user: int) -> bool:
    """Tell whether a group has one member, by the rule that such a group is called as its user is."""
    if group == 0:
        return True
    try:
        found = grp.getgrgid(group)
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        return False
    return found.gr_name == name and not set(found.gr_mem) - {name}


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"the user with number {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return f"with number {number}"
