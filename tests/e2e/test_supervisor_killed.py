"""A supervisor that is killed or stopped while its ranks train: the batch script starts another one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import sysconfig
from pathlib import Path

import pytest

from dtslurm.store.rundir import RunDir
from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli, events_of
from tests.preload import trouble_disk
from tests.waiting import wait_until

TRAIN = """
    import os, pathlib, sys, time
    folder = pathlib.Path(os.environ["DTSLURM_RUN_DIR"])
    (folder / ("began-" + os.environ["RANK"] + "-" + os.environ["DTSLURM_ATTEMPT"])).touch()
    step = 0
    go = folder / ("go-" + os.environ["DTSLURM_ATTEMPT"])
    while not go.exists():
        step += 1
        print("step", step, flush=True)
        time.sleep(0.2)
    sys.exit(int(go.read_text()))
"""


def let_end(run: RunDir, attempt: int, code: int) -> None:
    """Let the ranks of an attempt exit with this code."""
    draft = run.path / "draft"
    draft.write_text(str(code))
    draft.rename(run.path / f"go-{attempt}")


def processes_with(words: list[str]) -> list[int]:
    """Return the processes whose command lines have all these words and no other after them."""
    result = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue
            if all(any(word in part for part in line) for word in words):
                result.append(int(folder.name))
    return result


def supervisor_of(run: RunDir) -> int:
    pids = processes_with([f"{run.path}/supervisor", "--world-size="])
    [pid] = [pid for pid in pids if parent_of(pid) not in pids]  # a child has the same words until its exec
    return pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def start(cli: Cli, *words: str) -> tuple[str, RunDir]:
    """Start a run of two ranks and return it once both are at work."""
    options = ("-l", "srun", "--ntasks-per-node", "2", "--max-restarts", "2", "--hang-timeout", "off")
    job = cli.submit(*options, *words, cli.script(TRAIN))
    run = cli.run_dir(job)
    cli.wait_until(lambda: all((run.path / f"began-{rank}-0").exists() for rank in (0, 1)))
    cli.wait_until(lambda: events_of(run, "attempt"))
    return job, run


@WITHOUT_SSH
def test_f85_killed_supervisor_is_restarted_and_resumes_its_attempt(cli: Cli) -> None:
    job, run = start(cli)
    killed = supervisor_of(run)
    os.kill(killed, signal.SIGKILL)
    cli.wait_until(lambda: events_of(run, "supervisor_killed"))
    cli.wait_until(lambda: processes_with([f"{run.path}/supervisor", "--resume"]))
    assert "was killed, exit code 137" in " ".join(cli("status", job).stdout.split())
    let_end(run, 0, 0)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert [event["attempt"] for event in events_of(run, "attempt")] == [0]
    [ended] = events_of(run, "attempt_ended")
    assert (ended["attempt"], ended["cause"], ended["exit_code"]) == (0, "done", 0)
    assert not list(run.path.glob("began-*-1"))
    output = (run.path / "logs/batch.log").read_text()
    assert "the supervisor was killed or crashed (exit code 137)" in output
    assert "Killed" not in output


@WITHOUT_SSH
def test_f85_restarted_supervisor_handles_a_later_failure(cli: Cli) -> None:
    job, run = start(cli)
    os.kill(supervisor_of(run), signal.SIGKILL)
    cli.wait_until(lambda: events_of(run, "supervisor_killed"))
    let_end(run, 0, 3)
    let_end(run, 1, 0)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    first, second = events_of(run, "attempt_ended")
    assert (first["cause"], first["exit_code"], first["rank"]) == ("exit-code", 3, first["rank"])
    assert (second["attempt"], second["cause"]) == (1, "done")


@ON_SLURM
def test_f85_attempt_continues_after_the_supervisor_and_its_programs_are_killed(cli: Cli) -> None:
    job, run = start(cli)
    for pid in processes_with([f"{run.path}/supervisor"]):  # as by pkill -f: the nodes' watchers too
        os.kill(pid, signal.SIGKILL)
    cli.wait_until(lambda: "attempt 0 is resumed" in (run.path / "logs/batch.log").read_text())
    log = run.logs(0) / "rank-0.log"
    size = log.stat().st_size
    cli.wait_until(lambda: log.stat().st_size > size + 200)  # a good three seconds
    let_end(run, 0, 0)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert [event["cause"] for event in events_of(run, "attempt_ended")] == ["done"]


@ON_SLURM
def test_f85_repeatedly_killed_supervisor_ends_the_job_and_is_diagnosed(cli: Cli) -> None:
    job, run = start(cli)
    for count in range(5):
        cli.wait_until(lambda: processes_with([f"{run.path}/supervisor", "--world-size="]))
        os.kill(supervisor_of(run), signal.SIGKILL)
        cli.wait_until(lambda count=count: len(events_of(run, "supervisor_killed")) > count)  # type: ignore[misc]
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "FAILED"
    verdict = json.loads(cli("diagnose", "--json", job, code=None).stdout)["verdict"]
    assert (verdict["cause"], verdict["rank"]) == ("killed", None)
    assert "the supervisor was killed" in verdict["summary"]
    text = " ".join(cli("status", job).stdout.split())
    assert "the supervisor was killed, and the batch script" in text
    assert "failed first" not in text


@ON_SLURM
def test_f85_supervisor_killed_with_its_batch_script_is_diagnosed(cli: Cli) -> None:
    job, run = start(cli)
    supervisor = supervisor_of(run)
    victims = [
        pid
        for pid in (parent_of(supervisor), supervisor)
        if "slurmstepd" not in Path(f"/proc/{pid}/stat").read_text()
    ]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):  # slurmstepd may be faster
            os.kill(pid, signal.SIGKILL)
    cli.wait_for_end(job)
    verdict = json.loads(cli("diagnose", "--json", job, code=None).stdout)["verdict"]
    stdout = cli("status", job).stdout
    print(verdict, stdout, cli("diagnose", job, code=None).stdout)
    assert "could not start" not in verdict["summary"]
    assert "SIGKILL ended the batch script" in verdict["summary"]
    assert "supervisor" in verdict["summary"]
    assert verdict["rank"] is None
    assert "SIGKILL ended the batch script" in " ".join(stdout.split())
    assert "failed first" not in stdout


@WITHOUT_SSH
def test_f86_stopped_supervisor_is_reported_by_status_and_diagnose(cli: Cli) -> None:
    job, run = start(cli)
    stopped = supervisor_of(run)
    os.kill(stopped, signal.SIGSTOP)
    try:
        wait_until(lambda: events_of(run, "supervisor_stopped"), "the stop is noticed")
        assert "SUPERVISOR STOPPED" in cli("status").stdout
        words = " ".join(cli("status", job).stdout.split())
        assert f"warning the supervisor (process {stopped} on " in words
        text = " ".join(cli("diagnose", job, code=None).stdout.split())
        assert f"the supervisor (process {stopped} on " in text
        assert f"kill -CONT {stopped}" in text
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: events_of(run, "supervisor_continued"), "the stop is over")
    assert "warning" not in cli("status", job).stdout
    assert "SUPERVISOR STOPPED" not in cli("status").stdout
    let_end(run, 0, 0)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"


@WITHOUT_SSH
def test_f88_supervisor_continues_after_its_python_is_removed(cli: Cli) -> None:
    """The standard library of the supervisor's Python disappears, as in a package upgrade."""
    old, programs = cli.folder / "old", cli.folder / "programs"
    library = Path(sysconfig.get_path("stdlib"))
    unneeded = shutil.ignore_patterns(
        "site-packages", "dist-packages", "test", "__pycache__", "idlelib", "*.a"
    )
    shutil.copytree(library, old / "lib" / library.name, ignore=unneeded, symlinks=True)
    (old / "bin").mkdir()
    shutil.copy(Path(sys.executable).resolve(), old / "bin" / library.name)
    for shared in library.parent.glob("libpython*.so*"):
        shutil.copy(shared, old / "lib", follow_symlinks=False)
    programs.mkdir()
    (programs / "python3").symlink_to(old / "bin" / library.name)
    job, run = start(cli, "--setup", f"export PATH={programs}:$PATH")
    supervisor = supervisor_of(run)
    assert str(old) in Path(f"/proc/{supervisor}/maps").read_text()

    (old / "lib").rename(old / "gone")
    (programs / "python3").unlink()
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    let_end(run, 0, 7)
    cli.wait_until(lambda: len(events_of(run, "attempt")) == 2)
    assert [event["exit_code"] for event in events_of(run, "attempt_ended")] == [7]
    assert events_of(run, "supervisor_killed") == []
    let_end(run, 1, 0)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert "Traceback" not in (run.path / "logs" / "batch.log").read_text()


@WITHOUT_SSH
@pytest.mark.parametrize("seconds", [0.8, 4.0])
def test_file_server_that_fails_while_the_job_starts_does_not_end_it(cli: Cli, seconds: float) -> None:
    switch = cli.folder / "switch"
    env = trouble_disk(cli.folder.parent / "runs", switch, cli.folder)
    exports = "; ".join(f"export {name}={value}" for name, value in env.items())
    # The shell itself must have the library, so the script begins again.
    setup = f"""if [ -z "${{LD_PRELOAD-}}" ]; then {exports}; exec bash "$0"; fi
    echo stale >{switch}; (sleep {seconds}; rm {switch}) >/dev/null 2>&1 &"""
    job = cli.submit("-l", "srun", "--max-restarts", "1", "--setup", setup, cli.script("print('trained')"))
    run = cli.run_dir(job)
    assert run.path.is_relative_to(cli.folder.parent / "runs")
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert (run.logs(0) / "rank-0.log").read_text() == "trained\n"
    assert not switch.exists()
