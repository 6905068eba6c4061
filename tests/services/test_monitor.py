"""The number of scheduler queries of several windows, and the shared queue cache."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from dtslurm.config.profiles import LoadedProfile
from dtslurm.errors import SlurmUnavailable
from dtslurm.model.cluster import ClusterProfile, SlurmCustoms
from dtslurm.model.runs.queue import QueueMemory
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.scheduler.base import Scheduler
from dtslurm.services.runs import monitor
from dtslurm.services.runs.monitor import Freshness, QueueSnapshot
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.queue_cache import QueueCache
from dtslurm.transport.local import LocalTransport

HAND, WINDOW = Freshness(), Freshness(background=True)


class Slurm:
    """A scheduler whose jobs are in the states it is told, and that counts what it is asked."""

    def __init__(self) -> None:
        self.now = 1e9
        self.states: dict[str, JobState] = {"1": JobState.RUNNING}
        self.asked = 0
        self.took_s = 0.0
        self.down = False
        self.meanwhile: list[Any] = []


class Window:
    """One process's view of it."""

    def __init__(self, slurm: Slurm, folder: Path, min_poll_s: float = 30.0) -> None:
        self.slurm, self.memory, self.requests = slurm, QueueMemory(), 0
        env = {"XDG_CACHE_HOME": str(folder), "PATH": "/nowhere"}
        self.context = Context(cwd=folder, env=env, clock=lambda: slurm.now)
        profile = ClusterProfile(name="c", slurm=SlurmCustoms(min_poll_s=min_poll_s))
        loaded_profile = LoadedProfile(profile=profile, path=folder)
        self.cluster = ActiveCluster(loaded_profile, cast("Scheduler", self), LocalTransport(), "")

    def query(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        self.requests += 2
        self.slurm.asked += 2
        begin = self.slurm.now
        if self.slurm.down:
            raise SlurmUnavailable("squeue: the controller is down")
        jobs = tuple(
            JobStatus(job_id=job_id, state=state, observed_at=begin)
            for job_id, state in self.slurm.states.items()
        )
        for work in self.slurm.meanwhile:
            work()
        self.slurm.now += self.slurm.took_s
        self.memory = replace(self.memory, asked_at=begin, took_s=self.slurm.took_s, jobs=jobs)
        return self.recall(job_ids)

    def recall(self, job_ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        return {job_id: [job for job in self.memory.jobs if job.job_id == job_id] for job_id in job_ids}

    def runs(self, job_id: str) -> Sequence[JobStatus]:
        raise NotImplementedError

    def look(self, need: Freshness = HAND, job_id: str = "1") -> QueueSnapshot:
        return monitor.observe(self.context, self.cluster, [job_id], need)

    def state(self, need: Freshness = HAND) -> JobState:
        (status,) = self.look(need).jobs["1"]
        return status.state

    @property
    def cache(self) -> QueueCache:
        return monitor.cache_of(self.context, self.cluster)

    @property
    def files(self) -> dict[str, Path]:
        folder = Path(self.context.env["XDG_CACHE_HOME"]) / "dtslurm" / "queues"
        return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def windows(slurm: Slurm, tmp_path: Path) -> list[Window]:
    return [Window(slurm, tmp_path) for _ in range(5)]


def count_requests(windows: Sequence[Window], number: float, need: Freshness = WINDOW) -> int:
    """Let ``number`` minutes pass while every window queries each second; return the number of requests."""
    slurm = windows[0].slurm
    before, end = slurm.asked, slurm.now + 60 * number
    while slurm.now < end:
        for window in windows:
            window.look(need)
        slurm.now += 1
    return slurm.asked - before


def test_f21_five_windows_cause_no_more_requests_than_a_single_window(windows: list[Window]) -> None:
    assert 4 * 10 - 4 <= count_requests(windows[:1], 10) <= 5 * 10
    assert 4 * 10 - 4 <= count_requests(windows, 10) <= 5 * 10


@pytest.mark.parametrize(
    ("state", "most"), [(JobState.PENDING, 12), (JobState.COMPLETED, 2), (JobState.FAILED, 2)]
)
def test_pending_jobs_are_queried_rarely_and_finished_jobs_once(
    windows: list[Window], slurm: Slurm, state: JobState, most: int
) -> None:
    slurm.states["1"] = state
    assert 0 < count_requests(windows, 10) <= most


def test_a_manual_query_gets_an_answer_of_the_last_seconds(windows: list[Window], slurm: Slurm) -> None:
    for window in windows:
        window.look()
    assert slurm.asked == 2
    slurm.now += 4
    slurm.states["1"] = JobState.COMPLETED
    assert windows[1].state() is JobState.COMPLETED
    assert windows[0].look().observed_at == slurm.now


def test_f21_repeated_manual_queries_stay_within_the_request_limit(windows: list[Window]) -> None:
    assert count_requests(windows, 20, HAND) <= monitor.BURST + 20 * 5 + 2


def test_a_query_after_a_known_event_gets_a_newer_answer(windows: list[Window], slurm: Slurm) -> None:
    windows[0].look(WINDOW)
    slurm.now += 1.5
    slurm.states["1"] = JobState.COMPLETED
    assert windows[1].state(WINDOW) is JobState.RUNNING
    assert windows[1].state(replace(WINDOW, after=slurm.now - 0.5)) is JobState.COMPLETED
    assert windows[2].state(replace(WINDOW, after=slurm.now - 0.5)) is JobState.COMPLETED
    assert slurm.asked == 4


def test_f34_a_query_after_an_action_gets_a_newer_answer(windows: list[Window], slurm: Slurm) -> None:
    for need in (HAND, WINDOW):
        slurm.states["1"] = JobState.RUNNING
        with monitor.invalidating_cache(windows[0].context, windows[0].cluster):
            pass
        assert windows[1].state(need) is JobState.RUNNING
        with suppress(RuntimeError), monitor.invalidating_cache(windows[0].context, windows[0].cluster):
            slurm.states["1"] = JobState.CANCELLED
            raise RuntimeError("the answer was lost")
        assert windows[1].state(need) is JobState.CANCELLED


def test_an_answer_requested_before_an_action_is_not_used(windows: list[Window], slurm: Slurm) -> None:
    def cancel() -> None:
        slurm.meanwhile.clear()
        with monitor.invalidating_cache(windows[1].context, windows[1].cluster):
            slurm.states["1"] = JobState.CANCELLED

    slurm.meanwhile.append(cancel)
    windows[0].look()
    assert windows[2].state() is JobState.CANCELLED


def test_an_old_answer_is_not_used_after_the_clock_was_set_back(windows: list[Window], slurm: Slurm) -> None:
    first, second, *_ = windows
    slurm.now += 100
    first.look()
    slurm.now -= 99
    slurm.states["1"] = JobState.COMPLETED
    assert second.state() is JobState.COMPLETED
    asked = slurm.asked
    assert first.state() is JobState.COMPLETED
    assert slurm.asked == asked, "what the second heard is newer"


def test_f55_without_an_answer_the_last_snapshot_is_shown_with_its_age(
    windows: list[Window], slurm: Slurm
) -> None:
    asked_at = slurm.now
    windows[0].look()
    slurm.down = True
    slurm.now += 100
    for window in windows:
        result = window.look()
        assert (result.observed_at, result.trouble) == (asked_at, "squeue: the controller is down")
        assert result.jobs["1"][0].state is JobState.RUNNING
    assert slurm.asked == 4
    assert count_requests(windows, 60) <= 2 * 9  # ever more rarely: after 1, 2, 4, 8 minutes, then every 10
    slurm.down = False
    slurm.states["1"] = JobState.COMPLETED
    assert windows[0].look().trouble == ""
    assert windows[1].state(WINDOW) is JobState.COMPLETED


def test_f55_without_an_answer_after_an_action_no_snapshot_is_shown(
    windows: list[Window], slurm: Slurm
) -> None:
    windows[0].look()
    slurm.down = True
    with monitor.invalidating_cache(windows[0].context, windows[0].cluster):
        pass
    for need in (HAND, WINDOW):
        result = windows[1].look(need)
        assert not result.jobs
        assert result.trouble == "squeue: the controller is down"


@pytest.mark.slow
def test_f21_a_slow_scheduler_is_queried_less_often(windows: list[Window], slurm: Slurm) -> None:
    slurm.took_s = 3.0
    count_requests(windows, 10)
    assert count_requests(windows, 60) <= 2 * 8
    slurm.took_s = 0.1
    count_requests(windows, 11)
    assert count_requests(windows, 10) >= 36


def test_the_polling_interval_of_the_profile_is_respected(slurm: Slurm, tmp_path: Path) -> None:
    windows = [Window(slurm, tmp_path, min_poll_s=120) for _ in range(5)]
    assert count_requests(windows, 20) <= 2 * 12
    before = slurm.asked
    for _ in range(60):
        windows[0].look(replace(WINDOW, after=slurm.now))
        slurm.now += 1
    assert slurm.asked - before <= 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\x00", b'{"schema": 99, "memory": {}}', b'{"schema": 1}',
     b"[" * 100_000,
     b'{"schema": 1, "memory": {"jobs": [{"job_id": 1, "state": "RUNNING"}], "looked": {}, "columns": []}}',
     b'{"schema": 1, "memory": {"asked_at": "x", "looked": {}, "columns": []}}',
     b'{"schema": 1, "memory": {"looked": [1], "columns": 3}, "failures": "many"}'],
)  # fmt: skip
def test_f76_a_malformed_queue_cache_is_replaced(windows: list[Window], slurm: Slurm, content: bytes) -> None:
    windows[0].look()
    windows[0].files[".json"].write_bytes(content)
    assert windows[1].state() is JobState.RUNNING
    windows[0].files[".json"].write_bytes(content)
    assert windows[2].state(WINDOW) is JobState.RUNNING
    assert json.loads(windows[0].files[".json"].read_bytes())["memory"]["asked_at"] == slurm.now


