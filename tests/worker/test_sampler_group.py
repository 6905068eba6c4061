"""Detection of ranks that train separately, by their connections and their logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.sampler_group import GroupWatch, Socket, split_links
from tests.waiting import wait_until

# A rank: maps what looks like torch, connects as its arguments say, then waits for its stdin to end.
RANK = """
import mmap, socket, sys
torch = open(sys.argv[1], "r+b")
held = [mmap.mmap(torch.fileno(), 0)]
for word in sys.argv[2:]:
    kind, port = word.split("=")
    if kind == "listen":
        held.append(socket.create_server(("127.0.0.1", int(port))))
        print(held[-1].getsockname()[1], flush=True)
    elif kind == "accept":
        held.append(held[-1].accept())
    elif kind == "connect":
        held.append(socket.create_connection(("127.0.0.1", int(port))))
print("there", flush=True)
sys.stdin.read()
"""


class Job:
    """A run directory with ranks that are real processes."""

    def __init__(self, folder: Path, nodes: int, ranks_per_node: int) -> None:
        self.folder, self.nodes, self.ranks_per_node = folder, nodes, ranks_per_node
        self.processes: list[subprocess.Popen[str]] = []
        for name in ("logs", "ranks", "metrics"):
            (folder / name / "0").mkdir(parents=True)
        world = {"world_size": nodes * ranks_per_node, "ranks_per_node": ranks_per_node}
        (folder / "logs/0/manifest.json").write_text(json.dumps(world))

    def start(self, rank: int, *words: str, torch: bool = True) -> subprocess.Popen[str]:
        library = self.folder / ("libtorch.so" if torch else "libother.so")
        library.write_bytes(b"x" * 4096)
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(library), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DTSLURM_RUN_DIR": str(self.folder), "RANK": str(rank)},
        )
        self.processes.append(process)
        host = f"n{1 + rank // self.ranks_per_node}"
        record = {"rank": rank, "host": host, "pid": process.pid, "ended": None}
        (self.folder / f"ranks/0/{rank}.json").write_text(json.dumps(record))
        return process

    def ready(self, process: subprocess.Popen[str]) -> None:
        output = process.stdout
        assert output is not None
        wait_until(lambda: "there" in output.readline(), limit=60)

    def print(self, rank: int, text: str) -> None:
        with (self.folder / f"logs/0/rank-{rank}.log").open("a") as file:
            file.write(text)

    def watch(self, node_rank: int, event: str = "not_distributed") -> GroupWatch:
        env = {"DTSLURM_RUN_DIR": str(self.folder), "DTSLURM_ATTEMPT": "0", "SLURM_NODEID": str(node_rank)}
        return GroupWatch(env, f"n{node_rank + 1}", event)


MINUTES = count(1)
MakeJob = Callable[[int, int], Job]


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[MakeJob]:
    jobs: list[Job] = []

    def make(nodes: int, ranks_per_node: int) -> Job:
        jobs.append(Job(tmp_path / f"run-{len(jobs)}", nodes, ranks_per_node))
        return jobs[-1]

    yield make
    for job in jobs:
        for process in job.processes:
            process.kill()
            process.communicate()


def start_unconnected_ranks(job: Job) -> None:
    """Start every rank, none connected with another."""
    for rank in range(job.nodes * job.ranks_per_node):
        job.ready(job.start(rank))


def look(watch: GroupWatch) -> dict[str, Any]:
    """Look a minute after the look before."""
    return watch.look(60.0 * next(MINUTES)) or {}


@pytest.mark.parametrize(
    "line", ["step 3 loss 0.25\n", '{"loss": 1.5}\n', "Epoch 2: 50%|#| 3/6\r", "train_loss=nan\n"]
)
def test_ranks_with_losses_and_no_connections_are_reported_as_not_distributed(
    make_job: MakeJob, line: str
) -> None:
    job = make_job(1, 2)
    start_unconnected_ranks(job)
    watch = job.watch(0)
    job.print(1, line)
    assert not look(watch)  # they may have just left a group
    job.print(1, line)
    result = look(watch)
    assert (result["event"], result["ranks"], result["world_size"]) == ("not_distributed", "0-1", 2)
    assert result["evidence"].startswith(
        "training continues, but no network connection leads from ranks 0-1 on n1"
    )
    job.print(1, line)
    assert not look(watch)  # once is enough


def test_only_the_second_node_reports_when_rank_0_alone_prints(make_job: MakeJob) -> None:
    job = make_job(3, 2)
    start_unconnected_ranks(job)
    watches = [job.watch(node) for node in range(3)]
    for _ in range(3):
        job.print(0, "loss: 0.5\n")
        results = [look(watch) for watch in watches]
        if results[1]:
            break
    assert [bool(item) for item in results] == [False, True, False]
    assert results[1]["ranks"] == "2-3"


def test_ranks_connected_only_within_a_node_are_reported_as_not_distributed(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    start_unconnected_ranks(job)
    server = job.start(2, "listen=0", "accept=0")
    port = int(server.stdout.readline())  # type: ignore[union-attr]
    job.ready(job.start(3, f"connect={port}"))
    job.ready(server)
    watch = job.watch(1)
    for _ in range(2):
        job.print(2, "loss 1\n")
        result = look(watch)
    assert result["evidence"].endswith("leads from ranks 2-3 on n2 to a rank of another node")


@pytest.mark.parametrize("nodes", [1, 2])
def test_connected_ranks_settle_the_check_without_a_report(make_job: MakeJob, nodes: int) -> None:
    job = make_job(nodes, 2 // nodes)
    server = job.start(0, "listen=0", "accept=0")
    port = int(server.stdout.readline())  # type: ignore[union-attr]
    job.ready(job.start(1, f"connect={port}"))
    job.ready(server)
    watch = job.watch(nodes - 1)
    for _ in range(3):
        job.print(0, "loss 1\n")
        assert not look(watch)
    assert watch.settled


@pytest.mark.parametrize("why", ["no torch", "not started", "no losses", "ended", "another process"])
def test_ranks_without_evidence_of_training_are_not_reported(make_job: MakeJob, why: str) -> None:
    job = make_job(1, 2)
    job.ready(job.start(0, torch=why != "no torch"))
    if why != "not started":
        job.ready(job.start(1))
    if why == "ended":
        job.processes[1].communicate("")
    if why == "another process":  # that has the number of a rank that is gone
        record = json.loads((job.folder / "ranks/0/1.json").read_text())
        (job.folder / "ranks/0/1.json").write_text(json.dumps({**record, "pid": os.getpid()}))
    watch = job.watch(0)
    for _ in range(4):
        job.print(0, "Map: 10%|#| 3/6\n" if why == "no losses" else "loss 1\n")
        assert not look(watch)


def test_ranks_that_connect_later_are_reported_as_distributed(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    start_unconnected_ranks(job)
    watch = job.watch(0)
    for _ in range(2):
        job.print(0, "loss 1\n")
        result = look(watch)
    assert result["event"] == "not_distributed"
    server = job.start(0, "listen=0", "accept=0")
    port = int(server.stdout.readline())  # type: ignore[union-attr]
    job.ready(job.start(1, f"connect={port}"))
    job.ready(server)
    job.print(0, "loss 1\n")
    assert look(watch)["event"] == "distributed"


@pytest.mark.parametrize(
    ("lines", "group"),
    [
        (("Initializing: GLOBAL_RANK: 0, MEMBER: 1/2", "GLOBAL_RANK: 1, MEMBER: 2/2"), "2 processes"),
        (("Distributed environment: NO\nNum processes: 1", "Num processes: 1"), "1 process"),
        (("world size: 1", "world_size=1"), "1 process"),
        (("n_gpu: 0, distributed training: False", "n_gpu: 0distributed training: False"), "1 process"),
        (("n_gpu: 0, distributed training: True", "n_gpu: 0, distributed training: True"), None),
        (("Num processes: 1", "no word"), None),
        (("Num processes: 4", "Num processes: 4"), None),
        (("tensor parallel world size: 1", "tensor parallel world size: 1"), None),
        (("Num processes: 1", "Num processes: 1\nNum processes: 4"), None),
    ],
)  # fmt: skip
def test_logs_of_all_ranks_that_name_a_smaller_group_are_sufficient_evidence(
    make_job: MakeJob, lines: tuple[str, str], group: str | None
) -> None:
    job = make_job(2, 2)
    for rank, text in enumerate(lines, 2):
        job.print(rank, text + "\n")
    result = look(job.watch(1))
    assert result.get("evidence") == (
        group and f"the logs of ranks 2-3 on n2 report a process group of {group}"
    )


def test_connections_do_not_revoke_a_report_based_on_logs(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    server = job.start(0, "listen=0", "accept=0")
    port = int(server.stdout.readline())  # type: ignore[union-attr]
    job.ready(job.start(1, f"connect={port}"))
    job.ready(server)
    for rank in range(2):
        job.print(rank, "Num processes: 1\n")
    watch = job.watch(0)
    assert look(watch)["event"] == "not_distributed"
    job.print(0, "loss 1\n")
    assert not look(watch)


def test_helper_and_web_connections_do_not_count_as_rank_links() -> None:
    helper, web = Socket("0100007F:9000", "0100007F:9001"), Socket("0100000A:9002", "08080808:01BB")
    both = {helper, Socket(helper.remote, helper.local), web}
    assert split_links({0: both, 1: set()}) == (0, 0)
    assert split_links({0: {helper}, 1: {Socket(helper.remote, helper.local)}}) == (2, 0)
    assert split_links({0: {helper}, 1: set()}) == (0, 1)


def test_report_is_sent_only_with_an_event_name(make_job: MakeJob) -> None:
    job = make_job(1, 2)
    job.print(0, "Num processes: 1\n")
    job.print(1, "Num processes: 1\n")
    assert not look(job.watch(0, event=""))
    assert look(job.watch(0, event="ranks_apart"))["event"] == "ranks_apart"
