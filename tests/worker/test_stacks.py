"""Stacks of real processes, by py-spy, by a signal and from /proc."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtslurm.remote.worker_program import inline_program
from dtslurm.worker.stacks import readers, stacks
from dtslurm.worker.supervisor.hangs.own_code import waits_in_own_code
from tests.waiting import wait_until

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Python program and waits until it says that it is where it should be."""
    running: list[subprocess.Popen[bytes]] = []

    def run(text: str, *before: str) -> subprocess.Popen[bytes]:
        program, there = tmp_path / "train.py", tmp_path / "there"
        program.write_text(textwrap.dedent(text).replace("THERE", f"open({str(there)!r}, 'w')"))
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([*before, sys.executable, str(program)], stdout=log, stderr=log)
        running.append(process)
        end = time.monotonic() + 60
        while not there.exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        return process

    yield run
    for process in running:
        for child in _below(process.pid):
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()


def _below(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


WAITS = """
    import queue, threading, time
    items = queue.Queue()
    threading.Thread(target=items.get, name="loader", daemon=True).start()

    def read():
        THERE
        time.sleep(300)

    read()
"""
WAITS_FLAT = textwrap.dedent(WAITS)


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "py_spy", lambda pid: None)


def test_py_spy_reports_every_thread_with_the_main_thread_first(start: Start) -> None:
    process = start(WAITS)
    result = stacks.look([process.pid], interval=0.2)[process.pid]
    assert (result["by"], result["why"], result["moved"]) == ("py-spy", [], False)
    main, loader = result["threads"]
    assert main["tid"] == process.pid
    assert [frame["function"] for frame in main["frames"]] == ["read", "<module>"]
    assert main["frames"][0]["file"].endswith("train.py")
    assert main["frames"][0]["line"] == 8
    assert loader["name"] == "loader"
    assert "get" in loader["frames"][1]["function"]
    assert main["state"] == "S"
    assert "nanosleep" in main["waits"]
    assert process.poll() is None


@pytest.mark.parametrize(
    ("code", "is_own_wait"),
    [
        ("time.sleep(300)", True),
        ("threading.Event().wait()", True),
        ("queue.Queue().get()", True),
        ("multiprocessing.Queue().get(timeout=300)", True),
        ("subprocess.run(['sleep', '300'])", True),
        ("[None for _ in iter(int, 1)]", False),  # may be a wait for a GPU that keeps a core busy
        ("socket.create_server(('127.0.0.1', 0)).accept()", False),  # may be a wait for another rank
    ],
)
def test_f45_wait_in_the_training_code_is_distinguished_from_other_waits(
    start: Start, code: str, is_own_wait: bool
) -> None:
    process = start(f"""
        import multiprocessing, queue, socket, subprocess, threading, time
        THERE
        {code}
    """)
    result: dict[str, Any] = {}

    def reach_the_wait() -> bool:  # which begins after the process has reported
        result.update(stacks.look([process.pid], interval=0.1)[process.pid])
        lines = [frame["line"] for frame in result["threads"][0]["frames"] if "train.py" in frame["file"]]
        return lines[-1:] == [4] and result["by"] == "py-spy" and waits_in_own_code(result) is is_own_wait

    wait_until(reach_the_wait)


def test_computing_process_is_distinguished_by_its_cpu_time(start: Start) -> None:
    process = start("""
        def work():
            total = 0
            THERE
            while True:
                total += 1
        work()
    """)
    result = stacks.look([process.pid], interval=1.0)[process.pid]
    assert result["cpu"] > 0.02
    assert result["threads"][0]["frames"][0]["function"] == "work"


def test_python_process_below_a_shell_is_sampled(start: Start) -> None:
    process = start(WAITS, "bash", "-c", '"$@"; exit $?', "bash")
    result = stacks.look([process.pid], interval=0.1)[process.pid]
    assert result["pid"] in _below(process.pid)
    assert result["threads"][0]["frames"][0]["function"] == "read"


def test_stopped_process_is_reported_and_stays_stopped(start: Start) -> None:
    process = start(WAITS)
    os.kill(process.pid, signal.SIGSTOP)
    result = stacks.look([process.pid], interval=0.2)[process.pid]
    assert result["state"] == "T"
    assert result["threads"][0]["frames"][0]["function"] == "read"
    assert stacks.look([process.pid], interval=0)[process.pid]["state"] == "T"


