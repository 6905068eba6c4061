"""What experiment trackers are told of a run, by variables of their own; and what is uploaded afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dtslurm.errors import CommandNotFound, RequestInvalid, TransportError
from dtslurm.model.jobs.job import JobRecord, JobSpec
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.shell import Sh, quote
from dtslurm.model.values import dataclass
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.git_tree import GitState
from dtslurm.store.rundir import RunDir
from dtslurm.suggestions import suggest_name

TRACKERS = ("wandb", "mlflow", "tensorboard", "aim")
OPTIONS = ("project", "group", "tags", "uri", "mode")
_MODES = ("online", "offline")
_SYNC_S = 3600.0
_SERVER = "WANDB_BASE_URL"
_JOB = '"${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"'
_MLFLOW_UI = "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri"
_HERE = '"$DTSLURM_RUN_DIR"'


@dataclass(frozen=True)
class Facts:
    """What there is to tell of a run.

    Attributes:
        token: of the submission; for a sweep, of its first one.
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
    """Return ``KEY=VALUE`` texts as a mapping, without those that are none."""
    return dict(text.split("=", 1) for text in texts if "=" in text)


def problems(request: JobRequest) -> list[str]:
    """Return what is wrong with ``--tracker`` and ``--tracking``."""
    options = pairs(request.tracking)
    found = [
        f"--tracker {name}: there are {', '.join(TRACKERS)}{suggest_name(name, list(TRACKERS))}"
        for name in request.tracker
        if name not in TRACKERS
    ]
    found += [
        f"--tracking {key}: there are {', '.join(OPTIONS)}{suggest_name(key, list(OPTIONS))}"
        for key in options
        if key not in OPTIONS
    ]
    if options.get("mode", _MODES[0]) not in _MODES:
        found.append(f"--tracking mode={options['mode']}: there are {' and '.join(_MODES)}")
    if options and not request.tracker:
        found.append("--tracking says what a tracker is told; name one by --tracker")
    return found


def tracked(
    request: JobRequest, spec: JobSpec, cluster: ActiveCluster, git: GitState | None, token: str
) -> JobSpec:
    """Return the job with what its trackers are told; what the user sets holds over it.

    Args:
        token: of the submission, empty for a script that may be queued many times.
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
    mine = {*(name for name, _ in spec.env), *spec.secrets}
    told = variables(request.tracker, pairs(request.tracking), run)
    told = [(name, value) for name, value in told if name not in mine]
    trials = spec.trials
    if trials is not None:
        filled = tuple(name for name, value in told if "${DTSLURM_TRIAL" in value)
        trials = replace(trials, env=(*trials.env, *filled))
    return replace(spec, env=(*told, *spec.env), trials=trials)


def variables(trackers: Sequence[str], options: Mapping[str, str], run: Facts) -> list[tuple[str, str]]:
    """Return (name, value) of what trackers read; a value the job's shell completes is ``Sh``."""
    makers = {"wandb": _wandb, "mlflow": _mlflow, "tensorboard": _tensorboard, "aim": _aim}
    wanted = [name for name in dict.fromkeys(trackers) if name in makers]
    return [pair for name in wanted for pair in makers[name](options, run) if pair[1]]


def _offline(options: Mapping[str, str], run: Facts) -> bool:
    return options.get("mode", "offline" if run.offline else "online") == "offline"


def _name(run: Facts) -> str:
    """Return the run's name; trials have names of their own."""
    if run.trials is not None:
        return "${DTSLURM_TRIAL_NAME}"
    return Sh(f'{quote(run.name)}-"$SLURM_ARRAY_TASK_ID"') if run.array else run.name


def _identity(run: Facts) -> str:
    """Return what stays the same over requeues, restarts and resuming: one run of the tracker."""
    if not run.token:
        return Sh(f'{_JOB}-"${{SLURM_ARRAY_TASK_ID:-0}}"')
    if run.trials is not None:
        return f"{run.trials.token or run.token}-${{DTSLURM_TRIAL}}"
    return Sh(f'{run.token}-"$SLURM_ARRAY_TASK_ID"') if run.array else run.token


def _group(options: Mapping[str, str], run: Facts) -> str:
    if "group" in options or not run.array:
        return options.get("group", "")
    token = run.trials.token if run.trials and run.trials.token else run.token
    return f"{run.name}-{token}" if token else run.name


def _tags(options: Mapping[str, str], run: Facts) -> list[str]:
    given = [tag.strip() for tag in options.get("tags", "").split(",") if tag.strip()]
    return [
        *given,
        f"cluster:{run.cluster}",
        *([f"branch:{run.git.branch}"] if run.git and run.git.branch else []),
    ]


