"""Convert the telemetry worker program's JSON into `RunTelemetry`; drop values of a wrong type."""

from __future__ import annotations

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
from dtslurm.views.role_states import parse_roles
from dtslurm.worker.lib.json_records import finite_number, number

_JsonObject = Mapping[str, Any]
_INT_LIMIT = 2**63
_MIN_SKEW_S = 5.0  # a smaller difference can be the delay of a slow file system
_INTEGER_METRICS = {"rank", "step", "total_steps"}
_METRICS = tuple(metric.name for metric in fields(TrainPoint) if metric.name != "other")


def read(
    answer: _JsonObject, previous_telemetry: RunTelemetry | None = None, yield_control: Rest | None = None
) -> RunTelemetry:
    """Return the telemetry in a worker program's answer.

    A rank record that the answer does not repeat is taken from ``previous_telemetry``.
    """
    cursor = _mapping_or_empty(answer.get("cursor"))
    is_same_attempt = previous_telemetry is not None and (
        previous_telemetry.task,
        previous_telemetry.attempt,
    ) == (
        answer.get("task"),
        answer.get("attempt"),
    )
    earlier_ranks = previous_telemetry.ranks if previous_telemetry is not None and is_same_attempt else {}
    ranks = {}
    for name, values in chunked(_mapping_or_empty(answer.get("ranks")).items(), yield_control):
        if name.isdecimal() and isinstance(values, Mapping):
            ranks[int(name)] = _parse_rank(int(name), values, earlier_ranks.get(int(name)))
    train = _list_of_mappings(_mapping_or_empty(answer.get("train")).get("records"))
    world_size = _int_or_none(answer.get("world_size"))
    return RunTelemetry(
        now=finite_number(answer.get("now")) or 0.0,
        attempt=_int_or_none(answer.get("attempt")),
        attempts=tuple(attempt for attempt in answer.get("attempts", ()) if isinstance(attempt, int)),
        task=answer.get("task"),
        tasks=tuple(map(str, answer.get("tasks", ()))),
        world_size=world_size,
        ranks=dict(sorted(ranks.items())),
        first_failure=first_failure_of(answer.get("first_failure")),
        nodes=tuple(map(node, _list_of_mappings(answer.get("nodes")))),
        nodes_before=tuple(map(node, _list_of_mappings(answer.get("nodes_before")))),
        activity=tuple(map(node_activity, _list_of_mappings(answer.get("activity")))),
        roles=parse_roles(answer.get("roles")),
        train=tuple(point(record, world_size) for record in train),
        train_from=_text_or_empty(answer.get("train_from")),
        events=tuple(_list_of_mappings(_mapping_or_empty(answer.get("events")).get("records"))),
        cursor=cursor,
    )


def _parse_rank(rank: int, values: _JsonObject, previous_record: RankTelemetry | None) -> RankTelemetry:
    """Return a rank's record; without ``pid``, only its number of bytes and last output are new."""
    size, last_output_at = _int_or_none(values.get("bytes")) or 0, finite_number(values.get("spoke"))
    if "pid" not in values and previous_record is not None:
        is_unchanged = (size, last_output_at) == (previous_record.bytes, previous_record.last_output_at)
        return (
            previous_record
            if is_unchanged
            else replace(previous_record, bytes=size, last_output_at=last_output_at)
        )
    return RankTelemetry(
        rank=rank,
        bytes=size,
        last_output_at=last_output_at,
        node_rank=_int_or_none(values.get("node_rank")),
        local_rank=_int_or_none(values.get("local_rank")),
        host=_text_or_empty(values.get("host")),
        pid=_int_or_none(values.get("pid")),
        started=_int_or_none(values.get("started")),
        ended=_int_or_none(values.get("ended")),
        exit_code=_int_or_none(values.get("exit_code")),
        signal=_int_or_none(values.get("signal")),
        told_to_end=values.get("told_to_end") is True,
    )


def first_failure_of(value: object) -> FirstFailure | None:
    """Return the first failure in a worker program's answer, None if it contains none."""
    values = _mapping_or_empty(value)
    rank, code = _int_or_none(values.get("rank")), _int_or_none(values.get("exit_code"))
    if rank is None or code is None:
        return None
    return FirstFailure(
        rank=rank,
        exit_code=code,
        error=_text_or_empty(values.get("error")),
        file=_text_or_empty(values.get("file")),
        line=_int_or_none(values.get("line")),
    )


def node(values: _JsonObject) -> NodeSample:
    """Return the node sample of one record of the sampler."""
    return NodeSample(
        node=_text_or_empty(values.get("node")),
        node_rank=_int_or_none(values.get("node_rank")) or 0,
        time=finite_number(values.get("time")) or 0.0,
        gpus=tuple(map(_parse_gpu, _list_of_mappings(values.get("gpus")))),
        cpu_percent=finite_number(values.get("cpu_percent")),
        load=finite_number(values.get("load")),
        memory_used=_int_or_none(values.get("memory_used")),
        memory_total=_int_or_none(values.get("memory_total")),
        cgroup_memory=_int_or_none(values.get("cgroup_memory")),
        cgroup_limit=_int_or_none(values.get("cgroup_limit")),
        nics={name: _parse_nic(item) for name, item in _named_mappings(values.get("nics"))},
        disks={
            path: DiskUse(
                used=_int_or_none(item.get("used")) or 0, total=_int_or_none(item.get("total")) or 0
            )
            for path, item in _named_mappings(values.get("disks"))
        },
    )


