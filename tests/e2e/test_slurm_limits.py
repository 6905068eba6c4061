"""Requests that a real Slurm would refuse, and jobs that it has forgotten."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dtslurm.store.rundir import RunDir
from tests.e2e.conftest import Cli
from tests.lab.cluster import SlurmLab
from tests.lab.software import Software

pytestmark = pytest.mark.slurm


@pytest.fixture
def slurm(tmp_path: Path, slurm_lab: SlurmLab) -> Cli:
    return command_line(tmp_path, slurm_lab)


def command_line(tmp_path: Path, lab: SlurmLab) -> Cli:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    return Cli("slurm", folder, {**lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")})


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-N", "99"], 2, "at most 4"),
        (["-p", "short", "-N", "3"], 2, "partition short allows at most 2"),
        (["-p", "short", "-t", "20"], 2, "partition short allows at most 00:10:00"),
        (["-p", "mian"], 2, "did you mean 'main'"),
        (["--gpus-per-node", "9"], 2, "node has 8"),
        (["-c", "9"], 2, "node has 8"),
        (["-a", "0-10001"], 2, "MaxArraySize"),
        (["--sbatch", "--licenses=none"], 2, "Invalid license specification"),
        (["-l", "mpi", "--launcher-option", "mpi=pmix_v9"], 2, "mpi must be one of profile, pmix"),
        (["-w", "n9"], 2, "Invalid node name specified"),
        (["--no-check", "-w", "n9"], 3, "Invalid node name specified"),
    ],
)
def test_f10_invalid_submissions_are_refused_before_queueing(
    slurm: Cli, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    time = [] if "-t" in words else ["-t", "5"]
    done = slurm("submit", "--cluster", "slurm", *time, *words, "train.py", code=code)
    assert said in done.stderr
    assert done.stdout == ""
    assert list((tmp_path / "runs").glob("*")) == []
    assert slurm.recorded_runs() == []


def test_mpi_type_that_srun_does_not_offer_is_refused(slurm: Cli) -> None:
    (slurm.folder / "cluster_profiles").mkdir()
    (slurm.folder / "cluster_profiles" / "other.yaml").write_text("extends: slurm\nslurm:\n  mpi: pmix_v9\n")
    words = ["submit", "--cluster", "other", "-t", "5", "-l", "mpi"]
    done = slurm(*words, "train.py", code=2)
    # And pmix, where the Slurm was built with it.
    assert "srun --mpi=pmix_v9: this Slurm offers cray_shasta, none, pmi2" in done.stderr
    slurm(*words, "--launcher-option", "mpi=pmi2", "--dry-run", "train.py")


def test_rendered_script_runs_with_plain_sbatch(slurm: Cli, slurm_lab: SlurmLab) -> None:
    slurm("render", "--cluster", "slurm", "-t", "5", "--write", "job.sbatch", "train.py")
    for _ in range(2):
        slurm_lab.run(["sbatch", "--wait", "job.sbatch"], cwd=slurm.folder, env=slurm.env)
    logs = list((slurm.folder.parent / "runs").glob("train-*/logs/0/rank-0.log"))
    assert [path.read_text() for path in logs] == ["hello\n", "hello\n"]


def test_f54_state_of_a_job_forgotten_by_slurm_comes_from_the_run_record(
    tmp_path: Path, lab_root: Path, slurm_software: Software
) -> None:
    with SlurmLab(lab_root, min_job_age=2, nodes=1, software=slurm_software) as lab:
        slurm = command_line(tmp_path, lab)
        good = slurm.submit("train.py")
        slurm.script("raise SystemExit(7)", "bad.py")
        bad = slurm.submit("bad.py")
        # Not by `status`: it would remember the end of a job that Slurm has not forgotten yet.
        runs = [RunDir(next((tmp_path / "runs").glob(f"{name}-*"))) for name in ("train", "bad")]
        slurm.wait_until(lambda: all(run.events() and run.events()[-1]["event"] == "ended" for run in runs))
        lab.wait_for("Slurm to forget", lambda: not lab.run(["squeue", "-h", "-t", "all"]).stdout.strip())
        result = {job: slurm.status(job)["statuses"][0] for job in (good, bad)}
        assert (result[good]["state"], result[good]["source"]) == ("COMPLETED", "record")
        assert (result[bad]["state"], result[bad]["exit_code"]) == ("FAILED", 7)

        (runs[0].path / "events.jsonl").unlink()
        unknown = slurm.status(good)["statuses"][0]
        assert unknown["state"] == "UNKNOWN"
        assert "no record" in unknown["reason"]


def test_job_whose_epilog_runs_is_completing_and_not_unknown(
    tmp_path: Path, lab_root: Path, slurm_software: Software
) -> None:
    epilog = tmp_path / "epilog.sh"
    epilog.write_text(f"#!/bin/sh\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.2; done\n")
    epilog.chmod(0o755)
    conf = [f"Epilog={epilog}"]
    with SlurmLab(lab_root, nodes=1, extra_conf=conf, software=slurm_software) as lab:
        slurm = command_line(tmp_path, lab)
        job = slurm.submit("train.py")
        lab.wait_for("the epilog", lambda: "CG" in lab.run(["squeue", "-h", "-o", "%t"]).stdout)
        row = slurm("status").stdout.splitlines()[1]
        assert "COMPLETING" in row
        assert "no evidence" not in row
        program = f"""
