"""Checks a job's container: the site's runtime, the image, the mounts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import PurePosixPath

from dtslurm.container import registry
from dtslurm.container.base import FOLDER, ContainerOptions, Runtime, mount_problems
from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.diagnostics import Checked, errors
from dtslurm.model.jobs.job import JobSpec, Submission, TaskLayout
from dtslurm.model.paths import expand_home
from dtslurm.model.shell import join
from dtslurm.render.inside import container_entry, spec_of_role
from dtslurm.services.wiring.context import ActiveCluster, Context

_OPTION = "--container"


def runtime_for(
    context: Context,
    spec: JobSpec,
    profile: ClusterProfile,
    layout: TaskLayout | None,
    *,
    here: bool,
) -> Checked[Runtime | None]:
    """Return the runtime of the job's container, None without a container.

    Args:
        context: the working directory and the environment.
        spec: the job.
        profile: names the runtime.
        layout: the job's nodes and ranks; None if unknown.
        here: the job is submitted on this machine, so files and programs can be checked.
    """
    specs = specs_by_option(spec)
    if not specs:
        return Checked(
            None, errors(["--container-mount needs --container IMAGE"] if spec.container_mounts else [])
        )
    if profile.container.runtime == "none":
        problem = (
            f"{next(iter(specs))}: the profile of {profile.name} has no container runtime; set "
            "container.runtime in it (pyxis, apptainer, ...)"
        )
        return Checked(None, errors([problem]))
    try:
        runtime = registry.load(profile.container.runtime)
    except RequestInvalid as error:
        return Checked(None, errors(error.problems))
    problems = [*mount_problems(spec.container_mounts)]
    if layout is not None:
        for option, option_spec in specs.items():
            if entry := container_entry(option_spec, profile, layout):
                problems += _find_image_problems(runtime, option, entry)
                problems += _check_files(entry, spec) if here else []
        problems += _check_program(context, runtime, profile) if here else []
    return Checked(runtime, errors(list(dict.fromkeys(problems))))


def _find_image_problems(runtime: Runtime, option: str, entry: ContainerOptions) -> list[str]:
    problems = runtime.check(entry)
    if option != _OPTION and runtime.directives(entry):
        problems.append(f"{option}: {runtime.name} has one image for the whole job")
    return problems


def specs_by_option(spec: JobSpec) -> dict[str, JobSpec]:
    """Return the job with each of its different images, by the option or key that names the image."""
    specs = {_OPTION: spec} if spec.container else {}
    for role in spec.other_roles:
        role_spec = spec_of_role(spec, role)
        if role_spec.container and role_spec.container != spec.container:
            specs[f"roles.{role.name}.container"] = role_spec
    return specs


def unpulled(submission: Submission, cluster: ActiveCluster) -> Iterator[tuple[str, str, str]]:
    """Yield (test, path, problem if it fails) for an image that compute nodes cannot pull themselves."""
    profile = cluster.profile
    if not profile.environment.offline:
        return
    for option, spec in specs_by_option(submission.spec).items():
        entry = container_entry(spec, profile, submission.layout)
        runtime = registry.load(profile.container.runtime)
        file = runtime.file(entry) if entry else None
        if entry is None or file is None:
            continue
        folder = PurePosixPath(submission.run_dir).parent / FOLDER
        mkdir, pull = join(("mkdir", "-p", str(folder))), join((*runtime.pull(entry), str(folder / file)))
        where = "there" if cluster.remote else "here"
        problem = f"{option} {spec.container}: compute nodes of {profile.name} have no internet, "
        problem += f"so pull it {where} first: {mkdir} && {pull} {join((runtime.source(entry),))}"
        yield "s", str(folder / file), problem


def _check_files(entry: ContainerOptions, spec: JobSpec) -> list[str]:
    """Return problems with the image file and the user's mount sources if they do not exist."""
    errors = []
    if entry.is_file and not expand_home(entry.image).exists():
        errors.append(f"the image does not exist: {entry.image}")
    for mount in spec.container_mounts:
        source = mount.partition(":")[0]
        if source.startswith("/") and not os.path.lexists(source):
            errors.append(f"--container-mount {mount}: {source} does not exist")
    return errors


def _check_program(context: Context, runtime: Runtime, profile: ClusterProfile) -> list[str]:
    """Return the problem that the runtime is not installed; modules or setup lines may provide it later."""
    if runtime.name == "pyxis":
        return _check_pyxis(context)
    if runtime.program is None or profile.environment.modules or profile.environment.setup:
        return []
    if shutil.which(runtime.program, path=context.env.get("PATH")):
        return []
    hint = "if a module provides it, list the module in the profile's environment.modules"
    return [f"container runtime {runtime.name}: {runtime.program} is not on PATH; {hint}"]


def _check_pyxis(context: Context) -> list[str]:
    try:
        srun_help = context.transport.run(["srun", "--help"], timeout=20).stdout
    except TransportError:
        return []  # another check reports a missing srun
    if "--container-image" in srun_help:
        return []
    return ["container runtime pyxis: srun has no option --container-image, so the plugin is not installed"]
