"""Start a notebook, or a server for a remote editor, as a job: ``dtslurm notebook`` and ``dtslurm code``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from dtslurm import assets
from dtslurm.errors import RequestInvalid
from dtslurm.model.runs.record import SESSION_PROGRAM
from dtslurm.model.units import Walltime
from dtslurm.services.observe.inside.editor import read_public_key
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.wiring.context import Context

SessionKind = Literal["notebook", "editor"]
_OF_RANKS = {"array", "launcher", "ntasks_per_node"}  # options that start several processes
# The project may have other defaults.
_ONE_PROCESS = {"launcher": "single", "nodes": 1, "ntasks_per_node": 1}


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
        payload["editor.pub"] = read_public_key(context)
    return prepare(context, replace(request, payload=payload), standalone=False)
