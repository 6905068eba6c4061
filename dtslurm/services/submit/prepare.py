"""From a request to a frozen submission: check everything, report every problem at once, render."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from dtslurm.checks import job_checks
from dtslurm.config.job_file_detection import is_job_file
from dtslurm.errors import ProfileNotFound, RequestInvalid
from dtslurm.launch import registry
from dtslurm.launch.base import Launcher
from dtslurm.launch.detection.evidence import CONFIGURATIONS
from dtslurm.launch.layout import Resolution, resolve
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.job import JobSpec, Submission, TaskLayout
from dtslurm.model.paths import expanded
from dtslurm.model.values import dataclass
from dtslurm.render.script import RunPlace, render
from dtslurm.services.preflight.bad_nodes import exclude_bad_nodes
from dtslurm.services.preflight.containers import runtime_for
from dtslurm.services.request import experiment_trackers, staging
from dtslurm.services.request.code_snapshot import Code, code_of, git_state, script_digest
from dtslurm.services.request.environment import Environment, environment
from dtslurm.services.request.launcher_detection import cautions, suggested
from dtslurm.services.request.request import JobRequest
from dtslurm.services.request.run_paths import place, templates_of
from dtslurm.services.request.secrets import holds_password, looks_secret, name_problems, secrets_of
from dtslurm.services.request.spec import (
    hang_timeout,
    name_of,
    resources_of,
    spec_of,
    total_time,
    unset_variables,
    variables_of,
    with_signal_split,
)
from dtslurm.services.request.trust import stands_in, untrusted
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.git_tree import GitState
from dtslurm.suggestions import suggest_name

AUTO = "auto"  # as a launcher's name: the one that suits the script

_PASSED_S = 60.0

_WITHOUT_TORCH = {"horovod", "jax", "mpi", "tensorflow"}  # launchers whose environments may lack it


@dataclass(frozen=True)
class Prepared:
    """A checked and rendered request, and the cluster it is for.

    Attributes:
        code: what the job runs from, None where it runs in a folder as that is then.
        git: the commit that the code was at, None where that is not known.
        script_sha256: of a training script that the user may still edit, empty where there is none.
        secrets: values by name; in no text that is printed or queued.
        payload: further files of the run directory.
        transport: how the cluster is reached, as in `JobRecord`.
        request: what was asked for, without the project's defaults; what `resubmit` asks for again.
        folder: where it was asked.
        parent: the run that this one continues or repeats, if any.
        stage, stages, sweep: what it belongs to; see `JobRecord`.
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
            otherwise one for this submission, whose run directory is fixed.

    Raises:
        RequestInvalid: the request cannot work; every problem found is in it.
        ProfileNotFound, ProfileInvalid: so with the cluster's profile.
        RenderError: a template is wrong.
    """
    problems: list[str] = []
    asked, request = request, with_signal_split(request.with_defaults(context.project), problems)
    cluster = _cluster(context, request, problems, standalone)
    remarks = untrusted(context) + stands_in(context, cluster)
    wanted = request.launcher or (cluster.profile.default_launcher if cluster else None)
    launcher = _launcher(wanted, problems)
    resources = resources_of(request, problems)
    configs = launcher.configs if launcher is not None else CONFIGURATIONS if wanted == AUTO else ()
    problems += _script_problems(context, request, configs)
    problems += _option_problems(context, request, cluster, standalone=standalone)
    problems += name_problems(request.secrets, _shown_variables(context, request, cluster))
    values = secrets_of(context, request.secrets, problems) if not standalone else {}
    far = cluster is not None and cluster.remote
    env = Environment() if far else environment(context, request, cluster.profile if cluster else None)
    problems += env.problems
    if cluster is None:
        raise RequestInvalid(problems)
    where = place(context, cluster, request, name_of(request), standalone=standalone)
    if far and not standalone and not problems:
        _start_submission_worker(context, cluster, request)
    code = code_of(context, cluster, request, where, problems, remarks) if not standalone else None

    profile = cluster.profile
    layout = resolve(resources, profile, one_process=launcher is not None and launcher.one_process)
    advice: Sequence[str] = ()
    if launcher is None and wanted in {None, AUTO}:
        launcher, advice = suggested(context, request, layout, auto=wanted == AUTO)
    if launcher is not None and wanted == AUTO:
        layout = resolve(resources, profile, one_process=launcher.one_process)
        problems += set(_script_problems(context, request, launcher.configs)).difference(problems)
    problems += layout.problems
    request = _with_script_there(context, cluster, request, code, where, problems)
    fitting = None if standalone or problems else layout.layout
    resources = exclude_bad_nodes(context, cluster, request, resources, fitting, remarks)
    spec = spec_of(context, cluster, request, resources, launcher, code, env.folder)
    git = git_state(context, cluster, code, spec.work_dir) if not standalone else None
    spec = experiment_trackers.tracked(request, spec, cluster, git, "" if standalone else where.token)
    launcher = launcher.chosen(spec) if launcher is not None else None
    problems += staging.problems(request, spec, profile)
    problems += _find_conflicts(spec, profile, layout.layout, launcher, so_far=problems)
    runtime = runtime_for(
        context, spec, profile, layout.layout, problems, here=not standalone and not cluster.remote
    )
    if problems or layout.layout is None or launcher is None:
        raise RequestInvalid(problems)
    if wanted not in {None, AUTO}:
        advice = cautions(context, request, layout.layout, launcher)

    submission = render(
        spec,
        profile,
        layout.layout,
        launcher,
        where,
        templates=templates_of(context, request),
        runtime=runtime,
    )
    told = (
        *(*advice, *env.notices, *layout.notices, *remarks, *(code.notices if code else ())),
        *launcher.notices(spec),
        *job_checks.lead_notices(request.signal, request.signal_before, layout.layout.time),
    )
    submission = replace(
        submission,
        notices=(*told, *_notices(spec, layout, profile, submitted=not standalone)),
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
        secrets=values,
        transport=request.transport or cluster.way,
        payload=request.payload,
        request=asked,
        folder=str(context.cwd),
    )


def _start_submission_worker(context: Context, cluster: ActiveCluster, request: JobRequest) -> None:
    """Start what takes the run in on the far side, while the code is looked through here."""
    if request.once:  # of many under one key all but one would hold a session of the host's few for nothing
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
    """Return what of a job its site and its launcher do not take; the latter sees only what is right."""
    found = [*job_checks.sbatch_options(spec, layout), *job_checks.site(spec, profile, layout)]
    if launcher is not None:
        found += launcher.check_options(spec)
        if layout is not None:
            found += job_checks.launchers_variables(spec, profile, layout, launcher)
        if layout is not None and not found and not so_far:
            found += launcher.check(spec, layout)
    if spec.fabric_check and layout is not None and layout.world_size == 1:
        found.append("--fabric-check measures between ranks, and this job has one")
    return found


def _add_scheduler_warnings(
    context: Context, submission: Submission, cluster: ActiveCluster, *, check_there: bool
) -> Submission:
    """Return the submission with its scheduler's notices.

    Raises:
        RequestInvalid: the scheduler would refuse it, or something it needs is not there.
    """
    told = [*submission.notices, *cluster.scheduler.notices(submission)]
    if check_there:
        told += _run_preflight(context, submission, cluster)
    return replace(submission, notices=tuple(told))


def _run_preflight(context: Context, submission: Submission, cluster: ActiveCluster) -> list[str]:
    """Return what is noticed of a submission; what passed in the last minute is not looked at again.

    Raises:
        RequestInvalid: as `_add_scheduler_warnings` does.
    """
    same = submission.script.replace(submission.run_dir, "").replace(submission.token, "")
    key = hashlib.sha256(f"{cluster.name}\n{same}".encode("utf-8", "surrogateescape")).hexdigest()
    at, seen = context.passed.get(key, (float("-inf"), []))
    if 0 <= context.clock() - at < _PASSED_S:
        return seen
    from dtslurm.services.preflight.preflight import preflight

    refused = cluster.scheduler.validate(submission)
    findings = preflight(context, cluster, submission)
    problems = [*refused, *findings.problems, *findings.refusals]
    if problems:
        final = findings.refusals or (refused and cluster.profile.scheduler == "local")
        raise RequestInvalid(
            problems, hint="" if final else "--no-check submits the job without these checks"
        )
    context.passed[key] = context.clock(), findings.notices
    return findings.notices


def _cluster(
    context: Context, request: JobRequest, problems: list[str], standalone: bool
) -> ActiveCluster | None:
    """Return the cluster; live values are asked for unless the profile alone can answer."""
    try:
        cluster = context.cluster(request.cluster, request.transport)
        static = standalone or request.no_check
        if static and cluster.profile.scheduler == "slurm" and cluster.profile.node_types:
            return cluster
        return context.live_cluster(request.cluster, request.transport)
    except ProfileNotFound as error:
        problems += [f"{problem} ({error.hint})" for problem in error.problems]
        return None


def _launcher(name: str | None, problems: list[str]) -> Launcher | None:
    if name is None or name == AUTO:
        return None
    try:
        return registry.load(name)
    except RequestInvalid as error:
        problems += error.problems
        return None


def _script_problems(context: Context, request: JobRequest, configs: tuple[str, ...]) -> list[str]:
    """Return why the training script cannot be run from here."""
    path, written = context.cwd / request.script, request.script
    if not written:
        return ["no script: its name is empty"]
    if request.module or written in request.payload:
        return []
    if not path.exists():
        return [f"no such script: {written}{_similar(path)}"]
    if not path.is_file():
        return [
            f"{written} is a folder, not a script" if path.is_dir() else f"{written} is not a regular file"
        ]
    if not os.access(path, os.R_OK):
        return [f"{written} cannot be read: permission denied"]
    if path.suffix in {".yaml", ".yml"} and path.suffix not in configs:
        return [_no_script(path, written)]
    if path.suffix not in {".py", *configs} and not os.access(path, os.X_OK):
        return [f"{written} is neither a .py file nor executable; chmod +x it, or give the .py file"]
    return []


def _no_script(path: Path, written: str) -> str:
    """Return why a YAML file is not run; a job file gets here from Python alone."""
    if is_job_file(path):
        return f"{written} is a job file: dtslurm submit takes it; from Python name its script and options"
    return f"{written} is no job file: none of its lines begins with script:, extends: or stages:"


def _with_script_there(
    context: Context,
    cluster: ActiveCluster,
    request: JobRequest,
    code: Code | None,
    where: RunPlace,
    problems: list[str],
) -> JobRequest:
    """Return the request with its script as seen from the job's work dir, where only the snapshot is."""
    if request.script in request.payload:
        return replace(request, script=f"{where.directory}/{request.script}")
    if code is None or not cluster.remote or request.module:
        return request
    script = request.script
    path = context.cwd.resolve() / expanded(script)
    if not code.snapshot.problems and path.is_file() and not code.snapshot.holds(path):
        problems.append(
            f"{script} does not travel with the code below {code.snapshot.root}; go to its folder, "
            "name it by --code-include, or give --chdir and a path on the cluster"
        )
    if script.startswith("/"):
        return replace(request, script=os.path.relpath(path, context.cwd.resolve()))
    return request


