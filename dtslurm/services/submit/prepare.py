"""Turn a request into a frozen submission: check it, report all problems at once, and render it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import NamedTuple

from dtslurm.errors import ProfileNotFound, RequestInvalid
from dtslurm.launch import registry
from dtslurm.launch.base import Launcher
from dtslurm.launch.layout import Resolution, resolve
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.diagnostics import Checked, Diagnostics, errors
from dtslurm.model.jobs.job import Resources, Submission, TaskLayout
from dtslurm.model.paths import expand_home
from dtslurm.model.values import dataclass
from dtslurm.render.script import RunPlace, Site, render
from dtslurm.render.text import insert_dependency
from dtslurm.services.preflight.bad_nodes import choose_exclusion
from dtslurm.services.preflight.containers import runtime_for
from dtslurm.services.preflight.notifications import NotificationPlan, choose_notifications
from dtslurm.services.request import experiment_trackers, launcher_files
from dtslurm.services.request.code_snapshot import Code, code_of, git_state, script_digest
from dtslurm.services.request.launcher_detection import cautions, suggest_launcher
from dtslurm.services.request.request import JobRequest
from dtslurm.services.request.request_checks import (
    check_options,
    check_script_file,
    check_script_type,
    collect_notices,
    find_conflicts,
)
from dtslurm.services.request.run_paths import choose_run_place, templates_of
from dtslurm.services.request.spec import (
    ParsedOptions,
    find_environment,
    name_of,
    parse_options,
    secrets_of,
    spec_of,
    with_launcher,
    with_signal_split,
)
from dtslurm.services.submit.allocation import choose_nodes, fit_into_allocation
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.git_tree import GitState

AUTO = "auto"  # launcher name that selects the launcher by the training script

_PREFLIGHT_REUSE_S = 60.0


@dataclass(frozen=True)
class Prepared:
    """A checked and rendered request, with its cluster.

    Attributes:
        code: the code snapshot that the job runs, None if the job runs from a folder as it is at the start.
        git: the git commit of the code, None if unknown.
        script_sha256: SHA-256 of a training script that the user may still edit, empty if there is none.
        secrets: values of secrets by name; they appear in no text that is printed or queued.
        notifications: the addresses of messages about the run, None if there are none.
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
    notifications: NotificationPlan | None = field(default=None, repr=False)
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
    request, held = diagnostics.take(fit_into_allocation(request, cluster))
    if cluster is not None:
        request = diagnostics.take(_with_values_of_profile(request, cluster.profile))
    launcher = diagnostics.take(_load_launcher(request.launcher))
    parsed = diagnostics.take(parse_options(request))
    file_problems = check_script_file(context, request)
    diagnostics.add(file_problems)
    diagnostics.add(check_options(context, request, cluster, standalone=standalone))
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
        diagnostics.add(check_script_type(context, request, launcher.configs))
    diagnostics.error(*layout.problems)
    request = diagnostics.take(_with_script_in_job(context, cluster, request, code, run_place))
    if layout.layout is not None and not standalone and not diagnostics.problems:
        parsed = diagnostics.take(_exclude_bad_nodes(context, cluster, request, parsed, layout.layout))
    spec = with_launcher(spec_of(context, cluster, request, parsed, code, env.value), request, launcher)
    spec = diagnostics.take(choose_nodes(spec, held, layout.layout))
    git = git_state(context, cluster, code, spec.work_dir) if not standalone else None
    spec = experiment_trackers.add_tracker_variables(
        request, spec, cluster, git, "" if standalone else run_place.token
    )
    launcher = launcher.chosen(spec) if launcher is not None else None
    diagnostics.add(
        [
            *find_conflicts(
                request, spec, profile, layout.layout, launcher, is_valid=not diagnostics.problems
            ),
            *launcher_files.find_unsent(context, cluster, request, spec, code),
        ]
    )
    runtime = diagnostics.take(
        runtime_for(context, spec, profile, layout.layout, here=not standalone and not cluster.remote)
    )
    notifications = diagnostics.take(
        choose_notifications(
            context, cluster, request, spec, is_valid=not (diagnostics.problems or standalone)
        )
    )
    if diagnostics.problems or layout.layout is None or launcher is None:
        raise RequestInvalid(diagnostics.problems)
    advice = (
        advice if request.launcher in {None, AUTO} else cautions(context, request, layout.layout, launcher)
    )

    submission = render(
        spec, Site(profile, templates_of(context, request), runtime), layout.layout, launcher, run_place
    )
    notices = [*advice, *env.notices, *layout.notices, *diagnostics.notices, *launcher.notices(spec)]
    notices += map(str, collect_notices(request, spec, layout, profile, submitted=not standalone))
    submission = replace(
        submission,
        notices=tuple(notices),
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
        notifications=notifications,
        transport=request.transport or cluster.automatic_transport,
        payload=request.payload,
        request=original_request,
        folder=str(context.cwd),
    )


