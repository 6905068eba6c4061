"""A file server that fails for a while: the supervisor does not take its files for absent."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtslurm.worker.lib.json_records import write_atomically
from dtslurm.worker.supervisor import files, lease, main
from dtslurm.worker.supervisor.main import Supervisor

ASKED = ["--nodes=1", "--world-size=1"]


def fail_first(act: Callable[..., object], name: str, times: int, number: int) -> Callable[..., object]:
    """Return a function that fails so often for a path with this name, and then does what ``act`` does."""
    left = [times]

    def call(path: str, *more: object) -> object:
        if Path(path).name == name and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return act(path, *more)

    return call


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize(("word", "code"), [("stop", 1), ("done", 0)])
def test_f89_stop_and_done_files_count_after_file_server_errors(
    site: Path, monkeypatch: pytest.MonkeyPatch, word: str, code: int, number: int
) -> None:
    (site / "step.sh").write_text(f"echo >>{site}/starts\n")
    (site / word).touch()
    monkeypatch.setattr(os, "lstat", fail_first(os.lstat, word, 3, number))
    monkeypatch.setattr(Supervisor, "await_cancel", lambda _: True)
    assert Supervisor(ASKED).run() == code
    assert not (site / "starts").exists()


def test_f89_run_starts_when_the_file_server_does_not_recover(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "step.sh").write_text(f"echo >>{site}/starts\n")
    monkeypatch.setattr(main, "SERVER_S", 0.0)
    monkeypatch.setattr(os, "lstat", fail_first(os.lstat, "stop", 1, errno.ESTALE))
    assert Supervisor(ASKED).run() == 0
    assert (site / "starts").exists()


def test_f89_run_continues_when_the_disk_of_its_output_is_full(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "step.sh").write_text(f"echo >>{site}/starts\n")
    supervisor = Supervisor(ASKED)
    output = os.dup(1)
    with Path("/dev/full").open("w") as full:
        os.dup2(full.fileno(), 1)
        monkeypatch.setattr(sys, "stdout", full)
        try:
            supervisor.say("hello")
            assert supervisor.run() == 0
        finally:
            os.dup2(output, 1)
            os.close(output)
    assert (site / "starts").exists()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOSPC])
def test_f89_attempt_starts_after_its_lease_is_written(
    site: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (site / "step.sh").write_text(f"echo >>{site}/starts\n")
    monkeypatch.setattr(lease, "write_atomically", fail_first(write_atomically, "attempt", 2, number))
    assert Supervisor(ASKED).run() == 0
    assert (site / "starts").read_text() == "\n"
    assert (site / "attempt").read_text() == "0\n"


def test_permanent_errors_and_expired_retries_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(PermissionError):
        files.retry(lambda: fail_first(open, "x", 1, errno.EACCES)("x"), 100)
    with pytest.raises(OSError, match="Stale"):
        files.retry(lambda: fail_first(open, "x", 1, errno.ESTALE)("x"), -1.0)
    assert not files.is_there("/dev/null/x", 100)
