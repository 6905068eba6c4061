"""What the user has looked through: a file is trusted by its place and its content, as direnv has it.

Each trusted file has an entry in the folder ``trusted`` of the user's state, named by a hash of both: after
any edit the file must be trusted again. The variable ``DTSLURM_TRUSTED_FOLDERS`` names folders, separated by
``:``, below which everything is trusted: for CI and other unattended machines.
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
HINT = "look it through, then: dtslurm trust"


@dataclass(frozen=True)
class Trust:
    """What a user trusts.

    Attributes:
        entries: the folder of the entries, None for a user without a home.
        folders: everything below them is trusted.
    """

    entries: Path | None
    folders: tuple[Path, ...] = ()

    def has(self, path: Path, data: bytes) -> bool:
        """Tell whether the user has trusted this file with this content."""
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(folder) for folder in self.folders) or self.pins(path, data)

    def pins(self, path: Path, data: bytes) -> bool:
        """Tell whether the user has trusted this content itself, not only its folder."""
        if self.entries is None:
            return False
        real = Path(os.path.realpath(path))
        try:
            folder, entry = self.entries.lstat(), (self.entries / _digest(real, data)).lstat()
        except OSError:
            return False
        own = all(one.st_uid == os.geteuid() and not one.st_mode & 0o022 for one in (folder, entry))
        return own and stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(entry.st_mode)

    def add(self, path: Path, data: bytes) -> None:
        """Keep that the user trusts this file with this content.

        Raises:
            OSError: it cannot be kept, or there is no home to keep it in.
        """
        if self.entries is None:
            raise FileNotFoundError("there is neither HOME nor XDG_STATE_HOME")
        make_own_folder(self.entries)
        real = Path(os.path.realpath(path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(self.entries / _digest(real, data), flags, 0o600), "w") as entry:
            entry.write(f"{real}\n")  # for people who look into the folder


def trust_of(env: Mapping[str, str]) -> Trust:
    """Return what the user of this environment trusts."""
    entries = None
    if env.get("XDG_STATE_HOME"):
        entries = Path(env["XDG_STATE_HOME"], "dtslurm", "trusted")
    elif env.get("HOME"):
        entries = Path(env["HOME"], ".local", "state", "dtslurm", "trusted")
    folders = [Path(os.path.realpath(one)) for one in env.get(FOLDERS, "").split(":") if one.startswith("/")]
    return Trust(entries, tuple(folders))


def _digest(path: Path, data: bytes) -> str:
    return hashlib.sha256(os.fsencode(path) + b"\0" + data).hexdigest()
