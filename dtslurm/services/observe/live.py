"""Why a running job makes no progress: its ranks' stacks by one step beside it, last words, GPUs."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from dtslurm.diagnose import live
from dtslurm.errors import CommandNotFound, CommandTimeout, RequestInvalid, TransportError
from dtslurm.model.runs.live import LiveVerdict, RankLook, StackFrame
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.runs.telemetry import RankTelemetry, RunTelemetry
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.remote.worker_program import NO_PYTHON, inline_program, run_with_any_python
from dtslurm.services.observe.telemetry import pulse
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.wiring.context import Context
from dtslurm.slurm import commands
from dtslurm.transport.base import Completed

_PARTS = ("stacks.readers", "stacks.stacks", "stacks.live")
_LOOK_S = 20.0  # on each node
_LIMIT_S = 60.0  # for the step with all of its nodes
_PIECE = re.compile(r"dtslurm-live:([^:\s]+):(\d+):(\d+):([A-Za-z0-9+/=]+)")
_LONGEST = 120_000  # characters of one argument: Linux takes 128 KiB
_IDLE_PERCENT = 5.0
_HARMLESS = "lacks support for cpu binding"  # srun says so of --cpu-bind=none where there is none anyway

Looks = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class GpuUse:
    """What the newest samples say of the job's GPUs: how many there are, how many did nothing."""

    count: int
    idle: int
    util: float
    age_s: float


@dataclass(frozen=True)
class Live:
    """A verdict on a running job.

    Attributes:
        looks: every rank that is known.
        gpus: None where no sampler runs in the job.
        by: how many ranks' stacks were got in which way (``py-spy``, ``signal``, ``proc``).
        missing: what could not be had, and why; a line each.
    """

    record: JobRecord
    status: JobStatus
    attempt: int
    task: str | None
    verdict: LiveVerdict
    looks: tuple[RankLook, ...]
    gpus: GpuUse | None
    by: Mapping[str, int]
    missing: tuple[str, ...]


def diagnose_live(context: Context, record: JobRecord, *, task: str | None = None) -> Live:
    """Return what keeps a running job: one question to its files, one step on its nodes.

    Raises:
        RequestInvalid: the job does not run, or has not started a rank.
        TransportError: the files could not be read where they are.
    """
    view = views(context, [record])[0]
    status = _status(view, task)
    name = status.job_id or record.name
    if status.state is not JobState.RUNNING:
        raise RequestInvalid(
            [f"{name} does not run: it is {status.state.value}"],
            hint="dtslurm status tells why it waits; dtslurm diagnose without --live, why it ended",
        )
    if task is None and record.array is not None:
        task = status.job_id.rpartition("_")[2]
    now = pulse(context, record, task=task)
    if now.attempt is None:
        raise RequestInvalid(
            [f"{name} has not started any rank yet"], hint="dtslurm logs shows what its setup says"
        )
    attempt = now.attempt
    run_dir = record.run_dir if task is None else f"{record.run_dir}/tasks/{task}"
    found, missing = _look(context, view.record, status, now, run_dir)
    if any(look.get("by") == "none" for look in found.values()):  # it may have ended while we looked
        now = pulse(context, record, attempt=attempt, task=task)
    looks, reasons = answers.interpret(
        found,
        lambda found: (tuple(_rank(now, rank, found.get(rank)) for rank in now.ranks), _reasons(found)),
        "the program that looks at ranks",
    )
    by: dict[str, int] = defaultdict(int)
    for look in looks:
        if look.by in ("py-spy", "signal", "proc"):
            by[look.by] += 1
    return Live(
        record=view.record,
        status=status,
        attempt=attempt,
        task=task,
        verdict=live.judge(looks, now.world_size or view.record.world_size),
        looks=looks,
        gpus=_gpus(now),
        by=dict(by),
        missing=(*missing, *reasons),
    )


def _status(view: RunView, task: str | None) -> JobStatus:
    """Return the job's state, or that of one array task: by default the first that runs."""
    if task is not None:
        for status in view.statuses:
            if status.job_id.rpartition("_")[2] == task:
                return status
    running = [status for status in view.statuses if status.state is JobState.RUNNING]
    return (running or list(view.statuses))[0]


# ---- Looking ----


def _look(
    context: Context, record: JobRecord, status: JobStatus, now: RunTelemetry, run_dir: str
) -> tuple[Looks, list[str]]:
    """Return what was seen of each rank, and what could not be seen."""
    by_node: dict[str, list[list[int]]] = defaultdict(list)
    for rank in now.ranks.values():
        if rank.running and rank.pid is not None:
            by_node[rank.host].append([rank.rank, rank.pid])
    if not by_node:
        return {}, ["no rank has a record of its process"]
    cluster = context.cluster_of(record)
    here = cluster.profile.scheduler == "local"
    request = {"run_dir": run_dir, "limit": _LOOK_S, "ranks": by_node, "by_node": not here}
    argument = base64.b64encode(zlib.compress(json.dumps(request).encode(), 9)).decode()
    if len(argument) > _LONGEST:
        return {}, [f"{len(now.ranks):,} ranks are too many to look at with one step"]
    boot = inline_program(_PARTS, "module.main()")
    first = [sys.executable] if here else []
    argv = run_with_any_python("dtslurm-live", boot, argument, first)
    if not here:
        argv = commands.step_beside(status.raw_id or status.job_id, sorted(by_node), argv)
    try:
        done = cluster.transport.run(argv, timeout=_LIMIT_S)
    except CommandTimeout:
        return {}, [f"the step that looks at the nodes did not end within {_LIMIT_S:.0f} s"]
    except CommandNotFound as error:
        return {}, [f"no stacks: {error.message}"]
    return _read(done, by_node)


