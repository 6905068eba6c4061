"""Sends one request to a worker program on the machine that holds a run's files."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dtslurm.errors import TransportError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.remote import answers
from dtslurm.remote.worker_program import inline_program
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.login_node import query_login_node
from dtslurm.transport.base import Transport

SHARED = ("lib.answer", "lib.json_records", "lib.locks")  # modules that are sent with every program


class WorkerHost(NamedTuple):
    """The way to a machine that runs worker programs, and the Python interpreter there."""

    transport: Transport
    python: str


def find_worker_host(context: Context, record: JobRecord) -> WorkerHost:
    """Return the machine with the run's files.

    Raises:
        TransportError: the machine cannot be reached.
        ProfileNotFound, ProfileInvalid: the cluster's profile is gone or invalid.
    """
    if not record.mirror:
        return WorkerHost(context.transport, sys.executable)
    cluster = context.cluster_of(record)
    return WorkerHost(cluster.transport, query_login_node(context, cluster).python or "python3")


def query_worker(
    host: WorkerHost,
    program: str,
    request: Mapping[str, Any],
    *,
    timeout: float,
    parts: Sequence[str] = (),
) -> dict[str, Any]:
    """Send ``program`` over stdin, run it, and return its answer; no file is left on the other machine.

    The program defines ``answer(request)``, which returns the answer.

    Args:
        host: the machine with the run's files.
        program: a module below `dtslurm.worker`, like ``telemetry.gpu_time``.
        request: the argument of ``answer``.
        timeout: seconds.
        parts: the modules that the program imports besides `SHARED`, each after those that it imports itself.

    Raises:
        TransportError: there was no answer; the evidence is what Python printed to stderr.
    """
    marker = f"dtslurm-{program.rpartition('.')[2]}:"
    call = f"module.answer(json.loads({json.dumps(request)!r}))"
    source = inline_program(
        [*SHARED, *parts, program], f"sys.modules['far.lib.answer'].tell({marker!r}, {call})"
    )
    finished = host.transport.run([host.python, "-I", "-S", "-"], stdin=source.encode(), timeout=timeout)
    return _unpacked(marker, finished.stdout, finished.stderr)


def _unpacked(mark: str, stdout: str, stderr: str) -> dict[str, Any]:
    line = next((line for line in stdout.splitlines() if line.startswith(mark)), None)
    if line is not None:
        with contextlib.suppress(binascii.Error, ValueError):
            sender = f"{mark.removesuffix(':')} on the login node"
            data = base64.b64decode(line[len(mark) :], validate=True)
            return answers.parse_object(answers.unpack(data, sender), sender)
    raise TransportError(
        "the files of the run could not be read on the login node",
        evidence=stderr.splitlines()[-5:],
        hint="the login node needs Python 3.6 or later; set its path with login.python in the profile",
    )
