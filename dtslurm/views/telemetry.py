"""From a worker's JSON to a ``RunTelemetry``: what has the wrong kind is left out, whatever wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from dtslurm.diagnose.stall import judge_activity
from dtslurm.logs.clean import safe
from dtslurm.model.chunking import Rest, chunked
from dtslurm.model.runs.activity import Activity, NodeActivity
from dtslurm.model.runs.telemetry import (
    DiskUse,
    FirstFailure,
    GpuSample,
    NicCounters,
    NodeSample,
    RankTelemetry,
    RunTelemetry,
    TrainPoint,
)
from dtslurm.model.units import LARGEST_SKEW_S

_Values = Mapping[str, Any]
_LARGEST = 2**63
_NOTICED_S = 5.0  # a slow file system is late by seconds
_COUNTS = {"rank", "step", "total_steps"}
_KNOWN = tuple(item.name for item in fields(TrainPoint) if item.name != "other")


def read(answer: _Values, before: RunTelemetry | None = None, rest: Rest | None = None) -> RunTelemetry:
    """Return the pulse in an answer; what it does not repeat of ``before``, the ranks' records, is kept."""
    cursor = _mapping(answer.get("cursor"))
    same = before is not None and (before.task, before.attempt) == (answer.get("task"), answer.get("attempt"))
    known = before.ranks if before is not None and same else {}
    ranks = {}
    for name, values in chunked(_mapping(answer.get("ranks")).items(), rest):
        if name.isdecimal() and isinstance(values, Mapping):
            ranks[int(name)] = _rank(int(name), values, known.get(int(name)))
    train = _mappings(_mapping(answer.get("train")).get("records"))
    world_size = _whole(answer.get("world_size"))
    return RunTelemetry(
        now=_number(answer.get("now")) or 0.0,
        attempt=_whole(answer.get("attempt")),
        attempts=tuple(item for item in answer.get("attempts", ()) if isinstance(item, int)),
        task=answer.get("task"),
        tasks=tuple(map(str, answer.get("tasks", ()))),
        world_size=world_size,
        ranks=dict(sorted(ranks.items())),
        first_failure=first_failure_of(answer.get("first_failure")),
        nodes=tuple(map(node, _mappings(answer.get("nodes")))),
        nodes_before=tuple(map(node, _mappings(answer.get("nodes_before")))),
        activity=tuple(map(node_activity, _mappings(answer.get("activity")))),
        train=tuple(point(item, world_size) for item in train),
        train_from=_text(answer.get("train_from")),
        events=tuple(_mappings(_mapping(answer.get("events")).get("records"))),
        cursor=cursor,
    )


def _rank(rank: int, values: _Values, known: RankTelemetry | None) -> RankTelemetry:
    size, spoke = _whole(values.get("bytes")) or 0, _number(values.get("spoke"))
    if "pid" not in values and known is not None:
        same = (size, spoke) == (known.bytes, known.spoke)
        return known if same else replace(known, bytes=size, spoke=spoke)
    return RankTelemetry(
        rank=rank,
        bytes=size,
        spoke=spoke,
        node_rank=_whole(values.get("node_rank")),
        local_rank=_whole(values.get("local_rank")),
        host=_text(values.get("host")),
        pid=_whole(values.get("pid")),
        started=_whole(values.get("started")),
        ended=_whole(values.get("ended")),
        exit_code=_whole(values.get("exit_code")),
        signal=_whole(values.get("signal")),
        told_to_end=values.get("told_to_end") is True,
    )


def first_failure_of(value: object) -> FirstFailure | None:
    """Return the first failure that a worker program describes, None where it describes none."""
    values = _mapping(value)
    rank, code = _whole(values.get("rank")), _whole(values.get("exit_code"))
    if rank is None or code is None:
        return None
    return FirstFailure(
        rank=rank,
        exit_code=code,
        error=_text(values.get("error")),
        file=_text(values.get("file")),
        line=_whole(values.get("line")),
    )


def node(values: _Values) -> NodeSample:
    """Return one record of the sampler."""
    return NodeSample(
        node=_text(values.get("node")),
        node_rank=_whole(values.get("node_rank")) or 0,
        time=_number(values.get("time")) or 0.0,
        gpus=tuple(map(_gpu, _mappings(values.get("gpus")))),
        cpu_percent=_number(values.get("cpu_percent")),
        load=_number(values.get("load")),
        memory_used=_whole(values.get("memory_used")),
        memory_total=_whole(values.get("memory_total")),
        cgroup_memory=_whole(values.get("cgroup_memory")),
        cgroup_limit=_whole(values.get("cgroup_limit")),
        nics={name: _nic(item) for name, item in _named(values.get("nics"))},
        disks={
            path: DiskUse(used=_whole(item.get("used")) or 0, total=_whole(item.get("total")) or 0)
            for path, item in _named(values.get("disks"))
        },
    )


