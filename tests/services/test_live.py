"""The output of the nodes of a live diagnosis, whose lines srun may mix."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dtslurm.remote.worker_program import inline_program
from dtslurm.services.observe import live
from dtslurm.slurm.commands import step_beside
from dtslurm.transport.base import Completed
from dtslurm.worker.stacks import live as node_side

LOOK = {"pid": 7, "by": "py-spy", "why": [], "threads": [], "filler": ["x" * 9, *map(str, range(3000))]}


def node_output(capsys: pytest.CaptureFixture[str], node: str, ranks: list[int]) -> list[str]:
    node_side.answer(node, {"node": node, "ranks": {str(rank): LOOK for rank in ranks}})
    return capsys.readouterr().out.splitlines()


def test_mixed_output_lines_of_several_nodes_are_assembled_per_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = node_output(capsys, "n1", [0, 1]) + node_output(capsys, "n2", [2, 3])
    assert len(lines) > 4
    assert max(map(len, lines)) < 1000
    random.Random(1).shuffle(lines)
    stdout = "\n".join(["Welcome to the cluster", *lines, "srun: bye"])
    result, missing = live._read(
        Completed((), 0, stdout, ""), {"n1": [[0, 1], [1, 2]], "n2": [[2, 1], [3, 2]]}
    )
    assert sorted(result) == [0, 1, 2, 3]
    assert result[3]["pid"] == 7
    assert missing == []


def test_a_node_with_incomplete_output_is_named_with_the_srun_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = node_output(capsys, "n1", [0]) + node_output(capsys, "n2", [1])[:-1]
    stderr = "srun: error: cluster configuration lacks support for cpu binding\n"
    stderr += "srun: error: n2: task 1: Killed\n"
    done = Completed((), 0, "\n".join(lines), stderr)
    result, missing = live._read(done, {"n1": [[0, 1]], "n2": [[1, 1]]})
    assert list(result) == [0]
    assert missing == ["could not examine the ranks of n2: srun: error: n2: task 1: Killed"]


def test_the_reason_for_missing_stacks_is_reported_once() -> None:
    looks: dict[int, dict[str, Any]] = {rank: {"by": "proc", "why": ["no py-spy"]} for rank in range(8)}
    assert live._reasons(looks) == ["no stacks of 8 ranks: no py-spy"]


def test_the_srun_step_requests_no_resources_of_the_job() -> None:
    argv = step_beside("17", ["n1", "n2", "n5"], ["true"])
    assert argv[:2] == ["srun", "--jobid=17"]
    assert {"--overlap", "--mem=0", "--gres=none", "--input=none", "--ntasks=3", "--nodes=3"} <= set(argv)
    assert "--nodelist=n1,n2,n5" in argv  # Slurm would take the job's first ones


def test_the_node_program_fits_into_one_argument() -> None:
    assert len(inline_program(live._PARTS, "module.main()")) < 64_000


def test_a_rank_process_is_identified_by_its_environment_if_the_pid_differs(tmp_path: Path) -> None:
    """As in a container that counts processes by itself, or after its number was given to another."""
    run = tmp_path / "run-1"
    env = {**os.environ, "RANK": "5", "DTSLURM_RUN_DIR": str(run)}
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**env, "RANK": "6"})
    try:
        end = time.monotonic() + 30
        while node_side.process_of(5, other.pid, str(run)) != rank.pid:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert node_side.process_of(5, rank.pid, str(run)) == rank.pid
        assert node_side.process_of(7, rank.pid, str(run)) is None
        assert node_side.process_of(5, 2**22 + 1, str(tmp_path / "run-2")) is None
        task = {"RANK": "5", "DTSLURM_RUN_DIR": "/runs/run-1/tasks/5"}
        assert node_side.is_rank(task, 5, "/home/runs/run-1/tasks/5")
        assert not node_side.is_rank(task, 5, "/home/runs/run-2/tasks/5")
    finally:
        rank.kill()
        other.kill()
        rank.wait()
        other.wait()
