"""The name, group, tags, job and commit that real trackers record for a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.frameworks.conftest import SCRIPTS
from tests.frameworks.envs import environment
from tests.frameworks.wandb_server import Uploads, uploads

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.sampled(1, "trackers"),
]

TOLD = Path(__file__).parents[2] / "docs" / "trackers.md"
TRACKERS = ("wandb==0.31.0", "mlflow-skinny==3.17.2", "tensorboardX==2.6.5")


def commit(folder: Path) -> str:
    """Make a repository of a folder, and return its commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def user_of(python: Path, tmp_path: Path, script: str) -> Cli:
    """Return the command line of somebody whose environment is active, and who has such a train.py."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(script)
    (tmp_path / "home").mkdir()
    folders = {
        "DTSLURM_RUN_ROOT": "runs",
        "DTSLURM_LOCAL_STATE": "local",
        "XDG_STATE_HOME": "state",
        "HOME": "home",
    }
    env = {name: str(tmp_path / folder) for name, folder in folders.items()}
    env |= {"VIRTUAL_ENV": str(python.parents[1]), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    return Cli("local", project, env)


@pytest.fixture
def server() -> Iterator[Uploads]:
    with uploads() as served:
        yield served


def test_trackers_record_the_identity_of_the_run(tmp_path: Path, server: Uploads) -> None:
    python = environment("trackers", TRACKERS)
    cli = user_of(python, tmp_path, (SCRIPTS / "track.py").read_text())
    head = commit(cli.folder)
    trackers = ["--tracker", "wandb", "--tracker", "mlflow", "--tracker", "tensorboard"]
    about = ["project=llm", "group=night", "tags=a,b", "mode=offline", f"uri={server.url}"]
    words = [*trackers, *(word for text in about for word in ("--tracking", text))]
    job = cli.submit(*words, "-J", "first", "train.py")
    assert cli.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"

    run = cli.run_dir(job)
    token = run.load().token
    done = subprocess.run(
        [python, SCRIPTS / "read_tracked.py", run.path],
        env={**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    seen = document["wandb"]
    assert seen.pop("history")["loss"] == 0.5
    assert seen == {
        "name": "first",
        "id": token,
        "group": "night",
        "tags": ["a", "b", "cluster:local", "branch:main"],
        "notes": f"Slurm job on local: {job}",
        "project": "llm",
        "commit": head,
    }
    kept = document["mlflow"]
    assert (kept["experiment"], kept["name"], kept["metrics"]) == ("llm", "first", {"loss": 0.5})
    assert {
        "slurm.job_id": job,
        "mlflow.source.git.commit": head,
        "dtslurm.run": token,
        "dtslurm.cluster": "local",
        "dtslurm.group": "night",
        "dtslurm.tags": "a,b",
    }.items() <= kept["tags"].items()
    assert list((run.path / "tensorboard").glob("events.out.tfevents.*"))

    refused = cli("fetch", "--sync", job, code=None)  # W&B's own program, which has no key
    assert refused.returncode == 4
    assert "wandb sync" in refused.stderr
    assert "wandb login sets the key" in refused.stderr
    assert not server.history
    cli.env["WANDB_API_KEY"] = "0" * 40
    assert "uploaded 1 W&B run" in cli("fetch", "--sync", job).stderr
    [row] = server.history[token]
    assert row["loss"] == 0.5
    sent = server.runs[token]
    assert (sent["displayName"], sent["project"], sent["groupName"]) == ("first", "llm", "night")
    assert (sent["tags"], sent["commit"]) == (["a", "b", "cluster:local", "branch:main"], head)


def test_aim_records_the_identity_of_the_run(tmp_path: Path) -> None:
    python = environment("aim", ("aim==3.29.1",))
    [shown] = re.findall(r"```python\n(.*?)```", TOLD.read_text(), re.DOTALL)
    cli = user_of(python, tmp_path, f"import os\nimport aim\n{shown}run.close()\n")
    job = cli.submit(
        "--tracker", "aim", "--tracking", "project=llm", "--tracking", "tags=a,b", "-J", "first", "train.py"
    )
    assert cli.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"
    reader = [python, SCRIPTS / "read_aim.py", cli.run_dir(job).path / "aim"]
    done = subprocess.run(reader, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert (document["name"], document["experiment"]) == ("first", "llm")
    assert {"a", "b", "cluster:local"} <= set(document["tags"])
