"""The signal handling of the rendered rank script, run without a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.render.conftest import Render

TRAINS = """
import os, signal, sys, time
def leave(number, frame):
    while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    os._exit(int(sys.argv[1]))
for number in (signal.SIGTERM, signal.SIGUSR2)[: len(sys.argv) > 1 and 2]:
    signal.signal(number, leave)
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
sys.exit(3)
"""


class Ranks:
    """Processes that run ``task.sh`` as srun's tasks do: each leads a group, and TERM goes to all of it."""

    def __init__(self, folder: Path, script: str) -> None:
        self.run = folder
        self.tasks: dict[int, subprocess.Popen[bytes]] = {}
        for name in ("logs/0", "ranks/0"):
            (folder / name).mkdir(parents=True)
        (folder / "train.py").write_text(TRAINS)
        (folder / "task.sh").write_text(
            script.partition("task.sh\" <<'END' || exit\n")[2].partition("\nEND\n")[0]
        )

    def start(self, rank: int, *words: object, path: str = os.environ["PATH"]) -> None:
        """Start a rank that leaves a signal with the code given, once there is a file of the name given."""
        (self.run / f"words-{rank}").write_text(" ".join(map(str, words)))
        env = {"RANK": str(rank), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        self.tasks[rank] = subprocess.Popen(
            ["bash", "task.sh"],
            cwd=self.run,
            env={**os.environ, **env, "DTSLURM_RUN_DIR": str(self.run), "DTSLURM_ATTEMPT": "0", "PATH": path},
            start_new_session=True,
        )
        # The training code can begin before its shell has recorded its process id and expects TERM.
        self.wait_until(lambda: "ready" in self.log(rank) and "pid" in self.record(rank))

    def wait_until(self, happened: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.01)

    def log(self, rank: int) -> str:
        path = self.run / f"logs/0/rank-{rank}.log"
        return path.read_text() if path.is_file() else ""

    def record(self, rank: int) -> dict[str, Any]:
        path = self.run / f"ranks/0/{rank}.json"
        result: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"exit_code": None}
        return result

    def recorded(self, rank: int) -> Any:
        return self.record(rank)["exit_code"]

    def signal(self, rank: int, number: int) -> None:
        os.killpg(self.tasks[rank].pid, number)

    def left(self, rank: int) -> bool:
        return self.tasks[rank].poll() is not None

    def end(self, rank: int) -> int:
        return self.tasks[rank].wait(60)

    def failure(self) -> str:
        path = self.run / "ranks/0/first-failure"
        return path.read_text().strip() if path.is_file() else ""


@pytest.fixture
def ranks(tmp_path: Path, render_job: Render, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two ranks of a job with an early signal; the lead time is 300 s or the test's parameter."""
    text = render_job(
        "local",
        "srun",
        account=None,
        ntasks_per_node=2,
        python=sys.executable,
        args=(),
        signal_before=getattr(request, "param", 300),
    ).script
    started = Ranks(tmp_path, text.replace("train.py", '-S train.py $(cat "words-$RANK")'))
    yield started
    for rank in started.tasks:
        with suppress(ProcessLookupError):
            started.signal(rank, signal.SIGKILL)
        started.end(rank)


def test_the_exit_code_is_recorded_if_term_goes_to_the_whole_group(ranks: Ranks) -> None:
    seen: Counter[object] = Counter()
    for first in range(0, 30, 10):  # a race: bash's `wait` would lose most of them
        several = range(first, first + 10)
        for rank in several:
            ranks.start(rank, *[85] * (rank % 2))
        for rank in several:
            ranks.signal(rank, signal.SIGTERM)
        for rank in several:
            code, end = ranks.end(rank), ranks.record(rank)
            seen[rank % 2, code, end["exit_code"], end["signal"], end.get("told_to_end")] += 1
    assert seen == {(1, 85, 85, None, True): 15, (0, 143, 143, 15, True): 15}


def test_the_early_signal_does_not_kill_a_rank_without_a_handler(ranks: Ranks) -> None:
    ranks.start(0)
    ranks.signal(0, signal.SIGUSR2)
    (ranks.run / "go").touch()
    assert (ranks.end(0), ranks.recorded(0)) == (3, 3)


@pytest.mark.slow
def test_a_rank_that_saved_waits_for_the_last_rank(ranks: Ranks) -> None:
    ranks.start(0, 85)
    ranks.start(1, 85, "saved")
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGUSR2)
    ranks.wait_until(lambda: ranks.recorded(0) == 85)
    time.sleep(1)  # enough for one that does not wait to have left
    assert not ranks.left(0)
    assert not ranks.failure()
    (ranks.run / "saved").touch()
    assert [ranks.end(0), ranks.end(1)] == [85, 85]
    assert not (ranks.run / "ranks/0/running").exists()


