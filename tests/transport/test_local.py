"""The local transport against real processes and a real disk."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dtslurm.errors import CommandTimeout, StoreError
from dtslurm.transport.local import LocalTransport, scrubbed
from dtslurm.transport.process import PopenChannel
from tests.processes import ends_in_time, is_alive
from tests.waiting import busyness

HERE = LocalTransport()
AS_ROOT = os.geteuid() == 0


def test_timeout_ends_the_process_group_and_keeps_stderr(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {note}; echo nearly there >&2; wait"
    with pytest.raises(CommandTimeout) as caught:
        HERE.run(["sh", "-c", script], timeout=3 * busyness())
    assert "nearly there" in caught.value.evidence
    assert ends_in_time(int(note.read_text()))


def test_detached_process_with_the_pipe_does_not_delay_the_timeout(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"setsid sleep 600 & echo $! > {note}; sleep 600"
    with pytest.raises(CommandTimeout):
        HERE.run(["sh", "-c", script], timeout=3 * busyness())
    stray = int(note.read_text())
    assert is_alive(stray)
    os.kill(stray, signal.SIGKILL)


def test_interrupted_caller_leaves_no_command(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"""
import pathlib, signal, threading, time
from dtslurm.transport.local import LocalTransport
note = pathlib.Path({str(note)!r})
def interrupt():
    while not (note.exists() and note.read_text()):
        time.sleep(0.02)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
LocalTransport().run(["sh", "-c", f"echo $$ > {{note}}; sleep 60"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30 * busyness(), check=False
    )
    assert "KeyboardInterrupt" in done.stderr
    assert ends_in_time(int(note.read_text()))


def test_caller_interrupted_while_a_command_starts_leaves_no_command() -> None:
    """Popen then raises after the fork, and nobody has the process's handle."""
    code = """
import os, signal, subprocess
from dtslurm.transport.local import LocalTransport
start = subprocess.Popen._execute_child
def interrupted(process, *arguments):
    start(process, *arguments)
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
subprocess.Popen._execute_child = interrupted
LocalTransport().run(["sleep", "600"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30 * busyness(), check=False
    )
    command = int(done.stdout)
    try:
        assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
        assert ends_in_time(command, 5 * busyness())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(command, signal.SIGKILL)


@pytest.mark.parametrize(
    "name",
    ["SBATCH_PARTITION", "SQUEUE_STATES", "SLURM_JOB_ID", "SLURM_TIME_FORMAT", "PET_X",
     "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LD_PRELOAD", "BASH_ENV",
     "BASH_FUNC_module%%", "CUDA_VISIBLE_DEVICES"],
)  # fmt: skip
def test_variables_that_affect_slurm_and_torch_are_removed(name: str) -> None:
    assert name not in scrubbed({name: "x"})


def test_variables_that_select_the_slurm_cluster_are_retained() -> None:
    kept = {"SLURM_CONF": "a", "SLURM_CLUSTERS": "b", "SLURM_JWT": "c", "PATH": "d", "RANKING": "e"}
    assert scrubbed(kept) == kept


def test_put_sets_the_mode_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        HERE.put(b"x", str(tmp_path / "script"), mode=0o755)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "script").stat().st_mode) == 0o755


@pytest.mark.skipif(not AS_ROOT, reason="only root may become somebody else")
def test_put_without_permission_as_another_user_is_an_error(tmp_path: Path) -> None:
    code = (
        "import os\nfrom dtslurm.transport.local import LocalTransport\nos.setuid(65534)\n"
        f"LocalTransport().put(b'x', '{tmp_path}/file')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "permission denied" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_exceeded_quota_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def refuse(_handle: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", refuse)  # quotas of network file systems often refuse only here
    with pytest.raises(StoreError, match="quota exceeded") as caught:
        HERE.put(b"x", str(tmp_path / "file"))
    assert "quota -s" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["", "x"])
def test_channel_that_another_thread_ends_while_it_is_read_has_no_more_output(output: str) -> None:
    channel = PopenChannel(["sh", "-c", f"printf '{output}'"], env=dict(os.environ), stdin=False)
    select = channel._selector.select

    def select_then_end(timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        ready = select(timeout)
        channel.end()
        return ready

    channel._selector.select = select_then_end  # type: ignore[method-assign, assignment]
    assert channel.read(10) == (b"", b"")
    assert channel.ended
