"""What is fuzzed. A target takes any bytes; it may raise the errors its docstring promises, and nothing else.

Text of Slurm reaches its parsers with ``surrogateescape``, as transports decode it.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dtslurm.config import decode, strict_yaml
from dtslurm.config.job_files import jobs
from dtslurm.errors import DtslurmError
from dtslurm.logs import stamps
from dtslurm.logs.clean import safe
from dtslurm.logs.frames import Decoder
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.runs.state import JobState
from dtslurm.slurm import accounting, arrays, parse, parse_errors, parse_sacctmgr, parse_scontrol, pending
from dtslurm.store.rundir import RunDir
from dtslurm.views import telemetry
from dtslurm.worker.logtail import frames as wire

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "slurm" / "data"


class Target(NamedTuple):
    """A parser: what runs it on bytes, and what to begin with."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def profile(data: bytes) -> None:
    """A cluster profile; everything wrong with it is told at once, with its line."""
    with contextlib.suppress(DtslurmError):
        table, problems = strict_yaml.parse(data, "x.yaml")
        assert isinstance(decode.decode(ClusterProfile, table, problems=problems), ClusterProfile)


def job_file(data: bytes) -> None:
    """A job file, with its variables filled in."""
    folder = _folder()
    path = folder / "job.yaml"
    path.write_bytes(data)
    path.chmod(0o600)
    with contextlib.suppress(DtslurmError):
        jobs.load(path, {"lr": "3e-4"}, cwd=folder)


def squeue(data: bytes) -> None:
    """Records of squeue: an id is an id, a state is known or UNKNOWN."""
    for job in parse.squeue(_text(data)).jobs:
        assert arrays.is_valid_job_id(job.job_id)
        assert isinstance(job.state, JobState)
        pending.explain(job.reason, job.job_id)
        assert job.terminal in {True, False}


def sacct(data: bytes) -> None:
    """Records of sacct, for the end of jobs and for usage."""
    parse.keep_latest(parse.sacct(_text(data)).jobs)
    accounting.read(_text(data))


def scontrol(data: bytes) -> None:
    """Records of scontrol: jobs, partitions, nodes, the configuration."""
    text = _text(data)
    for job in parse_scontrol.jobs(text).jobs:
        assert arrays.is_valid_job_id(job.job_id)
    parse_scontrol.partitions(text)
    for node in parse_scontrol.nodes(text):
        assert node.name
    parse_scontrol.config(text)
    parse_sacctmgr.associations(text)


def messages(data: bytes) -> None:
    """What Slurm prints beside its data."""
    text = _text(data)
    parse_errors.classify_error(text)
    parse_errors.distinct_lines(text)
    parse_errors.hint_for(text)
    number = parse.parse_submitted_id(text)
    assert number is None or number.isdecimal()
    parse.mpi_types(text)


def frames(data: bytes) -> None:
    """Frames of a far side, cut anywhere: the same come out as of all bytes at once."""
    whole = _frames([data])
    third = len(data) // 3
    assert _frames([data[:third], data[third : third + 1], data[third + 1 :]]) == whole


def _frames(pieces: Iterable[bytes]) -> list[tuple[int, int, bytes]]:
    decoder, result = Decoder(), []
    try:
        for piece in pieces:
            for frame in decoder.feed(piece):
                result.append((frame.kind, frame.stream, frame.payload))
                with contextlib.suppress(DtslurmError):
                    frame.values()
    except DtslurmError:
        result.append((-1, 0, b""))
    return result


def log_lines(data: bytes) -> None:
    """A rank's log, cut anywhere: no line of it can command a terminal."""
    for text in (safe(_text(data)), safe(_text(data), colours=True)):
        bare = text.replace("\x1b[0m", "")
        assert not any(mark in bare for mark in ("\x07", "\x9b", "\u202e", "\x1b]", "\x1b[2J"))
    for line in _text(data).splitlines():
        stamps.written_at(line, 1_800_000_000.0, 3600)


def metrics(data: bytes) -> None:
    """Lines of metrics and samples, as a program or a sampler left them."""
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            values = json.loads(line)
            if isinstance(values, dict):
                telemetry.read(values)
                telemetry.node(values)
                telemetry.point(values)


def rank_records(data: bytes) -> None:
    """Exit records and events in a run directory, torn or forged."""
    run = RunDir(_folder())
    ranks = run.path / "ranks" / "0"
    ranks.mkdir(parents=True, exist_ok=True)
    for path in (ranks / "0.json", ranks / "first-failure", run.path / "events.jsonl"):
        path.write_bytes(data)
    for record in run.ranks(0):
        assert record.rank == 0
    run.first_failure(0)
    assert all(isinstance(event, dict) for event in run.events())


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="dtslurm-fuzz-"))


def _recorded(*patterns: str) -> list[bytes]:
    return [path.read_bytes()[:4096] for pattern in patterns for path in sorted(RECORDED.rglob(pattern))]


def _of_frames() -> list[bytes]:
    data = json.dumps({"path": "logs/0/rank-0.log", "inode": 7}).encode()
    return [wire.MAGIC + wire.frame(kind, 1, data) for kind in (wire.PACKED, wire.REQUEST, 3, 4)]


def _files(folder: str, pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / folder).rglob(pattern))]


def _json_lines() -> list[bytes]:
    values = [
        {"step": 12, "loss": 2.3, "tokens_per_s": 1e308, "time": 1.0},
        {
            "schema": 1,
            "time": 2.0,
            "node": "n1",
            "gpus": [{"index": 0, "util": 99}],
            "nics": {"a": {"rx_bytes": 1}},
        },
        {
            "schema": 1,
            "now": 3,
            "attempt": 0,
            "ranks": {"0": {"bytes": 1}},
            "train": {"records": [], "offset": 0},
        },
        {"schema": 1, "rank": 0, "local_rank": 0, "host": "n1", "started": 1, "ended": 2, "exit_code": 1},
    ]
    return [json.dumps(value).encode() + b"\n" for value in values]


TARGETS = {
    "profile": Target(profile, lambda: _files("cluster_profiles", "*.yaml")),
    "job_file": Target(job_file, lambda: _files("examples", "*.yaml")),
    "squeue": Target(squeue, lambda: _recorded("squeue*")),
    "sacct": Target(sacct, lambda: _recorded("sacct*")),
    "scontrol": Target(scontrol, lambda: _recorded("*job*", "*node*", "*partition*", "*config*")),
    "messages": Target(
        messages, lambda: [b"Submitted batch job 17\n", b"sbatch: error: Batch job submission failed: x"]
    ),
    "frames": Target(frames, _of_frames),
    "log_lines": Target(
        log_lines, lambda: [b"\x1b[31mred\x1b[0m\r12%\n", b"2026-01-01 10:00:00,123 INFO step 1"]
    ),
    "metrics": Target(metrics, _json_lines),
    "rank_records": Target(rank_records, _json_lines),
}