import json, dtslurm.executor
print(json.dumps({{"state": dtslurm.executor.DtslurmJob("logs/%j", {job!r}).state}}))
"""
        assert slurm.python(program)["state"] == "RUNNING"  # in submitit's words: it is not over
        (tmp_path / "go").touch()
        slurm.wait_until(lambda: slurm.state(job) == "COMPLETED")


def test_f55_f63_hanging_controller_does_not_change_the_job_state(
    tmp_path: Path, lab_root: Path, slurm_software: Software
) -> None:
    with SlurmLab(lab_root, nodes=1, software=slurm_software) as lab:
        slurm = command_line(tmp_path, lab)
        slurm.script("import time; time.sleep(300)", "long.py")
        job = slurm.submit("long.py")
        slurm.wait_until(
            lambda: slurm.run_dir(job).ranks(0)
        )  # srun itself fails if the controller hangs before
        lab.pause_controller()
        time.sleep(4)  # an answer of the last seconds would do
        run = json.loads(slurm("status", "--json", job, code=3).stdout)["runs"][0]
        assert run["statuses"][0]["state"] == "RUNNING"  # as last update, and so marked
        assert run["trouble"]
        assert run["age_s"] > 3
        assert "last update" in slurm("status", code=3).stderr
        refused = slurm("submit", "--cluster", "slurm", "-t", "5", "train.py", code=3)
        assert "controller" in refused.stderr
        looked = json.loads(slurm("doctor", "--cluster", "slurm", "--json", code=None).stdout)["findings"]
        assert next(item for item in looked if item["what"] == "scheduler")["ok"] is False
        lab.resume_controller()
        slurm.wait_until(lambda: slurm.state(job) == "RUNNING")
        slurm("cancel", job)


def test_f23_f25_f29_f39_doctor_describes_how_jobs_end_on_the_cluster(slurm: Cli) -> None:
    def told() -> dict[str, str]:
        findings = json.loads(slurm("doctor", "--cluster", "slurm", "--json").stdout)["findings"]
        return {finding["what"]: f"{finding['found']}; {finding['hint']}" for finding in findings}

    before = told()
    assert before["preemption"] == "none; "
    assert before["requeue"] == "a requeued job waits 6 s; "
    assert before["early signal"].endswith("--signal-before: the seconds that a save takes, and 60")
    assert before["end of a job"].startswith("KillWait=10 s from TERM to KILL; a save that takes longer")
    run = slurm.run_dir(slurm.submit("-N1", "train.py"))
    slurm.wait_for_end(slurm.started[-1])
    with (run.path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "checkpoint", "attempt": 0, "step": 1, "seconds": 20.4}) + "\n")
    after = told()
    assert "--signal-before 81: the longest save of your last runs took 20.4 s" in after["early signal"]
    assert "your longest save takes 20 s: it is lost if it begins at TERM" in after["end of a job"]
