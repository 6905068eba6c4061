"""Checks of a request from values: what prevents the job, and what the user should know."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from dtslurm.checks import job_checks, role_checks
from dtslurm.config.job_files.detection import is_job_file
from dtslurm.launch.base import Launcher
from dtslurm.launch.layout import Resolution
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.diagnostics import Diagnostic, errors, notes
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.services.request import experiment_trackers, staging
from dtslurm.services.request.request import JobRequest
from dtslurm.services.request.spec import name_of, unset_variables, variables_of
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.slurm.script import option_words
from dtslurm.suggestions import suggest_name

_LONGEST_HEADER = 65536  # bytes of a script
_WITHOUT_TORCH = {"horovod", "jax", "mpi", "tensorflow"}  # launchers whose environments may lack torch


def check_script_file(context: Context, request: JobRequest) -> Sequence[Diagnostic]:
    """Return the reason why the training script cannot be read."""
    script_path, script_name = context.cwd / request.script, request.script
    problem = ""
    if not script_name:
        problem = "the name of the script is empty"
    elif request.module or script_name in request.payload:
        return ()
    elif not script_path.exists():
        problem = f"script {script_name} does not exist{_suggest_script(script_path)}"
    elif script_path.is_dir():
        problem = f"{script_name} is a folder, not a script"
    elif not script_path.is_file():
        problem = f"{script_name} is not a regular file"
    elif not os.access(script_path, os.R_OK):
        problem = f"{script_name} cannot be read: permission denied"
    return errors([problem] if problem else [])


def check_script_type(
    context: Context, request: JobRequest, configs: tuple[str, ...]
) -> Sequence[Diagnostic]:
    """Return why the launcher, which also starts from ``configs`` files, cannot run the script as it is."""
    script_path, script_name = context.cwd / request.script, request.script
    if request.module or script_name in request.payload:
        return ()
    if script_path.suffix in {".yaml", ".yml"} and script_path.suffix not in configs:
        return errors([_explain_yaml_file(script_path, script_name)])
    if sbatch_options := _read_sbatch_options(script_path):
        return _explain_batch_script(script_name, sbatch_options)
    if script_path.suffix in {".py", *configs} or os.access(script_path, os.X_OK):
        return ()
    return errors([f"{script_name} is neither a .py file nor executable; chmod +x it, or give the .py file"])


def check_options(
    context: Context, request: JobRequest, cluster: ActiveCluster | None, *, standalone: bool
) -> Sequence[Diagnostic]:
    """Return the problems of single options, which depend on neither the layout nor the launcher."""
    limit = cluster.profile.slurm.max_array_size if cluster else None
    problems = [
        *job_checks.check_job_name(name_of(request)),
        *job_checks.check_variables(variables_of(context, request)),
        *unset_variables(context, request),
        *job_checks.check_array(request.array, limit),
        # For a script that is rendered only, the user may pass --array to sbatch.
        *([] if standalone else job_checks.check_arguments(request.args, request.array)),
        *job_checks.check_dependency(request.dependency),
        *job_checks.check_signal(request.signal or "USR2", request.signal_before),
    ]
    if request.once is not None and not request.once.strip():
        problems.append(
            "--once has an empty key (is a variable unset?), and each request would create a job; give a key"
        )
    problems += [f"--tracking {text!r}: write key=value" for text in request.tracking if "=" not in text]
    problems += experiment_trackers.problems(request)
    if request.template is not None and not (context.cwd / request.template).is_file():
        problems.append(f"template {request.template} does not exist")
    problems += job_checks.check_secret_names(request.secrets, _plain_variables(context, request, cluster))
    return errors(problems)


def find_conflicts(
    request: JobRequest,
    spec: JobSpec,
    profile: ClusterProfile,
    layout: TaskLayout | None,
    launcher: Launcher | None,
    *,
    is_valid: bool,
) -> Sequence[Diagnostic]:
    """Return the conflicts of a job with its cluster and launcher.

    Args:
        is_valid: whether the request has no other problem; only then the launcher checks the whole job.
    """
    conflicts = [
        *staging.problems(request, spec, profile),
        *job_checks.check_sbatch_options(spec, layout),
        *job_checks.find_rule_conflicts(spec, profile, layout),
        *role_checks.find_unknown_secrets(spec),
        *role_checks.find_component_conflicts(spec, profile),
        *(role_checks.find_gpu_conflicts(spec, layout, profile) if layout is not None else ()),
    ]
    if launcher is not None:
        conflicts += launcher.check_options(spec)
        if layout is not None:
            conflicts += job_checks.check_launcher_variables(spec, profile, layout, launcher)
        if layout is not None and is_valid and not conflicts:
            conflicts += launcher.check(spec, layout)
    if spec.fabric_check and layout is not None and layout.world_size == 1:
        conflicts.append("--fabric-check measures the network between ranks, and this job has only one rank")
    return errors(conflicts)


def collect_notices(
    request: JobRequest, spec: JobSpec, resolution: Resolution, profile: ClusterProfile, *, submitted: bool
) -> Sequence[Diagnostic]:
    """Return what the user should know about a valid job.

    Args:
        submitted: the job is submitted, not only rendered.
    """
    notices = []
    if resolution.layout:
        notices += job_checks.note_lead_time(request.signal, request.signal_before, resolution.layout.time)
    if resolution.layout and resolution.layout.time is None and request.allocation is None:
        local = profile.scheduler == "local"
        limit = "the job has no time limit" if local else "the partition's default limit applies"
        notices.append(f"no --time given: {limit}")
    notices += job_checks.note_secrets(spec)
    if spec.secrets and not submitted and profile.slurm.export != "forbidden":
        names = ",".join(spec.secrets)
        notices.append(
            f"secrets are not in the script: export these variables, and submit with sbatch --export={names}"
        )
    if spec.other_roles and not submitted:
        notices.append(
            "roles need the supervisor, which only dtslurm submit installs; with plain sbatch the job ends "
            "at once"
        )
    elif spec.notify and not submitted:
        notices.append("messages need the supervisor, which only dtslurm submit installs: none are sent")
    elif spec.supervised and not submitted:
        notices.append(
            "restarts need the supervisor, which only dtslurm submit installs; with plain sbatch the job "
            "is a single attempt"
        )
    notices += job_checks.note_constraint(spec, profile)
    notices += staging.notices(spec, profile, is_submitted=submitted)
    if spec.template:
        notices.append(f"template {spec.template} is used; its commands run with your rights")
    if spec.fabric_check and spec.launcher in _WITHOUT_TORCH:
        notices.append(f"--fabric-check needs torch: {spec.python} must have it on the nodes")
    if spec.fabric_check and not (profile.fabric and profile.fabric.expected_busbw_gbs):
        notices.append(
            "--fabric-check only reports the bandwidth, because the profile has no fabric.expected_busbw_gbs"
        )
    return notes(notices)


def _suggest_script(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f" (folder {path.parent} does not exist)"
    return suggest_name(path.name, names)


def _explain_batch_script(script_name: str, sbatch_options: str) -> Sequence[Diagnostic]:
    """Refuse a batch script, which may start ranks itself; of a Python script, only the options are lost."""
    if script_name.endswith(".py"):
        effect = f"have no effect; pass the options to dtslurm: {sbatch_options}"
        return notes([f"the #SBATCH lines of {script_name} {effect}"])
    problem = (
        f"{script_name} has #SBATCH lines, but dtslurm renders the batch script itself; submit the program "
        f"that {script_name} starts, with the same options: dtslurm submit {sbatch_options} PROGRAM"
    )
    return errors([problem])


def _read_sbatch_options(path: Path) -> str:
    """Return the options in the ``#SBATCH`` lines of a script, as a shell reads them."""
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST_HEADER).decode("utf-8", "replace")
    except OSError:
        return ""
    return shlex.join(option_words(text))


def _explain_yaml_file(path: Path, path_text: str) -> str:
    """Explain why a YAML file is no training script; only Python callers pass a job file here."""
    if is_job_file(path):
        return (
            f"{path_text} is a job file: submit it with dtslurm submit, or give its script and options in "
            "Python"
        )
    return f"{path_text} is not a job file: no line begins with script:, roles:, extends: or stages:"


def _plain_variables(context: Context, request: JobRequest, cluster: ActiveCluster | None) -> dict[str, str]:
    """Return the source of each variable that the script sets in plain text, by variable name."""
    profile_variables = cluster.profile.environment.variables if cluster else {}
    return {
        **dict.fromkeys(profile_variables, "environment.variables of the cluster's profile"),
        **{name: "--env" for name, _ in variables_of(context, request)},
    }
