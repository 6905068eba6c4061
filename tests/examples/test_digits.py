"""The digits example: one and two processes, an early stop, a resumed run, and failures."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

# Every process that collects tests would import them to find out whether they are there.
are_missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.sampled(1, "digits"),
    pytest.mark.skipif(bool(are_missing), reason=f"missing: {', '.join(are_missing)}"),
]
SCRIPT = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
TIMEOUT = 600
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")


def job_environment(run_dir: Path, **extra: str) -> dict[str, str]:
    """Return the environment of the training job, without the variables of a launcher."""
    inherited = {
        k: v for k, v in os.environ.items() if k not in OF_A_LAUNCHER and not k.startswith("TORCHELASTIC")
    }
    return {
        **inherited,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "DTSLURM_CHECKPOINT_DIR": str(run_dir / "checkpoints"),
        "DTSLURM_METRICS": str(run_dir / "metrics" / "train.jsonl"),
        **extra,
    }


def run_script(run_dir: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *([] if args[0] == "-m" else [str(SCRIPT)]), *args],
        env=job_environment(run_dir),
        cwd=run_dir,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def epochs_with_loss(run_dir: Path) -> list[int]:
    return [line["epoch"] for line in read_metrics(run_dir) if "loss" in line]


def test_a_single_process_trains_and_resumes_with_more_epochs(tmp_path: Path) -> None:
    first = run_script(tmp_path, "--epochs", "2")
    assert (first.returncode, first.stderr) == (0, "")
    assert epochs_with_loss(tmp_path) == [1, 2]
    *_, before_last, last = read_metrics(tmp_path)
    assert before_last.keys() == {"time", "step", "total_steps", "epoch", "loss", "lr", "samples_per_s"}
    assert before_last["step"] == before_last["total_steps"] == last["step"] == last["total_steps"]
    assert first.stdout.splitlines()[0].startswith("rank 0/1 on ")
    saved = tmp_path / "checkpoints" / "digits.pt"
    assert (
        first.stdout.splitlines()[-1]
        == f"test accuracy {100 * last['test_accuracy']:.1f} %, model in {saved}"
    )
    assert [path.name for path in saved.parent.iterdir()] == ["digits.pt"]

    second = run_script(tmp_path, "--epochs", "4")
    assert (second.returncode, second.stderr) == (0, "")
    assert f"continues after epoch 2 from {saved}" in second.stdout
    assert epochs_with_loss(tmp_path) == [1, 2, 3, 4]


@pytest.mark.slow
def test_two_processes_reach_the_accuracy(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_script(tmp_path, *torchrun, str(SCRIPT), "--min-accuracy", "0.97")
    assert (done.returncode, done.stderr) == (0, "")
    assert read_metrics(tmp_path)[-1]["test_accuracy"] >= 0.97
    for rank in (0, 1):
        assert f"rank {rank}/2 on {socket.gethostname()}: done after" in done.stdout


def test_a_signal_to_one_rank_stops_all_and_the_resumed_run_gives_the_same_result(
    tmp_path: Path,
) -> None:
    """Two processes started as srun would, with nothing but env:// variables."""
    broken, whole = tmp_path / "broken", tmp_path / "whole"

    def start(run_dir: Path, *args: str) -> list[subprocess.Popen[str]]:
        run_dir.mkdir(exist_ok=True)
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), "--epochs", "3", *args],
                env=job_environment(run_dir, RANK=str(rank), LOCAL_RANK=str(rank), **meeting),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in (0, 1)
        ]

    def finish(ranks: list[subprocess.Popen[str]]) -> list[int]:
        with ranks[0], ranks[1]:
            outputs = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
        print(*outputs, sep="\n---\n")
        return [rank.returncode for rank in ranks]

    ranks = start(broken, "--epoch-sleep", "0.5")
    out = ranks[0].stdout
    assert out is not None
    while not out.readline().startswith("epoch  1/3"):
        assert ranks[0].poll() is None
    for signum in (signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM):
        ranks[1].send_signal(signum)
    assert finish(ranks) == [85, 85]
    assert (broken / "checkpoints" / "digits.pt").exists()
    assert epochs_with_loss(broken) in ([1], [1, 2])
    assert finish(start(broken)) == [0, 0]
    assert epochs_with_loss(broken) == [1, 2, 3]

    assert finish(start(whole)) == [0, 0]
    assert read_metrics(broken)[-2]["loss"] == read_metrics(whole)[-2]["loss"]
    assert read_metrics(broken)[-1]["test_accuracy"] == read_metrics(whole)[-1]["test_accuracy"]


def test_a_drill_fails_with_the_requested_exit_code(tmp_path: Path) -> None:
    failed = run_script(
        tmp_path, "--epochs", "3", "--fail-rank", "0", "--fail-epoch", "2", "--fail-code", "42"
    )
    assert failed.returncode == 42
    assert failed.stderr == "rank 0: drill, leaving with exit code 42\n"
    assert epochs_with_loss(tmp_path) == [1]


def test_insufficient_accuracy_is_a_failure(tmp_path: Path) -> None:
    failed = run_script(tmp_path, "--epochs", "1", "--min-accuracy", "0.99")
    assert failed.returncode == 1
    assert "is below 0.99 (--min-accuracy)" in failed.stderr


def test_an_indivisible_batch_size_is_refused(tmp_path: Path) -> None:
    refused = run_script(tmp_path, "--batch-size", "0")
    assert refused.returncode == 2
    assert "--batch-size must be a multiple of the number of processes" in refused.stderr