@pytest.mark.usefixtures("no_py_spy")
def test_faulthandler_signal_returns_the_stacks_of_a_registered_program(start: Start) -> None:
    process = start("import faulthandler, signal\nfaulthandler.register(signal.SIGRTMAX - 4)\n" + WAITS_FLAT)
    result = stacks.look([process.pid], interval=0.1)[process.pid]
    assert result["by"] == "signal"
    assert "pip install py-spy" in result["why"][0]
    assert [frame["function"] for frame in result["threads"][0]["frames"]] == ["read", "<module>"]
    assert any(frame["function"] == "get" for frame in result["threads"][1]["frames"])
    assert process.poll() is None


@pytest.mark.usefixtures("no_py_spy")
def test_stacks_are_complete_if_the_program_pauses_while_it_writes_them(start: Start) -> None:
    process = start("""
        import signal, sys, time

        def write(*_):
            print("Thread 0x00007f1c (most recent call first):", file=sys.stderr)
            print('  File "threading.py", line 2 in wait', file=sys.stderr)
            print('  File "threading.py", line 1 in _bootstrap', file=sys.stderr, flush=True)
            time.sleep(0.5)  # preempted
            print("\\nCurrent thread 0x00007f1d (most recent call first):", file=sys.stderr)
            print('  File "train.py", line 9 in read', file=sys.stderr, flush=True)
            time.sleep(0.5)
            print('  File "train.py", line 12 in <module>', file=sys.stderr, flush=True)

        signal.signal(signal.SIGRTMAX - 4, write)
        THERE
        while True:
            time.sleep(300)
    """)
    result = stacks.look([process.pid], interval=0.1)[process.pid]
    stacks_written = [[frame["function"] for frame in thread["frames"]] for thread in result["threads"]]
    assert stacks_written == [["read", "<module>"], ["wait", "_bootstrap"]]


@pytest.mark.usefixtures("no_py_spy")
def test_proc_is_used_without_a_signal_for_an_unregistered_program(start: Start, tmp_path: Path) -> None:
    fifo = tmp_path / "shard-17"
    os.mkfifo(fifo)
    process = start(f"""
        import os, time
        handle = os.open({str(fifo)!r}, os.O_RDWR)
        THERE
        os.read(handle, 1)
    """)
    result = stacks.look([process.pid], interval=0.1)[process.pid]
    assert result["by"] == "proc"
    assert len(result["why"]) == 2
    assert result["threads"][0]["waits"].startswith(f"read of {fifo}")
    assert process.poll() is None
    assert f"waits in read of {fifo}" in stacks.text({process.pid: result})


def test_missing_process_is_reported(start: Start) -> None:
    process = start(WAITS)
    process.kill()
    process.wait()
    result = stacks.look([process.pid], interval=0)[process.pid]
    assert (result["by"], result["threads"]) == ("none", [])
    assert "no longer exists on this node" in stacks.dump([process.pid], interval=0)


def test_stack_dump_reports_a_denied_permission(start: Start) -> None:
    """Linux forbids a process to inspect a process with more privileges, or with dumping disabled."""
    process = start("import ctypes\nctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE\n" + WAITS_FLAT)
    call = f"sys.stdout.write(module.dump([{process.pid}]))"
    argv = [sys.executable, "-c", inline_program(["stacks.readers", "stacks.stacks"], call)]
    if os.getuid() == 0:
        tool = shutil.which("setpriv")
        if tool is None:
            pytest.skip("needs setpriv to give up root's right to look everywhere")
        argv = [tool, "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace", *argv]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=True)
    assert "(by proc)" in done.stdout
    assert "permission denied" in done.stdout or "ptrace_scope" in done.stdout
    assert process.poll() is None


def test_hanging_py_spy_is_ended(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 300\n")
    slow.chmod(0o755)
    monkeypatch.setattr(readers, "py_spy", lambda pid: str(slow))
    process = start(WAITS)
    result = stacks.look([process.pid], interval=0, limit=1)[process.pid]
    assert result["by"] == "proc"
    assert "did not end" in result["why"][0] or "no time was left" in result["why"][0]
    assert result["threads"][0]["state"] == "S"