def _read(done: Completed, by_node: Mapping[str, Sequence[Sequence[int]]]) -> tuple[Looks, list[str]]:
    """Put the nodes' answers together; say which did not answer and what srun said of it."""
    pieces: dict[str, dict[int, str]] = defaultdict(dict)
    counts: dict[str, int] = {}
    for node, number, count, text in _PIECE.findall(done.stdout):
        pieces[node][int(number)] = text
        counts[node] = int(count)
    found: dict[int, Mapping[str, Any]] = {}
    for node, parts in pieces.items():
        if len(parts) != counts[node]:
            continue
        with contextlib.suppress(binascii.Error, TransportError):
            data = base64.b64decode("".join(parts[number] for number in sorted(parts)))
            answer = answers.parse_object(answers.unpack(data, node), node)
            found |= answers.interpret(answer, _looks_of, node)
    silent = sorted(node for node, ranks in by_node.items() if not any(rank in found for rank, _ in ranks))
    if not silent:
        return found, []
    said = [line for line in done.stderr.splitlines() if line.strip() and _HARMLESS not in line][-3:]
    if NO_PYTHON in done.stdout:
        said.append("there is no Python 3.6 or later on the node")
    shown = ", ".join(silent[:5]) + (f" and {len(silent) - 5} more" if len(silent) > 5 else "")
    return found, [f"{shown} could not be looked at" + (f": {'; '.join(said)}" if said else "")]


def _looks_of(answer: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return {int(rank): dict(look) for rank, look in answer["ranks"].items()}


def _rank(now: RunTelemetry, rank: int, found: Mapping[str, Any] | None) -> RankLook:
    """Return one rank's look, of its record and of what its node told."""
    record: RankTelemetry = now.ranks[rank]
    look = RankLook(
        rank=rank,
        local_rank=record.local_rank,
        host=record.host,
        pid=record.pid,
        silent_s=_silence(now, rank),
        started=record.started is not None,
        ended=record.ended is not None,
        exit_code=record.exit_code,
    )
    if found is None:
        return look
    threads = found.get("threads") or [{}]
    return RankLook(
        rank=rank,
        local_rank=look.local_rank,
        host=look.host,
        pid=found.get("pid") or look.pid,
        state=str(threads[0].get("state") or found.get("state") or ""),
        cpu=float(found.get("cpu") or 0.0),
        moved=found.get("moved"),
        waits=str(threads[0].get("waits") or ""),
        frames=_frames(threads[0]),
        by=str(found.get("by") or ""),
        workers=tuple(_worker(worker) for worker in found.get("workers", [])),
        silent_s=look.silent_s,
    )


def _silence(now: RunTelemetry, rank: int) -> float | None:
    """Return how long a rank has said nothing, in its log or by the metrics of training."""
    silent = now.silent_s(rank)
    told = [point.time for point in now.train if point.time is not None and (point.rank or 0) == rank]
    ages = [max(0.0, now.now - time) for time in told[-1:]] + ([silent] if silent is not None else [])
    return min(ages, default=None)


def _frames(thread: Mapping[str, Any]) -> tuple[StackFrame, ...]:
    return tuple(
        StackFrame(str(frame.get("function")), str(frame.get("file")), int(frame.get("line") or 0))
        for frame in thread.get("frames", [])
    )


def _worker(found: Mapping[str, Any]) -> str:
    """Return what a data loading process does, in words."""
    look = RankLook(
        rank=0, state=str(found["threads"][0]["state"]), by="proc", waits=str(found["threads"][0]["waits"]),
        frames=_frames(found["threads"][0]), cpu=float(found.get("cpu") or 0.0),
    )  # fmt: skip
    return f"process {found.get('pid')}: {live.place_of(look)}"


def _reasons(found: Looks) -> list[str]:
    """Return why stacks could not be had, each reason once, with the number of ranks."""
    counts: dict[str, int] = defaultdict(int)
    for look in found.values():
        if look.get("by") == "proc":
            counts["; ".join(str(why) for why in look.get("why", []))] += 1
    return [f"no stacks of {count} rank{'s' if count > 1 else ''}: {why}" for why, count in counts.items()]


def _gpus(now: RunTelemetry) -> GpuUse | None:
    """Return what the newest sample of each node says of its GPUs."""
    known = [
        (gpu.util, now.now - node.time) for node in now.nodes for gpu in node.gpus if gpu.util is not None
    ]
    if not known:
        return None
    utils = [util for util, _ in known]
    idle = sum(util < _IDLE_PERCENT for util in utils)
    return GpuUse(len(utils), idle, round(sum(utils) / len(utils), 1), max(0.0, *(age for _, age in known)))
