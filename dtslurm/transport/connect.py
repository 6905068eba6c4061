"""Selects the transport for a host."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping

from dtslurm.errors import DtslurmError, RequestInvalid
from dtslurm.transport.base import Transport
from dtslurm.transport.local import LocalTransport

# Reject names that ssh would parse as an option, or a shell as more than one word.
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
    """Return the transport to ``host``; no connection is opened yet.

    Args:
        host: a name that the user's SSH configuration or DNS resolves; None for this machine.
        user: the login name, if it differs from the SSH configuration.
        transport: ``openssh``, ``paramiko``, ``local``; ``auto`` or None selects ``openssh`` if there is an
            ``ssh`` program, else ``paramiko``.
        env: the environment. ``DTSLURM_SSH_CONFIG`` names a configuration file to use instead of
            ``~/.ssh/config``.
        prompt: asks the user (question, whether the answer is echoed) and returns the answer; only
            paramiko calls it, because ssh prompts at the terminal itself.
        hint: another way for the user to proceed without a connection; appended to the errors' hint.

    Raises:
        RequestInvalid: the host, user or transport is malformed.
    """
    variables = os.environ if env is None else env
    transport_name, _ = choose(transport, variables)
    if host is None or transport_name == "local":
        return LocalTransport()
    problems = []
    if not _HOST.fullmatch(host):
        problems.append(f"login host {host!r} is not a host name")
    if user is not None and not _USER.fullmatch(user):
        problems.append(f"login user {user!r} is not a user name")
    if problems:
        raise RequestInvalid(problems)
    config = variables.get(CONFIG_VARIABLE) or None
    if transport_name == "paramiko":
        from dtslurm.transport.ssh.paramiko_ssh import ParamikoTransport

        return ParamikoTransport(host, user=user, config=config, env=variables, prompt=prompt, hint=hint)
    from dtslurm.transport.ssh.openssh import OpenSSHTransport

    return OpenSSHTransport(host, user=user, config=config, env=variables, hint=hint)


def choose(transport: str | None, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of the transport for a host and the reason for the choice.

    Raises:
        RequestInvalid: no transport has that name.
    """
    if transport and transport != "auto":
        if transport not in TRANSPORTS:
            raise RequestInvalid([f"unknown transport {transport!r}: use one of {', '.join(TRANSPORTS)}"])
        return transport, "requested"
    ssh = shutil.which("ssh", path=env.get("PATH"))
    if ssh:
        return "openssh", f"{ssh} is installed"
    return "paramiko", "this machine has no ssh"


def real_name(link: Transport) -> str:
    """Return the host name that the user's SSH configuration sets for the connection's host alias."""
    from dtslurm.transport.ssh.openssh import OpenSSHTransport

    if isinstance(link, OpenSSHTransport):
        with contextlib.suppress(DtslurmError):
            return link.real_name()
    return link.host


def software(name: str) -> str:
    """Return the name and version of the SSH implementation, whose vulnerabilities affect every login."""
    if name == "openssh":
        with contextlib.suppress(DtslurmError):
            result = LocalTransport().run(["ssh", "-V"])
            return (result.stderr or result.stdout).strip().partition(",")[0]
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        return f"{name} {version(name)}"
    return name
