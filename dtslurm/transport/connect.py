"""Chooses how a host is reached."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping

from dtslurm.errors import DtslurmError, RequestInvalid
from dtslurm.transport.base import Transport
from dtslurm.transport.local import LocalTransport

# A name that ssh could take for an option, or a shell for more than a name, is not a host's.
_HOST = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.:%\[\]-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\+-]*\$?")

CONFIG_VARIABLE = "DTSLURM_SSH_CONFIG"
TRANSPORTS = ("auto", "local", "openssh", "paramiko")

Prompt = Callable[[str, bool], str]


def connect(
    host: str | None,
    *,
    user: str | None = None,
    transport: str | None = None,
    env: Mapping[str, str] | None = None,
    prompt: Prompt | None = None,
    hint: str = "",
) -> Transport:
    """Return the transport to ``host``; nothing is opened yet.

    Args:
        host: a name that the user's SSH configuration or the network knows; None for this machine.
        user: the login name, if not the configuration's.
        transport: ``openssh``, ``paramiko``, ``local``; ``auto`` or None: ``openssh`` where there is an
            ``ssh``, else ``paramiko``.
        env: the environment. ``DTSLURM_SSH_CONFIG`` names a configuration file to use instead of
            ``~/.ssh/config``.
        prompt: asks a person (question, whether the answer may be seen) and returns the answer; only
            paramiko calls it, ssh asks at the terminal itself.
        hint: what else a person may do where there is no link; errors say it last.

    Raises:
        RequestInvalid: the host, user or transport has no such form.
    """
    variables = os.environ if env is None else env
    chosen, _ = choose(transport, variables)
    if host is None or chosen == "local":
        return LocalTransport()
    problems = []
    if not _HOST.fullmatch(host):
        problems.append(f"login host {host!r} is no name of a host")
    if user is not None and not _USER.fullmatch(user):
        problems.append(f"login user {user!r} is no name of a user")
    if problems:
        raise RequestInvalid(problems)
    config = variables.get(CONFIG_VARIABLE) or None
    if chosen == "paramiko":
        from dtslurm.transport.ssh.paramiko_ssh import ParamikoTransport

        return ParamikoTransport(host, user=user, config=config, env=variables, prompt=prompt, hint=hint)
    from dtslurm.transport.ssh.openssh import OpenSSHTransport

    return OpenSSHTransport(host, user=user, config=config, env=variables, hint=hint)


def choose(transport: str | None, env: Mapping[str, str]) -> tuple[str, str]:
    """Return which transport is used for a host, and why that one.

    Raises:
        RequestInvalid: there is no transport of that name.
    """
    if transport and transport != "auto":
        if transport not in TRANSPORTS:
            raise RequestInvalid([f"no transport {transport!r}: one of {', '.join(TRANSPORTS)}"])
        return transport, "asked for"
    ssh = shutil.which("ssh", path=env.get("PATH"))
    if ssh:
        return "openssh", f"{ssh} is there"
    return "paramiko", "there is no ssh on this machine"


def real_name(link: Transport) -> str:
    """Return the host that the user's SSH configuration means by the name it is reached under."""
    from dtslurm.transport.ssh.openssh import OpenSSHTransport

    if isinstance(link, OpenSSHTransport):
        with contextlib.suppress(DtslurmError):
            return link.real_name()
    return link.host


def software(name: str) -> str:
    """Return the name and version of what makes the link: holes in it are holes in every login."""
    if name == "openssh":
        with contextlib.suppress(DtslurmError):
            said = LocalTransport().run(["ssh", "-V"])
            return (said.stderr or said.stdout).strip().partition(",")[0]
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        return f"{name} {version(name)}"
    return name
