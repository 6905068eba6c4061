"""The files that the user has reviewed. As in direnv, trust depends on a file's path and content.

Each trusted file has an entry in the folder ``trusted`` of the user's state folder. The entry's name is a
hash of the path and the content, so that the file must be trusted again after any edit. The variable
``DTSLURM_TRUSTED_FOLDERS`` lists folders, separated by ``:``, below which everything is trusted, for CI and
other unattended machines.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from dtslurm.model.own_files import make_own_folder
from dtslurm.model.values import dataclass

FOLDERS = "DTSLURM_TRUSTED_FOLDERS"
HINT = "review the file, then run: dtslurm trust"


@dataclass(frozen=True)
class Trust:
    """The files and folders that a user trusts.

    Attributes:
        entries: the folder of the entries, None for a user without a home.
        folders: folders below which everything is trusted.
    """

    entries: Path | None
    folders: tuple[Path, ...] = ()

    def has(self, path: Path, data: bytes) -> bool:
        """Return whether the user trusts this file with this content, by an entry or by its folder."""
        real_path = Path(os.path.realpath(path))
        return any(real_path.is_relative_to(folder) for folder in self.folders) or self.pins(path, data)

    def pins(self, path: Path, data: bytes) -> bool:
        """Return whether the user has trusted this content itself, not only its folder."""
        if self.entries is None:
            return False
        real_path = Path(os.path.realpath(path))
        try:
            folder_status, entry_status = (
                self.entries.lstat(),
                (self.entries / _compute_digest(real_path, data)).lstat(),
            )
        except OSError:
            return False
        are_private = all(
            status.st_uid == os.geteuid() and not status.st_mode & 0o022
            for status in (folder_status, entry_status)
        )
        return are_private and stat.S_ISDIR(folder_status.st_mode) and stat.S_ISREG(entry_status.st_mode)

    def add(self, path: Path, data: bytes) -> None:
        """Record that the user trusts this file with this content.

        Raises:
            OSError: the entry cannot be written, or the user has no home folder.
        """
        if self.entries is None:
            raise FileNotFoundError("neither HOME nor XDG_STATE_HOME is set")
        make_own_folder(self.entries)
        real_path = Path(os.path.realpath(path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(self.entries / _compute_digest(real_path, data), flags, 0o600), "w") as entry:
            entry.write(f"{real_path}\n")  # for users who inspect the folder


def trust_of(env: Mapping[str, str]) -> Trust:
    """Return the trust settings of the user with this environment."""
    entries = None
    if env.get("XDG_STATE_HOME"):
        entries = Path(env["XDG_STATE_HOME"], "dtslurm", "trusted")
    elif env.get("HOME"):
        entries = Path(env["HOME"], ".local", "state", "dtslurm", "trusted")
    folders = [
        Path(os.path.realpath(path)) for path in env.get(FOLDERS, "").split(":") if path.startswith("/")
    ]
    return Trust(entries, tuple(folders))


def _compute_digest(path: Path, data: bytes) -> str:
    return hashlib.sha256(os.fsencode(path) + b"\0" + data).hexdigest()
