"""Whose a file is that decides what runs: one's own, or one that others could have written."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Mapping


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