def node_activity(values: _Values) -> NodeActivity:
    """Return what a sampler wrote of its node's ranks; a time that is missing is long ago.

    The node's clock may be wrong. ``written`` is when the file was written by the file system's clock: the
    sampler looked just before, so that tells how far the times are to be moved.
    """
    looked, written = _number(values.get("time")) or 0.0, _number(values.get("written")) or 0.0
    behind = written - looked if _NOTICED_S < abs(written - looked) <= LARGEST_SKEW_S else 0.0
    kinds = ("output", "cpu", "children", "io", "gpu")
    times = {kind: time + behind if (time := _number(values.get(kind))) else 0.0 for kind in kinds}
    return NodeActivity(
        time=looked + behind,
        ranks=_ranks(values.get("ranks")),
        seen=_ranks(values.get("seen")),
        world_size=_whole(values.get("world_size")),
        learned=values.get("learned") is True,
        longest_s=_number(values.get("longest")) or 0.0,
        waits={
            int(rank): (_text(what[0]), safe(_text(what[1]))[:32])
            for rank, what in _mapping(values.get("waits")).items()
            if rank.isdecimal() and isinstance(what, list) and len(what) == 2
        },
        over=values.get("over") is True,
        **times,
    )


def _ranks(value: Any) -> tuple[int, ...]:
    return tuple(rank for rank in map(_whole, _list(value)) if rank is not None)


def _gpu(values: _Values) -> GpuSample:
    return GpuSample(
        index=_whole(values.get("index")) or 0,
        uuid=_text(values.get("uuid")),
        name=_text(values.get("name")),
        util=_number(values.get("util")),
        sm_activity=_number(values.get("sm_activity")),
        memory_used=_whole(values.get("memory_used")),
        memory_total=_whole(values.get("memory_total")),
        power_w=_number(values.get("power_w")),
        temperature_c=_number(values.get("temperature_c")),
        sm_mhz=_number(values.get("sm_mhz")),
        throttle=tuple(item for item in _list(values.get("throttle")) if isinstance(item, str)),
        ecc_corrected=_whole(values.get("ecc_corrected")),
        ecc_uncorrected=_whole(values.get("ecc_uncorrected")),
        xid=tuple(item for item in _list(values.get("xid")) if _whole(item) is not None),
    )


def _nic(values: _Values) -> NicCounters:
    return NicCounters(
        rx_bytes=_whole(values.get("rx_bytes")),
        tx_bytes=_whole(values.get("tx_bytes")),
        errors=_whole(values.get("errors")),
    )


def point(values: _Values, world_size: int | None = None) -> TrainPoint:
    """Return one record of training code; what is told of one GPU only is multiplied by their number."""
    each = _number(values.get("tokens_per_s_per_gpu"))
    if each is not None and world_size and "tokens_per_s" not in values:
        values = {**values, "tokens_per_s": each * world_size}
    known: dict[str, Any] = {}
    for key in _KNOWN:
        known[key] = _whole(values.get(key)) if key in _COUNTS else _any_number(values.get(key))
    for key in ("time", "epoch"):
        known[key] = _number(known[key])
    other = {key: value for key, value in values.items() if value is not None and known.get(key) is None}
    return TrainPoint(**known, other=other)


def _any_number(value: Any) -> float | None:
    """Return a number, NaN and infinity too; programs write these as texts where their JSON has no word."""
    if isinstance(value, str) and value.lower().lstrip("+-") in {"nan", "inf", "infinity"}:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _number(value: Any) -> float | None:
    number = None if isinstance(value, str) else _any_number(value)
    return number if number is not None and math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    """Return a count that fits 64 bits, None for anything else."""
    number = _number(value)
    return int(value) if number is not None and abs(number) < _LARGEST else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> _Values:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[_Values]:
    return [item for item in _list(value) if isinstance(item, Mapping)]


def _named(value: Any) -> list[tuple[str, _Values]]:
    return [(name, item) for name, item in _mapping(value).items() if isinstance(item, Mapping)]


def activity_of(pulse: RunTelemetry, world_size: int) -> Activity | None:
    """Return what a running job does by a look at its newest attempt, None where that is not known."""
    if pulse.attempt != max(pulse.attempts, default=None):
        return None
    return judge_activity(pulse.activity, pulse.world_size or world_size, pulse.now)
