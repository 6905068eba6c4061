"""A persistent worker over a real link of OpenSSH and paramiko, and the faults of the link."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.errors import TransportError
from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.store.delivery import SubmitCommand, deliver
from dtslurm.transport.base import Transport
from tests.remote.conftest import delivery
from tests.sshd.servers import SshLab
from tests.transport.conftest import REMOTE, reach
from tests.waiting import wait_until

PATIENCE_S = 60.0


@pytest.fixture(params=REMOTE)
def far(request: pytest.FixtureRequest, sshd_lab: SshLab) -> Iterator[Transport]:
    if "narrow" not in sshd_lab.servers:
        sshd_lab.server("narrow", env={"HOME": str(sshd_lab.home("narrow"))}, lines=["MaxSessions 1"])
    transport = reach(sshd_lab, "narrow", request.param)
    yield transport
    transport.close()
    sshd_lab.logout()


def test_f58_worker_releases_the_only_session_for_another_command(
    far: Transport, worker: RemoteWorker, tmp_path: Path
) -> None:
    for number in range(1, 5):
        done = deliver(
            far, delivery(tmp_path, f"r{number}"), SubmitCommand(["echo", str(number)]), worker=worker
        )
        assert done is not None
        assert done.stdout == f"{number}\n"
        if number == 3:
            assert far.run(["echo", "between"]).stdout == "between\n"
    assert len(list((tmp_path / "root").glob("r*/events.jsonl"))) == 4


def test_f58_worker_started_in_advance_releases_the_only_session_for_another_command(
    far: Transport, worker: RemoteWorker, tmp_path: Path
) -> None:
    far.open()
    worker.begin()
    assert far.run(["echo", "before"]).stdout == "before\n"
    done = deliver(far, delivery(tmp_path, "a"), SubmitCommand(["echo", "1"]), worker=worker)
    assert done is not None
    assert done.stdout == "1\n"


def test_f57_submission_reconnects_after_a_link_cut_when_the_worker_started_in_advance(
    sshd_lab: SshLab, far: Transport, worker: RemoteWorker, tmp_path: Path
) -> None:
    far.open()
    worker.begin()
    wait_until(lambda: worker._running is not None and worker._beginning and not worker._beginning.is_alive())
    server = sshd_lab.servers["narrow"]
    server.cut()
    wait_until(lambda: worker._running is None or not worker._running.is_alive())
    done = deliver(far, delivery(tmp_path, "a"), SubmitCommand(["echo", "1"]), worker=worker)
    assert done is not None
    assert done.stdout == "1\n"


def test_f57_submission_reconnects_after_a_link_cut_between_submissions(
    sshd_lab: SshLab, far: Transport, worker: RemoteWorker, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        deliver(far, delivery(tmp_path, name), worker=worker)
    server = sshd_lab.servers["narrow"]
    server.cut()
    wait_until(lambda: not server.connections())
    wait_until(
        lambda: worker._running is None or not worker._running.is_alive()
    )  # this side has heard of it, too
    deliver(far, delivery(tmp_path, "c"), SubmitCommand(["echo", "3"]), worker=worker)
    assert '"job_id": "3"' in (tmp_path / "root/c/events.jsonl").read_text()


def test_f1_link_cut_during_a_submission_leaves_exactly_one_recorded_job(
    sshd_lab: SshLab, far: Transport, worker: RemoteWorker, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        deliver(far, delivery(tmp_path, name), worker=worker)
    log, go = tmp_path / "log", tmp_path / "go"
    queue = f"echo queued >>'{log}'; while [ ! -e '{go}' ]; do sleep 0.05; done; echo 17"

    def cut() -> None:
        wait_until(log.exists)
        sshd_lab.servers["narrow"].cut()

    cutter = threading.Thread(target=cut)
    cutter.start()
    with pytest.raises(TransportError, match="unknown"):
        deliver(far, delivery(tmp_path, "c"), SubmitCommand(["sh", "-c", queue]), worker=worker)
    cutter.join()
    go.touch()
    wait_until((tmp_path / "root/c/events.jsonl").exists)
    assert '"job_id": "17"' in (tmp_path / "root/c/events.jsonl").read_text()
    assert log.read_text() == "queued\n"
    deliver(far, delivery(tmp_path, "d"), SubmitCommand(["echo", "18"]), worker=worker)
