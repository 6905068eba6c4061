"""Open a shell on a node of a running job."""

from __future__ import annotations

import os
import shlex

from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.wiring.context import Context
from dtslurm.slurm import commands
from dtslurm.slurm.arrays import base_id, is_step_id
from dtslurm.transport.interactive import run_interactive


def shell_words(context: Context, record: JobRecord, node: str, job_id: str | None = None) -> list[str]:
    """Return the command that opens a shell inside a job's allocation on one of its nodes.

    Raises:
        RequestInvalid: the run has no job.
        ProfileNotFound, ProfileInvalid: the profile of the run's cluster is missing or invalid.
    """
    job = job_id or record.job_id
    if job is None:
        raise RequestInvalid([f"run {record.name} has no job"])
    if context.cluster_of(record).profile.scheduler == "local":
        return [os.environ.get("SHELL") or "/bin/sh"]  # every emulated node is this machine
    return commands.shell(base_id(job) if is_step_id(job) else job, node)


def open_shell(context: Context, record: JobRecord, node: str, job_id: str | None = None) -> int:
    """Open the shell in this terminal; return its exit code after the user leaves the shell.

    Raises:
        RequestInvalid: the run has no job.
        CommandNotFound, HostUnavailable, LoginRefused, TransportError: the shell could not be started.
    """
    argv = shell_words(context, record, node, job_id)
    print(f"{shlex.join(argv)}   (leave with exit or Ctrl-D)", flush=True)  # noqa: T201  this command owns the terminal
    return run_interactive(context.cluster_of(record).transport, argv, folder=record.run_dir)
