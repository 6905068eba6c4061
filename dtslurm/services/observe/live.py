"""Diagnose a running job without progress: stacks of its ranks from one srun step, log silence, GPU use."""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import sys
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
from dtslurm.remote.worker_program import NO_PYTHON, encode_request, inline_program, run_with_any_python
from dtslurm.services.observe.telemetry import RunPart, read_telemetry
from dtslurm.services.runs.status import choose_status, views
from dtslurm.services.wiring.context import Context
from dtslurm.slurm import commands
from dtslurm.transport.base import Completed

_PARTS = ("stacks.readers", "stacks.stacks", "stacks.live")
_NODE_LIMIT_S = 20.0  # time limit of the stack reader on each node
_LIMIT_S = 60.0  # time limit of the step on all nodes
_PIECE = re.compile(r"dtslurm-live:([^:\s]+):(\d+):(\d+):([A-Za-z0-9+/=]+)")
_LONGEST = 120_000  # characters of one argument; the limit of Linux is 128 KiB
_IDLE_PERCENT = 5.0
_NO_BINDING = "lacks support for cpu binding"  # harmless warning of srun for --cpu-bind=none

Looks = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class GpuUse:
    """GPU use of a job in the newest samples: number of GPUs, idle GPUs, mean utilization, sample age."""

    count: int
    idle: int
    util: float
    age_s: float


