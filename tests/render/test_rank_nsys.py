"""The rendered rank script, run without a cluster, with ranks that start below nsys."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.services.submit import supervision
from dtslurm.services.wiring.context import Context
from tests.render.conftest import Render
from tests.render.test_rank import Ranks

NSYS = """#!/bin/bash
# Like nsys, starts the program in a session of its own, returns its exit code, and is killed by most signals.
printf '%s\\n' "$*" >>"asked-$RANK"
[ "$(wc -l <"asked-$RANK")" -gt "$(cat fails)" ] || exit 3
[ "$1" = launch ] && shift
while [[ $1 == --* ]]; do shift; done
setsid --wait "$@"
"""


@pytest.fixture
def supervised_ranks(tmp_path: Path, render_job: Render) -> Iterator[Ranks]:
    """Two ranks of a supervised job with an early signal, of which rank 1 starts below nsys."""
    text = render_job(
        "local", "srun", account=None, ntasks_per_node=2, python=sys.executable, args=(),
        signal_before=300, max_restarts=1,
    ).script  # fmt: skip
    run = tmp_path / "run"
    run.mkdir()
    for name, content in supervision.files(Context(cwd=tmp_path)).items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    (run / "nsys-0").write_text("1\n")
    (run / "fails").write_text("0")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nsys").write_text(NSYS)
    (tools / "nsys").chmod(0o755)
    text = text.replace("/scratch/me/runs/train-1", str(run))
    started = Ranks(run, text.replace("train.py", '-S train.py $(cat "words-$RANK")'))
    yield started
    (run / "go").touch()  # each rank that still trains ends
    for rank in started.tasks:
        started.end(rank)


def test_chosen_ranks_start_below_nsys_and_are_signalled_themselves(
    supervised_ranks: Ranks, tmp_path: Path
) -> None:
    ranks = supervised_ranks
    path = f"{tmp_path}/tools:{os.environ['PATH']}"
    for rank in (0, 1):
        ranks.start(rank, 85 - rank, path=path)
    assert not (ranks.run / "asked-0").exists()
    words = (ranks.run / "asked-1").read_text()
    assert words.startswith("launch --session-new=dtslurm--0-1-1 --trace=cuda,nvtx ")
    pid = ranks.record(1)["pid"]
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert command[:3] == [sys.executable, "-S", "train.py"]  # not that of nsys
    assert b"DTSLURM_NSYS_SESSION=dtslurm--0-1-1" in Path(f"/proc/{pid}/environ").read_bytes()
    descriptors = {entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()}
    assert len(descriptors) <= 3, descriptors  # none of this program's own
    ranks.signal(1, signal.SIGUSR2)  # Slurm sends it to nsys too, which would leave its program an orphan
    ranks.signal(0, signal.SIGTERM)
    os.kill(pid, signal.SIGUSR2)
    assert (ranks.end(0), ranks.end(1)) == (85, 84)
    assert (ranks.recorded(0), ranks.recorded(1)) == (85, 84)


def test_term_to_all_processes_lets_a_rank_below_nsys_save(supervised_ranks: Ranks, tmp_path: Path) -> None:
    ranks = supervised_ranks
    ranks.start(1, 7, "may-leave", path=f"{tmp_path}/tools:{os.environ['PATH']}")
    ranks.signal(1, signal.SIGTERM)
    time.sleep(0.3)  # for a shell or a program that would end at once
    assert not ranks.left(1)
    (ranks.run / "may-leave").touch()
    assert (ranks.end(1), ranks.recorded(1)) == (7, 7)


@pytest.mark.parametrize(("fails", "is_below"), [(1, True), (2, False)])
def test_ranks_train_without_nsys_if_nsys_fails_twice(
    supervised_ranks: Ranks, tmp_path: Path, fails: int, is_below: bool
) -> None:
    ranks = supervised_ranks
    (ranks.run / "fails").write_text(str(fails))
    ranks.start(1, 7, path=f"{tmp_path}/tools:{os.environ['PATH']}")
    assert len((ranks.run / "asked-1").read_text().splitlines()) == 2
    pid = ranks.record(1)["pid"]
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert command[:3] == [sys.executable, "-S", "train.py"]
    assert (b"DTSLURM_NSYS_SESSION=" in Path(f"/proc/{pid}/environ").read_bytes()) is is_below
    assert ("nsys has failed, so the training code starts without it" in ranks.log(1)) is not is_below
    descriptors = {entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()}
    assert len(descriptors) <= 3, descriptors
    os.kill(pid, signal.SIGTERM)
    assert (ranks.end(1), ranks.recorded(1)) == (7, 7)


def test_ranks_start_without_nsys_where_it_is_missing(supervised_ranks: Ranks) -> None:
    ranks = supervised_ranks
    ranks.start(1, 7)
    ranks.signal(1, signal.SIGTERM)
    assert ranks.end(1) == 7
    assert not (ranks.run / "asked-1").exists()
