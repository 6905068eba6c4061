"""A run directory that tests fill, and fixtures that change the log follower."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtslurm.services.logs import log_link
from tests.services.log_reading import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture(autouse=True)
def log_follower_patch() -> Iterator[pytest.MonkeyPatch]:
    """Let the log follower keep its priority: at the lowest, it may get no CPU on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        change_log_follower(patch, "os.nice(19)", "pass")
        yield patch


@pytest.fixture
def pretend_all_file_systems_are_remote(log_follower_patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the log follower treat every file system as a network file system."""

    def pretend() -> None:
        change_log_follower(log_follower_patch, "return kind not in LOCAL_FILE_SYSTEMS", "return True")

    return pretend


def change_log_follower(patch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Replace a piece of the source that is sent to the log follower's machine."""
    source = log_link.far_source

    def changed() -> bytes:
        text = zlib.decompress(source()).decode()
        assert old in text
        return zlib.compress(text.replace(old, new).encode())

    patch.setattr(log_link, "far_source", changed)
