"""Turn a request into a frozen submission: check it, report all problems at once, and render it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import NamedTuple

from dtslurm.checks import job_checks
from dtslurm.config.job_file_detection import is_job_file
from dtslurm.errors import ProfileNotFound, RequestInvalid
from dtslurm.launch import registry
from dtslurm.launch.base import Launcher
from dtslurm.launch.layout import Resolution, resolve
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.diagnostics import Checked, Diagnostics, errors
from dtslurm.model.jobs.job import JobSpec, Resources, Submission, TaskLayout
from dtslurm.model.paths import expand_home
from dtslurm.model.values import dataclass
from dtslurm.render.script import RunPlace, render
from dtslurm.render.text import insert_dependency
from dtslurm.services.preflight.bad_nodes import choose_exclusion
from dtslurm.services.preflight.containers import runtime_for
from dtslurm.services.request import experiment_trackers, staging
from dtslurm.services.request.code_snapshot import Code, code_of, git_state, script_digest
from dtslurm.services.request.launcher_detection import cautions, suggest_launcher
from dtslurm.services.request.request import JobRequest
from dtslurm.services.request.run_paths import choose_run_place, templates_of
from dtslurm.services.request.spec import (
    find_environment,
    name_of,
    parse_options,
    secrets_of,
    spec_of,
    unset_variables,
    variables_of,
    with_signal_split,
)
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.git_tree import GitState
from dtslurm.suggestions import suggest_name

AUTO = "auto"  # launcher name that selects the launcher by the training script

_PREFLIGHT_REUSE_S = 60.0

_WITHOUT_TORCH = {"horovod", "jax", "mpi", "tensorflow"}  # launchers whose environments may lack torch


@dataclass(frozen=True)
class Prepared:
    """A checked and rendered request, with its cluster.

    Attributes:
        code: the code snapshot that the job runs, None if the job runs from a folder as it is at the start.
        git: the git commit of the code, None if unknown.
        script_sha256: SHA-256 of a training script that the user may still edit, empty if there is none.
        secrets: values of secrets by name; they appear in no text that is printed or queued.
        payload: additional files of the run directory, by relative path.
        transport: the transport to the cluster, as in `JobRecord`.
        request: the original request without the project's defaults, which `resubmit` submits again.
        folder: the folder in which the request was made.
        parent: the run that this run continues or repeats, if any.
        stage, stages, sweep: the stage or sweep that the run belongs to; see `JobRecord`.
    """

    submission: Submission
    cluster: ActiveCluster
    code: Code | None = None
    git: GitState | None = None
    script_sha256: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    transport: str = ""
    payload: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    request: JobRequest | None = None
    folder: str = ""
    parent: str = ""
    stage: str = ""
    stages: Mapping[str, str] = field(default_factory=dict)
    sweep: str = ""


def prepare(context: Context, request: JobRequest, *, standalone: bool) -> Prepared:
    """Check a request and render it.

    Args:
        standalone: render a script for plain ``sbatch``, whose run directory is named after its job id;
            otherwise render a script for this submission only, whose run directory is fixed.

    Raises:
        RequestInvalid: the request is invalid; the error lists every problem.
        ProfileNotFound, ProfileInvalid: the cluster profile is missing or invalid.
        RenderError: a template is invalid.
    """
    diagnostics, original_request = Diagnostics(), request
    request = diagnostics.take(with_signal_split(request.with_defaults(context.project)))
    cluster = diagnostics.take(_find_cluster(context, request, standalone=standalone))
    diagnostics.note(*context.check_project(cluster))
    if cluster is not None and not request.launcher:
        request = replace(request, launcher=cluster.profile.default_launcher)
    launcher = diagnostics.take(_load_launcher(request.launcher))
    parsed = diagnostics.take(parse_options(request))
    file_problems = _check_script_file(context, request)
    diagnostics.error(
        *file_problems,
        *_check_options(context, request, cluster, standalone=standalone),
        *job_checks.secret_names(request.secrets, _plain_variables(context, request, cluster)),
    )
    secret_values = {} if standalone else diagnostics.take(secrets_of(context, request.secrets))
    is_remote = cluster is not None and cluster.remote
    env: Checked[str | None] = Checked(None)
    if not is_remote:
        env = find_environment(context, request, cluster.profile if cluster else None)
        diagnostics.error(*env.problems)
    if cluster is None:
        raise RequestInvalid(diagnostics.problems)
    run_place = choose_run_place(context, cluster, request, name_of(request), standalone=standalone)
    if is_remote and not standalone and not diagnostics.problems:
        _start_submission_worker(context, cluster, request)
    code = None if standalone else diagnostics.take(code_of(context, cluster, request, run_place))

    profile = cluster.profile
    launcher, layout, advice = _choose_launcher(context, request, parsed.resources, profile, launcher)
    if launcher is not None and not file_problems:
        diagnostics.error(*_check_script_type(context, request, launcher.configs))
    diagnostics.error(*layout.problems)
    request = diagnostics.take(_with_script_in_job(context, cluster, request, code, run_place))
    if layout.layout is not None and not standalone and not diagnostics.problems:
        exclude = diagnostics.take(
            choose_exclusion(context, cluster, request, parsed.resources, layout.layout)
        )
        parsed = replace(parsed, resources=replace(parsed.resources, exclude=exclude))
    spec = spec_of(context, cluster, request, parsed, launcher, code, env.value)
    git = git_state(context, cluster, code, spec.work_dir) if not standalone else None
    spec = experiment_trackers.add_tracker_variables(
        request, spec, cluster, git, "" if standalone else run_place.token
    )
    launcher = launcher.chosen(spec) if launcher is not None else None
    diagnostics.error(*staging.problems(request, spec, profile))
    diagnostics.error(*_find_conflicts(spec, profile, layout.layout, launcher, so_far=diagnostics.problems))
    runtime = diagnostics.take(
        runtime_for(context, spec, profile, layout.layout, here=not standalone and not cluster.remote)
    )
    if diagnostics.problems or layout.layout is None or launcher is None:
        raise RequestInvalid(diagnostics.problems)
    if request.launcher not in {None, AUTO}:
        advice = cautions(context, request, layout.layout, launcher)

    submission = render(
        spec,
        profile,
        layout.layout,
        launcher,
        run_place,
        templates=templates_of(context, request),
        runtime=runtime,
    )
    notices = (
        *(*advice, *env.notices, *layout.notices, *diagnostics.notices),
        *launcher.notices(spec),
        *job_checks.lead_notices(request.signal, request.signal_before, layout.layout.time),
    )
    submission = replace(
        submission,
        notices=(*notices, *_collect_notices(spec, layout, profile, submitted=not standalone)),
        origins={**cluster.origins, "cluster": cluster.chosen_by, **request.origins},
    )
    if not standalone:
        submission = _add_scheduler_warnings(context, submission, cluster, check_there=not request.no_check)
    return Prepared(
        submission=submission,
        cluster=cluster,
        code=code,
        git=git,
        script_sha256=script_digest(cluster, code, spec) if not standalone else "",
        secrets=secret_values,
        transport=request.transport or cluster.way,
        payload=request.payload,
        request=original_request,
        folder=str(context.cwd),
    )


def add_dependency(prepared: Prepared, after: str) -> Prepared:
    """Return the job with a dependency; Slurm cancels the job if a required dependency fails.

    Args:
        after: sbatch's dependency expression, such as ``afterok:17:18``; empty for no dependency.
    """
    if not after:
        return prepared
    script = insert_dependency(prepared.submission.script, after)
    return replace(prepared, submission=replace(prepared.submission, script=script))


def _start_submission_worker(context: Context, cluster: ActiveCluster, request: JobRequest) -> None:
    """Start the worker program on the login node that receives the run, while the code is scanned here."""
    if request.once:  # of many clients with one key, all but one would occupy an SSH session for nothing
        return
    from dtslurm.services.wiring.submission_worker import submission_worker_of

    submission_worker_of(context, cluster).begin()


def _find_conflicts(
    spec: JobSpec,
    profile: ClusterProfile,
    layout: TaskLayout | None,
    launcher: Launcher | None,
    *,
    so_far: Sequence[str],
) -> list[str]:
    """Return the conflicts of a job with its cluster and launcher.

    The launcher checks the whole job only if no other problem was diagnostics.
    """
    conflicts = [
        *job_checks.sbatch_options(spec, layout),
        *job_checks.find_rule_conflicts(spec, profile, layout),
    ]
    if launcher is not None:
        conflicts += launcher.check_options(spec)
        if layout is not None:
            conflicts += job_checks.launchers_variables(spec, profile, layout, launcher)
        if layout is not None and not conflicts and not so_far:
            conflicts += launcher.check(spec, layout)
    if spec.fabric_check and layout is not None and layout.world_size == 1:
        conflicts.append("--fabric-check measures the network between ranks, and this job has only one rank")
    return conflicts


def _add_scheduler_warnings(
    context: Context, submission: Submission, cluster: ActiveCluster, *, check_there: bool
) -> Submission:
    """Return the submission with the notices of its scheduler and of the preflight checks.

    Raises:
        RequestInvalid: the scheduler would reject the job, or something that the job needs is missing.
    """
    notices = [*submission.notices, *cluster.scheduler.notices(submission)]
    if check_there:
        notices += _run_preflight(context, submission, cluster)
    return replace(submission, notices=tuple(notices))


def _run_preflight(context: Context, submission: Submission, cluster: ActiveCluster) -> list[str]:
    """Check a submission on the cluster and return the notices; reuse checks that passed in the last minute.

    Raises:
        RequestInvalid: as `_add_scheduler_warnings` does.
    """
    comparable_script = submission.script.replace(submission.run_dir, "").replace(submission.token, "")
    key = hashlib.sha256(
        f"{cluster.name}\n{comparable_script}".encode("utf-8", "surrogateescape")
    ).hexdigest()
    checked_at, cached_notices = context.passed.get(key, (float("-inf"), []))
    if 0 <= context.clock() - checked_at < _PREFLIGHT_REUSE_S:
        return cached_notices
    from dtslurm.services.preflight.preflight import preflight

    scheduler_problems = cluster.scheduler.validate(submission)
    findings = preflight(context, cluster, submission)
    problems = [*scheduler_problems, *findings.problems, *findings.refusals]
    if problems:
        is_final = findings.refusals or (scheduler_problems and cluster.profile.scheduler == "local")
        raise RequestInvalid(
            problems, hint="" if is_final else "--no-check submits the job without these checks"
        )
    context.passed[key] = context.clock(), findings.notices
    return findings.notices


def _find_cluster(
    context: Context, request: JobRequest, *, standalone: bool
) -> Checked[ActiveCluster | None]:
    """Return the cluster, with live values from Slurm unless the profile alone is sufficient."""
    try:
        cluster = context.cluster(request.cluster, request.transport)
        is_static = standalone or request.no_check
        if is_static and cluster.profile.scheduler == "slurm" and cluster.profile.node_types:
            return Checked(cluster)
        return Checked(context.live_cluster(request.cluster, request.transport))
    except ProfileNotFound as error:
        return Checked(None, errors(error.problems, error.hint))


def _load_launcher(name: str | None) -> Checked[Launcher | None]:
    if name is None or name == AUTO:
        return Checked(None)
    try:
        return Checked(registry.load(name))
    except RequestInvalid as error:
        return Checked(None, errors(error.problems))


class _LauncherChoice(NamedTuple):
    """The launcher of a request, None if the named one does not exist, and messages about the choice."""

    launcher: Launcher | None
    layout: Resolution
    advice: Sequence[str]


def _choose_launcher(
    context: Context,
    request: JobRequest,
    resources: Resources,
    profile: ClusterProfile,
    launcher: Launcher | None,
) -> _LauncherChoice:
    """Return the named launcher with the layout of its ranks; detect a launcher if none is named."""
    layout = resolve(resources, profile, one_process=launcher is not None and launcher.one_process)
    if launcher is not None or request.launcher not in {None, AUTO}:
        return _LauncherChoice(launcher, layout, ())
    detected, advice = suggest_launcher(context, request, layout, auto=request.launcher == AUTO)
    if request.launcher == AUTO:
        layout = resolve(resources, profile, one_process=detected.one_process)
    return _LauncherChoice(detected, layout, advice)


def _check_script_file(context: Context, request: JobRequest) -> list[str]:
    """Return the reason why the training script cannot be read."""
    script_path, script_name = context.cwd / request.script, request.script
    if not script_name:
        return ["the name of the script is empty"]
    if request.module or script_name in request.payload:
        return []
    if not script_path.exists():
        return [f"script {script_name} does not exist{_suggest_script(script_path)}"]
    if not script_path.is_file():
        return [
            f"{script_name} is a folder, not a script"
            if script_path.is_dir()
            else f"{script_name} is not a regular file"
        ]
    if not os.access(script_path, os.R_OK):
        return [f"{script_name} cannot be read: permission denied"]
    return []


def _check_script_type(context: Context, request: JobRequest, configs: tuple[str, ...]) -> list[str]:
    """Return the reason why the launcher, which also starts from ``configs`` files, cannot run the script."""
    script_path, script_name = context.cwd / request.script, request.script
    if request.module or script_name in request.payload:
        return []
    if script_path.suffix in {".yaml", ".yml"} and script_path.suffix not in configs:
        return [_explain_yaml_file(script_path, script_name)]
    if script_path.suffix not in {".py", *configs} and not os.access(script_path, os.X_OK):
        return [f"{script_name} is neither a .py file nor executable; chmod +x it, or give the .py file"]
    return []


def _explain_yaml_file(path: Path, written: str) -> str:
    """Explain why a YAML file is no training script; only Python callers pass a job file here."""
    if is_job_file(path):
        return (
            f"{written} is a job file: submit it with dtslurm submit, or give its script and options in "
            "Python"
        )
    return f"{written} is not a job file: no line begins with script:, extends: or stages:"


def _with_script_in_job(
    context: Context,
    cluster: ActiveCluster,
    request: JobRequest,
    code: Code | None,
    where: RunPlace,
) -> Checked[JobRequest]:
    """Return the request with the script's path in the job, which sees only the snapshot."""
    if request.script in request.payload:
        return Checked(replace(request, script=f"{where.directory}/{request.script}"))
    if code is None or not cluster.remote or request.module:
        return Checked(request)
    script, problems = request.script, []
    path = context.cwd.resolve() / expand_home(script)
    if not code.snapshot.problems and path.is_file() and not code.snapshot.holds(path):
        problems.append(
            f"{script} is not copied with the code of {code.snapshot.root}; change to its folder, "
            "include it with --code-include, or give --chdir and a path on the cluster"
        )
    if script.startswith("/"):
        request = replace(request, script=os.path.relpath(path, context.cwd.resolve()))
    return Checked(request, errors(problems))


