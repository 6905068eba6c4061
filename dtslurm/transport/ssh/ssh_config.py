"""The user's SSH configuration for paramiko, extended by the features that paramiko's parser lacks.

This module resolves ``Include``: the included file replaces the line, and the enclosing ``Host`` or
``Match`` block continues after it. (``Host`` lines in an included file apply to every host; in OpenSSH they
apply only inside the block that includes them.)
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtslurm.errors import LoginRefused
from dtslurm.model.paths import expand_home
from dtslurm.model.values import dataclass

if TYPE_CHECKING:
    from paramiko import SSHConfig

_SYSTEM = "/etc/ssh/ssh_config"
_INCLUDE = re.compile(r"\s*include(?:\s*=\s*|\s+)(.+)", re.IGNORECASE)
_BLOCK = re.compile(r"\s*(?:host|match)(?:\s*=\s*|\s+)", re.IGNORECASE)
_MAX_INCLUDE_DEPTH = 16
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class Settings:
    """The SSH configuration of one host.

    Attributes:
        host: the host as the user names it.
        name: the address to connect to.
        key_name: the name of its key in known_hosts (HostKeyAlias).
        jumps: the jump hosts, each ``[user@]host[:port]``, in the order of the connections.
        command: the ProxyCommand, which makes the connection instead.
        keys: the private key files, which may be missing.
        only_keys: whether only those of the agent's keys that are in ``keys`` may be offered
            (IdentitiesOnly).
        agent: the agent's socket if it is not the default; ``none`` for no agent.
        known: the known_hosts files, the user's first.
        connect_s: the time limit of a connection, in seconds.
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
        LoginRefused: the configuration cannot be read or parsed.
    """
    from paramiko import SSHConfig
    from paramiko.ssh_exception import ConfigParseError

    if path is None:
        user_text, system_text = (_read(Path(name), is_required=False) for name in ("~/.ssh/config", _SYSTEM))
        text = f"{user_text}\nMatch all\n{system_text}"
    else:
        text = _read(Path(path), is_required=True)
    try:
        return SSHConfig.from_text(text)
    except (ConfigParseError, ValueError) as error:
        raise LoginRefused(
            "the SSH configuration cannot be used",
            evidence=[str(error)],
            hint="fix the configuration, or use --transport openssh",
        ) from None


def _read(path: Path, *, is_required: bool, depth: int = 0) -> str:
    try:
        text = expand_home(path).read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, RuntimeError) as error:
        if not is_required:
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
        elif depth < _MAX_INCLUDE_DEPTH:
            included_paths = _find_included(include.group(1), path)
            lines += [
                *(
                    _read(included_path, is_required=False, depth=depth + 1)
                    for included_path in included_paths
                ),
                block,
            ]
    return "\n".join(lines)


def _find_included(patterns: str, path: Path) -> list[Path]:
    base = Path("/etc/ssh") if str(path) == _SYSTEM else Path("~/.ssh").expanduser()
    included_paths: list[Path] = []
    for word in shlex.split(patterns):
        pattern = base / expand_home(word)
        included_paths += sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    return included_paths


def lookup(config: SSHConfig, target: str, user: str | None = None) -> Settings:
    """Return the settings of ``[user@]host[:port]``.

    Raises:
        LoginRefused: a value in the configuration is invalid.
    """
    target_user, port, host = _split(target)
    try:
        options: Mapping[str, str] = config.lookup(host)
        return _settings(options, host, user or target_user, port)
    except (ValueError, KeyError) as error:
        raise LoginRefused(
            f"the SSH configuration of {host} cannot be used",
            evidence=[str(error)],
            hint="fix the configuration, or use --transport openssh",
        ) from None


def _settings(values: Mapping[str, Any], host: str, user: str | None, port: int | None) -> Settings:
    number = port or int(values.get("port", 22))
    identity_files: str | list[str] = values.get("identityfile", [])
    keys = [
        expand_home(file)
        for file in ([identity_files] if isinstance(identity_files, str) else identity_files)
    ]
    jumps = values.get("proxyjump") or "none"
    command = values.get("proxycommand") or "none"
    known_hosts_files = values.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")
    known_hosts_files += " " + values.get(
        "globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
    )
    agent = values.get("identityagent")
    connect_timeout = values.get("connecttimeout", "none")
    return Settings(
        host=host,
        name=values["hostname"],
        port=number,
        user=user or values.get("user") or _local_user_name(),
        key_name=values.get("hostkeyalias", ""),
        jumps=() if jumps.lower() == "none" else tuple(jumps.split(",")),
        command=None if command.lower() == "none" or jumps.lower() != "none" else command,
        keys=tuple(keys or (Path("~/.ssh").expanduser() / key for key in _DEFAULT_KEYS)),
        only_keys=values.get("identitiesonly", "no").lower() == "yes",
        agent=None if agent is None or agent == "SSH_AUTH_SOCK" else str(expand_home(agent)),
        known=tuple(expand_home(file) for file in shlex.split(known_hosts_files) if file.lower() != "none"),
        connect_s=float(connect_timeout)
        if connect_timeout.replace(".", "", 1).isdigit() and float(connect_timeout) > 0
        else 15.0,
    )


def _split(target: str) -> tuple[str | None, int | None, str]:
    """Return user, port and host of ``[user@]host[:port]``; an IPv6 address is in brackets."""
    target = target.strip().removeprefix("ssh://")
    user, _, host_and_port = target.rpartition("@")
    match = re.fullmatch(r"\[(.+)\](?::(\d+))?|([^:]+)(?::(\d+))?", host_and_port)
    if match is None:
        return user or None, None, host_and_port
    port = match.group(2) or match.group(4)
    return user or None, int(port) if port else None, match.group(1) or match.group(3)


def _local_user_name() -> str:
    import getpass

    return os.environ.get("USER") or getpass.getuser()