def _similar(path: Path) -> str:
    try:
        names = [item.name for item in path.parent.iterdir() if item.is_file()]
    except OSError:
        return f" (there is no folder {path.parent})"
    return suggest_name(path.name, names)


def _option_problems(
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
        ),  # sbatch --array may come
        *job_checks.dependency(request.dependency),
        *job_checks.signals(request.signal or "USR2", request.signal_before),
    ]
    if request.once is not None and not request.once.strip():
        problems.append(
            "--once has an empty key (is a variable unset?): each request would make a job; give it a key"
        )
    hang_timeout(request.hang_timeout, problems)
    total_time(request.total_time, problems)
    problems += [f"--tracking {text!r}: write key=value" for text in request.tracking if "=" not in text]
    problems += experiment_trackers.problems(request)
    if request.template is not None and not (context.cwd / request.template).is_file():
        problems.append(f"no such template: {request.template}")
    return problems


def _shown_variables(context: Context, request: JobRequest, cluster: ActiveCluster | None) -> dict[str, str]:
    """Return what sets a variable in the script itself, by the variable's name."""
    site = cluster.profile.environment.variables if cluster else {}
    return {
        **dict.fromkeys(site, "environment.variables of the cluster's profile"),
        **{name: "--env" for name, _ in variables_of(context, request)},
    }


