"""What the tests of links share: servers of a module, names behind proxies, patience."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from dtslurm.transport.base import Transport
from tests.sshd.proxy import Proxy
from tests.sshd.servers import Server, SshLab
from tests.waiting import wait_until

Reach = Callable[[str], Transport]


def server(lab: SshLab, alias: str, **more: object) -> Server:
    """A server of the module, started once."""
    if alias not in lab.servers:
        env = {"HOME": str(lab.home(alias)), **(more.pop("env", None) or {})}  # type: ignore[dict-item]
        lab.server(alias, env=env, **more)  # type: ignore[arg-type]
    return lab.servers[alias]


def home(lab: SshLab, alias: str) -> Path:
    return lab.root / "homes" / alias


def logins(one: Server) -> int:
    return len(re.findall(r"Accepted \S+ for ", one.log))


def do_when(happened: Callable[[], object], then: Callable[[], None]) -> None:
    wait_until(happened)
    then()


def name_for(lab: SshLab, proxy: Proxy, one: Server, *client: str) -> str:
    """A new name of a server behind a proxy, its key known."""
    alias = f"{one.alias}-{proxy.port}"
    with lab.known_hosts.open("a") as file:
        file.write(f"[127.0.0.1]:{proxy.port} {one.host_key}\n")
    lab.host(alias, proxy.port, *client)
    return alias