def test_f76_a_truncated_queue_cache_is_ignored(windows: list[Window]) -> None:
    windows[0].look()
    data = windows[0].files[".json"].read_bytes()
    for end in range(0, len(data), 7):
        windows[0].files[".json"].write_bytes(data[:end])
        assert windows[1].state() is JobState.RUNNING


def test_c26_a_link_or_fifo_in_place_of_the_queue_cache_is_not_followed(
    windows: list[Window], tmp_path: Path
) -> None:
    windows[0].look()
    path = windows[0].files[".json"]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    data = (tmp_path / "elsewhere").read_bytes()
    assert windows[1].state() is JobState.RUNNING
    assert (tmp_path / "elsewhere").read_bytes() == data
    path.unlink()
    os.mkfifo(path)
    assert windows[1].state() is JobState.RUNNING


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_c26_the_queue_cache_of_another_user_is_ignored(windows: list[Window], slurm: Slurm) -> None:
    windows[0].look()
    os.chown(windows[0].files[".json"], 65534, 65534)
    slurm.states["1"] = JobState.COMPLETED
    assert windows[1].state() is JobState.COMPLETED


def test_f76_without_a_cache_folder_each_process_queries(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    window = Window(slurm, tmp_path / "cache")
    assert window.state() is JobState.RUNNING
    with monitor.invalidating_cache(window.context, window.cluster):
        slurm.states["1"] = JobState.CANCELLED
    assert window.state() is JobState.CANCELLED
    slurm.states["1"] = JobState.RUNNING
    assert count_requests([window], 10) <= 50


def test_c21_the_queue_cache_is_readable_only_by_its_user(windows: list[Window]) -> None:
    with monitor.invalidating_cache(windows[0].context, windows[0].cluster):
        windows[0].look()
    for path in windows[0].files.values():
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert set(windows[0].files) == {".json", ".lock", ".changed"}


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(1000)
"""


@contextmanager
def lock_holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that holds the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_f77_only_one_process_queries_at_a_time(windows: list[Window], slurm: Slurm) -> None:
    windows[0].look()
    slurm.now += 100
    path = windows[0].files[".lock"]
    with lock_holder(path) as process:
        assert windows[1].look(WINDOW).observed_at == slurm.now - 100  # a window does not wait
        assert slurm.asked == 2
        result: list[QueueSnapshot] = []
        by_hand = threading.Thread(target=lambda: result.append(windows[2].look()))
        by_hand.start()
        # The other process writes what it heard, though it still holds the lock.
        shared = windows[0].cache.read()
        windows[0].cache.write(replace(shared, memory=replace(shared.memory, asked_at=slurm.now)))
        by_hand.join(60)
        assert result[0].observed_at == slurm.now
        assert slurm.asked == 2
        process.kill()
        process.wait()
        slurm.now += 100
        assert windows[3].look(WINDOW).observed_at == slurm.now  # the dead hold nothing


def test_f77_a_stopped_lock_holder_is_bypassed(windows: list[Window], slurm: Slurm) -> None:
    windows[0].look()
    slurm.now += 100
    path = windows[0].files[".lock"]
    with lock_holder(path) as process:
        process.send_signal(signal.SIGSTOP)
        long_ago = time.time() - 1000
        os.utime(path, (long_ago, long_ago))
        assert windows[1].look(WINDOW).observed_at == slurm.now


def test_f77_without_file_locks_each_process_queries(
    windows: list[Window], slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert windows[0].state() is JobState.RUNNING
    slurm.now += 100
    assert windows[1].look(WINDOW).observed_at == slurm.now
