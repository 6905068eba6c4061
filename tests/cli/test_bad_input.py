"""Invalid requests: message and exit code, and nothing is written or queued."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.disks import small_disk

SUBMIT = ("submit", "--cluster", "local", "-t", "10")


def submission_files(tmp_path: Path) -> list[Path]:
    """Return the files that a submission would have written."""
    return [*(tmp_path / "runs").glob("*"), *(tmp_path / "local").glob("jobs/*")]


@pytest.fixture(autouse=True)
def assert_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DTSLURM_RUN_ROOT", str(tmp_path / "runs"))
    yield
    assert submission_files(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian.py"], "script trian.py does not exist; did you mean 'train.py'?"),
        (["nowhere/train.py"], "does not exist (folder "),
        (["~nobody-here/train.py"], "does not exist (folder "),
        (["."], ". is a folder, not a script"),
        (["data.txt"], "neither a .py file nor executable; chmod +x it"),
        (["-l", "torchrum", "train.py"], "unknown launcher 'torchrum'; did you mean 'torchrun'?"),
        (["-N", "0", "train.py"], "--nodes must be at least 1, not 0"),
        (["-N", "x", "train.py"], "'x' is not a valid integer"),
        (["-N", "1000", "train.py"], "1000"),
        (["--mem", "900T", "train.py"], "--mem 900T"),
        (["--mem", "much", "train.py"], "'much' is not a memory size"),
        (["-t", "25:99:1:2", "train.py"], "'25:99:1:2' is not a duration"),
        (["-t", "0", "train.py"], "is a duration of 0"),
        (["-J", "a\nb", "train.py"], "--job-name contains a control character"),
        (["-J", "", "train.py"], "--job-name is empty"),
        (["-J", "107", "train.py"], "name '107' looks like a job id"),
        (["-J", "x" * 300, "train.py"], "the maximum is 200"),
        (["--env", "1A=x", "train.py"], "'1A' is not a variable name"),
        (["--env", "SLURM_JOB_ID=3", "train.py"], "--env SLURM_JOB_ID is set by Slurm"),
        (["-l", "srun", "--env", "MASTER_PORT=1", "train.py"], "--env MASTER_PORT is set for launcher srun"),
        (["job.yaml"], "job.yaml:2: env.DTSLURM_RUN_DIR: is set by the job script"),
        (["-a", "3-1", "train.py"], "ends before it starts"),
        (["-d", "after ok", "train.py"], "--dependency"),
        (["--signal-before", "0", "train.py"], "1 to 65535"),
        (["--hang-timeout", "soon", "train.py"], "--hang-timeout: 'soon' is not a duration"),
        (["--total-time", "-1", "train.py"], "--total-time: '-1' is not a duration"),
        (["--max-restarts", "-1", "train.py"], "not in the range x>=0"),
        (["--sbatch", "-N2", "train.py"], "not a long option of sbatch"),
        (["--launcher-option", "rdzv=1", "-l", "torchrun", "train.py"], "read it as --rdzv_backend"),
        (["--template", "none.j2", "train.py"], "template none.j2 does not exist"),
        (["-N2", "-l", "single", "train.py"], "launcher single runs on one node"),
        (["--node-type", "dgx", "train.py"], "no such type"),
        (["--nonsense", "train.py"], "No such option"),
        (["--env", "NOWHERE", "train.py"], "--env NOWHERE: your environment has no such variable"),
        ([""], "the name of the script is empty"),
        (["empty.yaml"], "empty.yaml is not a job file"),
        ([], "Missing argument 'SCRIPT|JOB.yaml'"),
    ],
)
def test_submit_reports_an_invalid_request(run: Run, folder: Path, words: list[str], said: str) -> None:
    (folder / "data.txt").write_text("")
    (folder / "empty.yaml").write_text("")
    (folder / "job.yaml").write_text("script: train.py\nenv: {DTSLURM_RUN_DIR: /nonex}\n")
    done = run(*SUBMIT, *words, code=2)
    assert said in done.stderr
    assert done.stdout == ""


def test_submit_reports_all_problems_together(run: Run) -> None:
    done = run(*SUBMIT, "-N0", "--mem", "much", "-J", "a\nb", "-l", "torchrum", "-a", "x", "none.py", code=2)
    assert "6 problems" in done.stderr
    for word in ("--nodes", "much", "--job-name", "torchrum", "--array", "none.py"):
        assert word in done.stderr


def test_submit_suggests_the_closest_cluster_name(run: Run) -> None:
    done = run("submit", "--cluster", "perlmuter", "train.py", code=2)
    assert "did you mean 'perlmutter'" in done.stderr


def test_without_home_the_run_root_is_in_the_account_home_folder(run: Run, folder: Path) -> None:
    done = run(
        *SUBMIT, "--dry-run", "train.py", code=0, prefix=("env", "-u", "HOME", "-u", "DTSLURM_RUN_ROOT")
    )
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert f"#SBATCH --output={home}/dtslurm-runs/train-" in done.stdout


@pytest.mark.parametrize("variable", ["", None])
def test_a_run_root_with_an_unset_or_empty_variable_is_refused(run: Run, variable: str | None) -> None:
    extra = {} if variable is None else {"SCRATCH": variable}
    done = run(*SUBMIT, "--run-root", "$SCRATCH/runs", "train.py", code=2, **extra)
    assert "needs $SCRATCH, which is not set here" in done.stderr


def test_a_script_named_like_an_option_is_rendered_as_a_path(run: Run, folder: Path) -> None:
    (folder / "-x.py").write_text("print('hello')\n")
    assert " ./-x.py <" in run("render", "--cluster", "local", "--", "-x.py", code=0).stdout


def test_an_unreadable_script_is_refused(run: Run, folder: Path) -> None:
    (folder / "train.py").chmod(0)
    # Root reads everything, unless it gives that power up.
    ordinary = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    assert "permission denied" in run(*SUBMIT, "train.py", code=2, prefix=ordinary).stderr


def test_ten_mistakes_in_a_profile_are_reported_with_their_lines(run: Run, folder: Path) -> None:
    profiles = folder / "cluster_profiles"
    profiles.mkdir()
    (profiles / "bad.yaml").write_text(
        """\
