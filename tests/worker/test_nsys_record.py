"""What nsys records of a rank: reports of real GPUs, and a nsys that fails."""

from __future__ import annotations

import base64
import gzip
import json
import os
import sqlite3
import stat
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from dtslurm.model.runs.profile import RankProfile
from dtslurm.services.observe.inside.profile import interpret_trace
from dtslurm.worker.probe import nsys_record

DATA = Path(__file__).parent / "data"
PROGRAM = nsys_record.__file__
NSYS = """#!/bin/bash
printf '%s\\n' "$*" >>calls
env >>environment
case "$1" in
  start) for word; do [[ $word == --output=* ]] && echo "${word#--output=}" >output; done ;;
  stop) [ -e no-report ] || cp report "$(cat output)$(cat suffix)" ;;
  export) for word; do [[ $word == --output=* ]] && cp database "${word#--output=}"; done ;;
esac
[ ! -e "fails-$1" ] || { echo "cannot $1" >&2; exit 3; }
"""


def make_database(name: str, path: Path) -> str:
    with sqlite3.connect(path) as connection:
        connection.executescript((DATA / f"nsys-{name}.sql").read_text())
    return str(path)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a nsys that records and exports what lies there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nsys").write_text(NSYS)
    (tmp_path / "nsys").chmod(0o755)
    (tmp_path / "report").write_bytes(b"the report")
    (tmp_path / "suffix").write_text(".nsys-rep")
    make_database("saxpy", tmp_path / "database")
    return tmp_path


def ask(site: Path, pid: int | None = None, **variables: str) -> subprocess.CompletedProcess[bytes]:
    env = {
        "PATH": f"{site}:{os.environ['PATH']}", "DTSLURM_NSYS_SESSION": "dtslurm-17-1-0", "RANK": "3",
        "DTSLURM_PID": str(pid or os.getpid()), "DTSLURM_RUN_DIR": str(site), **variables,
    }  # fmt: skip
    command = [sys.executable, PROGRAM, "0.1"]
    return subprocess.run(command, env=env, capture_output=True, check=False, cwd=site)


def read_parts(done: subprocess.CompletedProcess[bytes]) -> dict[str, bytes]:
    assert max(map(len, done.stdout.splitlines())) <= 720  # srun would mix longer lines of several nodes
    parts: defaultdict[str, bytes] = defaultdict(bytes)
    for line in done.stdout.splitlines():
        kind, _, piece = line.partition(b" ")
        parts[kind.decode()] += piece
    return {kind: base64.b64decode(data, validate=True) for kind, data in parts.items()}


def test_exports_of_real_gpus_are_read(tmp_path: Path) -> None:
    events = nsys_record.read_events(make_database("saxpy", tmp_path / "saxpy"))
    assert Counter((event["cat"], event["name"]) for event in events) == {
        ("kernel", "saxpy"): 5,
        ("gpu_memcpy", "Memcpy HtoD"): 10,
        ("gpu_memcpy", "Memcpy DtoH"): 5,
        ("user_annotation", "saxpy"): 5,
        ("user_annotation", "MPI_Init"): 1,
        ("user_annotation", "MPI_Send"): 10,
        ("user_annotation", "MPI_Recv"): 5,
        ("user_annotation", "MPI_Finalize"): 1,
    }
    assert events[2] == {
        "ph": "X", "name": "saxpy", "cat": "kernel", "ts": 924922.186, "dur": 17704.808, "pid": 0,
        "tid": "stream 7",
    }  # fmt: skip
    annotation = next(event for event in events if event["cat"] == "user_annotation")
    assert (annotation["name"], annotation["ts"], annotation["tid"]) == (
        "MPI_Init",
        65117.824,
        "thread 1230493",
    )
    assert annotation["dur"] == pytest.approx(645678.983)

    # A later version of nsys, with another order of columns and without two of the tables.
    events = nsys_record.read_events(make_database("cloverleaf", tmp_path / "cloverleaf"))
    assert Counter((event["cat"], event["name"]) for event in events) == {
        ("kernel", "par_ranged1d_kernel"): 8,
        ("kernel", "par_ranged2d_kernel"): 4,
        ("gpu_memcpy", "Memcpy HtoD"): 12,
    }


