"""Environment variables that describe a run to experiment trackers, and upload of offline tracker data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dtslurm.errors import CommandNotFound, RequestInvalid, TransportError
from dtslurm.model.jobs.job import JobRecord, JobSpec
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.shell import RawShell, quote
from dtslurm.model.values import dataclass
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.git_tree import GitState
from dtslurm.store.rundir import RunDir
from dtslurm.suggestions import suggest_name

TRACKERS = ("wandb", "mlflow", "tensorboard", "aim")
OPTIONS = ("project", "group", "tags", "uri", "mode")
_MODES = ("online", "offline")
_SYNC_LIMIT_S = 3600.0
_WANDB_SERVER = "WANDB_BASE_URL"
_JOB_ID = '"${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"'
_MLFLOW_UI = "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri"
_RUN_DIR = '"$DTSLURM_RUN_DIR"'


@dataclass(frozen=True)
class Facts:
    """The facts about a run that are passed to trackers.

    Attributes:
        name: the run's name.
        token: identifies the submission; a resumed sweep keeps that of its first submission.
        cluster: the cluster's name.
        array: the job is a job array.
        trials: the trials of a sweep; None for other runs.
        git: the commit that the code was taken from; None if unknown.
        offline: compute nodes have no internet.
    """

    name: str
    token: str
    cluster: str
    array: bool
    trials: Trials | None
    git: GitState | None
    offline: bool


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Return ``KEY=VALUE`` texts as a mapping; texts without ``=`` are skipped."""
    return dict(text.split("=", 1) for text in texts if "=" in text)


def problems(request: JobRequest) -> list[str]:
    """Return the problems with ``--tracker`` and ``--tracking``."""
    options = pairs(request.tracking)
    errors = [
        (
            f"--tracker {name}: unknown tracker; known trackers: "
            f"{', '.join(TRACKERS)}{suggest_name(name, list(TRACKERS))}"
        )
        for name in request.tracker
        if name not in TRACKERS
    ]
    errors += [
        (
            f"--tracking {key}: unknown option; known options: "
            f"{', '.join(OPTIONS)}{suggest_name(key, list(OPTIONS))}"
        )
        for key in options
        if key not in OPTIONS
    ]
    if options.get("mode", _MODES[0]) not in _MODES:
        errors.append(f"--tracking mode={options['mode']}: unknown mode; known modes: {' and '.join(_MODES)}")
    if options and not request.tracker:
        errors.append("--tracking sets options of a tracker; name the tracker with --tracker")
    return errors


def add_tracker_variables(
    request: JobRequest, spec: JobSpec, cluster: ActiveCluster, git: GitState | None, token: str
) -> JobSpec:
    """Return the job with its trackers' variables added; variables that the user sets take precedence.

    Args:
        request: names the trackers and their options.
        spec: the job.
        cluster: where the job will run.
        git: the commit that the code was taken from; None if unknown.
        token: identifies the submission; empty for a script that may be submitted many times.
    """
    run = Facts(
        name=spec.name,
        token=token,
        cluster=cluster.name,
        array=spec.array is not None,
        trials=spec.trials,
        git=git,
        offline=cluster.profile.environment.offline,
    )
    user_names = {*(name for name, _ in spec.env), *spec.secrets}
    tracker_variables = variables(request.tracker, pairs(request.tracking), run)
    tracker_variables = [(name, value) for name, value in tracker_variables if name not in user_names]
    trials = spec.trials
    if trials is not None:
        trial_names = tuple(name for name, value in tracker_variables if "${DTSLURM_TRIAL" in value)
        trials = replace(trials, env=(*trials.env, *trial_names))
    return replace(spec, env=(*tracker_variables, *spec.env), trials=trials)


def variables(trackers: Sequence[str], options: Mapping[str, str], run: Facts) -> list[tuple[str, str]]:
    """Return the (name, value) pairs that trackers read; the job's shell expands ``RawShell`` values."""
    makers = {
        "wandb": _wandb_variables,
        "mlflow": _mlflow_variables,
        "tensorboard": _tensorboard_variables,
        "aim": _aim_variables,
    }
    names = [name for name in dict.fromkeys(trackers) if name in makers]
    return [pair for name in names for pair in makers[name](options, run) if pair[1]]


def _is_offline(options: Mapping[str, str], run: Facts) -> bool:
    return options.get("mode", "offline" if run.offline else "online") == "offline"


def _run_name(run: Facts) -> str:
    """Return the run's name; each trial has its own."""
    if run.trials is not None:
        return "${DTSLURM_TRIAL_NAME}"
    return RawShell(f'{quote(run.name)}-"$SLURM_ARRAY_TASK_ID"') if run.array else run.name


def _run_id(run: Facts) -> str:
    """Return an id that requeues, restarts and resumed sweeps keep, so that the tracker shows one run."""
    if not run.token:
        return RawShell(f'{_JOB_ID}-"${{SLURM_ARRAY_TASK_ID:-0}}"')
    if run.trials is not None:
        return f"{run.trials.token or run.token}-${{DTSLURM_TRIAL}}"
    return RawShell(f'{run.token}-"$SLURM_ARRAY_TASK_ID"') if run.array else run.token


def _run_group(options: Mapping[str, str], run: Facts) -> str:
    if "group" in options or not run.array:
        return options.get("group", "")
    token = run.trials.token if run.trials and run.trials.token else run.token
    return f"{run.name}-{token}" if token else run.name


