"""The user's SSH configuration for paramiko, which reads it but leaves some of it to us.

``Include`` is put in by us: a file is read in place of its line, and the ``Host`` or ``Match`` around the
line goes on after it. (``Host`` lines in an included file are heeded for every host; OpenSSH heeds them only
inside the block that includes them.)
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtslurm.errors import LoginRefused
from dtslurm.model.paths import expanded
from dtslurm.model.values import dataclass

if TYPE_CHECKING:
    from paramiko import SSHConfig

_SYSTEM = "/etc/ssh/ssh_config"
_INCLUDE = re.compile(r"\s*include(?:\s*=\s*|\s+)(.+)", re.IGNORECASE)
_BLOCK = re.compile(r"\s*(?:host|match)(?:\s*=\s*|\s+)", re.IGNORECASE)
_DEEPEST = 16
_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class Settings:
    """What the configuration says of one host.

    Attributes:
        host: as the user names it.
        name: the address to connect to.
        key_name: the name its key is known by.
        jumps: hosts on the way, each ``[user@]host[:port]``, the first one first.
        command: a program that makes the connection instead.
        keys: files of private keys, some perhaps missing.
        only_keys: whether of the agent's keys only those of ``keys`` may be offered.
        agent: the socket of an agent if not the usual one; ``none`` for no agent.
        known: known_hosts files, the user's first.
        connect_s: seconds a connection may take.
    """

    host: str
    name: str
    port: int
    user: str
    key_name: str
    jumps: tuple[str, ...]
    command: str | None
    keys: tuple[Path, ...]
    only_keys: bool
    agent: str | None
    known: tuple[Path, ...]
    connect_s: float


def load(path: str | None) -> SSHConfig:
    """Read ``path``, or the user's and the system's configuration.

    Raises:
        LoginRefused: it cannot be read or understood.
    """
    from paramiko import SSHConfig
    from paramiko.ssh_exception import ConfigParseError

    if path is None:
        text = (
            f"{_read(Path('~/.ssh/config'), needed=False)}\nMatch all\n{_read(Path(_SYSTEM), needed=False)}"
        )
    else:
        text = _read(Path(path), needed=True)
    try:
        return SSHConfig.from_text(text)
    except (ConfigParseError, ValueError) as error:
        raise LoginRefused(
            "the SSH configuration cannot be used",
            evidence=[str(error)],
            hint="mend it, or use --transport openssh",
        ) from None


def _read(path: Path, *, needed: bool, depth: int = 0) -> str:
    try:
        text = expanded(path).read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, RuntimeError) as error:
        if not needed:
            return ""
        raise LoginRefused("the SSH configuration cannot be read", evidence=[str(error)]) from None
    lines = []
    block = "Match all"
    for line in text.splitlines():
        if _BLOCK.match(line):
            block = line
        include = _INCLUDE.match(line)
        if include is None:
            lines.append(line)
        elif depth < _DEEPEST:
            found = _included(include.group(1), path)
            lines += [*(_read(one, needed=False, depth=depth + 1) for one in found), block]
    return "\n".join(lines)


def _included(words: str, path: Path) -> list[Path]:
    base = Path("/etc/ssh") if str(path) == _SYSTEM else Path("~/.ssh").expanduser()
    found: list[Path] = []
    for word in shlex.split(words):
        pattern = base / expanded(word)
        found += sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    return found


def lookup(config: SSHConfig, target: str, user: str | None = None) -> Settings:
    """Return what holds for ``[user@]host[:port]``.

    Raises:
        LoginRefused: a value cannot be used.
    """
    name, port, host = _split(target)
    try:
        found: Mapping[str, str] = config.lookup(host)
        return _settings(found, host, user or name, port)
    except (ValueError, KeyError) as error:
        raise LoginRefused(
            f"the SSH configuration of {host} cannot be used",
            evidence=[str(error)],
            hint="mend it, or use --transport openssh",
        ) from None


def _settings(found: Mapping[str, Any], host: str, user: str | None, port: int | None) -> Settings:
    number = port or int(found.get("port", 22))
    listed: str | list[str] = found.get("identityfile", [])
    keys = [expanded(one) for one in ([listed] if isinstance(listed, str) else listed)]
    jumps = found.get("proxyjump") or "none"
    command = found.get("proxycommand") or "none"
    known = found.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")
    known += " " + found.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2")
    agent = found.get("identityagent")
    wait = found.get("connecttimeout", "none")
    return Settings(
        host=host,
        name=found["hostname"],
        port=number,
        user=user or found.get("user") or _own_name(),
        key_name=found.get("hostkeyalias", ""),
        jumps=() if jumps.lower() == "none" else tuple(jumps.split(",")),
        command=None if command.lower() == "none" or jumps.lower() != "none" else command,
        keys=tuple(keys or (Path("~/.ssh").expanduser() / key for key in _KEYS)),
        only_keys=found.get("identitiesonly", "no").lower() == "yes",
        agent=None if agent is None or agent == "SSH_AUTH_SOCK" else str(expanded(agent)),
        known=tuple(expanded(one) for one in shlex.split(known) if one.lower() != "none"),
        connect_s=float(wait) if wait.replace(".", "", 1).isdigit() and float(wait) > 0 else 15.0,
    )


def _split(target: str) -> tuple[str | None, int | None, str]:
    """Return user, port and host of ``[user@]host[:port]``, also with an IPv6 address in brackets."""
    target = target.strip().removeprefix("ssh://")
    user, _, rest = target.rpartition("@")
    match = re.fullmatch(r"\[(.+)\](?::(\d+))?|([^:]+)(?::(\d+))?", rest)
    if match is None:
        return user or None, None, rest
    port = match.group(2) or match.group(4)
    return user or None, int(port) if port else None, match.group(1) or match.group(3)


def _own_name() -> str:
    import getpass

    return os.environ.get("USER") or getpass.getuser()
