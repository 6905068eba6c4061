"""From a request to a frozen submission: check everything, report every problem at once, render."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from dtslurm.errors import ProfileNotFound, RequestInvalid
from dtslurm.launch import registry
from dtslurm.launch.base import Launcher
from dtslurm.launch.evidence import CONFIGURATIONS
from dtslurm.launch.layout import Resolution, resolve
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.job import JobSpec, Resources, Submission
from dtslurm.model.units import Memory, Walltime
from dtslurm.render.script import render
from dtslurm.services import check
from dtslurm.services.code import Code, code_of
from dtslurm.services.containers import runtime_for
from dtslurm.services.context import Cluster, Context
from dtslurm.services.environment import Environment, environment
from dtslurm.services.place import place, template_folders
from dtslurm.services.preflight import preflight
from dtslurm.services.request import JobRequest
from dtslurm.services.secrets import looks_secret, secrets_of
from dtslurm.services.suggest import cautions, suggested

AUTO = "auto"  # as a launcher's name: the one that suits the script

_Parsed = TypeVar("_Parsed")
_WITHOUT_TORCH = {"horovod", "jax", "mpi", "tensorflow"}  # launchers whose environments may lack it


@dataclass(frozen=True)
class Prepared:
    """A checked and rendered request, and the cluster it is for.

    Attributes:
        code: what the job runs from, None where it runs in a folder as that is then.
        secrets: values by name; in no text that is printed or queued.
        transport: how the cluster is reached, if not as its profile says.
    """

    submission: Submission
    cluster: Cluster
    code: Code | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    transport: str = ""


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
    request = request.with_defaults(context.project)
    problems: list[str] = []
    cluster = _cluster(context, request, problems, standalone)
    wanted = request.launcher or (cluster.profile.default_launcher if cluster else None)
    launcher = _launcher(wanted, problems)
    resources = _resources(request, problems)
    configs = launcher.configs if launcher is not None else CONFIGURATIONS if wanted == AUTO else ()
    problems += _script_problems(context, request, configs)
    problems += _option_problems(context, request, cluster)
    values = secrets_of(context, request.secrets, problems) if not standalone else {}
    far = cluster is not None and cluster.remote
    env = Environment() if far else environment(context, request, cluster.profile if cluster else None)
    problems += env.problems
    if cluster is None:
        raise RequestInvalid(problems)
    where = place(context, cluster, request, _name(request), standalone=standalone)
    remarks: list[str] = []
    code = code_of(context, cluster, request, where, problems, remarks) if not standalone else None

    profile = cluster.profile
    layout = resolve(resources, profile, one_process=launcher is not None and launcher.one_process)
    advice: list[str] = []
    if launcher is None and wanted in {None, AUTO}:
        launcher, advice = suggested(context, request, layout, auto=wanted == AUTO)
        if wanted == AUTO:
            layout = resolve(resources, profile, one_process=launcher.one_process)
            problems += set(_script_problems(context, request, launcher.configs)).difference(problems)
    problems += layout.problems
    request = _with_script_there(context, cluster, request, code, problems)
    spec = _spec(context, cluster, request, resources, launcher, code, env.folder)
    problems += check.site(spec, profile, layout.layout)
    if launcher is not None:
        launcher = launcher.chosen(spec)
        problems += launcher.check_options(spec)
        if layout.layout is not None and not problems:
            problems += launcher.check(spec, layout.layout)
    if spec.fabric_check and layout.layout is not None and layout.layout.world_size == 1:
        problems.append("--fabric-check measures between ranks, and this job has one")
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
        folders=template_folders(context, request.template),
        runtime=runtime,
    )
    submission = replace(
        submission,
        notices=(
            *(*advice, *env.notices, *layout.notices),
            *(*remarks, *(code.notices if code else ()), *_notices(spec, layout, profile)),
        ),
        origins={**cluster.origins, **request.origins, "cluster": cluster.chosen_by},
    )
    if not standalone:
        submission = _accepted(context, submission, cluster, check_there=not request.no_check)
    return Prepared(submission, cluster, code, values, request.transport or "")


def _accepted(context: Context, submission: Submission, cluster: Cluster, *, check_there: bool) -> Submission:
    """Return the submission with its scheduler's notices.

    Raises:
        RequestInvalid: the scheduler would refuse it, or something it needs is not there.
    """
    told = [*submission.notices, *cluster.scheduler.notices(submission)]
    if check_there:
        refused = cluster.scheduler.validate(submission)
        missing, seen = preflight(context, cluster, submission)
        if refused or missing:
            raise RequestInvalid([*refused, *missing], hint="--no-check queues it all the same")
        told += seen
    return replace(submission, notices=tuple(told))


def _cluster(context: Context, request: JobRequest, problems: list[str], standalone: bool) -> Cluster | None:
    """Return the cluster; live values are asked for unless the profile alone can answer."""
    try:
        cluster = context.cluster(request.cluster, request.transport)
        static = standalone or request.no_check
        if static and cluster.profile.scheduler == "slurm" and cluster.profile.node_types:
            return cluster
        return context.live_cluster(request.cluster, request.transport)
    except ProfileNotFound as error:
        problems += error.problems
        return None


def _launcher(name: str | None, problems: list[str]) -> Launcher | None:
    if name is None or name == AUTO:
        return None
    try:
        return registry.load(name)
    except RequestInvalid as error:
        problems += error.problems
        return None


def _resources(request: JobRequest, problems: list[str]) -> Resources:
    return Resources(
        nodes=request.nodes,
        gpus_per_node=request.gpus_per_node,
        ntasks_per_node=request.ntasks_per_node,
        cpus_per_task=request.cpus_per_task,
        mem=_parsed("--mem", request.mem, Memory.parse, problems),
        time=_parsed("--time", request.time, Walltime.parse, problems),
        partition=request.partition,
        account=request.account,
        qos=request.qos,
        constraint=request.constraint,
        exclude=request.exclude,
        nodelist=request.nodelist,
        reservation=request.reservation,
        node_type=request.node_type,
    )


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


def _script_problems(context: Context, request: JobRequest, configs: tuple[str, ...]) -> list[str]:
    """Return why the training script cannot be run from here."""
    path, written = context.cwd / request.script, request.script
    if request.module:
        return []
    if not path.exists():
        return [f"no such script: {written}{_similar(path)}"]
    if path.is_dir():
        return [f"{written} is a folder, not a script"]
    if not path.is_file():
        return [f"{written} is not a regular file"]
    if not os.access(path, os.R_OK):
        return [f"{written} cannot be read: permission denied"]
    if path.suffix not in {".py", *configs} and not os.access(path, os.X_OK):
        return [f"{written} is neither a .py file nor executable; chmod +x it, or give the .py file"]
    return []


def _with_script_there(
    context: Context, cluster: Cluster, request: JobRequest, code: Code | None, problems: list[str]
) -> JobRequest:
    """Return the request with its script as seen from the job's work dir, where only the snapshot is."""
    if code is None or not cluster.remote or request.module:
        return request
    script = request.script
    path = context.cwd.resolve() / Path(script).expanduser()
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
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(close[0]).name}?" if close else ""


