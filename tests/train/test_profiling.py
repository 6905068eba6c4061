"""Profiles of steps that are requested while training runs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from dtslurm.services.observe.inside.profile import _RECORD_STEPS
from dtslurm.train.profiling import StepProfiler, choose_begin, find_request_path, take_request
from dtslurm.train.run_files import RunFiles

WRITTEN = 1_000_000.0  # when requests are written


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return RunFiles(folder=tmp_path / "runs" / "a")


def write_request(run: RunFiles, trace: Path, *lines: object, rank: int = 0) -> Path:
    """Request a profile of a rank; return the path of the request."""
    path = find_request_path(run, rank)
    assert path is not None
    path.write_text("".join(f"{line}\n" for line in (*lines[:1], trace, *lines[1:])))
    path.chmod(0o600)
    os.utime(path, (WRITTEN, WRITTEN))
    return path


class Clock:
    """A clock that advances by two seconds with each look at it."""

    def __init__(self, start: float = WRITTEN) -> None:
        self._time = start

    def __call__(self) -> float:
        self._time += 2
        return self._time


def train_steps(profiler: StepProfiler, number: int = 5) -> None:
    for _ in range(number):
        train_step()
        profiler.end_step()


def train_step() -> None:
    torch.ones(4, 4) @ torch.ones(4, 4)


def recorded(trace: Path) -> list[str]:
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    return sorted(name for name in names if name.startswith("ProfilerStep#"))


def test_requested_steps_are_recorded_once(run: RunFiles, tmp_path: Path) -> None:
    profiler = StepProfiler(run, 0, Clock())
    trace, other = tmp_path / "trace.json", tmp_path / "other.json"
    write_request(run, trace, 2)
    write_request(run, other, 2, rank=1)
    ended = []
    for step in range(6):
        train_step()
        profiler.end_step()
        ended += [step] if trace.exists() else []
    assert ended[0] == 4  # the first step ends before the begin, and one warms the profiler up
    assert recorded(trace) == ["ProfilerStep#1", "ProfilerStep#2"]
    assert "aten::matmul" in trace.read_text()
    assert not other.exists()
    assert sorted(path.name[-2:] for path in tmp_path.glob("dtslurm-profile-*")) == ["-1"]


@pytest.mark.parametrize(("written", "begin"), [(100.0, 104), (101.9, 104), (102.0, 106)])
def test_begin_leaves_two_seconds_to_start_the_profiler(written: float, begin: float) -> None:
    assert choose_begin(written) == begin


def test_request_on_a_file_server_whose_clock_is_ahead_begins_within_seconds(
    run: RunFiles, tmp_path: Path
) -> None:
    path = write_request(run, tmp_path / "trace.json", 1)
    os.utime(path, (time.time() + 3600,) * 2)
    assert take_request(path).begin <= time.time() + 4


def test_training_that_ends_earlier_leaves_the_steps_so_far(run: RunFiles, tmp_path: Path) -> None:
    profiler = StepProfiler(run, 0, Clock())
    trace = tmp_path / "trace.json"
    write_request(run, trace, 100)
    train_steps(profiler)
    profiler.close()
    profiler.close()
    assert recorded(trace) == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]


def test_training_that_ends_before_the_begin_is_reported(run: RunFiles, tmp_path: Path) -> None:
    """Its process can live much longer, and the command would wait for the trace."""
    profiler = StepProfiler(run, 0, Clock())
    trace = tmp_path / "trace.json"
    write_request(run, trace, 1)
    train_steps(profiler, 1)
    profiler.close()
    assert "ended before" in trace.with_name("trace.json.error").read_text()


def test_training_that_profiles_itself_is_not_disturbed(run: RunFiles, tmp_path: Path) -> None:
    profiler = StepProfiler(run, 0, Clock())
    trace = tmp_path / "trace.json"
    write_request(run, trace, 1)
    with torch.profiler.profile() as own:
        train_steps(profiler)
    assert "aten::matmul" in {event.key for event in own.key_averages()}
    assert not trace.exists()
    assert "uses torch.profiler itself" in trace.with_name("trace.json.error").read_text()


def test_trace_that_cannot_be_written_does_not_end_the_training(
    run: RunFiles, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profiler = StepProfiler(run, 0, Clock())
    write_request(run, tmp_path / "gone" / "trace.json", 1)
    train_steps(profiler)
    assert "dtslurm: steps cannot be profiled: " in capfd.readouterr().err


def test_allocations_are_recorded_on_request(run: RunFiles, tmp_path: Path) -> None:
    profiler = StepProfiler(run, 0, Clock())
    write_request(run, tmp_path / "trace.json", 1, "memory")
    train_steps(profiler)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    assert 64 in sizes  # 4 x 4 numbers of 4 bytes


@pytest.mark.parametrize(
    "text", ["", "x\n/trace\n", "0\n/trace\n", "1001\n/trace\n", "3\ntrace\n", "3", "3\n/trace\nfrog\n"]
)
def test_other_files_are_refused_once(run: RunFiles, capfd: pytest.CaptureFixture[str], text: str) -> None:
    profiler = StepProfiler(run, 0, Clock())
    path = find_request_path(run, 0)
    assert path is not None
    path.write_text(text)
    profiler.end_step()
    path.write_text(text)
    profiler.end_step()
    assert capfd.readouterr().err.count("steps cannot be profiled") == 1


def test_files_of_other_users_are_not_read(run: RunFiles, tmp_path: Path) -> None:
    path = write_request(run, tmp_path / "trace.json", 1)
    path.chmod(0o622)
    with pytest.raises(PermissionError):
        take_request(path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        take_request(path)


@pytest.mark.parametrize("padding", range(3))
def test_long_run_directories_have_the_requests_that_the_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = Path("/", *["ü" * 100] * 4, "x" * padding, "run-17")  # the cut is within a character, or not
    [line] = [line for line in _RECORD_STEPS.splitlines() if line.startswith("name=")]
    shell = ["sh", "-c", f'{line}; : >"$TMPDIR/dtslurm-profile-$name-12"']
    subprocess.run(shell, env={**os.environ, "DTSLURM_RUN_DIR": str(folder)}, check=True)
    path = find_request_path(RunFiles(folder=folder), 12)
    assert path is not None
    assert path.exists()
    assert find_request_path(RunFiles(), 0) is None
