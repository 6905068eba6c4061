"""Ctrl-C: the message about a queued job, and no traceback during the start."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Finished, Run
from tests.cli.slurm_programs import Programs, list_jobs

SUBMIT = ("submit", "--cluster", "slurm", "-t", "5", "--no-snapshot")
QUEUED = "interrupted: job 4711 (train) was submitted to slurm and stays in the queue"
CANCEL = "; dtslurm cancel 4711 cancels it"
STAGES = "time: 5\ncluster: slurm\nstages:\n  a: {script: train.py}\n  b: {script: train.py, needs: [a]}\n"
# The programs are children of dtslurm, so that their signal reaches it as Ctrl-C does.
INTERRUPT = "kill -INT $PPID; sleep 5"
AT_FUNCTION = """
import importlib, os, signal, sys
name, _, function = sys.argv.pop(1).partition(":")
module = importlib.import_module(name)
original = getattr(module, function)

def interrupted(*args, **options):
    value = original(*args, **options)
    os.kill(os.getpid(), signal.SIGINT)
    return value

setattr(module, function, interrupted)
from dtslurm.__main__ import main
main()
"""


@pytest.fixture
def job_folder(slurm: Programs) -> Path:
    """A folder with a file for each job that sbatch queued: its comment."""
    folder = slurm.folder / "queue"
    folder.mkdir()
    slurm.do("squeue", list_jobs(folder))
    slurm.do("scancel", f'for job; do rm "{folder}/$job"; done')
    return folder


def take_job(folder: Path, job: int, then: str = "") -> str:
    """Return the line of shell that queues a job as sbatch does, and what to do before its answer is read."""
    return (
        "for word; do case $word in --comment=*) comment=${word#--comment=};; esac; done; "
        f'printf %s "$comment" >{folder}/{job}; {then or ":"}; echo {job}'
    )


def run_program(folder: Path, *words: str, code: str = "") -> Finished:
    """Run dtslurm in a process of its own, or a program that calls it."""
    program = ["-c", code] if code else ["-m", "dtslurm"]
    return subprocess.run(
        [sys.executable, *program, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )


# ---- While a job is submitted ----


def test_an_interrupt_before_the_answer_of_sbatch_names_the_job(
    slurm: Programs, job_folder: Path, folder: Path, invoke: Run
) -> None:
    slurm.do("sbatch --parsable", take_job(job_folder, 4711, INTERRUPT))
    done = run_program(folder, *SUBMIT, "train.py")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == QUEUED + CANCEL
    assert "cancelled: 4711" in invoke("cancel", "4711", code=0).stderr
    assert list(job_folder.iterdir()) == []


def test_an_interrupt_without_a_queued_job_prints_that_no_job_was_submitted(
    slurm: Programs, job_folder: Path, folder: Path, invoke: Run
) -> None:
    slurm.do("sbatch --parsable", INTERRUPT)
    done = run_program(folder, *SUBMIT, "train.py")
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "interrupted: no job was submitted"
    assert "CANCELLED" in invoke("status", code=0).stdout
    assert list(job_folder.iterdir()) == []


def test_an_interrupt_while_slurm_does_not_answer_reports_an_unknown_submission(
    slurm: Programs, job_folder: Path, folder: Path
) -> None:
    slurm.do("sbatch --parsable", take_job(job_folder, 4711, INTERRUPT))
    slurm.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller\n")
    done = run_program(folder, *SUBMIT, "train.py")
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == (
        "interrupted: it is not known whether a job was submitted; dtslurm status shows it"
    )


@pytest.mark.parametrize("options", [(), ("--json",), ("--parsable",)])
@pytest.mark.parametrize(
    "function",
    [
        "dtslurm.services.submit.submit:_queue",
        "dtslurm.services.submit.submit:_keep",
        "dtslurm.cli.commands.submit:_queue",
    ],
)
def test_an_interrupt_after_the_answer_of_sbatch_names_the_job(
    slurm: Programs, job_folder: Path, folder: Path, function: str, options: tuple[str, ...]
) -> None:
    slurm.do("sbatch --parsable", take_job(job_folder, 4711))
    done = run_program(folder, function, *SUBMIT, *options, "train.py", code=AT_FUNCTION)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == QUEUED + CANCEL


def test_an_interrupt_at_a_later_stage_cancels_all_stages(
    slurm: Programs, job_folder: Path, folder: Path
) -> None:
    slurm.do("sbatch --parsable", f"if [ -f {job_folder}/1 ]; then {take_job(job_folder, 2, INTERRUPT)}; "
             f"else {take_job(job_folder, 1)}; fi")  # fmt: skip
    (folder / "job.yaml").write_text(STAGES)
    (folder / "job.yaml").chmod(0o644)
    done = run_program(folder, "submit", "--no-snapshot", "job.yaml")
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "interrupted: 1, 2 were queued and are cancelled again"
    assert list(job_folder.iterdir()) == []


def test_an_interrupt_of_resubmit_names_the_job(
    slurm: Programs, job_folder: Path, folder: Path, invoke: Run
) -> None:
    slurm.do("sbatch --parsable", take_job(job_folder, 7))
    invoke(*SUBMIT, "train.py", code=0)
    slurm.do("sbatch --parsable", take_job(job_folder, 4711, INTERRUPT))
    done = run_program(folder, "resubmit", "7")
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == QUEUED + CANCEL


# ---- While Python imports ----


@pytest.mark.parametrize("module", ["click", "dtslurm.cli.commands.status"])
def test_an_interrupt_while_modules_are_imported_prints_nothing(
    module: str, folder: Path, tmp_path: Path
) -> None:
    code = f"""
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
from dtslurm.__main__ import main
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "status"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"importing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == 130


def test_a_background_job_of_a_shell_ignores_interrupts_from_the_start(folder: Path) -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from dtslurm.__main__ import main\n"
        "import dtslurm.cli.main as program\n"
        "program.cli.main = lambda **_: os.kill(os.getpid(), signal.SIGINT)\n"
        "main()"
    )
    assert run_program(folder, code=code).returncode == 0
