"""An ssh configuration file that enforces host key checks and includes the user's configuration.

An option on the command line would not apply to the jump hosts: ssh starts a process for each of them, and
passes it only the configuration file. ssh uses the first value of a repeated keyword.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from dtslurm.transport.local import LocalTransport
from dtslurm.transport.ssh import control

_DEFAULT_FILES = ("~/.ssh/config", "/etc/ssh/ssh_config")


def write(env: Mapping[str, str], config: str | None, *, may_ask: bool) -> Path:
    """Return the path of the file; write it into the private folder of the control sockets if it is missing.

    Args:
        config: the user's configuration file, None for the default files.
        may_ask: whether the user may accept an unknown key; changed and revoked keys are always refused.

    Raises:
        TransportError: there is no private folder.
        StoreError: the file cannot be written.
    """
    files = _DEFAULT_FILES if config is None else (str(Path(config).absolute()),)
    lines = [
        f"StrictHostKeyChecking {'ask' if may_ask else 'yes'}",
        *(f"Include {_quoted(file)}" for file in files),
    ]
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    path = control.folder(env) / f"config-{hashlib.sha256(data).hexdigest()[:16]}"
    if not path.is_file() or path.read_bytes() != data:
        LocalTransport().put(data, str(path))
    return path


def _quoted(path: str) -> str:
    """Quote a path for Include: double quotes because of spaces, and glob characters in brackets."""
    return '"{}"'.format(re.sub(r"[*?\[]", r"[\g<0>]", path))
