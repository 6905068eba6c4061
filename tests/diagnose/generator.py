"""Run directories of failed runs whose cause is known: what ranks, launcher and Slurm would leave behind.

Each run has a culprit, consequences on the other ranks, noise that looks like errors, nodes whose clocks are
up to five seconds off, and a file system whose times are its own or the nodes'.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from dtslurm.model.runs.diagnosis import JobFacts
from tests.diagnose.phrases import PHRASES, Half, Lines

START = 1_795_000_000


@dataclass(frozen=True)
class Kind:
    """How a run of one kind fails.

    Attributes:
        cause: the right verdict.
        says: phrases of the culprit, by their name; None for a culprit that says nothing.
        who: ``one`` rank, a whole ``node``, ``all`` ranks, rank ``zero``, or ``nobody``.
        code, signal: of the culprit's end; both None for one that leaves no record of its end.
        others: what the other ranks say: ``lost``, ``timeout-nccl``, ``timeout-gloo``,
            ``timeout-breaks`` (who gives up first closes its connections to the others), ``ended``, ``fine``.
        late: the culprit is ended by force only after the others.
        batch: phrases in the batch script's log.
        state: Slurm's word.
        blame: who is to blame, where that is certain.
    """

    cause: str
    says: str | None = None
    who: str = "one"
    code: int | None = 1
    signal: int | None = None
    others: str = "lost"
    late: bool = False
    batch: str | None = None
    state: str = "FAILED"
    blame: str | None = None
    dumps: bool = False


KINDS: dict[str, Kind] = {
    "exception": Kind("python-exception", "exception", blame="code"),
    "exception-everywhere": Kind("python-exception", "exception", who="all", blame="code"),
    "exception-and-timeouts": Kind("python-exception", "exception", others="timeout-nccl"),
    "exception-then-hang": Kind("python-exception", "exception", others="timeout-gloo", late=True),
    "exception-then-time-limit": Kind("python-exception", "exception", others="ended", late=True,
                                      batch="time-limit", state="TIMEOUT"),
    "import": Kind("import-error", "import", who="all"),
    "import-on-one-node": Kind("import-error", "import", who="node", others="ended", blame="node"),
    "file-on-one-node": Kind("python-exception", "file", who="node", others="ended", blame="node"),
    "gpu-memory": Kind("gpu-out-of-memory", "gpu-memory"),
    "gpu-memory-and-timeouts": Kind("gpu-out-of-memory", "gpu-memory", others="timeout-nccl"),
    "host-memory": Kind("host-out-of-memory", None, code=137, signal=9, batch="slurm-oom"),
    "host-memory-by-state": Kind("host-out-of-memory", None, code=137, signal=9, state="OUT_OF_MEMORY"),
    "host-memory-in-python": Kind("host-out-of-memory", "python-memory"),
    "hang-nccl": Kind("collective-timeout", None, code=None, others="timeout-nccl", late=True),
    "hang-gloo": Kind("collective-timeout", None, code=143, signal=15, others="timeout-gloo", late=True),
    "hang-gloo-breaks": Kind("collective-timeout", None, code=143, signal=15, others="timeout-breaks",
                             late=True),
    "hang-killed-late": Kind("collective-timeout", code=137, signal=9, others="timeout-nccl", late=True),
    "hang-with-flight-record": Kind("collective-timeout", "all-time-out", code=134, signal=6,
                                    others="timeout-nccl", dumps=True),
    "left-early": Kind("collective-timeout", None, code=0, others="timeout-nccl"),
    "rendezvous": Kind("rendezvous", None, code=None, others="rendezvous"),
    "port": Kind("port-in-use", "port", who="zero", others="rendezvous"),
    "device": Kind("invalid-device", "device"),
    "driver-on-one-node": Kind("driver-mismatch", "driver", who="node", others="ended", blame="node"),
    "driver": Kind("driver-mismatch", "driver", who="all"),
    "gpu-fault": Kind("gpu-fault", "gpu-fault", blame="node"),
    "gpu-fault-and-timeouts": Kind("gpu-fault", "gpu-fault", others="timeout-nccl", blame="node"),
    "link": Kind("link-down", "link", blame="node"),
    "disk": Kind("disk-full", "disk", who="zero"),
    "quota": Kind("disk-full", "quota", who="zero"),
    "segfault": Kind("segfault", "segfault", code=139, signal=11),
    "segfault-silent": Kind("segfault", None, code=139, signal=11),
    "bus": Kind("bus-error", "bus"),
    "bus-silent": Kind("bus-error", None, code=135, signal=7),
    "nan": Kind("nan-loss", "nan", who="all"),
    "nan-on-rank-0": Kind("nan-loss", "nan", who="zero"),
    "container": Kind("container", None, who="nobody", others="never", batch="container"),
    "exit-code": Kind("exit-code", None, code=3),
    "killed": Kind("killed", None, code=137, signal=9),
    "signalled-then-timeouts": Kind("killed", None, code=143, signal=15, others="timeout-nccl"),
    "signalled-then-gloo": Kind("killed", None, code=143, signal=15, others="timeout-gloo"),
    "aborted": Kind("abort", None, code=134, signal=6),
    "killed-then-timeouts": Kind("killed", None, code=137, signal=9, others="timeout-nccl"),
    "time-limit": Kind("time-limit", None, who="nobody", others="ended", batch="time-limit", state="TIMEOUT"),
    "time-limit-unsaid": Kind("time-limit", None, who="nobody", others="ended", batch="time-limit",
                              state="UNKNOWN"),
    "preempted": Kind("preempted", None, who="nobody", others="ended", batch="preempted", state="PREEMPTED"),
    "cancelled": Kind("cancelled", None, who="nobody", others="ended", batch="cancelled", state="CANCELLED"),
    "node": Kind("node-failure", None, who="node", code=None, others="ended", batch="node", state="NODE_FAIL",
                 blame="node"),
    "node-by-launcher": Kind("node-failure", None, who="node", code=None, batch="node", blame="node"),
    "node-unsaid": Kind("node-failure", None, who="node", code=None, others="lost", blame="node"),
    "fine": Kind("none", None, who="nobody", others="fine", state="COMPLETED"),
}  # fmt: skip


@dataclass
class GeneratedRun:
    """A run directory, what Slurm says of the job, and the right answer.

    Attributes:
        ranks: the ranks any of which is right; empty where no rank is.
    """

    kind: str
    folder: Path
    facts: JobFacts
    cause: str
    ranks: set[int]
    blame: str | None
    batch: Path


@dataclass
class _Run:
    dice: random.Random
    half: Half
    kind: Kind
    world: int
    per_node: int
    culprits: set[int] = field(default_factory=set)
    skew: dict[int, float] = field(default_factory=dict)
    server_time: bool = True
    failed_at: float = 0.0
    logs: dict[int, list[str]] = field(default_factory=dict)
    ends: dict[int, tuple[float, int | None, int | None] | None] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    words_chosen: int = 0

    def node(self, rank: int) -> int:
        return rank // self.per_node

    def phrase(self, name: str, rank: int) -> list[str]:
        """Return one of the ways to say it; what fails, fails in the same words on all ranks."""
        ways = PHRASES[self.half][name]
        lines: Lines = (
            ways[self.words_chosen % len(ways)] if name == self.kind.says else self.dice.choice(ways)
        )
        return [self.fill(line, rank) for line in lines]

    def fill(self, line: str, rank: int) -> str:
        words = {**self.words, "rank": str(rank), "node": f"n{self.node(rank) + 1}"}
        return re.sub(r"\{(\w+)\}", lambda result: words.get(result[1], result[0]), line)


def make_run(folder: Path, name: str, seed: int, half: Half, *, world: int | None = None) -> GeneratedRun:
    """Write a failed run of a kind, and return the correct answer.

    Args:
        world: how many ranks; by default 8 to 64, now and then up to 1,024.
    """
    dice = random.Random(f"{half}/{name}/{seed}")
    kind = KINDS[name]
    per_node = dice.choice([2, 4, 8])
    if world is None:
        world = dice.choice([8, 8, 16, 16, 24, 32, 64, 128] if seed % 20 else [512, 1024])
    nodes = max(2, world // per_node)
    run = _Run(dice, half, kind, nodes * per_node, per_node)
    run.skew = {node: dice.uniform(-5, 5) for node in range(nodes)}
    run.server_time = dice.random() < 0.5
    run.words_chosen = seed
    run.failed_at = START + dice.uniform(100, 5000)
    run.culprits = choose_culprits(run)
    local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(run.failed_at + 5))
    sequence = dice.randrange(100, 100000)
    run.words = {"job": str(dice.randrange(10, 99999)), "at": local, "seq": str(sequence),
                 "ahead": str(sequence + dice.randrange(0, 3)), "done": str(sequence - 1)}  # fmt: skip
    for rank in range(run.world):
        end_rank(run, rank)
    batch = write_run(run, folder)
    return GeneratedRun(name, folder, job_facts(run), kind.cause, set(run.culprits), kind.blame, batch)


def choose_culprits(run: _Run) -> set[int]:
    who = run.kind.who
    if who == "nobody":
        return set()
    if who == "all":
        return set(range(run.world))
    if who == "zero":
        return {0}
    if who == "node":
        node = run.dice.randrange(run.world // run.per_node)
        return {rank for rank in range(run.world) if run.node(rank) == node}
    return {run.dice.randrange(run.world)}


def end_rank(run: _Run, rank: int) -> None:
    run.logs[rank] = log_until_failure(run, rank)
    wait = 600.0 if run.kind.others.startswith(("timeout", "rendezvous")) else 0.0
    if run.kind.others == "timeout-breaks":
        wait = run.dice.uniform(5, 15)  # less than clocks differ by
    if run.kind.cause == "time-limit" or run.kind.state == "TIMEOUT":
        wait = 3000.0
    if rank in run.culprits:
        end_culprit(run, rank, wait)
    else:
        end_other_rank(run, rank, run.failed_at + wait + run.dice.uniform(0.3, 5))


def end_culprit(run: _Run, rank: int, wait: float) -> None:
    dice, kind, log = run.dice, run.kind, run.logs[rank]
    if kind.says is not None:
        log += run.phrase("timeout-nccl" if kind.says == "all-time-out" else kind.says, rank)
    if kind.code is None:
        run.ends[rank] = None
        return
    end = run.failed_at + dice.uniform(0, 3)
    code, signal = kind.code, kind.signal
    if kind.late:
        end = run.failed_at + wait + dice.uniform(15, 40)
        if kind.says:
            code, signal = dice.choice([(143, 15), (137, 9)])
    elif kind.says == "all-time-out":
        end += wait
    run.ends[rank] = (end, code, signal)


def end_other_rank(run: _Run, rank: int, end: float) -> None:
    dice, kind, log = run.dice, run.kind, run.logs[rank]
    if kind.others == "never":
        run.ends[rank] = None
        del run.logs[rank]
    elif kind.others == "fine":
        log += ["done"]
        run.ends[rank] = (end, 0, None)
    elif kind.others == "ended":
        log += run.phrase("ended", rank)
        run.ends[rank] = None if dice.random() < 0.2 and kind.who != "node" else (end + 5, 143, 15)
    elif kind.others == "lost" and dice.random() < 0.25:
        run.ends[rank] = (end + 3, 143, 15)  # ended by srun before it noticed
    else:
        says = kind.others
        if says == "timeout-breaks":
            says = "timeout-gloo" if rank - min(run.culprits) == 1 or dice.random() < 0.3 else "lost"
        log += run.phrase(says, rank)
        aborts = "timeout-nccl" if kind.others == "timeout-nccl" else ""
        run.ends[rank] = (end, 134, 6) if aborts else (end, 1, None)


def log_until_failure(run: _Run, rank: int) -> list[str]:
    """Return a rank's log lines before the failure: setup, steps, noise."""
    dice = run.dice
    small = run.world > 256
    log = [f"rank {rank} of {run.world} on n{run.node(rank) + 1}", "loading the model", "compiling kernels"]
    starts = run.kind.cause in ("import-error", "rendezvous", "port-in-use", "driver-mismatch")
    for step in range(0 if starts else dice.randrange(3, 12 if small else 80)):
        log.append(f"step {step} loss {dice.uniform(0, 4):.4f} lr 3.0e-04 tokens/s {dice.randrange(9000)}")
        if dice.random() < (0.01 if small else 0.04):
            log += run.phrase("noise", rank)
            log += [f"step {step}.{n} loss {dice.uniform(0, 4):.4f} lr 3.0e-04 tokens/s 17" for n in range(6)]
    if starts and dice.random() < 0.3:
        log += run.phrase("noise", rank)
    return log


