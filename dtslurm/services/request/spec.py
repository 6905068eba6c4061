"""What a request asks for as the values of a job; what cannot be read is told, and checked elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from dtslurm.launch.base import Launcher
from dtslurm.model.jobs.job import JobSpec, Resources
from dtslurm.model.jobs.options import Placement
from dtslurm.model.jobs.sbatch import shares_gpu, split_signal
from dtslurm.model.paths import expanded
from dtslurm.model.units import Memory, Walltime
from dtslurm.services.request import staging
from dtslurm.services.request.code_snapshot import Code
from dtslurm.services.request.launcher_detection import resumes_from_checkpoints
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context

_Parsed = TypeVar("_Parsed")


def name_of(request: JobRequest) -> str:
    """Return the job's name: as asked, else the script's or module's."""
    if request.job_name is not None:
        return request.job_name
    return request.script.rsplit(".", 1)[-1] if request.module else Path(request.script).stem


def unset_variables(context: Context, request: JobRequest) -> list[str]:
    """Return why bare names cannot be copied from the user's environment."""
    bare = [text for text in request.env if text and "=" not in text]
    return [
        f"--env {name}: there is no such variable here; write {name}=VALUE"
        for name in bare
        if name not in context.env
    ]


def variables_of(context: Context, request: JobRequest) -> list[tuple[str, str]]:
    """Return (name, value) pairs; a bare name takes its value from the user's environment."""
    pairs = []
    for text in request.env:
        name, equals, value = text.partition("=")
        pairs.append((name, value if equals else context.env.get(name, "")))
    return pairs


def launcher_options_of(request: JobRequest) -> dict[str, str | None]:
    """Return the launcher's options by name, None for one without a value; dashes before it are left out."""
    parts = [text.lstrip("-").partition("=") for text in request.launcher_options]
    return {name: value if equals else None for name, equals, value in parts}


def resources_of(request: JobRequest, problems: list[str]) -> Resources:
    """Return what is asked of the scheduler; ``problems`` gets what cannot be read."""
    placement = {item.name: getattr(request, item.name) for item in fields(Placement)}
    if shares_gpu(request.sbatch):
        if request.gpus_per_node:
            problems.append("--gpus-per-node asks for whole GPUs, and --gres for a part of one: give one")
        placement["gpus_per_node"] = 0
    return Resources(
        **placement,
        mem=_parsed("--mem", request.mem, Memory.parse, problems),
        time=_parsed("--time", request.time, Walltime.parse, problems),
    )


def spec_of(
    context: Context,
    cluster: ActiveCluster,
    request: JobRequest,
    resources: Resources,
    launcher: Launcher | None,
    code: Code | None,
    activate: str | None,
) -> JobSpec:
    """Return the job; ``activate`` is the environment's folder there."""
    return JobSpec(
        name=name_of(request),
        script=f"./{request.script}" if request.script.startswith("-") else request.script,
        args=request.args,
        module=request.module,
        work_dir=_work_dir(context, request, code),
        python=_python_there(cluster, request) if cluster.remote else _python(context, request, activate),
        activate=activate,
        resources=resources,
        launcher=launcher.name if launcher else "",
        launcher_options=launcher_options_of(request),
        array=request.array,
        dependency=request.dependency,
        env=tuple(variables_of(context, request)),
        setup=request.setup,
        teardown=request.teardown,
        output=request.output,
        error=request.error,
        signal=request.signal or (launcher.early_signal if launcher else "USR2"),
        signal_before=request.signal_before,
        max_restarts=request.max_restarts,
        spare_nodes=request.spare_nodes or 0,
        hang_timeout=hang_timeout(request.hang_timeout, []),
        total_time=total_time(request.total_time, []),
        requeue=request.requeue,
        resumes=resumes_from_checkpoints(context, request),
        container=_image(context, request.container),
        container_mounts=request.container_mounts,
        fabric_check=bool(request.fabric_check),
        health_check=request.health_check,
        sample=cluster.profile.sample if request.sample is None else request.sample,
        stage_in=staging.texts(request.stage_in, staging.disk_of(request, cluster.profile)),
        stage_out=staging.texts(request.stage_out, out=True),
        artifacts=request.artifacts,
        sbatch_options=request.sbatch,
        secrets=request.secrets,
        template=request.template,
        trials=request.trials,
        separate_streams=request.separate_streams,
    )


def with_signal_split(request: JobRequest, problems: list[str]) -> JobRequest:
    """Return the request with sbatch's ``--signal B:USR1@300`` as dtslurm's signal and its seconds."""
    if request.signal is None:
        return request
    name, seconds = split_signal(request.signal)
    if seconds is not None and request.signal_before not in {None, seconds}:
        problems.append(
            f"--signal {request.signal} and --signal-before {request.signal_before} contradict each other"
        )
    before = request.signal_before if seconds is None else seconds
    return replace(request, signal=name, signal_before=before)


def hang_timeout(text: str | None, problems: list[str]) -> int | None:
    """Return seconds; 0 for ``auto``, which learns them, and -1 for ``off``."""
    if text in {"auto", "off"}:
        return 0 if text == "auto" else -1
    found = _parsed("--hang-timeout", text, Walltime.parse, problems)
    return found.seconds if found else None


def total_time(text: str | None, problems: list[str]) -> int | None:
    """Return seconds of training altogether."""
    found = _parsed("--total-time", text, Walltime.parse, problems)
    return found.seconds if found else None


def _parsed(
    flag: str, text: str | None, parse: Callable[[str], _Parsed], problems: list[str]
) -> _Parsed | None:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        problems.append(f"{flag}: {error}")
        return None


def _work_dir(context: Context, request: JobRequest, code: Code | None) -> str:
    if code is not None:
        return code.work_dir
    return str(context.cwd / expanded(request.chdir)) if request.chdir else str(context.cwd)


def _python_there(cluster: ActiveCluster, request: JobRequest) -> str:
    """Return the interpreter on another machine: as asked, the profile's, the image's or PATH's."""
    if request.python is not None:
        return request.python
    return "python" if request.container else cluster.profile.environment.python or "python3"


def _image(context: Context, image: str | None) -> str | None:
    """Return the image; a path relative to here becomes absolute."""
    if image is not None and image.startswith(("./", "../")):
        return str((context.cwd / image).resolve())
    return image


def _python(context: Context, request: JobRequest, activate: str | None) -> str:
    """Return the interpreter: as asked, the active environment's, else the first on PATH."""
    if request.python is not None:
        asked = context.cwd / expanded(request.python)
        return str(asked) if "/" in request.python else request.python
    if activate or request.container is not None:
        return "python"  # the environment's own, or the image's
    path = context.env.get("PATH")
    return shutil.which("python", path=path) or shutil.which("python3", path=path) or "python3"