titel: x
scheduler: pbs
slurm:
  gpu_request: gpus
  min_poll_s: often
  default_time: soon
  exclusive: perhaps
  partitions:
    gpu: {max_nodes: many}
node_types:
  a:
    sockets: two
    memory: plenty
    gpus: {model: A100}
"""
    )
    done = run("submit", "--cluster", "bad", "train.py", code=2)
    for line in (1, 2, 4, 5, 6, 7, 9, 12, 13, 14):
        assert f"bad.yaml:{line}: " in done.stderr, done.stderr
    assert "title" in done.stderr


def test_a_missing_sbatch_is_reported(run: Run) -> None:
    done = run("submit", "--cluster", "a100x8-ib", "-t", "10", "-A", "x", "train.py", code=2, PATH="/nowhere")
    assert "no sbatch" in done.stderr


def test_a_run_root_below_a_file_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(*SUBMIT, "--run-root", str(tmp_path / "file" / "runs"), "train.py", code=5)
    assert str(tmp_path / "file") in done.stderr
    assert "hint:" in done.stderr


def test_a_read_only_run_root_is_refused(run: Run) -> None:
    done = run(*SUBMIT, "--run-root", "/proc/runs", "train.py", code=5)
    assert "/proc/runs" in done.stderr


def test_a_run_root_on_a_full_disk_is_refused_and_stays_empty(run: Run, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "size=4k") as small:
        done = run(*SUBMIT, "--run-root", str(small / "runs"), "train.py", code=5)
        assert "full" in done.stderr or "no space" in done.stderr.lower()
        assert not list(small.glob("runs/*"))


def test_a_run_root_with_an_unknown_variable_is_refused(run: Run) -> None:
    done = run(*SUBMIT, "--run-root", "$NOWHERE/runs", "train.py", code=2)
    assert "$NOWHERE" in done.stderr


@pytest.mark.parametrize("root", ["runs-%j", "a\nb"])
def test_a_run_root_with_characters_that_slurm_expands_is_refused(run: Run, root: str) -> None:
    assert (
        ", which Slurm changes in file names" in run(*SUBMIT, "--run-root", root, "train.py", code=2).stderr
    )


@pytest.mark.parametrize("verb", ["logs", "status", "cancel", "diagnose", "report"])
def test_a_path_in_the_home_of_an_unknown_user_is_an_unknown_run(run: Run, verb: str) -> None:
    name = "~nobody-here/runs/train-1"
    assert f"no run '{name}' is known on this machine" in run(verb, name, code=3).stderr


def test_an_unknown_job_is_reported(run: Run) -> None:
    for verb in ("status", "logs", "cancel", "requeue", "hold", "release"):
        assert "no run '99'" in run(verb, "99", code=3).stderr


def test_an_unknown_command_is_reported_with_the_closest_command(run: Run) -> None:
    assert "No such command 'sumbit'; did you mean 'submit'?" in run("sumbit", code=2).stderr


def test_c1_c2_escape_sequences_in_names_are_not_printed(run: Run) -> None:
    done = run(*SUBMIT, "\x1b]0;owned\x07.py", code=2)
    assert "\x1b" not in done.stderr
    assert "\x07" not in done.stderr


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", ".", "..", "-rf", "a/b", "%x%j"])
def test_c6_a_job_name_cannot_move_the_run_directory(run: Run, tmp_path: Path, name: str) -> None:
    done = run(*SUBMIT, f"--job-name={name}", "--dry-run", "--json", "train.py")
    if done.returncode:
        assert "--job-name" in done.stderr
        return
    document = json.loads(done.stdout)
    folder = Path(document["run_dir"])
    assert folder.parent == tmp_path / "runs"
    assert re.match(r"\w", folder.name)
    written = re.findall(r"^#SBATCH --(?:output|error)=(.*)", document["script"], re.MULTILINE)
    assert all("%x" not in path and ".." not in path for path in written)


BATCH_SCRIPT = """#!/bin/bash
#SBATCH -J old --nodes 2
#SBATCH --ntasks-per-node=2
#SBATCH --comment 'a b'
module load cuda
srun python train.py
"""


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_submit_refuses_a_batch_script_and_its_hint_renders_the_program(
    run: Run, folder: Path, mode: int
) -> None:
    (folder / "job.sh").write_text(BATCH_SCRIPT)
    (folder / "job.sh").chmod(mode)
    done = run(*SUBMIT, "job.sh", code=2)
    assert "error: job.sh has #SBATCH lines, but dtslurm renders the batch script itself" in done.stderr
    hint = done.stderr.partition("dtslurm submit ")[2].partition(" PROGRAM")[0]
    assert shlex.split(hint) == ["-J", "old", "--nodes", "2", "--ntasks-per-node=2", "--comment", "a b"]
    rendered = run("render", "--cluster", "a100x8-ib", *shlex.split(hint), "-t", "10", "train.py").stdout
    assert "#SBATCH --job-name=old" in rendered
    assert "# train.py: 4 ranks (2 nodes x 2)" in rendered


def test_options_of_a_batch_script_cannot_control_the_terminal(run: Run, folder: Path) -> None:
    (folder / "job.sh").write_text("#!/bin/bash\n#SBATCH -J 'a\x1b]0;b\x07\x9b2J'\nsrun true\n")
    done = run(*SUBMIT, "job.sh", code=2)
    assert "dtslurm submit -J " in done.stderr
    assert not {"\x1b", "\x07", "\x9b"} & set(done.stderr)


def test_submit_notes_that_the_options_of_a_python_script_have_no_effect(run: Run, folder: Path) -> None:
    (folder / "job.py").write_text("#!/usr/bin/env python3\n#SBATCH -N 2\nprint()\n")
    done = run("render", "--cluster", "local", "-t", "10", "job.py")
    assert (
        "note: the #SBATCH lines of job.py have no effect; pass the options to dtslurm: -N 2\n" in done.stderr
    )
