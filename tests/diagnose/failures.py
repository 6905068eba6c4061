"""Failed runs written rank by rank, and their diagnosis."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtslurm.model.runs.diagnosis import JobFacts, Verdict
from tests.diagnose.judge import verdict

START = 1_795_000_000

NCCL = "[rank0]:[E] ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout: "
NCCL += "WorkNCCL(SeqNum=7753, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600061 milliseconds"
GLOO = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"
BARRIER = "RuntimeError: Rank {} failed to pass monitoredBarrier in 60000 ms"
LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:40112"
ENQUEUED = "[PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected by watchdog at work sequence id: 8 "
ENQUEUED += "PG status: last enqueued work: {}, last completed work: 7"


@dataclass(frozen=True)
class Left:
    """What a rank left behind.

    Attributes:
        log: its last lines; None where it never wrote any.
        code, signal: as its record has them; without a code there is no record of its end.
        ended, wrote: seconds after the start at which it ended, and last wrote.
        started: False where there is no record of it at all.
        told_to_end: whether its record says that its launcher, or Slurm, passed the signal on.
    """

    log: str | None = ""
    code: int | None = None
    signal: int | None = None
    ended: float = 600.0
    wrote: float | None = None
    host: str = "n1"
    started: bool = True
    error: Mapping[str, Any] | None = None
    told_to_end: bool = False


def collective_timeout(log: str = NCCL, **values: Any) -> Left:
    """Return a rank that ended after the timeout of a collective."""
    return Left(log, 134, 6, **values)


def lost_connection(log: str = LOST, **values: Any) -> Left:
    """Return a rank that lost its connection to another rank."""
    return Left(log, 1, **values)


def diagnose_run(
    folder: Path,
    *ranks: Left,
    first: tuple[int, int] | None = None,
    batch: str | None = "",
    launchers: Sequence[str] = (),
    events: Sequence[Mapping[str, Any]] = (),
    dumps: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    stacks: Mapping[str, str] | None = None,
    **facts: Any,
) -> Verdict:
    """Return the diagnosis of a run with these ranks and files; all node clocks are right."""
    logs, records = folder / "logs" / "0", folder / "ranks" / "0"
    logs.mkdir(parents=True)
    records.mkdir(parents=True)
    for rank, left in enumerate(ranks):
        if left.log is not None:
            path = logs / f"rank-{rank}.log"
            path.write_text(f"step 1 loss 0.5\n{left.log}\n")
            at = START + (left.ended if left.wrote is None else left.wrote)
            os.utime(path, (at, at))
        if left.started:
            _record(records / f"{rank}.json", rank, left)
        if left.error is not None:
            (records / f"{rank}.error.json").write_text(json.dumps({"message": left.error}))
    for node, text in enumerate(launchers):
        (logs / f"node-{node}.log").write_text(text + "\n")
    if first is not None:
        (records / "first-failure").write_text(f"{first[0]} {first[1]}\n")
    for rank, entries in (dumps or {}).items():
        (records / f"flight_{rank}").write_text(json.dumps({"version": "2.9", "entries": entries}))
    for name, text in (stacks or {}).items():
        (records / "stacks").mkdir(exist_ok=True)
        (records / "stacks" / name).write_text(text)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if batch is not None:
        (folder / "logs" / "batch.log").write_text(batch + "\n" if batch else "")
    result: dict[str, Any] = {"job_id": "17", "state": "FAILED", "over": True, "exit_code": 1}
    result |= {"start": START, "end": START + 700, "world_size": len(ranks), **facts}
    return verdict(folder, JobFacts(**result))


def _record(path: Path, rank: int, left: Left) -> None:
    values: dict[str, Any] = {"schema": 1, "rank": rank, "local_rank": 0, "pid": 7}
    values |= {"node_rank": int(left.host[1:]) - 1}
    values |= {"host": left.host, "started": START + 5, "exit_code": left.code, "signal": left.signal}
    values |= {"told_to_end": True} if left.told_to_end else {}
    ended = None if left.code is None else int(START + left.ended)
    path.write_text(json.dumps({**values, "ended": ended}))
    if ended is not None:
        os.utime(path, (ended, ended))