def _with_values_of_profile(request: JobRequest, profile: ClusterProfile) -> Checked[JobRequest]:
    """Return a request with the launcher of a profile if it has none, and with the profile's addresses."""
    diagnostics = Diagnostics()
    request = replace(request, launcher=request.launcher or profile.default_launcher)
    if profile.notify and request.array is not None:
        diagnostics.note(f"job arrays send no messages: notify of profile {profile.name} has no effect")
    elif request.idle_limit is None:  # an allocation runs no script
        request = replace(request, notify=(*profile.notify, *request.notify))
    return Checked(request, diagnostics.diagnostics)


def _exclude_bad_nodes(
    context: Context,
    cluster: ActiveCluster,
    request: JobRequest,
    parsed_options: ParsedOptions,
    layout: TaskLayout,
) -> Checked[ParsedOptions]:
    """Return the options with the nodes of the bad-node list excluded; an allocation has its nodes."""
    if request.allocation is not None:
        return Checked(parsed_options)
    resources = parsed_options.resources
    exclusion = choose_exclusion(context, cluster, request, resources, layout)
    excluding = replace(parsed_options, resources=replace(resources, exclude=exclusion.value))
    return Checked(excluding, exclusion.diagnostics)


def add_dependency(prepared: Prepared, dependency: str) -> Prepared:
    """Return the job with a dependency; Slurm cancels the job if a required dependency fails.

    Args:
        dependency: sbatch's dependency expression, such as ``afterok:17:18``; empty for no dependency.
    """
    if not dependency:
        return prepared
    script = insert_dependency(prepared.submission.script, dependency)
    return replace(prepared, submission=replace(prepared.submission, script=script))


def _start_submission_worker(context: Context, cluster: ActiveCluster, request: JobRequest) -> None:
    """Start the worker program on the login node that receives the run, while the code is scanned here."""
    if request.once:  # of many clients with one key, all but one would occupy an SSH session for nothing
        return
    from dtslurm.services.wiring.submission_worker import submission_worker_of

    submission_worker_of(context, cluster).begin()


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
    checked_at, cached_notices = context.preflight_results.get(key, (float("-inf"), []))
    if 0 <= context.clock() - checked_at < _PREFLIGHT_REUSE_S:
        return cached_notices
    from dtslurm.services.preflight.preflight import preflight

    scheduler_problems = [] if submission.allocation else cluster.scheduler.validate(submission)
    findings = preflight(context, cluster, submission)
    problems = [*scheduler_problems, *findings.problems, *findings.refusals]
    if problems:
        is_final = findings.refusals or (scheduler_problems and cluster.profile.scheduler == "local")
        raise RequestInvalid(
            problems, hint="" if is_final else "--no-check submits the job without these checks"
        )
    context.preflight_results[key] = context.clock(), findings.notices
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


def _with_script_in_job(
    context: Context,
    cluster: ActiveCluster,
    request: JobRequest,
    code: Code | None,
    run_place: RunPlace,
) -> Checked[JobRequest]:
    """Return the request with the script's path in the job, which sees only the snapshot."""
    if request.script in request.payload:
        return Checked(replace(request, script=f"{run_place.directory}/{request.script}"))
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
