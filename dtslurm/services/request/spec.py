"""Converts a request to a job's values and reports those that cannot be parsed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from dtslurm.launch.base import Launcher
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.diagnostics import Checked, Diagnostics, errors, notes
from dtslurm.model.jobs.job import JobSpec, Resources
from dtslurm.model.jobs.options import JobSettings, Placement
from dtslurm.model.jobs.roles import Roles
from dtslurm.model.jobs.sbatch import shares_gpu, split_signal
from dtslurm.model.paths import expand_home
from dtslurm.model.shell import quote
from dtslurm.model.units import Memory, Walltime
from dtslurm.model.values import dataclass
from dtslurm.services.request import staging
from dtslurm.services.request.code_snapshot import Code
from dtslurm.services.request.launcher_detection import resumes_from_checkpoints
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import expand_cluster_home

KEYRING_SERVICE = "dtslurm"
_Parsed = TypeVar("_Parsed")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def name_of(request: JobRequest) -> str:
    """Return the job's name: the requested one, else that of the script or module."""
    if request.job_name is not None:
        return request.job_name
    return request.script.rsplit(".", 1)[-1] if request.module else Path(request.script).stem


def unset_variables(context: Context, request: JobRequest) -> list[str]:
    """Return the problems with bare names in ``--env`` that the user's environment does not set."""
    bare_names = [text for text in request.env if text and "=" not in text]
    return [
        f"--env {name}: your environment has no such variable; write {name}=VALUE"
        for name in bare_names
        if name not in context.env
    ]


def variables_of(context: Context, request: JobRequest) -> list[tuple[str, str]]:
    """Return (name, value) pairs; a bare name takes its value from the user's environment."""
    pairs = []
    for text in request.env:
        name, equals, value = text.partition("=")
        pairs.append((name, value if equals else context.env.get(name, "")))
    return pairs


def find_environment(
    context: Context, request: JobRequest, profile: ClusterProfile | None
) -> Checked[str | None]:
    """Return the folder of the venv or conda environment that a request's job activates.

    The folder is None if the request names an interpreter or an image.

    ``uv run`` and ``uv pip`` need no activated environment, so a job does not either. As with uv, the nearest
    ``.venv`` in this folder and those above it is used if uv made it or ``uv.lock`` is beside it.
    """
    if request.python is not None:
        return Checked(None, errors(_command_line_problems(context, request.python)))
    if request.container is not None:
        return Checked(None)
    if active := context.env.get("VIRTUAL_ENV") or context.env.get("CONDA_PREFIX"):
        return Checked(active)
    for folder in (context.cwd, *context.cwd.parents):
        has_lock_file = (folder / "uv.lock").is_file()
        venv = folder / ".venv"
        if has_lock_file:  # uv reads this variable for projects, relative to the project's folder
            venv = folder / (context.env.get("UV_PROJECT_ENVIRONMENT") or ".venv")
        if (venv / "bin" / "activate").is_file() and (has_lock_file or _is_made_by_uv(venv)):
            return Checked(str(venv), notes([f"no environment is active: the job uses uv's {venv}"]))
        if has_lock_file:
            return _unsynced_environment(folder, venv, profile)
    return Checked(None)


def label_address(text: str) -> str:
    """Return a value of ``--notify`` as it may be shown: the name of a secret, or the scheme of a URL."""
    scheme, separator, _ = text.partition("://")
    return f"{scheme}://***" if separator else text


def secrets_of(context: Context, names: Sequence[str], option: str = "--secret") -> Checked[dict[str, str]]:
    """Return the values of the secrets, from the environment, else from the user's keyring.

    No message contains a value. Invalid names are skipped; `job_checks.check_secret_names` reports them.

    Args:
        option: the option that names the secrets.
    """
    values: dict[str, str] = {}
    problems = []
    for name in names:
        if not _VARIABLE.fullmatch(name):
            continue
        value = context.env.get(name) or _read_keyring(name)
        if not value:
            problems.append(
                f"{option} {name}: neither your environment nor the keyring has a value of this name "
                f"(keyring set {KEYRING_SERVICE} {name})"
            )
        elif "\0" in value:
            problems.append(f"{option} {name}: the value contains a NUL byte")
        else:
            values[name] = value
    return Checked(values, errors(problems))


