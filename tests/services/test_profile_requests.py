"""The command that waits for the profile of a rank's steps, and what the user is told without one."""

from __future__ import annotations

import base64
import gzip
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.services.observe.inside import profile
from dtslurm.services.observe.inside.execute import CommandStreams
from dtslurm.services.observe.inside.profile import ProfileRequest, record_profiles
from dtslurm.services.observe.inside.target_process import ProcessSelector
from tests.waiting import wait_until

# srun passes lines of up to 1024 bytes on in one piece, with the label of the rank and a kind in front.
LONGEST_LINE = 700


def start(
    tmp_path: Path, *, pid: int, limit_s: int = 100, subjects: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start the command as `dtslurm exec` does in the place of rank 3."""
    env = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(tmp_path),
        "DTSLURM_RUN_DIR": "/runs/a b",
        "DTSLURM_PID": str(pid),
        "RANK": "3",
    }
    argv = ["sh", "-c", profile._RECORD_STEPS, "dtslurm-profile", "2", str(limit_s), *(subjects or [""])]
    argv.append("import sys; print('asked:', *sys.argv[1:])")
    return subprocess.Popen(
        argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )


def take_request(tmp_path: Path, subjects: Sequence[str] = ()) -> Path:
    """Take the request of a rank as its session does; return the path of the trace."""
    path = tmp_path / "dtslurm-profile-_runs_a b-3"
    wait_until(path.exists)
    assert path.stat().st_mode & 0o777 == 0o600
    steps, trace, *others = path.read_text().splitlines()
    path.unlink()
    assert (steps, others) == ("2", list(subjects))
    return Path(trace)


def end_of(process: subprocess.Popen[str], tmp_path: Path) -> tuple[int, str, str]:
    out, errors = process.communicate()
    assert list(tmp_path.iterdir()) == []
    return process.returncode, out, errors


@pytest.mark.parametrize("subjects", [(), ("memory",)])
def test_trace_is_printed_in_lines_that_srun_does_not_split(tmp_path: Path, subjects: Sequence[str]) -> None:
    process = start(tmp_path, pid=os.getpid(), subjects=subjects)
    trace = take_request(tmp_path, subjects)
    part = trace.with_suffix(".part")
    part.write_text(text := os.urandom(5000).hex())
    part.replace(trace)
    code, out, errors = end_of(process, tmp_path)
    assert (code, errors) == (0, "")
    assert max(map(len, out.splitlines())) <= LONGEST_LINE
    assert gzip.decompress(base64.b64decode(out.replace("\n", ""), validate=True)).decode() == text


def test_reason_of_the_rank_is_printed(tmp_path: Path) -> None:
    process = start(tmp_path, pid=os.getpid())
    trace = take_request(tmp_path)
    part = trace.with_suffix(".part")
    part.write_text("no space left\n")
    part.replace(trace.with_name(f"{trace.name}.error"))
    assert end_of(process, tmp_path) == (1, "", "no space left\n")


def test_folder_of_another_user_in_the_place_of_the_request_gets_no_file(tmp_path: Path) -> None:
    (folder := tmp_path / "dtslurm-profile-_runs_a b-3").mkdir()
    process = start(tmp_path, pid=os.getpid(), limit_s=0)
    _, errors = process.communicate()
    assert process.returncode not in {0, 4}
    assert "directory" in errors
    assert list(folder.iterdir()) == []


def test_rank_that_takes_no_request_is_waited_for_until_the_limit(tmp_path: Path) -> None:
    assert end_of(start(tmp_path, pid=os.getpid(), limit_s=0), tmp_path) == (4, "", "")


@pytest.mark.parametrize("subjects", [(), ("memory",)])
def test_rank_that_asks_for_requests_itself_gets_none_in_a_file(
    tmp_path: Path, subjects: Sequence[str]
) -> None:
    env = {**os.environ, "KINETO_IPC_SOCKET_DIR": "/tmp/dtslurm-x"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE) as rank:
        process = start(tmp_path, pid=rank.pid, limit_s=0, subjects=subjects)
        out, errors = process.communicate()
        rank.communicate(b"\n")
    assert errors == ""
    if subjects:  # allocations need the request in a file
        assert (process.returncode, out) == (4, "")
    else:
        assert (process.returncode, out) == (0, f"asked: {rank.pid} 2 0\n")


def test_rank_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert end_of(start(tmp_path, pid=ended.pid), tmp_path) == (1, "", "the rank has ended\n")


@pytest.mark.parametrize(
    ("request_", "code", "error", "message"),
    [
        (
            ProfileRequest("torch", 3),
            4,
            RequestInvalid,
            "no rank has begun to record steps within 120 s",
        ),
        (ProfileRequest("py-spy", 3), 4, TransportError, "the ranks cannot be profiled"),
        (ProfileRequest("py-spy", 3), 127, RequestInvalid, "py-spy is not installed where the ranks run"),
        (ProfileRequest("torch", 3), 1, TransportError, "the ranks cannot be profiled"),
    ],
)
def test_reason_for_a_missing_profile_is_named(
    monkeypatch: pytest.MonkeyPatch,
    request_: ProfileRequest,
    code: int,
    error: type[Exception],
    message: str,
) -> None:
    nothing: Any = None
    monkeypatch.setattr(profile, "execute", lambda *args, **options: code)
    with pytest.raises(error, match=message):
        record_profiles(nothing, nothing, ProcessSelector(), request_)


def test_profiles_are_in_the_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = base64.b64encode(gzip.compress(b"[]")).decode()

    def execute(*args: Any, streams: CommandStreams, **options: Any) -> int:
        for label in ("10", "server/1", "9", "server/0"):
            streams.write(f"[{label}] {data}\n".encode(), b"")
        return 0

    nothing: Any = None
    monkeypatch.setattr(profile, "execute", execute)
    recorded = record_profiles(nothing, nothing, ProcessSelector(), ProfileRequest("py-spy", 3))
    assert [item.summary.label for item in recorded] == ["9", "10", "server/0", "server/1"]


def test_lines_of_ranks_on_several_nodes_may_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    data = base64.b64encode(gzip.compress(b"[" + b" " * 1000 + b"]")).decode()
    pieces = [data[start : start + 8] for start in range(0, len(data), 8)]
    assert len(pieces) > 3

    def execute(*args: Any, streams: CommandStreams, **options: Any) -> int:
        for piece in pieces:
            streams.write("".join(f"[{rank}] {piece}\n" for rank in (8, 0)).encode(), b"")
        return 0

    nothing: Any = None
    monkeypatch.setattr(profile, "execute", execute)
    recorded = record_profiles(nothing, nothing, ProcessSelector(), ProfileRequest("py-spy", 3))
    assert [(item.summary.label, len(item.trace)) for item in recorded] == [("0", 1002), ("8", 1002)]
