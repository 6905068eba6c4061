"""A cluster behind SSH: commands on a laptop, and broken connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli, far_profile
from tests.lab.cluster import SlurmLab
from tests.sshd.fixtures import Login
from tests.store.trees import git

pytestmark = pytest.mark.slurm


def run_dirs(tmp_path: Path) -> list[Path]:
    """The run directories on the cluster."""
    return [path for path in (tmp_path / "runs").glob("*") if not path.name.startswith(".")]


def test_f78_job_runs_the_code_at_submission(far: Cli) -> None:
    far.script("import helper; print('says', helper.WORD)")
    far.script("WORD = 'then'", "helper.py")
    job = far.submit("--sbatch=--hold", "train.py")
    far.script("WORD = 'now'", "helper.py")
    far("release", job)
    assert far.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert "says then" in far("logs", job).stdout


def test_ignored_data_files_are_named_at_submission_and_after_the_failure(far: Cli) -> None:
    git(far.folder, "init", "-q")
    (far.folder / "data").mkdir()
    (far.folder / "data" / "train.csv").write_text("1,2")
    (far.folder / ".gitignore").write_text("data/\n")
    far.script("print('read', open('data/train.csv').read())")
    done = far("submit", "--cluster", "far", "-t", "10", "--parsable", "--wait", "train.py", code=1)
    assert "note: git ignores data/train.csv, which train.py or its arguments name" in done.stderr
    verdict = json.loads(far("diagnose", "--json", done.stdout.strip()).stdout)["verdict"]
    assert f"{far.folder / 'data/train.csv'} was not copied with the code" in verdict["summary"]
    assert (verdict["blame"], "--code-include data/train.csv" in verdict["advice"]) == ("user", True)
    again = far.submit("--code-include", "data/train.csv", "train.py")
    assert far.wait_for_end(again)["statuses"][0]["state"] == "COMPLETED"
    assert "read 1,2" in far("logs", again).stdout


def test_fetch_copies_results_from_the_cluster(far: Cli, tmp_path: Path) -> None:
    job = far.submit(
        far.script(
            """
            import os, pathlib
            folder = pathlib.Path(os.environ["DTSLURM_CHECKPOINT_DIR"])
            (folder / "step 1.pt").write_bytes(os.urandom(3_000_000))
            print("done")
            """
        )
    )
    far.wait_for_end(job)
    source = Path(far.status(job)["record"]["run_dir"]) / "checkpoints" / "step 1.pt"
    first = json.loads(far("fetch", job, "checkpoints", "--json", "-o", "back").stdout)
    back = far.folder / "back" / "checkpoints" / "step 1.pt"
    assert first["bytes"] == 3_000_000
    assert back.read_bytes() == source.read_bytes()
    with back.open("r+b") as file:
        file.truncate(1_000_000)  # as after a link that was cut
    second = json.loads(far("fetch", job, "checkpoints/*", "--json", "-o", "back").stdout)
    assert second["bytes"] == 2_000_000
    assert back.read_bytes() == source.read_bytes()
    assert "no new files" in far("fetch", job, "checkpoints", "-o", "back").stderr
    everything = json.loads(far("fetch", job, "--json").stdout)
    names = {Path(name).name for name in everything["files"]}
    assert {"rank-0.log", "events.jsonl", "step 1.pt", "job.json"} <= names
    assert "train.py" not in names
    assert "matches nope" in far("fetch", job, "nope", code=3).stderr


def test_remote_failure_is_diagnosed_locally(far: Cli) -> None:
    job = far.submit("-N2", "-l", "srun", far.script("import no_such_module"))
    far.wait_for_end(job)
    verdict = json.loads(far("diagnose", job, "--json").stdout)["verdict"]
    assert (verdict["cause"], verdict["blame"]) == ("import-error", "user")
    stdout = far("diagnose", job).stdout
    assert "no_such_module" in stdout
    assert f"{far.status(job)['record']['run_dir']}/logs/0" in stdout, "here are no logs"
    assert "ModuleNotFoundError" in far("logs", job, "--rank", str(verdict["rank"])).stdout


def test_submission_through_a_jump_host_works(far: Cli, tmp_path: Path, sshd_login: Login) -> None:
    far_profile(tmp_path, sshd_login.jumped)
    job = far.submit(far.script("print('hello')"))
    assert far.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert "hello" in far("logs", job).stdout


def test_doctor_describes_the_connection(far: Cli) -> None:
    findings = {
        item["what"]: item
        for item in json.loads(far("doctor", "--cluster", "far", "--json").stdout)["findings"]
    }
    assert findings["link"]["found"].startswith("openssh to login (from the profile), ")
    assert "home " in findings["login node"]["found"]
    assert findings["remote python"]["ok"]
    assert findings["version"]["found"].startswith("slurm")
    assert findings["sbatch"]["ok"]


def test_submission_refused_by_slurm_leaves_no_files(far: Cli, tmp_path: Path) -> None:
    far.script("pass")
    done = far(
        "submit", "--cluster", "far", "-t", "5", "--no-check", "--sbatch=--licenses=none", "train.py", code=3
    )
    assert "Invalid license" in done.stderr
    assert run_dirs(tmp_path) == []
    assert far.recorded_runs() == []
    assert list((tmp_path / "state" / "dtslurm" / "remote" / "far").glob("*")) == []


def test_f14_remote_problems_are_reported_before_files_are_sent(far: Cli, tmp_path: Path) -> None:
    far.script("pass")
    words = ("submit", "--cluster", "far", "-t", "5")
    done = far(*words, "--python", "/no/python", "--chdir", "/no/folder", "train.py", code=2)
    assert "the interpreter /no/python does not exist on login" in done.stderr
    assert "the working directory /no/folder does not exist on login" in done.stderr
    assert "did you mean 'main'" in far(*words, "-p", "mian", "train.py", code=2).stderr
    assert run_dirs(tmp_path) == []


def other_home(far: Cli, tmp_path: Path, login: Login, slurm: SlurmLab) -> Path:
    """A home on the login node that differs from the one on this machine, with a project and a Python."""
    name = f"odd-{tmp_path.name}"
    home = login.lab.home(f"home of {name}")
    login.lab.server(name, env={**slurm.env, "HOME": str(home)})
    far_profile(tmp_path, name, root=Path("~/runs"))
    (home / "work").mkdir()
    (home / "python").write_text(f'#!/bin/sh\nINTERPRETER=$0 exec {sys.executable} "$@"\n')
    (home / "python").chmod(0o755)
    (home / "work" / far.script("import os; print(os.getcwd(), os.environ['INTERPRETER'])")).write_text(
        (far.folder / "train.py").read_text()
    )
    return home


def test_a_tilde_is_the_home_on_the_cluster(
    far: Cli, tmp_path: Path, sshd_login: Login, slurm_lab: SlurmLab
) -> None:
    home = other_home(far, tmp_path, sshd_login, slurm_lab)
    far.script(
        """
        script: train.py
        chdir: ~/work
        python: ~/python
        output: ~/copy-%j.log
        """,
        "job.yaml",
    )
    job = far.submit("job.yaml")
    assert far.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert f"{home}/work {home}/python" in far("logs", job).stdout
    assert (home / f"copy-{job}.log").exists()
    script = far("render", "--cluster", "far", "-t", "5", "--chdir", "~/work", "train.py").stdout
    assert f"{home}/work" in script
    assert (
        "~bob/work: write"
        in far("render", "--cluster", "far", "--chdir", "~bob/work", "train.py", code=2).stderr
    )


def test_a_path_below_the_home_of_the_laptop_is_explained(
    far: Cli, tmp_path: Path, sshd_login: Login, slurm_lab: SlurmLab
) -> None:
    home = other_home(far, tmp_path, sshd_login, slurm_lab)
    far.env["HOME"], host = str(tmp_path), f"odd-{tmp_path.name}"
    words = ("submit", "--cluster", "far", "-t", "5", "--chdir", f"{tmp_path}/work", "train.py")
    assert (
        f"the working directory {tmp_path}/work does not exist on {host}: the path is below the home of "
        f"this machine, and your home on {host} is {home}; write '~/work', with the quotes"
    ) in far(*words, code=2).stderr


def test_submission_without_a_connection_queues_nothing_and_reports_the_host(
    far: Cli, tmp_path: Path
) -> None:
    far.script("pass")
    far_profile(tmp_path, "no-such-host.invalid")
    done = far("submit", "--cluster", "far", "-t", "5", "train.py", code=4)
    assert "no-such-host.invalid" in done.stderr
    assert "Traceback" not in done.stderr
    assert far.recorded_runs() == []


def test_f18_twenty_concurrent_submissions_with_the_same_key_make_a_single_job(
    far: Cli, tmp_path: Path
) -> None:
    far.script("print('hello')")
    words = (
        "submit",
        "--cluster",
        "far",
        "-t",
        "5",
        "--parsable",
        "--no-check",
        "--once",
        "night",
        "train.py",
    )
    far("doctor", "--cluster", "far")  # one login for all
    with ThreadPoolExecutor(20) as pool:
        result = list(pool.map(lambda _: far(*words, code=None, timeout=600), range(20)))
    ids = {done.stdout.strip() for done in result}
    assert len(ids) == 1, [done.stderr for done in result]
    assert ids != {""}
    far.started += ids
    assert len(run_dirs(tmp_path)) == 1
    assert far.wait_for_end(ids.pop())["statuses"][0]["state"] == "COMPLETED"


@pytest.mark.parametrize("after", [0.05, 0.3, 0.6, 0.9, 1.2, 1.6, 2.2])
def test_f2_client_killed_at_any_time_leaves_a_single_job(far: Cli, tmp_path: Path, after: float) -> None:
    """The same request with the same key finds the job later, or makes the only job."""
    far("doctor", "--cluster", "far")
    far.script("import os; open(os.environ['DTSLURM_RUN_DIR'] + '/worked', 'a').write('x')")
    words = ("submit", "--cluster", "far", "-t", "5", "--parsable", "--no-check", "--once", "k", "train.py")
    argv = [sys.executable, "-m", "dtslurm", *words]
    process = subprocess.Popen(
        argv,
        cwd=far.folder,
        env={**os.environ, **far.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    job = far(*words, timeout=600).stdout.strip()
    far.started.append(job)
    assert far.wait_for_end(job, limit=120)["statuses"][0]["state"] == "COMPLETED"
    made = [path / "worked" for path in run_dirs(tmp_path) if (path / "worked").exists()]
    assert [path.read_text() for path in made] == ["x"]