def _read_keyring(name: str) -> str | None:
    """Return the value in the user's keyring; None if there is no keyring or no such entry."""
    try:
        import keyring

        value: str | None = keyring.get_password(KEYRING_SERVICE, name)
    except Exception:  # noqa: BLE001 - keyring backends raise errors of any type; all mean that there is no value
        return None
    return value


def shell_file(values: Mapping[str, str]) -> bytes:
    """Return the content of the shell file that exports the secrets in the job."""
    lines = [f"export {name}={quote(value)}\n" for name, value in values.items()]
    return "".join(lines).encode("utf-8", "surrogateescape")


def launcher_options_of(request: JobRequest) -> dict[str, str | None]:
    """Return the launcher's options by name without leading dashes; None is an option without a value."""
    parts = [text.lstrip("-").partition("=") for text in request.launcher_options]
    return {name: value if equals else None for name, equals, value in parts}


@dataclass(frozen=True)
class ParsedOptions:
    """The options of a request that are written as sizes and times.

    Attributes:
        resources: the resources to request from Slurm.
        hang_timeout: seconds; 0 for ``auto``, which measures the timeout, and -1 for ``off``.
        total_time: the total training time over all attempts, in seconds.
    """

    resources: Resources
    hang_timeout: int | None
    total_time: int | None


def parse_options(request: JobRequest) -> Checked[ParsedOptions]:
    """Parse the sizes and times of a request; a value that cannot be parsed is None."""
    diagnostics = Diagnostics()
    placement = {item.name: getattr(request, item.name) for item in fields(Placement)}
    if shares_gpu(request.sbatch):
        if request.gpus_per_node:
            diagnostics.error(
                "--gpus-per-node requests whole GPUs, and --gres requests a part of a GPU: give only one "
                "of these options"
            )
        placement["gpus_per_node"] = 0
    resources = Resources(
        **placement,
        mem=diagnostics.take(_parse_option("--mem", request.mem, Memory.parse)),
        time=diagnostics.take(_parse_option("--time", request.time, Walltime.parse)),
    )
    hang_timeout = {"auto": 0, "off": -1}.get(request.hang_timeout or "")
    if hang_timeout is None:
        hang_timeout = diagnostics.take(_parse_option("--hang-timeout", request.hang_timeout, _parse_seconds))
    total_time = diagnostics.take(_parse_option("--total-time", request.total_time, _parse_seconds))
    return Checked(ParsedOptions(resources, hang_timeout, total_time), diagnostics.diagnostics)


def spec_of(
    context: Context,
    cluster: ActiveCluster,
    request: JobRequest,
    parsed_options: ParsedOptions,
    code: Code | None,
    activate: str | None,
) -> JobSpec:
    """Return the job; `with_launcher` adds the launcher.

    Args:
        context: the working directory and the environment.
        cluster: where the job will run.
        request: the user's request.
        parsed_options: the sizes and times of the request.
        code: the snapshot to run from; None to run in a folder on the cluster.
        activate: the folder of the environment to activate on the cluster; None without one.
    """
    settings = {item.name: getattr(request, item.name) for item in fields(JobSettings)}
    for name in ("output", "error"):
        settings[name] = settings[name] and expand_cluster_home(context, cluster, settings[name])
    return JobSpec(
        **settings,
        name=name_of(request),
        script=f"./{request.script}" if request.script.startswith("-") else request.script,
        args=request.args,
        module=request.module,
        work_dir=_work_dir(context, cluster, request, code),
        python=remote_python(context, cluster, request)
        if cluster.remote
        else _local_python(context, request, activate),
        activate=activate,
        resources=parsed_options.resources,
        launcher="",
        launcher_options=launcher_options_of(request),
        env=tuple(variables_of(context, request)),
        signal=request.signal or "USR2",
        spare_nodes=request.spare_nodes or 0,
        hang_timeout=parsed_options.hang_timeout,
        total_time=parsed_options.total_time,
        resumes=resumes_from_checkpoints(context, request),
        container=_absolute_image(context, cluster, request.container),
        fabric_check=bool(request.fabric_check),
        sample=cluster.profile.sample if request.sample is None else request.sample,
        stage_in=staging.texts(request.stage_in, staging.disk_of(request, cluster.profile)),
        stage_out=staging.texts(request.stage_out, is_stage_out=True),
        sbatch_options=request.sbatch,
        roles=_roles_with_absolute_images(context, cluster, request.roles),
        trials=request.trials,
        separate_streams=request.separate_streams,
        idle_limit=request.idle_limit,
        notify=tuple(label_address(text) for text in request.notify),
    )