@dataclass(frozen=True)
class Live:
    """The verdict on a running job.

    Attributes:
        looks: the observed state of every known rank.
        gpus: GPU use; None if no sampler runs in the job.
        by: number of ranks by the method that read their stacks (``py-spy``, ``signal``, ``proc``).
        missing: evidence that could not be collected, with the reason; one line each.
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
    """Find what blocks a running job, with one query of its files and one srun step on its nodes.

    Raises:
        RequestInvalid: the job does not run, or has not started a rank.
        TransportError: the run's files could not be read on their machine.
    """
    view = views(context, [record])[0]
    status = choose_status(view, task)
    name = status.job_id or record.name
    if status.state is not JobState.RUNNING:
        raise RequestInvalid(
            [f"job {name} is not running: its state is {status.state.value}"],
            hint="dtslurm status shows why a job is pending; dtslurm diagnose without --live shows why it "
            "ended",
        )
    if task is None and record.array is not None:
        task = status.job_id.rpartition("_")[2]
    telemetry = read_telemetry(context, record, RunPart(task=task))
    if telemetry.attempt is None:
        raise RequestInvalid(
            [f"job {name} has not started any rank"], hint="dtslurm logs shows the output of its setup"
        )
    attempt = telemetry.attempt
    run_dir = record.run_dir if task is None else f"{record.run_dir}/tasks/{task}"
    observations, missing = _observe_ranks(context, view.record, status, telemetry, run_dir)
    if any(look.get("by") == "none" for look in observations.values()):  # the process may have ended
        telemetry = read_telemetry(context, record, RunPart(attempt=attempt, task=task))
    looks, reasons = answers.interpret(
        observations,
        lambda records: (
            tuple(_combine_rank(telemetry, rank, records.get(rank)) for rank in telemetry.ranks),
            _reasons(records),
        ),
        "the program that examines ranks",
    )
    ranks_by_method: dict[str, int] = defaultdict(int)
    for look in looks:
        if look.by in ("py-spy", "signal", "proc"):
            ranks_by_method[look.by] += 1
    return Live(
        record=view.record,
        status=status,
        attempt=attempt,
        task=task,
        verdict=live.judge(looks, telemetry.world_size or view.record.world_size),
        looks=looks,
        gpus=_measure_gpus(telemetry),
        by=dict(ranks_by_method),
        missing=(*missing, *reasons),
    )


# ---- Reading stacks on the nodes ----


def _observe_ranks(
    context: Context, record: JobRecord, status: JobStatus, now: RunTelemetry, run_dir: str
) -> tuple[Looks, list[str]]:
    """Return the observation of each rank, and messages about those that could not be observed."""
    by_node: dict[str, list[list[int]]] = defaultdict(list)
    for rank in now.ranks.values():
        if rank.running and rank.pid is not None:
            by_node[rank.host].append([rank.rank, rank.pid])
    if not by_node:
        return {}, ["no rank has recorded its process id"]
    cluster = context.cluster_of(record)
    is_local = cluster.profile.scheduler == "local"
    request = {"run_dir": run_dir, "limit": _NODE_LIMIT_S, "ranks": by_node, "by_node": not is_local}
    argument = encode_request(request)
    if len(argument) > _LONGEST:
        return {}, [f"{len(now.ranks):,} ranks are too many for one srun step"]
    program = inline_program(_PARTS, "module.main()")
    pythons = [sys.executable] if is_local else []
    argv = run_with_any_python("dtslurm-live", program, argument, pythons)
    if not is_local:
        argv = commands.step_beside(status.step_id(), sorted(by_node), argv)
    try:
        result = cluster.transport.run(argv, timeout=_LIMIT_S)
    except CommandTimeout:
        return {}, [f"the srun step that examines the ranks did not end within {_LIMIT_S:.0f} s"]
    except CommandNotFound as error:
        return {}, [f"no stacks: {error.message}"]
    return _read(result, by_node)


def _read(done: Completed, by_node: Mapping[str, Sequence[Sequence[int]]]) -> tuple[Looks, list[str]]:
    """Join the pieces of the nodes' answers; report nodes without an answer, with srun's messages."""
    pieces: dict[str, dict[int, str]] = defaultdict(dict)
    counts: dict[str, int] = {}
    for node, number, count, text in _PIECE.findall(done.stdout):
        pieces[node][int(number)] = text
        counts[node] = int(count)
    observations: dict[int, Mapping[str, Any]] = {}
    for node, parts in pieces.items():
        if len(parts) != counts[node]:
            continue
        with contextlib.suppress(binascii.Error, TransportError):
            data = base64.b64decode("".join(parts[number] for number in sorted(parts)))
            answer = answers.parse_object(answers.unpack(data, node), node)
            observations |= answers.interpret(answer, _parse_ranks, node)
    silent = sorted(
        node for node, ranks in by_node.items() if not any(rank in observations for rank, _ in ranks)
    )
    if not silent:
        return observations, []
    errors = [line for line in done.stderr.splitlines() if line.strip() and _NO_BINDING not in line][-3:]
    if NO_PYTHON in done.stdout:
        errors.append("the node has no Python 3.6 or later")
    nodes = ", ".join(silent[:5]) + (f" and {len(silent) - 5} more" if len(silent) > 5 else "")
    return observations, [
        f"could not examine the ranks of {nodes}" + (f": {'; '.join(errors)}" if errors else "")
    ]


def _parse_ranks(answer: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return {int(rank): dict(look) for rank, look in answer["ranks"].items()}


def _combine_rank(now: RunTelemetry, rank: int, observation: Mapping[str, Any] | None) -> RankLook:
    """Combine a rank's record and its node's observation into the state of the rank."""
    record: RankTelemetry = now.ranks[rank]
    look = RankLook(
        rank=rank,
        local_rank=record.local_rank,
        host=record.host,
        pid=record.pid,
        silent_s=_silence_s(now, rank),
        started=record.started is not None,
        ended=record.ended is not None,
        exit_code=record.exit_code,
    )
    if observation is None:
        return look
    threads = observation.get("threads") or [{}]
    return RankLook(
        rank=rank,
        local_rank=look.local_rank,
        host=look.host,
        pid=observation.get("pid") or look.pid,
        state=str(threads[0].get("state") or observation.get("state") or ""),
        cpu=float(observation.get("cpu") or 0.0),
        moved=observation.get("moved"),
        waits=str(threads[0].get("waits") or ""),
        frames=_parse_frames(threads[0]),
        by=str(observation.get("by") or ""),
        workers=tuple(_describe_worker(worker) for worker in observation.get("workers", [])),
        silent_s=look.silent_s,
    )


def _silence_s(now: RunTelemetry, rank: int) -> float | None:
    """Return the seconds since a rank last wrote to its log or recorded training metrics."""
    log_silence_s = now.silent_s(rank)
    times = [point.time for point in now.train if point.time is not None and (point.rank or 0) == rank]
    ages = [max(0.0, now.now - time) for time in times[-1:]] + (
        [log_silence_s] if log_silence_s is not None else []
    )
    return min(ages, default=None)


def _parse_frames(thread: Mapping[str, Any]) -> tuple[StackFrame, ...]:
    return tuple(
        StackFrame(str(frame.get("function")), str(frame.get("file")), int(frame.get("line") or 0))
        for frame in thread.get("frames", [])
    )


def _describe_worker(observation: Mapping[str, Any]) -> str:
    """Describe what a data loader worker process does."""
    thread = observation["threads"][0]
    look = RankLook(
        rank=0, state=str(thread["state"]), by="proc", waits=str(thread["waits"]),
        frames=_parse_frames(thread), cpu=float(observation.get("cpu") or 0.0),
    )  # fmt: skip
    return f"process {observation.get('pid')}: {live.place_of(look)}"


def _reasons(looks: Looks) -> list[str]:
    """Return the reasons for missing stacks, each once with its number of ranks."""
    counts: dict[str, int] = defaultdict(int)
    for look in looks.values():
        if look.get("by") == "proc":
            counts["; ".join(str(reasons) for reasons in look.get("why", []))] += 1
    return [
        f"no stacks of {count} rank{'s' if count > 1 else ''}: {reasons}" for reasons, count in counts.items()
    ]


def _measure_gpus(now: RunTelemetry) -> GpuUse | None:
    """Return the GPU use in the newest sample of each node."""
    samples = [
        (gpu.util, now.now - node.time) for node in now.nodes for gpu in node.gpus if gpu.util is not None
    ]
    if not samples:
        return None
    utils = [util for util, _ in samples]
    idle_count = sum(util < _IDLE_PERCENT for util in utils)
    return GpuUse(
        len(utils), idle_count, round(sum(utils) / len(utils), 1), max(0.0, *(age for _, age in samples))
    )