def _suggest_script(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f" (folder {path.parent} does not exist)"
    return suggest_name(path.name, names)


def _check_options(
    context: Context, request: JobRequest, cluster: ActiveCluster | None, *, standalone: bool
) -> list[str]:
    limit = cluster.profile.slurm.max_array_size if cluster else None
    problems = [
        *job_checks.job_name(name_of(request)),
        *job_checks.variables(variables_of(context, request)),
        *unset_variables(context, request),
        *job_checks.array(request.array, limit),
        *(
            [] if standalone else job_checks.job_values(request.args, request.array)
        ),  # the user may pass --array to sbatch
        *job_checks.dependency(request.dependency),
        *job_checks.signals(request.signal or "USR2", request.signal_before),
    ]
    if request.once is not None and not request.once.strip():
        problems.append(
            "--once has an empty key (is a variable unset?), and each request would create a job; give a key"
        )
    problems += [f"--tracking {text!r}: write key=value" for text in request.tracking if "=" not in text]
    problems += experiment_trackers.problems(request)
    if request.template is not None and not (context.cwd / request.template).is_file():
        problems.append(f"template {request.template} does not exist")
    return problems


def _plain_variables(context: Context, request: JobRequest, cluster: ActiveCluster | None) -> dict[str, str]:
    """Return the source of each variable that the script sets in plain text, by variable name."""
    profile_variables = cluster.profile.environment.variables if cluster else {}
    return {
        **dict.fromkeys(profile_variables, "environment.variables of the cluster's profile"),
        **{name: "--env" for name, _ in variables_of(context, request)},
    }


def _collect_notices(
    spec: JobSpec, resolution: Resolution, profile: ClusterProfile, *, submitted: bool
) -> list[str]:
    notices = []
    if resolution.layout and resolution.layout.time is None:
        local = profile.scheduler == "local"
        limit = "the job has no time limit" if local else "the partition's default limit applies"
        notices.append(f"no --time given: {limit}")
    notices += job_checks.secret_notices(spec)
    if spec.secrets and not submitted and profile.slurm.export != "forbidden":
        names = ",".join(spec.secrets)
        notices.append(
            f"secrets are not in the script: export these variables, and submit with sbatch --export={names}"
        )
    if spec.supervised and not submitted:
        notices.append(
            "restarts need the supervisor, which only dtslurm submit installs; with plain sbatch the job "
            "is a single attempt"
        )
    notices += job_checks.constraint_notices(spec, profile)
    notices += staging.notices(spec, profile, is_submitted=submitted)
    if spec.template:
        notices.append(f"template {spec.template} is used; its commands run with your rights")
    if spec.fabric_check and spec.launcher in _WITHOUT_TORCH:
        notices.append(f"--fabric-check needs torch: {spec.python} must have it on the nodes")
    if spec.fabric_check and not (profile.fabric and profile.fabric.expected_busbw_gbs):
        notices.append(
            "--fabric-check only reports the bandwidth, because the profile has no fabric.expected_busbw_gbs"
        )
    return notices
