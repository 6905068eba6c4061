"""Jobs that wait for an action: `status` suggests a command, the test runs the command, and the job runs."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ON_SLURM, Cli
from tests.lab.cluster import SlurmLab
from tests.lab.software import Software

pytestmark = pytest.mark.slurm

PROLOG = """\
#!/bin/sh
[ ! -e {root}/bad ] || exit 1
"""


@pytest.fixture
def lab(lab_root: Path, slurm_software: Software) -> Iterator[SlurmLab]:
    lab_root.mkdir(exist_ok=True)
    prolog = lab_root / "prolog"
    prolog.write_text(PROLOG.format(root=lab_root))
    prolog.chmod(0o755)
    with SlurmLab(lab_root, nodes=2, extra_conf=[f"Prolog={prolog}"], software=slurm_software) as lab:
        yield lab


def suggested_commands(cli: Cli, job: str, reason: str) -> list[list[str]]:
    """Wait until a job waits for a reason, and return the words of the commands that `status` tells."""
    cli.wait_until(lambda: reason in str(cli.status(job)["statuses"][0]["reason"]), 120)
    shown = cli("status", job).stdout
    result = next(line for line in shown.splitlines() if "what to do" in line)
    matches = re.findall(r"((?:scontrol update JobId=|dtslurm release )\d+[ \w=]*?)(?= and |;|,|$)", result)
    assert matches, shown
    return [shlex.split(item) for item in matches]


def test_f23_f32_f32b_status_suggests_a_command_that_ends_each_wait(lab: SlurmLab, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    cli = Cli("slurm", folder, {**lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")})
    cli.script("print('trained')\n", "train.py")

    def obey(job: str, reason: str) -> None:
        for words in suggested_commands(cli, job, reason):
            if words[0] == "dtslurm":  # a job that the first command set free may be over by now
                cli(*words[1:], code=None)
            else:
                lab.run(words)
        assert cli.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"

    def submit(*words: str) -> str:
        return cli.submit("-N1", *words, "--python", sys.executable, "train.py")

    (lab.root / "bad").touch()
    held = submit("--requeue")
    cli.wait_until(lambda: "held" in str(cli.status(held)["statuses"][0]["reason"]), 120)
    (lab.root / "bad").unlink()  # the site has mended its node
    lab.run(["scontrol", "update", "NodeName=" + ",".join(lab.node_names), "State=RESUME"], check=False)
    obey(held, "held")

    lab.run(["scontrol", "update", "NodeName=n1,n2", "AvailableFeatures=fast", "ActiveFeatures=fast"])
    never = submit("-C", "fast", "--sbatch=--begin=now+1hour")
    lab.run(["scontrol", "update", "NodeName=n1,n2", "AvailableFeatures=slow", "ActiveFeatures=slow"])
    lab.run(["scontrol", "update", f"JobId={never}", "StartTime=now"])
    obey(never, "BadConstraints")

    later = submit("--sbatch=--begin=now+1hour")  # as a requeued one waits for its two minutes
    obey(later, "BeginTime")


@ON_SLURM
def test_f32b_run_excludes_no_node_that_the_job_needs(cli: Cli) -> None:
    shutil.copy(Path(__file__).with_name("surviving_train.py"), cli.folder / "train.py")
    words = ["-N2", "-l", "srun", "-x", "n3,n4", "--max-restarts", "2", "--env", "FAULT=gpu@12"]
    job = cli.submit(*words, "--python", sys.executable, "train.py")
    run = cli.run_dir(job)
    assert cli.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"
    ended = [event for event in run.events() if event["event"] == "attempt_ended"]
    assert [event["cause"] for event in ended] == ["gpu-fault", "done"]
    text = (run.path / "logs/batch.log").read_text()
    assert f"{ended[0]['node']} is not excluded: the job needs 2 of 2 nodes" in text


@ON_SLURM
def test_f32b_status_names_the_excess_excluded_nodes(cli: Cli, slurm_lab: SlurmLab) -> None:
    cli.script("print('trained')\n", "train.py")
    job = cli.submit("-N2", "-x", "n4", "--sbatch=--begin=now+1hour", "--python", sys.executable, "train.py")
    slurm_lab.run(["scontrol", "update", f"JobId={job}", "ExcNodeList=n2,n3,n4", "StartTime=now"])
    result = suggested_commands(cli, job, "BadConstraints")
    assert "excludes n[2-4]" in cli("status", job).stdout
    assert result[0][1:] == ["update", f"JobId={job}", "ExcNodeList="]
    for words in result[:2]:
        if words[0] == "dtslurm":
            cli(*words[1:], code=None)
        else:
            slurm_lab.run(words)
    assert cli.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"
