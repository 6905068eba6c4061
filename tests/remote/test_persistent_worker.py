"""A worker that serves many submissions: each happens once, even if the worker dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtslurm.errors import CommandNotFound, RunExists, StoreError, TransportError
from dtslurm.remote import remote_worker
from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.store.delivery import MODULES, Delivery, SubmitCommand, deliver
from dtslurm.transport.base import Stream
from tests.remote.conftest import delivery
from tests.store.trees import PYTHON, FarSide
from tests.waiting import wait_until

PATIENCE_S = 60.0


class Counted(FarSide):
    """Counts the channels that are opened, and knows the processes at their far ends."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = 0
        self.has_login = False
        self.spare: list[object] = []

    def logged_in(self) -> bool:
        return self.has_login

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Stream]:
        self.streams += 1
        with super().stream(argv, stdin=stdin) as stream:
            yield stream


@pytest.fixture
def far() -> Counted:
    return Counted()


def worker_processes(mark: str = "keep") -> list[int]:
    """The kept workers below this process."""
    listed = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", f"dtslurm-worker.* {mark}$"], capture_output=True, check=False
    )
    return [int(word) for word in listed.stdout.split()]


def test_submissions_share_a_single_worker_channel(
    far: Counted, worker: RemoteWorker, tmp_path: Path
) -> None:
    for number in range(5):
        done = deliver(
            far, delivery(tmp_path, f"r{number}"), SubmitCommand(["echo", f"{number + 1}"]), worker=worker
        )
        assert done is not None
        assert done.stdout == f"{number + 1}\n"
        events = (tmp_path / f"root/r{number}/events.jsonl").read_text()
        assert f'"job_id": "{number + 1}"' in events
    assert (len(far.sent), far.streams) == (1, 1)
    assert len(worker_processes()) == 1
    worker.close()
    assert worker_processes() == []


def test_worker_started_in_advance_serves_the_first_request(far: Counted, tmp_path: Path) -> None:
    far.has_login = True
    worker = RemoteWorker(far, MODULES, PYTHON)
    worker.begin()
    worker.begin()  # once is enough
    wait_until(worker_processes)
    done = deliver(far, delivery(tmp_path, "a"), SubmitCommand(["echo", "1"]), worker=worker)
    assert done is not None
    assert done.stdout == "1\n"
    assert (len(far.sent), far.streams) == (0, 1)
    worker.close()
    assert worker_processes() == []


def test_worker_does_not_start_in_advance_without_a_login(
    far: Counted, worker: RemoteWorker, tmp_path: Path
) -> None:
    worker.begin()
    deliver(far, delivery(tmp_path, "a"), worker=worker)
    assert (len(far.sent), far.streams) == (1, 0)


def test_interpreter_error_of_a_worker_started_in_advance_appears_at_the_first_request(
    far: Counted, tmp_path: Path
) -> None:
    far.has_login = True
    worker = RemoteWorker(far, MODULES, "/nowhere/python3")
    worker.begin()
    with pytest.raises(CommandNotFound, match="/nowhere/python3"):
        deliver(far, delivery(tmp_path, "a"), worker=worker)
    assert not (tmp_path / "root").exists()