def _wandb(options: Mapping[str, str], run: Facts) -> list[tuple[str, str]]:
    return [
        ("WANDB_NAME", _name(run)),
        ("WANDB_RUN_ID", _identity(run)),
        ("WANDB_RESUME", "allow"),
        ("WANDB_RUN_GROUP", _group(options, run)),
        ("WANDB_TAGS", ",".join(_tags(options, run))),
        ("WANDB_NOTES", Sh(f"{quote(f'Slurm job on {run.cluster}: ')}{_JOB}")),
        ("WANDB_PROJECT", options.get("project", "")),
        (_SERVER, options.get("uri", "")),
        ("WANDB_GIT_COMMIT", (run.git and run.git.commit) or ""),
        ("WANDB_DIR", Sh(_HERE)),
        ("WANDB_MODE", "offline" if _offline(options, run) else ""),
    ]


def _mlflow(options: Mapping[str, str], run: Facts) -> list[tuple[str, str]]:
    uri = "" if _offline(options, run) else options.get("uri", "")
    tags = {
        "mlflow.runName": "" if run.trials else run.name,
        "mlflow.source.git.commit": (run.git and run.git.commit) or "",
        "dtslurm.run": run.token,
        "dtslurm.cluster": run.cluster,
        "dtslurm.group": _group(options, run),
        "dtslurm.tags": options.get("tags", ""),
    }
    context = json.dumps({key: value for key, value in tags.items() if value})[:-1]
    job = Sh(f'{quote(context + ", " + json.dumps("slurm.job_id") + ": ")}\\"{_JOB}\\"' + quote("}"))
    return [
        ("MLFLOW_RUN_NAME", _name(run)),
        ("MLFLOW_EXPERIMENT_NAME", options.get("project", "")),
        ("MLFLOW_TRACKING_URI", uri or Sh(f"file://{_HERE}/mlruns")),
        # A database's locks do not hold on every parallel file system; MLflow 3 wants to hear that we know.
        ("MLFLOW_ALLOW_FILE_STORE", "" if uri else "true"),
        ("MLFLOW_RUN_CONTEXT", job),
    ]


def _tensorboard(options: Mapping[str, str], run: Facts) -> list[tuple[str, str]]:
    del options, run
    return [(name, Sh(f"{_HERE}/tensorboard")) for name in ("TENSORBOARD_LOGGING_DIR", "TENSORBOARD_LOGDIR")]


def _aim(options: Mapping[str, str], run: Facts) -> list[tuple[str, str]]:
    uri = "" if _offline(options, run) else options.get("uri", "")
    return [
        ("AIM_REPO", uri or Sh(f"{_HERE}/aim")),
        ("AIM_EXPERIMENT", options.get("project", "") or run.name),
        ("AIM_RUN_NAME", _name(run)),
        ("AIM_RUN_TAGS", ",".join(_tags(options, run))),
    ]


def _server(record: JobRecord) -> dict[str, str]:
    """Return what names the W&B server of a run; without it all would go to W&B's own, out of the house."""
    spec = RunDir(Path(record.folder)).document().get("spec")
    told = spec.get("env", []) if isinstance(spec, dict) else []
    return {name: value for name, value in told if name == _SERVER}


@dataclass(frozen=True)
class Synced:
    """What became of what trackers had kept: what was uploaded, and what has to be done by hand."""

    uploaded: tuple[Path, ...]
    left: tuple[str, ...]


def sync(context: Context, record: JobRecord, folder: Path) -> Synced:
    """Upload what W&B kept offline in a fetched run, to the run's server; say how the rest is looked at.

    Raises:
        RequestInvalid: there is something to upload, and ``wandb`` is not installed here.
        TransportError: it refused; its words are the evidence.
    """
    runs = sorted(folder.glob("**/wandb/offline-run-*"))
    server = {} if _SERVER in context.env or not runs else _server(record)
    for run in runs:
        try:
            done = context.transport.run(["wandb", "sync", "--", str(run)], timeout=_SYNC_S, env=server)
        except CommandNotFound:
            raise RequestInvalid(
                ["W&B runs are to be uploaded, and there is no wandb here"],
                hint=f"pip install wandb; then dtslurm fetch {record.job_id} --sync, or wandb sync {run}",
            ) from None
        if not done.ok:
            words = (done.stderr + done.stdout).splitlines()[-5:]
            raise TransportError(f"wandb sync {run} failed", evidence=words, hint="wandb login sets the key")
    left = [
        f"MLflow cannot upload a folder of its own: {_MLFLOW_UI} {path}"
        for path in sorted(folder.glob("**/mlruns"))
    ]
    left += [f"tensorboard --logdir {path}" for path in sorted(folder.glob("**/tensorboard"))]
    left += [f"aim up --repo {path}" for path in sorted(folder.glob("**/aim"))]
    return Synced(tuple(runs), tuple(left))
