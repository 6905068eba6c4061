"""Runs on this machine with a fake queue, and the posts of the dashboard's threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dtslurm.dashboard.feed import Feed
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.scheduler.base import Look
from dtslurm.scheduler.local import LocalScheduler
from dtslurm.services.observe.diagnose import Diagnosis
from dtslurm.services.observe.live import Live
from dtslurm.services.observe.run_list import JobRow
from dtslurm.services.wiring.context import Context
from tests.dashboard import samples
from tests.services.test_runs import create_run
from tests.services.test_telemetry import RunFiles as Files
from tests.waiting import busyness

T = TypeVar("T")


class Desk:
    """A user's runs below a folder, a queue that answers as it is told to, and a feed over both.

    Attributes:
        answers: what the queue says of each job id; nothing of others.
        asked: what the queue was asked to do.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.answers: dict[str, JobStatus] = {}
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.posts: queue.SimpleQueue[object] = queue.SimpleQueue()
        patch.setattr(LocalScheduler, "query", lambda _, ids: self._query(ids))
        for verb in ("cancel", "requeue", "hold", "release"):
            patch.setattr(LocalScheduler, verb, lambda _, ids, look, verb=verb: self._act(verb, ids, look))

    def context(self) -> Context:
        return Context(cwd=self.folder, clock=lambda: samples.NOW)

    def run(self, number: int, cluster: str = "local", job: str = "7") -> tuple[JobRecord, Files]:
        """Make a run, and return its record and what writes its files."""
        record = create_run(self.context(), number, cluster, job)
        return record, Files(Path(record.run_dir))

    def say(self, job: str, state: JobState, **values: Any) -> None:
        """Let the queue say this of a job."""
        known = {"name": "train", "source": "local", "observed_at": samples.NOW, **values}
        self.answers[job] = JobStatus(job_id=job, state=state, **known)

    def feed(self, say: Callable[[Diagnosis | Live], Sequence[str]] = lambda _: (), **values: Any) -> Feed:
        """Return a feed that posts here, not yet started as far as its board goes."""
        feed = Feed(self.context, say, **values)
        feed._post = self.posts.put
        return feed

    def next(self, kind: type[T], matches: Callable[[T], bool] = lambda _: True) -> T:
        """Return the next of what is posted that is of this kind and as wanted."""
        while True:
            value = self.posts.get(timeout=600)
            if isinstance(value, kind) and matches(value):
                return value

    def _query(self, ids: Sequence[str]) -> Mapping[str, list[JobStatus]]:
        return {job: [self.answers[job]] if job in self.answers else [] for job in ids}

    def _act(self, verb: str, ids: Sequence[str], look: Look) -> None:
        look(self._query(ids))
        self.asked.append((verb, tuple(ids)))


def row_of(record: JobRecord, **values: object) -> JobRow:
    """Return a run's row as a board has it."""
    known = {"key": record.token, "token": record.token, "job_id": record.job_id, "cluster": record.cluster}
    return samples.row(1, **{**known, "run_dir": record.run_dir, **values})


def join_feed_threads() -> None:
    """Wait until the feed's threads have ended."""
    for thread in threading.enumerate():
        if thread.name == "dtslurm-feed":
            thread.join(60 * busyness())
            assert not thread.is_alive()
