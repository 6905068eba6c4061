"""Sample boards and pages, and a source that posts them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dtslurm.dashboard.actions.handoffs import Opener
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.feed import LAST_LINES, ComparisonText, Diagnosed, LogState, Post, RunUtilization
from dtslurm.dashboard.store import LineStore
from dtslurm.model.runs.telemetry import (
    DiskUse,
    GpuSample,
    NicCounters,
    NodeSample,
    RankTelemetry,
    RunTelemetry,
    TrainPoint,
)
from dtslurm.services.observe.run_list import Board, ClusterLine, JobRow
from dtslurm.services.observe.utilization_history import UtilizationHistory
from dtslurm.views.forecast import Forecast
from dtslurm.views.run_page import JobOutlook, Page, page

NOW = 1_795_300_000.0  # 2026-11-21 22:26:40 UTC
GIB = 1 << 30


def row(number: int, **values: object) -> JobRow:
    base: dict[str, object] = {
        "key": f"{number:012x}",
        "token": f"{number:012x}",
        "job_id": str(4700 + number),
        "name": f"train-{number}",
        "cluster": "hpc",
        "state": "RUNNING",
        "nodes": 2,
        "gpus": 16,
        "ranks": 16,
        "created": NOW - 3600 * number,
        "start": int(NOW) - 3723,
        "limit": 4 * 3600,
        "nodelist": "gpu[01-02]",
        "run_dir": f"/scratch/ada/runs/train-{number}",
        "observed_at": NOW - 2,
    }
    return JobRow(**{**base, **values})  # type: ignore[arg-type]


def board() -> Board:
    """Return a board with a job in each state, on two clusters of which one does not answer."""
    cut = Forecast(step=20_000, total=50_000, pace=3.2, done_at=NOW + 9375, cut_at=41_200)
    array = {"token": "a" * 12, "name": "sweep", "cluster": "slow", "limit": 3600, "gpus": 1, "ranks": 1}
    rows = (
        row(1, name="llama-8b", forecast=cut),
        row(
            2,
            name="llama-70b",
            state="PENDING",
            pending=True,
            nodes=64,
            gpus=512,
            ranks=512,
            nodelist="",
            start=None,
            reason="Priority",
            about="jobs with a higher priority wait, too",
            fix="a smaller or shorter request may start before them",
            estimated_start=int(NOW) + 7200,
        ),
        row(
            3,
            state="PENDING",
            pending=True,
            start=None,
            nodelist="",
            reason="QOSMaxWallDurationPerJobLimit",
            about="requests more time than the QOS allows",
            fix="lower --time",
            never=True,
        ),
        row(
            4,
            key="a" * 12,
            job_id="4704",
            tasks=(("RUNNING", 2), ("COMPLETED", 1)),
            about="2 running, 1 completed",
            **array,
        ),
        row(
            41, key="a" * 12 + "_0", job_id="4704_0", task="0", state="COMPLETED", over=True, ok=True, **array
        ),
        row(42, key="a" * 12 + "_1", job_id="4704_1", task="1", **array),
        row(43, key="a" * 12 + "_2", job_id="4704_2", task="2", **array),
        row(
            5,
            name="vit-ünïcode-数据",
            state="FAILED",
            over=True,
            end=int(NOW) - 100,
            about="rank 3 failed first, exit code 1",
        ),
        row(6, state="OUT_OF_MEMORY", over=True, end=int(NOW) - 200, about="exit code 137"),
        row(7, state="TIMEOUT", over=True, end=int(NOW) - 300, about="TimeLimit"),
        row(8, state="COMPLETED", over=True, ok=True, end=int(NOW) - 3000),
        row(
            9,
            state="UNKNOWN",
            unknown=True,
            start=None,
            about="the scheduler has no record of this job",
        ),
        row(10, state="CANCELLED", over=True, end=int(NOW) - 3500),
    )
    lines = (
        ClusterLine(name="hpc", observed_at=NOW - 2),
        ClusterLine(name="slow", observed_at=NOW - 95, trouble="there is no link to login.slow"),
    )
    return Board(rows=rows, clusters=lines, taken_at=NOW)


def many_jobs(count: int = 2000) -> Board:
    dice = random.Random(1)
    states = ["RUNNING", "PENDING", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"]
    rows = []
    for number in range(1, count + 1):
        state = dice.choice(states)
        over = state not in {"RUNNING", "PENDING"}
        rows.append(row(number, state=state, over=over, ok=state == "COMPLETED", pending=state == "PENDING"))
    return Board(rows=tuple(rows), clusters=(ClusterLine(name="hpc", observed_at=NOW),), taken_at=NOW)


def telemetry_of(ranks: int, per_node: int = 8, *, steps: int = 200, odd: bool = True) -> RunTelemetry:
    """Return telemetry of a job with GPUs; if ``odd``, a silent rank, a failed rank and an idle GPU."""
    dice = random.Random(2)
    result = {}
    for rank in range(ranks):
        last_output_at = NOW - dice.random() * 4
        code = None
        if odd and rank == 5 % ranks:
            last_output_at = NOW - 245
        if odd and ranks > 9 and rank == 9:
            code = 1
        result[rank] = RankTelemetry(
            rank=rank,
            bytes=40_000 + rank,
            last_output_at=last_output_at,
            node_rank=rank // per_node,
            local_rank=rank % per_node,
            host=f"gpu{rank // per_node + 1:02}",
            pid=4000 + rank,
            started=int(NOW) - 3700,
            ended=int(NOW) - 60 if code is not None else None,
            exit_code=code,
        )
    newest, before = [], []
    for node in range(-(-ranks // per_node)):
        gpus = tuple(
            GpuSample(
                index=index,
                util=3.0 if odd and node == 1 and index == 4 else 90 + dice.random() * 9,
                memory_used=70 * GIB,
                memory_total=80 * GIB,
                temperature_c=86 if odd and node == 0 and index == 0 else 61.0,
                throttle=("thermal",) if odd and node == 0 and index == 0 else (),
            )
            for index in range(per_node)
        )
        newest.append(_sample(node, NOW - 3, gpus, 120))
        before.append(_sample(node, NOW - 63, gpus, 60))
    train = tuple(
        TrainPoint(
            time=NOW - (steps - step) * 2.0,
            rank=0,
            step=step * 10,
            total_steps=50_000,
            loss=2.5 / (1 + step * 0.05) + 0.02 * math.sin(step),
            tokens_per_s=410_000 + 9_000 * math.sin(step / 7),
        )
        for step in range(1, steps + 1)
    )
    events = (
        {"time": NOW - 3800, "event": "submitted", "job_id": "4701"},
        {"time": NOW - 3723, "event": "started", "attempt": 0, "job_id": "4701", "nodes": "gpu[01-02]"},
        {"time": NOW - 1000, "event": "checkpoint", "attempt": 0, "step": 1500, "path": "checkpoints/1500"},
    )
    return RunTelemetry(
        now=NOW,
        attempt=0,
        attempts=(0,),
        world_size=ranks,
        ranks=result,
        nodes=tuple(newest),
        nodes_before=tuple(before),
        train=train,
        train_from="file",
        events=events,
    )


def _sample(node: int, time: float, gpus: tuple[GpuSample, ...], seconds: int) -> NodeSample:
    return NodeSample(
        node=f"gpu{node + 1:02}",
        node_rank=node,
        time=time,
        gpus=gpus,
        cpu_percent=37.0,
        memory_used=200 * GIB,
        memory_total=1000 * GIB,
        nics={"mlx5_0": NicCounters(rx_bytes=seconds * 10**9, tx_bytes=seconds * 2 * 10**9, errors=0)},
        disks={
            "/tmp": DiskUse(used=10 * GIB, total=100 * GIB),
            "/dev/shm": DiskUse(used=GIB, total=500 * GIB),
        },
    )


def page_of(ranks: int = 16, key: str = "000000000001", **values: object) -> Page:
    telemetry = telemetry_of(ranks, **values)  # type: ignore[arg-type]
    return page(telemetry, key=key, taken_at=NOW, job=JobOutlook(limit_at=NOW + 10_677, world_size=ranks))


LOG = "".join(f"step {step} loss {2.5 / (1 + step * 0.05):.4f}\n" for step in range(1, 60))
VERDICT = (
    "job 4705 (vit): FAILED",
    "",
    "failed first  rank 3 (local rank 3) on gpu01 with exit code 1",
    "cause         gpu-out-of-memory (95%)",
)
LIVE = ("job 4701 (llama-8b): RUNNING, live", "", "verdict       the job hangs (90%)")


@dataclass
class SampleSource:
    """A source whose snapshots are given; remembers what was asked of it."""

    board: Board = field(default_factory=board)
    page: Callable[[JobRow], Page] = lambda row: page_of(row.ranks, row.key)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    post: Post = lambda _: None
    use: UtilizationHistory | None = None
    skipped: bool = False
    followed: tuple[int | None, int] = (None, 0)

    def start(self, post: Post) -> None:
        self.post = post
        post(self.board)

    def stop(self) -> None:
        self.asked.append(("stop",))

    def refresh(self) -> None:
        self.asked.append(("poke",))

    def watch(self, row: JobRow | None, attempt: int | None = None) -> None:
        self.asked.append(("watch", row.job_id if row else "", str(attempt)))
        if row is not None:
            self.post(self.page(row))

    def follow(
        self,
        row: JobRow | None,
        store: LineStore,
        ranks: str = "",
        *,
        attempt: int | None = None,
        lines: int = LAST_LINES,
    ) -> None:
        self.asked.append(("follow", row.job_id if row else "", ranks))
        self.followed = attempt, lines
        store.skipped = self.skipped
        store.loading = False
        if row is not None:
            for rank in range(4):
                store.add(str(rank), LOG.encode())
            store.add("3", b"RuntimeError: CUDA out of memory\n\x1b]52;c;ZXZpbA==\x07\x1b[2Jwiped? \xff\n")
            self.post(LogState(row.key, "all ranks"))

    def verdict(self, row: JobRow, attempt: int | None = None) -> None:
        self.asked.append(("verdict", row.job_id))
        self.post(Diagnosed(row.key, VERDICT))

    def history(self, row: JobRow, attempt: int) -> None:
        self.asked.append(("history", row.job_id, str(attempt)))
        if self.use is not None:
            self.post(RunUtilization(row.key, attempt, self.use))

    def live(self, row: JobRow) -> None:
        self.asked.append(("live", row.job_id))
        self.post(Diagnosed(row.key, LIVE, live=True))

    def change_job(self, verb: str, row: JobRow) -> None:
        self.asked.append((verb, row.job_id))

    def shell(self, row: JobRow, node: str) -> int:
        self.asked.append(("shell", row.job_id, node))
        return 0

    def open_log(self, row: JobRow, rank: int, attempt: int, opener: Opener) -> int:
        self.asked.append((opener.name, row.job_id, str(rank), str(attempt)))
        return 0

    def report(self, row: JobRow, attempt: int | None = None) -> None:
        self.asked.append(("report", row.job_id, str(attempt)))

    def resubmit(self, row: JobRow) -> None:
        self.asked.append(("resubmit", row.job_id))

    def compare(self, rows: Sequence[JobRow]) -> None:
        self.asked.append(("compare", *(row.job_id for row in rows)))
        self.post(ComparisonText(("state  FAILED  COMPLETED", "loss by step")))

    def demo(self) -> None:
        self.asked.append(("demo",))


def app_of(source: SampleSource | None = None, **values: object) -> TopApp:
    return TopApp(source or SampleSource(), lambda: NOW, **values)  # type: ignore[arg-type]
