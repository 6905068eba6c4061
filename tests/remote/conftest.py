"""A persistent worker on the remote side of a test's link, and deliveries for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.store.delivery import MODULES, Delivery
from dtslurm.transport.base import Transport
from tests.store.trees import PYTHON


@pytest.fixture
def worker(far: Transport) -> Iterator[RemoteWorker]:
    """A worker over the link ``far``, a fixture of the test's own file."""
    worker = RemoteWorker(far, MODULES, PYTHON)
    yield worker
    worker.close()


def delivery(folder: Path, name: str) -> Delivery:
    return Delivery(str(folder / "root" / name), str(folder / "root/.objects"), {"job.json": b"{}"})