def node_activity(values: _JsonObject) -> NodeActivity:
    """Return the activity that a sampler recorded for the ranks of its node; a missing time becomes 0.

    The node's clock may be wrong. ``written`` is the time of the file by the file system's clock. The sampler
    writes the file right after sampling, so the difference to ``time`` is the error of the node's clock, by
    which all times are corrected.
    """
    sampled_at, written_at = (
        finite_number(values.get("time")) or 0.0,
        finite_number(values.get("written")) or 0.0,
    )
    clock_offset = (
        written_at - sampled_at if _MIN_SKEW_S < abs(written_at - sampled_at) <= LARGEST_SKEW_S else 0.0
    )
    kinds = ("output", "cpu", "children", "io", "gpu")
    times = {
        kind: time + clock_offset if (time := finite_number(values.get(kind))) else 0.0 for kind in kinds
    }
    return NodeActivity(
        time=sampled_at + clock_offset,
        ranks=_parse_rank_list(values.get("ranks")),
        seen=_parse_rank_list(values.get("seen")),
        world_size=_int_or_none(values.get("world_size")),
        learned=values.get("learned") is True,
        longest_s=finite_number(values.get("longest")) or 0.0,
        waits={
            int(rank): (_text_or_empty(wait_record[0]), safe(_text_or_empty(wait_record[1]))[:32])
            for rank, wait_record in _mapping_or_empty(values.get("waits")).items()
            if rank.isdecimal() and isinstance(wait_record, list) and len(wait_record) == 2
        },
        over=values.get("over") is True,
        **times,
    )


def _parse_rank_list(value: Any) -> tuple[int, ...]:
    return tuple(rank for rank in map(_int_or_none, _list_or_empty(value)) if rank is not None)


def _parse_gpu(values: _JsonObject) -> GpuSample:
    return GpuSample(
        index=_int_or_none(values.get("index")) or 0,
        uuid=_text_or_empty(values.get("uuid")),
        name=_text_or_empty(values.get("name")),
        util=finite_number(values.get("util")),
        sm_activity=finite_number(values.get("sm_activity")),
        memory_used=_int_or_none(values.get("memory_used")),
        memory_total=_int_or_none(values.get("memory_total")),
        power_w=finite_number(values.get("power_w")),
        temperature_c=finite_number(values.get("temperature_c")),
        sm_mhz=finite_number(values.get("sm_mhz")),
        throttle=tuple(item for item in _list_or_empty(values.get("throttle")) if isinstance(item, str)),
        ecc_corrected=_int_or_none(values.get("ecc_corrected")),
        ecc_uncorrected=_int_or_none(values.get("ecc_uncorrected")),
        xid=tuple(item for item in _list_or_empty(values.get("xid")) if _int_or_none(item) is not None),
    )


def _parse_nic(values: _JsonObject) -> NicCounters:
    return NicCounters(
        rx_bytes=_int_or_none(values.get("rx_bytes")),
        tx_bytes=_int_or_none(values.get("tx_bytes")),
        errors=_int_or_none(values.get("errors")),
    )


def point(values: _JsonObject, world_size: int | None = None) -> TrainPoint:
    """Return one record of training metrics; ``tokens_per_s_per_gpu`` is multiplied by ``world_size``."""
    tokens_per_gpu = finite_number(values.get("tokens_per_s_per_gpu"))
    if tokens_per_gpu is not None and world_size and "tokens_per_s" not in values:
        values = {**values, "tokens_per_s": tokens_per_gpu * world_size}
    metrics: dict[str, Any] = {}
    for key in _METRICS:
        metrics[key] = (
            _int_or_none(values.get(key)) if key in _INTEGER_METRICS else _number_or_none(values.get(key))
        )
    for key in ("time", "epoch"):
        metrics[key] = finite_number(metrics[key])
    other_metrics = {
        key: value for key, value in values.items() if value is not None and metrics.get(key) is None
    }
    return TrainPoint(**metrics, other=other_metrics)


def _number_or_none(value: Any) -> float | None:
    """Return a number, including NaN and infinity, which some programs write as JSON strings."""
    if isinstance(value, str) and value.lower().lstrip("+-") in {"nan", "inf", "infinity"}:
        return float(value)
    return number(value)


def _int_or_none(value: Any) -> int | None:
    """Return an integer that fits in 64 bits, truncated from a fraction; None for any other value."""
    decoded = finite_number(value)
    return int(value) if decoded is not None and abs(decoded) < _INT_LIMIT else None


def _text_or_empty(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _list_or_empty(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping_or_empty(value: Any) -> _JsonObject:
    return value if isinstance(value, Mapping) else {}


def _list_of_mappings(value: Any) -> list[_JsonObject]:
    return [item for item in _list_or_empty(value) if isinstance(item, Mapping)]


def _named_mappings(value: Any) -> list[tuple[str, _JsonObject]]:
    return [(name, item) for name, item in _mapping_or_empty(value).items() if isinstance(item, Mapping)]


def activity_of(telemetry: RunTelemetry, world_size: int) -> Activity | None:
    """Return the activity of a running job in its newest attempt, None if it is unknown."""
    if telemetry.attempt != max(telemetry.attempts, default=None):
        return None
    return judge_activity(telemetry.activity, telemetry.world_size or world_size, telemetry.now)