def test_a_waiting_rank_leaves_on_sigterm(ranks: Ranks) -> None:
    for rank in (0, 1):
        ranks.start(rank, 85)
    ranks.signal(0, signal.SIGUSR2)
    ranks.wait_until(lambda: ranks.recorded(0) == 85)
    ranks.signal(0, signal.SIGTERM)
    assert (ranks.end(0), ranks.failure()) == (85, "0 85")
    assert "Terminated" not in ranks.log(0)
    ranks.signal(1, signal.SIGTERM)
    assert ranks.end(1) == 85


def test_a_rank_leaves_on_sigterm_while_its_record_is_written(ranks: Ranks) -> None:
    slow = ranks.run / "bin/mv"
    slow.parent.mkdir()
    slow.write_text('#!/bin/sh\n/bin/mv "$@"\nsleep 1\n')
    slow.chmod(0o755)
    for rank in (0, 1):
        ranks.start(rank, 85, path=f"{slow.parent}:{os.environ['PATH']}")
    ranks.signal(0, signal.SIGUSR2)
    ranks.wait_until(lambda: ranks.recorded(0) == 85)
    ranks.signal(0, signal.SIGTERM)
    assert (ranks.end(0), ranks.failure()) == (85, "0 85")


@pytest.mark.parametrize("ranks", [300, None], indirect=True)
def test_an_exit_record_that_did_not_fit_on_the_disk_is_written_again(ranks: Ranks) -> None:
    full = ranks.run / "bin/mv"
    full.parent.mkdir()
    full.write_text('#!/bin/sh\nrm full 2>/dev/null && exit 1\nexec /bin/mv "$@"\n')
    full.chmod(0o755)
    ranks.start(0, path=f"{full.parent}:{os.environ['PATH']}")
    ranks.wait_until(lambda: "started" in ranks.record(0))
    (ranks.run / "full").touch()
    (ranks.run / "go").touch()
    assert (ranks.end(0), ranks.recorded(0)) == (3, 3)
    assert not (ranks.run / "full").exists()


@pytest.mark.parametrize(("code", "failure"), [(7, "1 7"), (0, "")])
def test_another_exit_code_is_recorded_immediately_without_waiting(
    code: int, failure: str, ranks: Ranks
) -> None:
    ranks.start(0, 85)
    ranks.start(1, code)
    ranks.signal(1, signal.SIGUSR2)
    assert (ranks.end(1), ranks.failure()) == (code, failure)
    assert "told_to_end" not in ranks.record(1)
    ranks.signal(0, signal.SIGTERM)
    assert ranks.end(0) == 85


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_a_rank_waits_no_longer_than_the_lead_time(ranks: Ranks) -> None:
    for rank in (0, 1):
        ranks.start(rank, 85)
    ranks.signal(0, signal.SIGUSR2)
    assert ranks.end(0) == 85
    assert not ranks.left(1)
    ranks.signal(1, signal.SIGTERM)
    assert ranks.end(1) == 85


def test_files_of_a_node_get_the_number_of_its_first_rank_also_if_another_rank_starts_first(
    tmp_path: Path, render_job: Render
) -> None:
    script = render_job("a100x8-ib", "srun", nodes=65, python=sys.executable, max_restarts=1).script
    ranks = Ranks(tmp_path, script)
    environment = {
        "DTSLURM_RUN_DIR": str(tmp_path), "DTSLURM_ATTEMPT": "0", "TMPDIR": str(tmp_path),
        "SLURM_JOB_ID": "17", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n2", "SLURM_PROCID": "11",
        "SLURM_LOCALID": "3",
    }  # fmt: skip
    task = subprocess.Popen(
        ["bash", "task.sh"], cwd=tmp_path, env={**os.environ, **environment}, start_new_session=True
    )
    folder = tmp_path / f"dtslurm-17-{tmp_path.name}-0-n2"
    try:
        ranks.wait_until((folder / ".first").exists)
        assert json.loads((folder / ".first").read_text()) == {"first": 8}
    finally:
        os.killpg(task.pid, signal.SIGKILL)
        task.wait(60)