def _option_problems(context: Context, request: JobRequest, cluster: Cluster | None) -> list[str]:
    limit = cluster.profile.slurm.max_array_size if cluster else None
    problems = [
        *check.job_name(_name(request)),
        *check.variables(_variables(context, request)),
        *check.array(request.array, limit),
        *check.dependency(request.dependency),
        *check.signals(request.signal or "USR2", request.signal_before),
        *check.sbatch_options(request.sbatch),
    ]
    problems += [
        f"--launcher-option {text!r}: write key=value" for text in request.launcher_options if "=" not in text
    ]
    if request.template is not None and not (context.cwd / request.template).is_file():
        problems.append(f"no such template: {request.template}")
    return problems


def _name(request: JobRequest) -> str:
    if request.job_name is not None:
        return request.job_name
    return request.script.rsplit(".", 1)[-1] if request.module else Path(request.script).stem


def _variables(context: Context, request: JobRequest) -> list[tuple[str, str]]:
    """Return (name, value) pairs; a bare name takes its value from the user's environment."""
    pairs = []
    for text in request.env:
        name, equals, value = text.partition("=")
        pairs.append((name, value if equals else context.env.get(name, "")))
    return pairs


def _spec(
    context: Context,
    cluster: Cluster,
    request: JobRequest,
    resources: Resources,
    launcher: Launcher | None,
    code: Code | None,
    activate: str | None,
) -> JobSpec:
    return JobSpec(
        name=_name(request),
        script=request.script,
        args=request.args,
        module=request.module,
        work_dir=_work_dir(context, request, code),
        python=_python_there(cluster, request) if cluster.remote else _python(context, request, activate),
        activate=activate,
        resources=resources,
        launcher=launcher.name if launcher else "",
        launcher_options=dict(text.split("=", 1) for text in request.launcher_options if "=" in text),
        array=request.array,
        dependency=request.dependency,
        env=tuple(_variables(context, request)),
        setup=request.setup,
        signal=request.signal or (launcher.early_signal if launcher else "USR2"),
        signal_before=request.signal_before,
        container=_image(context, request.container),
        container_mounts=request.container_mounts,
        fabric_check=bool(request.fabric_check),
        sbatch_options=request.sbatch,
        secrets=request.secrets,
        template=request.template,
    )


def _work_dir(context: Context, request: JobRequest, code: Code | None) -> str:
    if code is not None:
        return code.work_dir
    return str(context.cwd / Path(request.chdir).expanduser()) if request.chdir else str(context.cwd)


def _python_there(cluster: Cluster, request: JobRequest) -> str:
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
        asked = context.cwd / Path(request.python).expanduser()
        return str(asked) if "/" in request.python else request.python
    if activate or request.container is not None:
        return "python"  # the environment's own, or the image's
    path = context.env.get("PATH")
    return shutil.which("python", path=path) or shutil.which("python3", path=path) or "python3"


def _notices(spec: JobSpec, resolution: Resolution, profile: ClusterProfile) -> list[str]:
    notices = []
    if resolution.layout and resolution.layout.time is None:
        notices.append("no --time given: the partition's default limit applies")
    notices += [
        f"--env {name} is written into the script; --secret {name} keeps its value out of it"
        for name, _ in spec.env
        if looks_secret(name)
    ]
    if spec.template:
        notices.append(f"template {spec.template} is used; a template runs as you")
    if spec.fabric_check and spec.launcher in _WITHOUT_TORCH:
        notices.append(f"--fabric-check measures with torch: {spec.python} must have it on the nodes")
    if spec.fabric_check and not (profile.fabric and profile.fabric.expected_busbw_gbs):
        notices.append(
            "--fabric-check only tells the bandwidth: the profile has no fabric.expected_busbw_gbs"
        )
    return notices