def with_launcher(spec: JobSpec, request: JobRequest, launcher: Launcher | None) -> JobSpec:
    """Return the job with the launcher that starts the ranks of each node, and the signal it expects."""
    if launcher is None:
        return spec
    return replace(spec, launcher=launcher.name, signal=request.signal or launcher.early_signal)


def with_signal_split(request: JobRequest) -> Checked[JobRequest]:
    """Return the request with sbatch's ``--signal B:USR1@300`` split into signal name and seconds."""
    if request.signal is None:
        return Checked(request)
    name, seconds = split_signal(request.signal)
    contradiction = (
        f"--signal {request.signal} and --signal-before {request.signal_before} contradict each other"
    )
    is_contradictory = seconds is not None and request.signal_before not in {None, seconds}
    signal_before = request.signal_before if seconds is None else seconds
    return Checked(
        replace(request, signal=name, signal_before=signal_before),
        errors([contradiction] if is_contradictory else []),
    )


def _parse_seconds(text: str) -> int:
    return Walltime.parse(text).seconds


def _parse_option(flag: str, text: str | None, parse: Callable[[str], _Parsed]) -> Checked[_Parsed | None]:
    if text is None:
        return Checked(None)
    try:
        return Checked(parse(text))
    except ValueError as error:
        return Checked(None, errors([f"{flag}: {error}"]))


def _work_dir(context: Context, cluster: ActiveCluster, request: JobRequest, code: Code | None) -> str:
    if code is not None:
        return code.work_dir
    if request.chdir:
        return str(context.cwd / expand_cluster_home(context, cluster, request.chdir))
    return str(context.cwd)


def remote_python(context: Context, cluster: ActiveCluster, request: JobRequest) -> str:
    """Return the interpreter on another machine: the requested, the profile's, the image's or PATH's.

    Raises:
        RequestInvalid, TransportError: as `expand_cluster_home`.
    """
    if request.python is not None:
        return expand_cluster_home(context, cluster, request.python)
    if request.container:
        return "python"
    return expand_cluster_home(context, cluster, cluster.profile.environment.python or "python3")


def _absolute_image(context: Context, cluster: ActiveCluster, image: str | None) -> str | None:
    """Return the image; a path relative to the working directory or to the home becomes absolute."""
    if image is not None and image.startswith(("./", "../")):
        return str((context.cwd / image).resolve())
    return expand_cluster_home(context, cluster, image) if image is not None else None


def _roles_with_absolute_images(
    context: Context, cluster: ActiveCluster, roles: Roles | None
) -> Roles | None:
    """Return the roles; None for a run of one role."""
    if roles is None or not roles.others:
        return None
    others = [
        replace(
            role,
            options=replace(
                role.options, container=_absolute_image(context, cluster, role.options.container)
            ),
        )
        for role in roles.others
    ]
    return replace(roles, others=tuple(others))


def _local_python(context: Context, request: JobRequest, activate: str | None) -> str:
    """Return the interpreter: the requested, the active environment's, else the first on PATH."""
    if request.python is not None:
        interpreter = context.cwd / expand_home(request.python)
        return str(interpreter) if "/" in request.python else request.python
    if activate or request.container is not None:
        return "python"  # the environment's own, or the image's
    path = context.env.get("PATH")
    return shutil.which("python", path=path) or shutil.which("python3", path=path) or "python3"


def _is_made_by_uv(venv: Path) -> bool:
    try:
        lines = (venv / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.partition("=")[0].strip() == "uv" for line in lines)


def _unsynced_environment(project: Path, venv: Path, profile: ClusterProfile | None) -> Checked[str | None]:
    if profile is not None and (profile.environment.modules or profile.environment.setup):
        return Checked(None)  # modules or setup lines may provide a Python
    problem = f"{project / 'uv.lock'} has no environment {venv}: run uv sync, or give --python"
    return Checked(None, errors([problem]))


def _command_line_problems(context: Context, python: str) -> tuple[str, ...]:
    words = python.split()
    if len(words) < 2 or (context.cwd / expand_home(python)).exists():
        return ()
    hint = (
        "without --python, the job uses the project's .venv" if words[0] == "uv" else "--setup may prepare it"
    )
    return (f"--python {python!r} is a command line, not an interpreter: {hint}",)