def _notices(spec: JobSpec, resolution: Resolution, profile: ClusterProfile, *, submitted: bool) -> list[str]:
    notices = []
    if resolution.layout and resolution.layout.time is None:
        local = profile.scheduler == "local"
        limit = "the job has no time limit" if local else "the partition's default limit applies"
        notices.append(f"no --time given: {limit}")
    notices += [
        f"--env {name} is written into the script; --secret {name} keeps its value out of it"
        for name, _ in spec.env
        if looks_secret(name)
    ]
    notices += [
        f"{name} is an address with a password in it, which is written into the script; "
        f"--secret {name} keeps it out of it"
        for name, value in spec.env
        if holds_password(value) and not looks_secret(name)
    ]
    if spec.secrets and not submitted and profile.slurm.export != "forbidden":
        names = ",".join(spec.secrets)
        notices.append(f"secrets are not in the script: export them, and submit with sbatch --export={names}")
    if spec.supervised and not submitted:
        notices.append("restarts need the supervisor that submit brings; by plain sbatch it is one attempt")
    notices += job_checks.constraint_notices(spec, profile)
    notices += staging.notices(spec, profile, submitted=submitted)
    if spec.template:
        notices.append(f"template {spec.template} is used; a template runs as you")
    if spec.fabric_check and spec.launcher in _WITHOUT_TORCH:
        notices.append(f"--fabric-check measures with torch: {spec.python} must have it on the nodes")
    if spec.fabric_check and not (profile.fabric and profile.fabric.expected_busbw_gbs):
        notices.append(
            "--fabric-check only tells the bandwidth: the profile has no fabric.expected_busbw_gbs"
        )
    return notices
