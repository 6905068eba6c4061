"""This machine's side of ``dtslurm code``: its key, and the SSH configuration that leads to a job."""

from __future__ import annotations

import getpass
from pathlib import Path

from dtslurm.errors import StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.services.observe.inside.session import SessionServer
from dtslurm.services.wiring.context import Context
from dtslurm.store.index import state_folder
from dtslurm.transport.deletion import remove

_KEY = "id_ed25519"


def _editor_folder(context: Context) -> Path:
    """Return the folder of the key and of the SSH configurations, which only this user may access."""
    folder = state_folder(context.env) / "editor"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def read_public_key(context: Context) -> bytes:
    """Return the public key of this machine for editors, which is made once.

    Raises:
        CommandNotFound, StoreError: there is no key, and none can be made.
    """
    path = _editor_folder(context) / _KEY
    if not path.exists():
        comment = f"dtslurm-{getpass.getuser()}"
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
        done = context.transport.run(argv)
        if not done.ok:
            raise StoreError(f"ssh-keygen cannot make {path}", evidence=done.stderr.splitlines())
    return path.with_suffix(".pub").read_bytes()


def write_ssh_config(
    context: Context, record: JobRecord, session: SessionServer, port: int
) -> tuple[str, Path]:
    """Write the SSH configuration of an editor's session; return the name of its host, and the file.

    Args:
        port: the port of this machine that leads to the server.
    """
    folder, name = _editor_folder(context), f"dtslurm-{record.job_id}"
    known_hosts, config = folder / f"{name}.known_hosts", folder / f"{name}.conf"
    context.transport.put(f"{name} {session.host_key}\n".encode(), str(known_hosts))
    lines = [
        f"Host {name}",
        "  HostName 127.0.0.1",
        f"  Port {port}",
        f"  User {session.user}",
        f"  HostKeyAlias {name}",
        f'  UserKnownHostsFile "{known_hosts}"',
        f'  IdentityFile "{folder / _KEY}"',
        "  IdentitiesOnly yes",
    ]
    context.transport.put("\n".join([*lines, ""]).encode(), str(config))
    return name, config


def remove_ssh_config(context: Context, record: JobRecord) -> None:
    """Remove the SSH configuration of an editor's session, whose port is no longer forwarded."""
    folder = _editor_folder(context)
    for suffix in ("conf", "known_hosts"):
        remove(folder / f"dtslurm-{record.job_id}.{suffix}", within=folder)
