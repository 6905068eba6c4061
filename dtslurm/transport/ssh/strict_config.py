"""A configuration file for ssh that holds the user's own, and before it that keys of hosts are checked.

An option on the command line would not reach the jump hosts: ssh starts a process of its own for each, and
hands it the configuration file only. Of a keyword that comes twice, ssh takes the first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from dtslurm.transport.local import LocalTransport
from dtslurm.transport.ssh import control

_USUAL = ("~/.ssh/config", "/etc/ssh/ssh_config")


def write(env: Mapping[str, str], config: str | None, *, asks: bool) -> Path:
    """Return the file, written into the private folder of the control sockets where it is missing.

    Args:
        config: the user's configuration file, None for the usual ones.
        asks: whether a person may accept a key that is not known; a changed or revoked one is refused anyway.

    Raises:
        TransportError: there is no private folder.
        StoreError: the disk refused.
    """
    files = _USUAL if config is None else (str(Path(config).absolute()),)
    lines = [
        f"StrictHostKeyChecking {'ask' if asks else 'yes'}",
        *(f"Include {_quoted(file)}" for file in files),
    ]
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    path = control.folder(env) / f"config-{hashlib.sha256(data).hexdigest()[:16]}"
    if not path.is_file() or path.read_bytes() != data:
        LocalTransport().put(data, str(path))
    return path


def _quoted(path: str) -> str:
    """Return a path as Include takes it: in quotes for spaces, signs of patterns in brackets."""
    return '"{}"'.format(re.sub(r"[*?\[]", r"[\g<0>]", path))
