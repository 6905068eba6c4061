"""The program at the socket where PyTorch asks for requests; a thread of the test asks as PyTorch does."""

from __future__ import annotations

import base64
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtslurm import assets
from dtslurm.worker.probe import torch_request
from dtslurm.worker.probe.torch_request import (
    HEADER,
    KIND,
    NOT_TAKEN,
    PID,
    REQUEST,
    Daemon,
    RecordingFailed,
)

STEP = {"name": "Optimizer.step#SGD.step", "cat": "user_annotation", "ph": "X"}


class Client:
    """Asks for requests as libkineto does, and writes traces."""

    def __init__(self, folder: Path, pid: int, *, steps_per_s: float = 2) -> None:
        self.folder, self.pid, self.steps_per_s = folder, pid, steps_per_s
        self.windows: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "dynoconfigclient"))
        self._socket.settimeout(10)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(0.02):
            text = self.ask([self.pid, 1])
            if text:
                values = dict(line.split("=") for line in text.splitlines())
                self.windows.append(int(values["ACTIVITIES_DURATION_MSECS"]))
                self.write(Path(values["ACTIVITIES_LOG_FILE"]), self.windows[-1])

    def ask(self, pids: list[int]) -> str:
        content = REQUEST.pack(3, len(pids), 17) + b"".join(PID.pack(pid) for pid in pids)
        try:
            self._socket.sendto(HEADER.pack(len(content), KIND) + content, str(self.folder / "dynolog"))
            answer = self._socket.recv(1 << 16)
        except OSError:  # nobody is there
            return ""
        assert HEADER.unpack_from(answer)[0] == len(answer) - HEADER.size
        return answer[HEADER.size :].decode()

    def write(self, path: Path, window_ms: int) -> None:
        count = int(self.steps_per_s * window_ms / 1000)
        text = json.dumps({"traceEvents": [STEP] * count})
        target = path.with_name(f"trace_{self.pid}.json")
        target.write_text(text[:-2])
        time.sleep(0.3)  # it is written in place
        target.write_text(text)

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()
        self._socket.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of this user, with a short path as sockets need it."""
    folder = Path("/tmp", f"dtslurm-test-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir(mode=0o700)
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def run(pid: int, steps: int, seconds: float) -> subprocess.CompletedProcess[str]:
    program = assets.worker("probe/torch_request.py").read_text()
    argv = [sys.executable, "-I", "-c", program, str(pid), str(steps), str(seconds)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.fixture
def rank(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was started with the folder's name."""
    with subprocess.Popen(["sleep", "600"], env={"KINETO_IPC_SOCKET_DIR": str(folder)}) as process:
        yield process
        process.kill()


def unpack(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(text, validate=True)))
    return document


def test_window_grows_until_the_trace_has_the_steps(folder: Path, rank: subprocess.Popen[bytes]) -> None:
    client = Client(folder, rank.pid)
    done = run(rank.pid, 3, 60)
    client.stop()
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 700  # srun would mix longer lines of several nodes
    assert client.windows == [1000, 4000]  # two optimizer steps are the ends of one step
    assert unpack(done.stdout.replace("\n", "")) == {"traceEvents": [STEP] * 8}
    assert sorted(path.name for path in folder.iterdir()) == ["dynoconfigclient", "lock"]


def test_window_of_a_slow_or_unmarked_loop_has_a_limit(
    folder: Path, rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_request, "LONGEST_WINDOW_MS", 5000)
    client = Client(folder, rank.pid, steps_per_s=0)
    daemon = Daemon(str(folder), rank.pid)
    trace = torch_request.record_steps(daemon, 3, time.monotonic() + 60)
    daemon.close()
    client.stop()
    assert client.windows == [1000, 5000]
    assert json.loads(trace) == {"traceEvents": []}


def test_process_that_does_not_ask_is_waited_for_until_the_limit(
    folder: Path, rank: subprocess.Popen[bytes]
) -> None:
    client = Client(folder, rank.pid + 1)  # a child process, which may be a worker of a data loader
    done = run(rank.pid, 3, 1)
    client.stop()
    assert (done.returncode, done.stdout, done.stderr) == (NOT_TAKEN, "", "")
    assert client.windows == []


def test_folder_that_others_can_enter_is_refused(folder: Path, rank: subprocess.Popen[bytes]) -> None:
    folder.chmod(0o755)
    done = run(rank.pid, 3, 60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{folder} belongs to another user, or others can enter it\n"
    folder.chmod(0o700)
    assert list(folder.iterdir()) == []


def test_rank_that_ends_is_not_waited_for(folder: Path, rank: subprocess.Popen[bytes]) -> None:
    daemon = Daemon(str(folder), rank.pid)
    rank.kill()
    rank.wait()
    with pytest.raises(RecordingFailed, match="the rank has ended"):
        daemon.record(1000, time.monotonic() + 60)
    daemon.close()


def test_second_program_waits_for_the_first_one(folder: Path, rank: subprocess.Popen[bytes]) -> None:
    with torch_request.hold_lock(str(folder), time.monotonic()):
        assert run(rank.pid, 3, 0.5).returncode == NOT_TAKEN
    client = Client(folder, rank.pid, steps_per_s=9)
    assert run(rank.pid, 3, 60).returncode == 0
    client.stop()


def test_old_traces_and_datagrams_of_another_form_are_ignored(
    folder: Path, rank: subprocess.Popen[bytes]
) -> None:
    (folder / "trace_1.json").write_text("{}")
    daemon = Daemon(str(folder), rank.pid)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    for data in (b"", b"x", HEADER.pack(4, b"ctxt") + REQUEST.pack(0, 0, 0) + PID.pack(rank.pid)):
        sender.sendto(data, str(folder / "dynolog"))
    with pytest.raises(TimeoutError):
        daemon.record(1000, time.monotonic() + 1)
    assert not (folder / "trace_1.json").exists()
    daemon.close()
    sender.close()