def test_summary_of_an_export_shows_the_work_of_the_gpu(tmp_path: Path) -> None:
    events = nsys_record.read_events(make_database("saxpy", tmp_path / "saxpy"))
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
    summary = interpret_trace("nsys", "3", packed).summary
    assert isinstance(summary, RankProfile)
    assert summary.label == "3"
    assert summary.seconds == pytest.approx(2.024, abs=0.001)
    assert summary.shares["compute"] == pytest.approx(0.184, abs=0.001)  # 88 ms of kernels, 285 of copies
    places = [(spot.place, round(spot.share, 3)) for spot in summary.hot_spots]
    assert places == [("Memcpy HtoD", 0.092), ("Memcpy DtoH", 0.049), ("saxpy", 0.044)]


def test_kernels_of_a_collective_count_as_communication(tmp_path: Path) -> None:
    database = make_database("saxpy", tmp_path / "saxpy")
    with sqlite3.connect(database) as connection:
        connection.execute(
            "UPDATE StringIds SET value = 'ncclDevKernel_AllReduce_Sum_f32_RING_LL' WHERE id = 671"
        )
    packed = gzip.compress(json.dumps({"traceEvents": nsys_record.read_events(database)}).encode())
    summary = interpret_trace("nsys", "0", packed).summary
    assert isinstance(summary, RankProfile)
    assert summary.shares["communication"] > 0.04


def test_report_and_trace_are_printed(site: Path) -> None:
    done = ask(site, LD_PRELOAD="", NSYS_PROFILING_SESSION_ID="7", CUDA_INJECTION64_PATH="x", MINE="y")
    assert (done.returncode, done.stderr) == (0, b"")
    parts = read_parts(done)
    assert parts["nsys-rep"] == b"the report"
    assert len(json.loads(gzip.decompress(parts["trace"]))["traceEvents"]) == 42
    calls = [line.split() for line in (site / "calls").read_text().splitlines()]
    assert [words[0] for words in calls] == ["start", "stop", "export"]
    assert calls[0][1] == calls[1][1] == "--session=dtslurm-17-1-0"
    folder = Path((site / "output").read_text()).parent
    assert not folder.exists()
    variables = (site / "environment").read_text().splitlines()
    assert "MINE=y" in variables
    assert not [line for line in variables if line.startswith(("LD_PRELOAD", "NSYS_", "CUDA_INJECTION"))]


def test_ranks_that_are_not_below_nsys_are_not_recorded(site: Path) -> None:
    done = ask(site, DTSLURM_NSYS_SESSION="")
    assert (done.returncode, done.stdout) == (nsys_record.NOT_BELOW_NSYS, b"")
    assert done.stderr == b"rank 3 does not run below nsys\n"
    assert not (site / "calls").exists()


def test_report_of_a_nsys_without_its_importer_is_brought_without_a_trace(site: Path) -> None:
    (site / "suffix").write_text(".qdstrm")
    done = ask(site)
    assert read_parts(done) == {"trace": b"", "qdstrm": b"the report"}
    assert "export" not in (site / "calls").read_text()


def test_report_that_cannot_be_exported_is_brought_without_a_trace(site: Path) -> None:
    (site / "fails-export").touch()
    done = ask(site)
    assert (done.returncode, done.stderr.decode().strip()) == (0, "nsys export ended with 3: cannot export")
    assert read_parts(done) == {"trace": b"", "nsys-rep": b"the report"}


def test_large_report_stays_in_the_run_directory(site: Path) -> None:
    with (site / "report").open("wb") as file:
        file.truncate(nsys_record.LONGEST_REPORT + 1)
    parts = read_parts(ask(site))
    kept = Path(parts["kept"].decode())
    assert (kept.parent, kept.suffix) == (site, ".nsys-rep")
    assert kept.name.startswith("nsys-3-")
    assert kept.stat().st_size == nsys_record.LONGEST_REPORT + 1
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("fails-start", "nsys start ended with 3: cannot start"),
        ("fails-stop", "nsys stop ended with 3: cannot stop"),
        ("no-report", "nsys wrote no report"),
    ],
)
def test_nsys_that_fails_is_reported_in_its_words(site: Path, file: str, message: str) -> None:
    (site / file).touch()
    done = ask(site)
    assert (done.returncode, done.stdout, done.stderr.decode().strip()) == (1, b"", message)


def test_recording_is_cancelled_when_the_rank_ends(site: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    done = ask(site, pid=ended.pid)
    assert (done.returncode, done.stderr.decode().strip()) == (1, "the rank has ended")
    assert (site / "calls").read_text().split("\n")[1] == "cancel --session=dtslurm-17-1-0"