def job_facts(run: _Run) -> JobFacts:
    known = run.kind.state != "UNKNOWN"
    times = [end[0] for end in run.ends.values() if end is not None]
    last = max(times, default=run.failed_at + 30) + 2
    return JobFacts(
        job_id=run.words["job"],
        state=run.kind.state,
        over=known,
        exit_code=0 if run.kind.cause == "none" else 1 if run.kind.state == "FAILED" else None,
        start=START,
        end=int(last) if known else None,
        time_limit=int(last - START) if run.kind.state == "TIMEOUT" else 86400,
        world_size=run.world,
    )


# ---- To disk ----


def write_run(run: _Run, folder: Path) -> Path:
    logs, ranks = folder / "logs" / "0", folder / "ranks" / "0"
    logs.mkdir(parents=True)
    ranks.mkdir(parents=True)
    (logs / "manifest.json").write_text(
        json.dumps({"schema": 1, "world_size": run.world, "ranks_per_node": run.per_node})
    )
    (folder / "events.jsonl").write_text(json.dumps({"time": START, "event": "started"}) + "\n")
    for rank, lines in run.logs.items():
        end = run.ends[rank]
        stopped = run.failed_at if rank in run.culprits or end is None else end[0]
        write_file(run, logs / f"rank-{rank}.log", "\n".join(lines) + "\n", rank, stopped)
        write_file(
            run,
            ranks / f"{rank}.json",
            json.dumps(_record(run, rank, end)),
            rank,
            end[0] if end else START + 5,
        )
    write_first_failure(run, ranks)
    if run.kind.dumps:
        write_flight_records(run, ranks)
    culprit = min(run.culprits, default=0)
    text = run.phrase(run.kind.batch, culprit) if run.kind.batch else []
    if run.kind.cause != "none":
        text += ["srun: error: n1: task 0: Exited with exit code 1"] if run.kind.others == "lost" else []
    batch = folder / "logs" / "batch.log"
    batch.write_text("".join(f"{line}\n" for line in text))
    return batch


