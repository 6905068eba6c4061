"""The live diagnosis on one node: how it finds rank processes, and what it prints."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.services.observe import live as service
from dtslurm.transport.base import Completed
from dtslurm.worker.stacks import live, stacks
from tests.waiting import wait_until

LOOK = {"by": "py-spy", "why": [], "threads": []}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts a rank that waits; returns its process id."""
    running: list[subprocess.Popen[bytes]] = []

    def run(rank: object, program: str = sys.executable, run_dir: str = "/far/run-1", **env: str) -> int:
        there = tmp_path / f"there-{len(running)}"
        code = f"import time; open({str(there)!r}, 'w'); time.sleep(600)"
        argv = [program, "-S", "-c", code] if program == sys.executable else [program, "600"]
        values = {"PATH": os.environ["PATH"], "RANK": str(rank), "DTSLURM_RUN_DIR": run_dir, **env}
        running.append(subprocess.Popen(argv, env={key: value for key, value in values.items() if value}))
        if program == sys.executable:
            wait_until(there.exists)
        return running[-1].pid

    yield run
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """What is seen of processes, by their ids; of others nothing."""
    seen: dict[int, dict[str, Any]] = {}

    def look(pids: list[int], **_more: Any) -> dict[int, dict[str, Any]]:
        return {pid: {**LOOK, "pid": pid, **seen.get(pid, {})} for pid in pids}

    monkeypatch.setattr(stacks, "look", look)
    return seen


def thread(file: str) -> dict[str, Any]:
    return {"threads": [{"main": True, "frames": [{"file": file, "line": 1, "function": "f"}]}]}


def test_rank_process_is_identified_by_its_pid_or_its_environment(start: Callable[..., int]) -> None:
    first = start(0, run_dir="/on/node/run-1")  # the same folder by another path
    start(1, run_dir="/far/run-2")
    start(2, program="sleep")
    assert live.process_of(0, first, "/far/run-1") == first
    assert live.process_of(0, 999_999_999, "/far/run-1") == first  # as in a container
    assert live.process_of(0, os.getppid(), "/far/run-1") == first  # somebody else has the number now
    assert live.process_of(1, 999_999_999, "/far/run-1") is None  # of another run
    assert live.process_of(2, 999_999_999, "/far/run-1") is None  # a launcher around it


def test_process_of_a_single_rank_is_identified_without_a_rank_number(start: Callable[..., int]) -> None:
    alone = start("", DTSLURM_ATTEMPT="0")
    assert live.process_of(0, alone, "/far/run-1") == alone
    assert live.process_of(1, alone, "/far/run-1") is None
    assert live.process_of(0, alone, "/far/run-2") is None


def test_oldest_of_several_processes_of_a_rank_is_chosen(start: Callable[..., int]) -> None:
    first, second = start(0), start(0)
    assert live.process_of(0, 999_999_999, "/far/run-1") == min(first, second, key=stacks.started_at)


def test_rank_that_waits_for_its_data_loader_reports_the_worker_stacks(
    start: Callable[..., int], looks: dict[int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = [start(rank) for rank in (0, 1)]
    looks[pids[0]] = thread("/x/torch/utils/data/dataloader.py")
    looks[pids[1]] = thread("/x/train.py")
    looks[70] = thread("/x/dataset.py")
    monkeypatch.setattr(stacks, "children_of", lambda pid: {pids[0]: [70, 71, 72, 73, 74]}[pid])
    result = live.look([[0, pids[0]], [1, pids[1]], [2, 999_999_999]], "/far/run-1", 1.0)
    assert [worker["pid"] for worker in result["0"]["workers"]] == [70]  # those that are seen to do something
    assert "workers" not in result["1"]
    assert result["2"] == {"pid": None, "by": "none", "why": [], "threads": []}


@pytest.mark.parametrize(
    ("name", "by_node", "ranks"),
    [
        ("n1", True, ["0"]),
        ("n1.site.example", True, ["0"]),
        ("n9", True, []),
        ("n9", False, ["0", "1"]),  # a machine that plays all nodes
    ],
)
def test_each_node_reports_only_its_own_ranks(
    looks: dict[int, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    by_node: bool,
    ranks: list[str],
) -> None:
    looks[1] = {"why": ["x" * 20, *(str(number) for number in range(3000))]}  # takes several lines
    monkeypatch.setattr(live, "process_of", lambda rank, _pid, _run: 1 if rank == 0 else None)
    monkeypatch.setenv("SLURMD_NODENAME", name)
    alarms: list[int] = []
    monkeypatch.setattr(live, "signal", SimpleNamespace(
        SIGALRM=0, SIG_DFL=0, signal=lambda *_: None, alarm=alarms.append
    ))  # fmt: skip
    monkeypatch.setattr(os, "nice", lambda _by: 0)
    nodes: Mapping[str, list[list[int]]] = {"n1": [[0, 1]], "n2": [[1, 1]]}
    request = {"run_dir": "/far/run-1", "limit": 5.0, "by_node": by_node, "ranks": nodes}
    packed = base64.b64encode(zlib.compress(json.dumps(request).encode())).decode()
    monkeypatch.setattr(sys, "argv", ["-", packed])
    live.main()
    out = capsys.readouterr().out
    assert all(line.startswith(f"dtslurm-live:{name}:") for line in out.splitlines())
    assert all(len(line) < 800 for line in out.splitlines())
    assert alarms == [15]  # it ends by itself when its time is up
    result, _ = service._read(Completed(("srun",), 0, out, ""), {name: nodes.get(name, [])})
    assert sorted(map(str, result)) == ranks
