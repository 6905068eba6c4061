"""A run directory that tests fill, and a fixture that makes all file systems remote."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from dtslurm.services.logs import log_link
from tests.services.log_reading import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def pretend_all_file_systems_are_remote(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the log follower treat every file system as a network file system."""

    def pretend() -> None:
        source = log_link.far_source

        def changed() -> bytes:
            text = zlib.decompress(source()).decode()
            assert "return kind not in LOCAL_FILE_SYSTEMS" in text
            return zlib.compress(
                text.replace("return kind not in LOCAL_FILE_SYSTEMS", "return True").encode()
            )

        monkeypatch.setattr(log_link, "far_source", changed)

    return pretend