def write_file(run: _Run, path: Path, text: str, rank: int, when: float) -> None:
    path.write_text(text)
    shown = when if run.server_time else when + run.skew[run.node(rank)]
    os.utime(path, (shown, shown))


def _record(run: _Run, rank: int, end: tuple[float, int | None, int | None] | None) -> dict[str, object]:
    node = run.node(rank)
    skew = run.skew[node]
    return {
        "schema": 1,
        "rank": rank,
        "local_rank": rank % run.per_node,
        "node_rank": node,
        "host": f"n{node + 1}",
        "pid": 4242 + rank,
        "started": int(START + 5 + skew),
        "ended": int(end[0] + skew) if end else None,
        "exit_code": end[1] if end else None,
        "signal": end[2] if end else None,
        **({"told_to_end": True} if end and end[2] == 15 and not is_external_signal(run) else {}),
    }


def is_external_signal(run: _Run) -> bool:
    """Tell whether a signal from outside the run ended only the culprit."""
    return run.kind.signal == 15 and not run.kind.late


def write_first_failure(run: _Run, ranks: Path) -> None:
    failed = [(end[0], rank, end[1]) for rank, end in run.ends.items() if end is not None and end[1]]
    if failed and run.dice.random() < 0.9:  # without it where the file system lost the race
        _, rank, code = min(failed)
        (ranks / "first-failure").write_text(f"{rank} {code}\n")


def write_flight_records(run: _Run, ranks: Path) -> None:
    sequence = int(run.words["seq"])
    for rank in range(run.world):
        behind = rank in run.culprits
        entries = [
            {"collective_seq_id": number, "process_group": ["0", "default_pg"], "is_p2p": False,
             "profiling_name": "nccl:all_reduce", "state": "completed" if number < sequence else "scheduled",
             "frames": []}
            for number in range(sequence - 3, sequence + (0 if behind else 1))
        ]  # fmt: skip
        (ranks / f"flight_{rank}").write_text(json.dumps({"version": "2.9", "entries": entries}))


def is_right(generated_run: GeneratedRun, cause: str, rank: int | None) -> bool:
    """Tell whether an answer is right: the cause, and the rank where there is one."""
    if cause != generated_run.cause:
        return False
    return generated_run.kind == "rendezvous" or not generated_run.ranks or rank in generated_run.ranks
