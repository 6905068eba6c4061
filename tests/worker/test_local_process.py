"""Processes of the embedded scheduler's jobs: started, found again, signalled and ended to the last one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.localslurm import process as local_process
from tests.waiting import wait_until


@pytest.fixture
def files(tmp_path: Path) -> Iterator[local_process.Files]:
    """Standard streams of a child: nothing comes, and what it says is kept."""
    null = os.open(os.devnull, os.O_RDONLY)
    out, err = (os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("out", "err"))
    yield local_process.Files(null, out, err)
    for descriptor in (null, out, err):
        os.close(descriptor)


def ended(pid: int) -> int:
    """Return the exit code of a process that was started, once it has ended."""
    found: dict[int, int] = {}
    wait_until(lambda: found.update(local_process.reap()) or pid in found)
    return os.waitstatus_to_exitcode(found[pid])


def start(files: local_process.Files, cwd: Path, *argv: str, **env: str) -> int:
    return local_process.start(argv, {"PATH": "/usr/bin:/bin", **env}, str(cwd), files, "local1")


def test_a_program_has_its_own_session_streams_and_variables(
    files: local_process.Files, tmp_path: Path
) -> None:
    pid = start(files, tmp_path, "sh", "-c", "pwd; echo $SLURM_TASK_PID $A >&2; ps -o sid= $$; exit 7", A="x")
    assert ended(pid) == 7
    where, session = (tmp_path / "out").read_text().split()
    assert (where, int(session)) == (str(tmp_path), pid)
    assert (tmp_path / "err").read_text() == f"{pid} x\n"


def test_signals_that_are_ignored_here_are_not_ignored_there(
    files: local_process.Files, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        pid = start(files, tmp_path, "sh", "-c", "kill $$; exit 3")
        assert ended(pid) == -signal.SIGTERM
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(local_process.HANDLED) == set()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("no-such-program", 2, "execve(): no-such-program: No such file or directory"),
        ("plain", 13, "execve(): plain: Permission denied"),
        ("/no/such/program", 2, "execve(): /no/such/program: No such file or directory"),
    ],
)
def test_a_program_that_cannot_be_started_says_so_and_ends_with_the_errors_number(
    files: local_process.Files, tmp_path: Path, program: str, code: int, words: str
) -> None:
    (tmp_path / "plain").write_text("text")
    assert ended(start(files, tmp_path, program, PATH=f"/nowhere:{tmp_path}:")) == code
    assert (tmp_path / "err").read_text() == f"slurmstepd-local1: error: {words}\n"


def test_where_its_folder_is_gone_a_program_starts_in_tmp(files: local_process.Files, tmp_path: Path) -> None:
    assert ended(start(files, tmp_path / "gone", "pwd")) == 0
    assert (tmp_path / "out").read_text() == "/tmp\n"
    told = (tmp_path / "err").read_text()
    assert f"couldn't chdir to `{tmp_path}/gone': No such file or directory: going to /tmp" in told


# ---- Who is who ----


def test_descendants_leave_out_other_jobs_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {10: 1, 11: 10, 12: 11, 13: 10, 14: 13, 20: 1}
    monkeypatch.setattr(local_process, "is_keeper", lambda pid: pid == 13)
    assert local_process.descendants([10], table) == {11, 12}
    assert local_process.descendants([99], table) == set()


def test_where_there_is_no_proc_processes_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda _path: False)
    monkeypatch.setattr(subprocess, "check_output", lambda _argv: b"    1     0\n  170     1\n")
    assert local_process.parents() == {1: 0, 170: 1}

    def refused(_argv: list[str]) -> bytes:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "check_output", refused)
    assert local_process.parents() == {}


@pytest.fixture
def sleeping() -> Iterator[Any]:
    """Starts processes that wait, and ends them at last."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**env: str) -> int:
        process = subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], **env})
        started.append(process)
        wait_until(
            lambda: local_process.environment_of(process.pid) - {b""} >= {b"PATH=" + os.environb[b"PATH"]}
        )
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_processes_are_known_by_what_they_were_started_with(sleeping: Any) -> None:
    task, keeper, other = sleeping(SLURM_STEP_ID="0"), sleeping(DTSLURM_LOCAL_KEEPER="1"), sleeping()
    assert [local_process.in_step(pid) for pid in (task, keeper, other)] == [True, False, False]
    assert [local_process.is_keeper(pid) for pid in (task, keeper, other)] == [False, True, False]
    assert {task, keeper, other} <= set(local_process.direct_children(os.getpid()))
    assert {task, other} <= local_process.descendants([os.getpid()])
    assert keeper not in local_process.descendants([os.getpid()])
    gone = 999_999_999
    assert local_process.direct_children(gone) == []
    assert local_process.environment_of(gone) == set()
    local_process.end([gone])  # nothing happens


def test_what_is_left_of_a_job_is_found_and_killed(sleeping: Any, tmp_path: Path) -> None:
    state = str(tmp_path)
    mine = sleeping(DTSLURM_LOCAL_STATE=state, SLURM_JOB_ID="17")
    others = [
        sleeping(DTSLURM_LOCAL_STATE=state, SLURM_JOB_ID="18"),
        sleeping(DTSLURM_LOCAL_STATE="/other", SLURM_JOB_ID="17"),
    ]
    assert local_process.kill_strays(state, 17) == 1
    assert ended(mine) == -signal.SIGKILL
    assert local_process.kill_strays(state, 17) == 0
    for pid in others:
        os.kill(pid, 0)  # it is there


def test_all_below_are_killed_but_those_to_keep(sleeping: Any) -> None:
    kept, other = sleeping(), sleeping()
    reaped = local_process.kill_below(keep=[kept, *set(local_process.descendants([os.getpid()])) - {other}])
    assert os.waitstatus_to_exitcode(reaped[other]) == -signal.SIGKILL
    os.kill(kept, 0)


# ---- Keepers ----


def test_a_keeper_outlives_who_started_it_and_is_known_as_one(tmp_path: Path) -> None:
    words = "import os, sys, time; print('kept', os.getsid(0) == os.getpid(), flush=True); time.sleep(600)"
    log = tmp_path / "log"
    log.write_text("before\n")
    pid = local_process.spawn_keeper([sys.executable, "-c", words], str(tmp_path), {}, str(log))
    try:
        wait_until(lambda: log.read_text() == "before\nkept True\n")
        assert local_process.is_keeper(pid)
        assert pid not in local_process.direct_children(os.getpid())
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_keeper_that_cannot_be_started_is_an_error_with_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        local_process.spawn_keeper(["/bin/true"], str(tmp_path), {}, f"{tmp_path}/none/log")
