"""Processes of the embedded scheduler's jobs: start, identification, signals and end."""

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


def exit_code_of(pid: int) -> int:
    """Return the exit code of a process that was started, once it has ended."""
    result: dict[int, int] = {}
    wait_until(lambda: result.update(local_process.reap()) or pid in result)
    return os.waitstatus_to_exitcode(result[pid])


def start(files: local_process.Files, cwd: Path, *argv: str, **env: str) -> int:
    return local_process.start(argv, {"PATH": "/usr/bin:/bin", **env}, str(cwd), files, "local1")


def test_started_program_has_a_separate_session_streams_and_variables(
    files: local_process.Files, tmp_path: Path
) -> None:
    pid = start(files, tmp_path, "sh", "-c", "pwd; echo $SLURM_TASK_PID $A >&2; ps -o sid= $$; exit 7", A="x")
    assert exit_code_of(pid) == 7
    where, session = (tmp_path / "out").read_text().split()
    assert (where, int(session)) == (str(tmp_path), pid)
    assert (tmp_path / "err").read_text() == f"{pid} x\n"


def test_started_program_does_not_inherit_ignored_signals(files: local_process.Files, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        pid = start(files, tmp_path, "sh", "-c", "kill $$; exit 3")
        assert exit_code_of(pid) == -signal.SIGTERM
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
def test_program_that_cannot_start_writes_an_error_and_exits_with_errno(
    files: local_process.Files, tmp_path: Path, program: str, code: int, words: str
) -> None:
    (tmp_path / "plain").write_text("text")
    assert exit_code_of(start(files, tmp_path, program, PATH=f"/nowhere:{tmp_path}:")) == code
    assert (tmp_path / "err").read_text() == f"slurmstepd-local1: error: {words}\n"


def test_program_starts_in_tmp_when_its_directory_is_missing(
    files: local_process.Files, tmp_path: Path
) -> None:
    assert exit_code_of(start(files, tmp_path / "gone", "pwd")) == 0
    assert (tmp_path / "out").read_text() == "/tmp\n"
    text = (tmp_path / "err").read_text()
    assert f"couldn't chdir to `{tmp_path}/gone': No such file or directory: going to /tmp" in text


# ---- Who is who ----


def test_descendants_exclude_keepers_of_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {10: 1, 11: 10, 12: 11, 13: 10, 14: 13, 20: 1}
    monkeypatch.setattr(local_process, "is_keeper", lambda pid: pid == 13)
    assert local_process.descendants([10], table) == {11, 12}
    assert local_process.descendants([99], table) == set()


def test_parents_come_from_ps_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda _path: False)
    monkeypatch.setattr(subprocess, "check_output", lambda _argv: b"    1     0\n  170     1\n")
    assert local_process.parents() == {1: 0, 170: 1}

    def refused(_argv: list[str]) -> bytes:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "check_output", refused)
    assert local_process.parents() == {}


@pytest.fixture
def start_sleeping() -> Iterator[Any]:
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


def test_processes_are_classified_by_their_environment(start_sleeping: Any) -> None:
    task, keeper, other = (
        start_sleeping(SLURM_STEP_ID="0"),
        start_sleeping(DTSLURM_LOCAL_KEEPER="1"),
        start_sleeping(),
    )
    assert [local_process.in_step(pid) for pid in (task, keeper, other)] == [True, False, False]
    assert [local_process.is_keeper(pid) for pid in (task, keeper, other)] == [False, True, False]
    assert {task, keeper, other} <= set(local_process.direct_children(os.getpid()))
    assert {task, other} <= local_process.descendants([os.getpid()])
    assert keeper not in local_process.descendants([os.getpid()])
    gone = 999_999_999
    assert local_process.direct_children(gone) == []
    assert local_process.environment_of(gone) == set()
    local_process.end([gone])  # nothing happens


def test_kill_strays_kills_the_remaining_processes_of_a_job(start_sleeping: Any, tmp_path: Path) -> None:
    state = str(tmp_path)
    mine = start_sleeping(DTSLURM_LOCAL_STATE=state, SLURM_JOB_ID="17")
    others = [
        start_sleeping(DTSLURM_LOCAL_STATE=state, SLURM_JOB_ID="18"),
        start_sleeping(DTSLURM_LOCAL_STATE="/other", SLURM_JOB_ID="17"),
    ]
    assert local_process.kill_strays(state, 17) == 1
    assert exit_code_of(mine) == -signal.SIGKILL
    assert local_process.kill_strays(state, 17) == 0
    for pid in others:
        os.kill(pid, 0)  # it is there


def test_kill_below_kills_all_descendants_except_the_named_processes(start_sleeping: Any) -> None:
    kept, other = start_sleeping(), start_sleeping()
    reaped = local_process.kill_below(
        kept_pids=[kept, *set(local_process.descendants([os.getpid()])) - {other}]
    )
    assert os.waitstatus_to_exitcode(reaped[other]) == -signal.SIGKILL
    os.kill(kept, 0)


# ---- Keepers ----


def test_keeper_runs_detached_from_its_parent_and_is_recognized(tmp_path: Path) -> None:
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


def test_keeper_that_cannot_start_raises_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        local_process.spawn_keeper(["/bin/true"], str(tmp_path), {}, f"{tmp_path}/none/log")
