"""Start a notebook, or a server for a remote editor, as a job: ``dtslurm notebook`` and ``dtslurm code``."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dtslurm import assets
from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.model.runs.record import SESSION_PROGRAM, JobRecord
from dtslurm.model.units import Walltime
from dtslurm.services.observe.inside.session import SessionServer
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.wiring.context import Context
from dtslurm.store.index import state_folder
from dtslurm.transport.deletion import remove

SessionKind = Literal["notebook", "editor"]
_KEY = "id_ed25519"
_OF_RANKS = {"array", "launcher", "ntasks_per_node"}  # options that start several processes
_ONE_PROCESS = {
    "launcher": "single",
    "nodes": 1,
    "ntasks_per_node": 1,
}  # also if the project has other defaults


def prepare_session(
    context: Context, kind: SessionKind, idle_time: str, words: Sequence[str], options: Mapping[str, Any]
) -> Prepared:
    """Check and render the job of a session.

    Args:
        idle_time: the time without use after which the job ends.
        words: further arguments of Jupyter.
        options: the options of ``submit``, by name.

    Raises:
        RequestInvalid, ProfileNotFound, ProfileInvalid: as `prepare`.
        CommandNotFound, StoreError: there is no key for the editor, and none can be made.
    """
    try:
        idle_s = Walltime.parse(idle_time).seconds
    except ValueError as error:
        raise RequestInvalid([f"--idle: {error}"]) from None
    values = {name: value for name, value in options.items() if value is not None}
    problems = [
        f"--{name.replace('_', '-')} does not apply to a session, which is one process"
        for name in _OF_RANKS & set(values)
    ]
    if values.get("nodes", 1) != 1:
        problems.append("a session runs on one node")
    if problems:
        raise RequestInvalid(sorted(problems))
    request = JobRequest(
        script=SESSION_PROGRAM,
        args=(kind, str(idle_s), *words),
        **{"job_name": kind, "snapshot": False, **_ONE_PROCESS, **values},
    )
    cluster = context.cluster(request.with_defaults(context.project).cluster, request.transport)
    if cluster.remote and request.chdir is None:
        raise RequestInvalid(
            [f"files that are changed on {cluster.name} stay there: choose a folder for them with --chdir"]
        )
    payload = {SESSION_PROGRAM: assets.worker("session.py").read_bytes()}
    if kind == "editor":
        payload["editor.pub"] = _read_public_key(context)
    return prepare(context, replace(request, payload=payload), standalone=False)


def _editor_folder(context: Context) -> Path:
    """Return the folder of the key and of the SSH configurations, which only this user may access."""
    folder = state_folder(context.env) / "editor"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _read_public_key(context: Context) -> bytes:
    """Return the public key of this machine for editors, which is made once."""
    path = _editor_folder(context) / _KEY
    if not path.exists():
        argv = [
            "ssh-keygen",
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-C",
            f"dtslurm-{getpass.getuser()}",
            "-f",
            str(path),
        ]
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
    """Remove the SSH configuration of an editor's session, whose port leads nowhere any more."""
    folder = _editor_folder(context)
    for suffix in ("conf", "known_hosts"):
        remove(folder / f"dtslurm-{record.job_id}.{suffix}", within=folder)