def _run_tags(options: Mapping[str, str], run: Facts) -> list[str]:
    user_tags = [tag.strip() for tag in options.get("tags", "").split(",") if tag.strip()]
    return [
        *user_tags,
        f"cluster:{run.cluster}",
        *([f"branch:{run.git.branch}"] if run.git and run.git.branch else []),
    ]


def _wandb_variables(options: Mapping[str, str], run: Facts) -> list[tuple[str, str]]:
    return [
        ("WANDB_NAME", _run_name(run)),
        ("WANDB_RUN_ID", _run_id(run)),
        ("WANDB_RESUME", "allow"),
        ("WANDB_RUN_GROUP", _run_group(options, run)),
        ("WANDB_TAGS", ",".join(_run_tags(options, run))),
        ("WANDB_NOTES", RawShell(f"{quote(f'Slurm job on {run.cluster}: ')}{_JOB_ID}")),
        ("WANDB_PROJECT", options.get("project", "")),
        (_WANDB_SERVER, options.get("uri", "")),
        ("WANDB_GIT_COMMIT", (run.git and run.git.commit) or ""),
        ("WANDB_DIR", RawShell(_RUN_DIR)),
        ("WANDB_MODE", "offline" if _is_offline(options, run) else ""),
    ]


def _mlflow_variables(options: Mapping[str, str], run: Facts) -> list[tuple[str, str]]:
    uri = "" if _is_offline(options, run) else options.get("uri", "")
    tags = {
        "mlflow.runName": "" if run.trials else run.name,
        "mlflow.source.git.commit": (run.git and run.git.commit) or "",
        "dtslurm.run": run.token,
        "dtslurm.cluster": run.cluster,
        "dtslurm.group": _run_group(options, run),
        "dtslurm.tags": options.get("tags", ""),
    }
    context = json.dumps({key: value for key, value in tags.items() if value})[:-1]
    job = RawShell(f'{quote(context + ", " + json.dumps("slurm.job_id") + ": ")}\\"{_JOB_ID}\\"' + quote("}"))
    return [
        ("MLFLOW_RUN_NAME", _run_name(run)),
        ("MLFLOW_EXPERIMENT_NAME", options.get("project", "")),
        ("MLFLOW_TRACKING_URI", uri or RawShell(f"file://{_RUN_DIR}/mlruns")),
        # MLflow 3 writes to a folder only if this is set. A database would need file locks, which do not work
        # on every parallel file system.
        ("MLFLOW_ALLOW_FILE_STORE", "" if uri else "true"),
        ("MLFLOW_RUN_CONTEXT", job),
    ]


def _tensorboard_variables(options: Mapping[str, str], run: Facts) -> list[tuple[str, str]]:
    del options, run
    return [
        (name, RawShell(f"{_RUN_DIR}/tensorboard"))
        for name in ("TENSORBOARD_LOGGING_DIR", "TENSORBOARD_LOGDIR")
    ]


def _aim_variables(options: Mapping[str, str], run: Facts) -> list[tuple[str, str]]:
    uri = "" if _is_offline(options, run) else options.get("uri", "")
    return [
        ("AIM_REPO", uri or RawShell(f"{_RUN_DIR}/aim")),
        ("AIM_EXPERIMENT", options.get("project", "") or run.name),
        ("AIM_RUN_NAME", _run_name(run)),
        ("AIM_RUN_TAGS", ",".join(_run_tags(options, run))),
    ]


def _server(record: JobRecord) -> dict[str, str]:
    """Return the variable for the run's W&B server; without it, wandb uploads to W&B's public server."""
    spec = RunDir(Path(record.folder)).document().get("spec")
    env = spec.get("env", []) if isinstance(spec, dict) else []
    return {name: value for name, value in env if name == _WANDB_SERVER}


@dataclass(frozen=True)
class Synced:
    """The outcome of an upload of offline tracker data.

    Attributes:
        uploaded: the folders of the W&B runs that were uploaded.
        left: commands for the user, for the data that dtslurm does not upload.
    """

    uploaded: tuple[Path, ...]
    left: tuple[str, ...]


def sync(context: Context, record: JobRecord, folder: Path) -> Synced:
    """Upload a fetched run's offline W&B data to the run's server; return commands for other trackers' data.

    Raises:
        RequestInvalid: there is something to upload, and ``wandb`` is not installed on this machine.
        TransportError: ``wandb sync`` failed; the evidence is its output.
    """
    runs = sorted(folder.glob("**/wandb/offline-run-*"))
    server = {} if _WANDB_SERVER in context.env or not runs else _server(record)
    for run in runs:
        try:
            result = context.transport.run(
                ["wandb", "sync", "--", str(run)], timeout=_SYNC_LIMIT_S, env=server
            )
        except CommandNotFound:
            raise RequestInvalid(
                ["cannot upload the W&B runs: wandb is not installed on this machine"],
                hint=f"pip install wandb; then dtslurm fetch {record.job_id} --sync, or wandb sync {run}",
            ) from None
        if not result.ok:
            last_lines = (result.stderr + result.stdout).splitlines()[-5:]
            raise TransportError(
                f"wandb sync {run} failed", evidence=last_lines, hint="wandb login sets the key"
            )
    commands = [
        f"MLflow cannot upload its folder; show it with {_MLFLOW_UI} {path}"
        for path in sorted(folder.glob("**/mlruns"))
    ]
    commands += [f"tensorboard --logdir {path}" for path in sorted(folder.glob("**/tensorboard"))]
    commands += [f"aim up --repo {path}" for path in sorted(folder.glob("**/aim"))]
    return Synced(tuple(runs), tuple(commands))
