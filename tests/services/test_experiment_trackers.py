"""The variables for experiment trackers, and the upload of offline runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.shell import quote
from dtslurm.services.request import experiment_trackers
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import Context
from dtslurm.store.codec import SCHEMA
from dtslurm.store.git_tree import GitState

GIT = GitState(commit="c0ffee", branch="main", dirty=False)


def tracker_variables(*trackers: str, options: dict[str, str] | None = None, **facts: Any) -> dict[str, str]:
    """Return the variables as bash has them after the script's export lines."""
    run = {"name": "it's", "token": "abc", "cluster": "big", "array": False, "trials": None, "git": GIT}
    result = experiment_trackers.variables(
        trackers, options or {}, experiment_trackers.Facts(**{**run, "offline": False, **facts})
    )
    lines = "".join(f"export {name}={quote(value)}\n" for name, value in result)
    names = " ".join(name for name, _ in result)
    script = f'{lines}for name in {names}; do printf \'%s=%s\\0\' "$name" "${{!name}}"; done'
    job = {"SLURM_JOB_ID": "18", "DTSLURM_RUN_DIR": "/run dir", "PATH": os.environ["PATH"]}
    job |= {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"} if facts.get("array") else {}
    done = subprocess.run(["bash", "-uc", script], env=job, capture_output=True, text=True, check=True)
    return dict(item.split("=", 1) for item in done.stdout.split("\0")[:-1])


def test_wandb_gets_one_run_for_all_attempts() -> None:
    seen = tracker_variables("wandb", options={"project": "llm", "tags": "a, b", "group": "night"})
    assert seen == {
        "WANDB_NAME": "it's",
        "WANDB_RUN_ID": "abc",
        "WANDB_RESUME": "allow",
        "WANDB_RUN_GROUP": "night",
        "WANDB_TAGS": "a,b,cluster:big,branch:main",
        "WANDB_NOTES": "Slurm job on big: 18",
        "WANDB_PROJECT": "llm",
        "WANDB_GIT_COMMIT": "c0ffee",
        "WANDB_DIR": "/run dir",
    }
    assert tracker_variables("wandb", offline=True)["WANDB_MODE"] == "offline"
    assert "WANDB_MODE" not in tracker_variables("wandb", offline=True, options={"mode": "online"})


def test_array_tasks_are_wandb_runs_of_one_group() -> None:
    seen = tracker_variables("wandb", array=True)
    assert (seen["WANDB_NAME"], seen["WANDB_RUN_ID"], seen["WANDB_RUN_GROUP"]) == (
        "it's-3",
        "abc-3",
        "it's-abc",
    )
    assert seen["WANDB_NOTES"].endswith(": 17")


def test_a_resumed_trial_continues_its_wandb_run() -> None:
    first = tracker_variables("wandb", array=True, trials=Trials())
    again = tracker_variables("wandb", array=True, token="new", trials=Trials(token="abc"))
    assert first["WANDB_RUN_ID"] == again["WANDB_RUN_ID"] == "abc-${DTSLURM_TRIAL}"
    assert first["WANDB_RUN_GROUP"] == again["WANDB_RUN_GROUP"]
    assert first["WANDB_NAME"] == "${DTSLURM_TRIAL_NAME}"


def test_mlflow_gets_tags_as_json() -> None:
    seen = tracker_variables("mlflow", options={"project": "llm", "uri": "https://m"})
    assert (seen["MLFLOW_EXPERIMENT_NAME"], seen["MLFLOW_TRACKING_URI"]) == ("llm", "https://m")
    tags = json.loads(seen["MLFLOW_RUN_CONTEXT"])
    assert (tags["slurm.job_id"], tags["mlflow.runName"], tags["dtslurm.cluster"]) == ("18", "it's", "big")
    offline = tracker_variables("mlflow", options={"uri": "https://m"}, offline=True)
    assert offline["MLFLOW_TRACKING_URI"] == "file:///run dir/mlruns"
    assert offline["MLFLOW_ALLOW_FILE_STORE"] == "true"
    assert "MLFLOW_ALLOW_FILE_STORE" not in seen


def test_tensorboard_and_aim_get_folders() -> None:
    assert tracker_variables("tensorboard")["TENSORBOARD_LOGGING_DIR"] == "/run dir/tensorboard"
    assert tracker_variables("aim")["AIM_REPO"] == "/run dir/aim"
    assert "AIM_RUN_HASH" not in tracker_variables(
        "aim"
    )  # Aim opens a run of a given hash only if it is there
    assert tracker_variables("aim", options={"uri": "aim://host"})["AIM_REPO"] == "aim://host"


def test_unknown_trackers_and_options_are_reported() -> None:
    request = JobRequest(script="", tracker=("wanbd",), tracking=("projct=a", "mode=off"))
    text = "\n".join(experiment_trackers.problems(request))
    assert "did you mean 'wandb'" in text
    assert "did you mean 'project'" in text
    assert "online and offline" in text
    assert (
        "name the tracker with --tracker"
        in experiment_trackers.problems(JobRequest(script="", tracking=("tags=a",)))[0]
    )


def install_wandb(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "wandb").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "wandb").chmod(0o755)


def run_with_variables(folder: Path, *env: tuple[str, str]) -> JobRecord:
    """Return the record of a run in a folder, whose job has these variables."""
    job = {"schema": SCHEMA, "spec": {"env": env}}
    (folder / "job.json").write_text(json.dumps(job))
    return JobRecord(
        token="t",
        script_hash="",
        cluster="here",
        name="a",
        run_dir=str(folder),
        phase="submitted",
        created_at=90.0,
    )


def test_offline_wandb_runs_are_uploaded_by_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run" / "wandb" / "offline-run-1"
    run.mkdir(parents=True)
    (tmp_path / "run" / "mlruns").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    record = run_with_variables(tmp_path / "run", ("WANDB_BASE_URL", "https://own"), ("WANDB_PROJECT", "a"))
    with pytest.raises(RequestInvalid, match="wandb is not installed on this machine"):
        experiment_trackers.sync(Context(), record, tmp_path / "run")
    install_wandb(tmp_path, f'echo "$@" to "$WANDB_BASE_URL" $WANDB_PROJECT >>{tmp_path}/said')
    synced = experiment_trackers.sync(Context(), record, tmp_path / "run")
    assert synced.uploaded == (run,)
    assert "mlflow ui" in synced.left[0]
    assert (tmp_path / "said").read_text() == f"sync -- {run} to https://own\n"
    monkeypatch.setenv("WANDB_BASE_URL", "https://tunnel")  # the person knows better how to reach it
    experiment_trackers.sync(Context(), record, tmp_path / "run")
    assert (tmp_path / "said").read_text().splitlines()[1] == f"sync -- {run} to https://tunnel"


def test_a_failed_upload_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "wandb" / "offline-run-1").mkdir(parents=True)
    install_wandb(tmp_path, "echo no key >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    with pytest.raises(TransportError) as caught:
        experiment_trackers.sync(Context(), run_with_variables(tmp_path / "run"), tmp_path / "run")
    assert caught.value.evidence == ("no key",)