def test_worker_serves_further_requests_after_refused_requests(
    far: Counted, worker: RemoteWorker, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        deliver(far, delivery(tmp_path, name), worker=worker)
    with pytest.raises(RunExists):
        deliver(far, delivery(tmp_path, "a"), worker=worker)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file"):
        deliver(far, Delivery(str(tmp_path / "file/x"), str(tmp_path / "file/o"), {}), worker=worker)
    with pytest.raises(Exception, match="not a path below"):
        deliver(far, Delivery(str(tmp_path / "root/c"), str(tmp_path / "o"), {"../x": b""}), worker=worker)
    deliver(far, delivery(tmp_path, "d"), worker=worker)
    assert sorted(path.name for path in (tmp_path / "root").glob("[a-z]*")) == ["a", "b", "d"]
    assert far.streams == 2  # one that was asked what makes no sense ends: what follows cannot be told apart


def test_worker_killed_between_submissions_is_replaced(
    far: Counted, worker: RemoteWorker, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        deliver(far, delivery(tmp_path, name), worker=worker)
    [pid] = worker_processes()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: worker_processes() == [])
    deliver(far, delivery(tmp_path, "c"), worker=worker)
    assert (tmp_path / "root/c/job.json").exists()
    assert far.streams == 2


def test_idle_worker_that_does_not_answer_a_ping_is_replaced(
    far: Counted, worker: RemoteWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_worker, "_FRESH_S", 0.0)
    for name in ("a", "b", "c"):
        deliver(far, delivery(tmp_path, name), worker=worker)
    assert far.streams == 1
    [pid] = worker_processes()
    os.kill(pid, signal.SIGSTOP)  # as one at the other end of a link that swallows everything
    monkeypatch.setattr(remote_worker, "_PING_S", 0.2)
    monkeypatch.setattr(remote_worker, "_GOODBYE_S", 0.1)
    deliver(far, delivery(tmp_path, "d"), worker=worker)
    assert far.streams == 2
    assert (tmp_path / "root/d/job.json").exists()


def test_f1_submission_is_not_repeated_when_the_worker_dies_during_the_command(
    far: Counted, worker: RemoteWorker, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        deliver(far, delivery(tmp_path, name), worker=worker)
    log, go = tmp_path / "log", tmp_path / "go"
    queue = f"echo queued >>'{log}'; while [ ! -e '{go}' ]; do sleep 0.05; done"
    [pid] = worker_processes()

    def kill() -> None:
        wait_until(log.exists)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(TransportError, match="its effects are unknown"):
        deliver(far, delivery(tmp_path, "c"), SubmitCommand(["sh", "-c", queue]), worker=worker)
    killer.join()
    go.touch()
    assert log.read_text() == "queued\n"


def test_f2_worker_ends_when_the_client_is_killed(tmp_path: Path) -> None:
    client = tmp_path / "client.py"
    client.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.remote.test_persistent_worker import *\n"
        "far, folder = FarSide(), Path(sys.argv[1])\n"
        "worker = RemoteWorker(far, MODULES, PYTHON)\n"
        "for name in 'ab':\n"
        "    deliver(far, delivery(folder, name), worker=worker)\n"
        "print(worker_processes()[0], flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(client), str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        started.kill()
        wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/exe").exists())


def test_f58_idle_worker_releases_its_session_for_another_command(
    far: Counted, worker: RemoteWorker, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        deliver(far, delivery(tmp_path, name), worker=worker)
    [release_if_idle] = far.spare
    assert release_if_idle() is True  # type: ignore[operator]
    assert worker_processes() == []
    assert release_if_idle() is False  # type: ignore[operator]
    deliver(far, delivery(tmp_path, "c"), worker=worker)
    assert (tmp_path / "root/c/job.json").exists()


def test_concurrent_submissions_of_two_threads_do_not_block_each_other(
    far: Counted, worker: RemoteWorker, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        deliver(far, delivery(tmp_path, name), worker=worker)
    go = tmp_path / "go"
    slow = ["sh", "-c", f"while [ ! -e '{go}' ]; do sleep 0.05; done; echo 7"]
    answers: list[str] = []

    def first() -> None:
        done = deliver(far, delivery(tmp_path, "c"), SubmitCommand(slow), worker=worker)
        answers.append(done.stdout if done else "")

    thread = threading.Thread(target=first)
    thread.start()
    wait_until((tmp_path / "root/c").exists)
    done = deliver(far, delivery(tmp_path, "d"), SubmitCommand(["echo", "8"]), worker=worker)
    assert done is not None
    assert (done.stdout, answers) == ("8\n", [])
    go.touch()
    thread.join(PATIENCE_S)
    assert answers == ["7\n"]
