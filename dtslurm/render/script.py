"""Render a job spec for a cluster profile and a launcher into a frozen ``Submission``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dtslurm
from dtslurm import assets
from dtslurm.container.base import FOLDER, Runtime
from dtslurm.launch.base import Launcher
from dtslurm.model.cluster import ClusterProfile, Variable
from dtslurm.model.jobs.destination import choose_destination
from dtslurm.model.jobs.job import JobSpec, Submission, TaskLayout
from dtslurm.model.jobs.roles import has_references, quote_with_references
from dtslurm.model.shell import RawShell, join, quote_with_job_values, quote_with_variables
from dtslurm.model.values import dataclass
from dtslurm.render.directives import Directives, build, build_components, cpus_per_task
from dtslurm.render.engine import Engine, Templates, engine_of
from dtslurm.render.inside import ContainerParts, container_entry, spec_of_role
from dtslurm.render.output_paths import fill_in_pattern
from dtslurm.render.roles import role_files
from dtslurm.render.staging import staging_values
from dtslurm.render.text import check, comment_text, heredoc_end, insert_after_comments, wrap
from dtslurm.worker.sampler_values import plain_nodes

_RESTARTS = 3  # if restarts are requested without a number
_BASE = "base.sbatch.j2"
_IDLE_POLL_S = 300  # between an allocation's queries of its steps, at most
# When a task fails, srun either ends the other tasks of the step, or (elastic) lets them continue. A task
# that exits without an error ends no other task (--wait=0 overrides the cluster's WaitTime), because rank 0
# may save or evaluate long after the other ranks.
_END_OPTIONS = ("--kill-on-bad-exit=1", "--wait=0")
_ELASTIC_END_OPTIONS = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
# Each attempt names its nodes and overlaps, so that it does not wait until Slurm has ended the earlier step.
_OVERLAP_OPTIONS = (RawShell('--nodelist="$SLURM_JOB_NODELIST"'), "--overlap")


@dataclass(frozen=True)
class RunPlace:
    """The paths of a run, and its token.

    Attributes:
        directory: the run directory as written in the script; ``RawShell`` if the job's shell expands it.
        output: value of ``--output``, None for Slurm's default.
        token: the token that identifies the submission.
    """

    directory: str
    output: str | None
    token: str

    @property
    def images(self) -> str:
        """The folder of container images, which all runs of the run root share."""
        root = self.directory.rpartition("/")[0]
        return RawShell(f'{root}/{FOLDER}"') if isinstance(self.directory, RawShell) else f"{root}/{FOLDER}"


@dataclass(frozen=True)
class Site:
    """What a script is rendered for and from.

    Attributes:
        templates: the folders of templates.
        runtime: the container runtime, if the job has a container image.
    """

    profile: ClusterProfile
    templates: Templates
    runtime: Runtime | None = None


def render(
    spec: JobSpec, site: Site, layout: TaskLayout, launcher: Launcher, run_place: RunPlace
) -> Submission:
    """Render the submission of ``spec`` to a cluster.

    Raises:
        RequestInvalid: a value cannot be written in an sbatch directive.
        RenderError: a template is invalid.
    """
    profile = site.profile
    launcher = launcher.chosen(spec)
    tasks_per_node = launcher.tasks_per_node(layout)
    shrinks = spec.supervised and launcher.least_nodes(spec, layout) < layout.nodes
    end_options = _choose_end_options(spec, profile, launcher, shrinks=shrinks)
    directives = build(spec, profile, layout, tasks_per_node, run_place.output, end_options)
    engine = engine_of(site.templates)
    environment = _environment_values(spec, profile, layout, launcher)
    addressed = _variables_of_addresses(spec)
    exported = [*environment["variables"], *addressed]
    container_options = container_entry(spec, profile, layout, exported, launcher.step_variables)
    container = ContainerParts(site.runtime, container_options)
    for name, value in container.directives().items():
        directives.set(name, value)
    srun = _step_words(spec, profile, layout, launcher, directives, shrinks=shrinks)
    is_submitted = not isinstance(run_place.directory, RawShell)
    values = {
        **_job_values(spec, profile, layout, launcher),
        "run_dir": run_place.directory,
        "images": run_place.images,
        "supervised": spec.supervised,
        "keep_trying": RawShell("keep_trying " if spec.supervised else ""),
        "shrinks": shrinks,
        "world": RawShell('"$world"') if shrinks else layout.world_size,
        "world_text": RawShell("$world") if shrinks else layout.world_size,
        "supervisor": RawShell(
            wrap(_supervisor_command(spec, profile, layout, launcher, run_place.directory)).replace(
                "\n", "\n    "
            )
        ),
        "extra_nodes": spec.extra_nodes,
        "in_allocation": spec.allocation is not None,
        "roles": bool(spec.other_roles),
        "addressed_variables": addressed,
        "secrets": tuple(map(RawShell, spec.secrets)),
        "starts_once": not spec.supervised and "no-requeue" in directives,
        "copies": _output_copies(spec) if run_place.output else {},
        "claim": is_submitted,
        "work_dir": spec.work_dir,
        "live_script": _live_script(spec, run_place),
        **environment,
        **container.values(),
        "directives": RawShell(directives.text()),
        "components": RawShell(build_components(spec, profile, layout, end_options)),
        "export_none": "export" in directives and "--export=NONE" in directives.text(),
        "srun": RawShell(wrap((*srun, *container.words(), "bash", RawShell('"$DTSLURM_RUN_DIR/task.sh"')))),
        "srun_cpus": "cpus-per-task" in directives,
        "fabric_check": _fabric_check_values(spec, profile, layout, directives, container)
        if spec.fabric_check
        else None,
    }
    values["staging"] = staging_values(
        spec, layout, directives, run_place.directory, program=values["claim"] is True, shrinks=shrinks
    )
    roles = role_files(engine, spec, profile, values, _containers_of_roles(spec, site, layout, exported))
    values["task_files"] = _task_files(engine, spec, layout, launcher, values, roles)
    name = _BASE if spec.template is None else Path(spec.template).name
    if spec.idle_limit is not None:
        name = "allocation.sbatch.j2"
        values |= {
            "idle_limit": spec.idle_limit,
            "idle_poll": min(max(spec.idle_limit // 6, 1), _IDLE_POLL_S),
            "rendezvous": False,
        }
    script = engine.render(name, values)
    check(script, name)
    return Submission(
        token=run_place.token,
        cluster=profile.name,
        spec=spec,
        layout=layout,
        run_dir=run_place.directory,
        script=script.rstrip("\n") + "\n",
        step_script=_render_step_script(engine, spec, values, directives),
    )


def _render_step_script(
    engine: Engine, spec: JobSpec, values: Mapping[str, object], directives: Directives
) -> str:
    """Return the script that runs the batch script as a step of an allocation; empty for a job of its own."""
    if spec.allocation is None:
        return ""
    variables = {
        "SLURM_JOB_NODELIST": ",".join(spec.allocation.nodes),
        "SLURM_NODELIST": ",".join(spec.allocation.nodes),
        "SLURM_JOB_NUM_NODES": str(len(spec.allocation.nodes)),
        "SLURM_NNODES": str(len(spec.allocation.nodes)),
        "SLURM_JOB_NAME": spec.name,
        "SLURM_SUBMIT_DIR": spec.work_dir,
    }
    if tasks := directives.value("ntasks-per-node"):
        variables["SLURM_NTASKS"] = str(int(tasks) * len(spec.allocation.nodes))
    for name in ("ntasks-per-node", "cpus-per-task", "gpus-per-node"):
        if value := directives.value(name):
            variables[f"SLURM_{name.replace('-', '_').upper()}"] = value
    slurm_variables = [{"name": RawShell(name), "value": value} for name, value in variables.items()]
    return engine.render("attempt/allocation.sh.j2", {**values, "slurm_variables": slurm_variables})


def _containers_of_roles(
    spec: JobSpec, site: Site, layout: TaskLayout, exported: Sequence[Mapping[str, str]]
) -> dict[str, ContainerParts]:
    """Return the container of each role beside the main role, by its name."""
    return {
        role.name: ContainerParts(
            site.runtime, container_entry(spec_of_role(spec, role), site.profile, layout, exported)
        )
        for role in spec.other_roles
    }


def _has_node_files(spec: JobSpec, layout: TaskLayout, *, restarts: bool) -> bool:
    """Return whether the ranks of a node share a log and a file of records, which the node's agent writes.

    In a container the ranks may not share a temporary folder. A launcher that restarts ranks may move a rank
    to another node, and a rank with separate streams has files of its own anyway.
    """
    is_plain = restarts or spec.separate_streams or spec.container is not None
    return spec.supervised and layout.nodes > plain_nodes(dict(spec.env)) and not is_plain


def _job_values(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, launcher: Launcher
) -> dict[str, object]:
    restarts = "max_restarts" in launcher.options and launcher.option(spec, "max_restarts") != "0"
    has_one_rank = layout.world_size == 1
    ranks = "1 rank" if has_one_rank else f"{layout.world_size} ranks"
    nodes = "1 node" if layout.nodes == 1 else f"{layout.nodes} nodes x {layout.ranks_per_node}"
    return {
        "version": RawShell(dtslurm.__version__),
        "cluster": RawShell(comment_text(profile.name)),
        "headline": RawShell(comment_text(f"{spec.script}: {ranks} ({nodes}) by {launcher.name}")),
        "login_flag": RawShell(" -l" if profile.environment.login_shell else ""),
        "array": spec.array is not None,
        "trials": spec.trials is not None,
        "separate_streams": spec.separate_streams,
        "node_files": _has_node_files(spec, layout, restarts=restarts),
        "nodes": layout.nodes,
        "world_size": layout.world_size,
        "ranks_per_node": layout.ranks_per_node,
        "gpus_per_node": layout.gpus_per_node,
        "rendezvous": launcher.needs_rendezvous(layout) or spec.fabric_check,
        "head_address": profile.slurm.head_address or None,
        # Job ids of the local scheduler are unique per user only; process ids are unique on the machine.
        # With 4 added, they do not get the ports of the first four attempts of a Slurm job.
        "port_offset": RawShell("$$ * 8 + 4" if profile.scheduler == "local" else "SLURM_JOB_ID * 8"),
        "host_suffix": RawShell(profile.slurm.host_suffix or ""),
        "options": {key: launcher.option(spec, key) for key in launcher.options},
        "rank_cpus": RawShell(join(_rank_cpus(spec, profile, layout))),
        "passed_on": RawShell(join(launcher.passed_on(spec))),
        "worker_program": _embed_program(launcher.worker_program) if launcher.worker_program else None,
        "restarts": restarts,
        "elastic": launcher.elastic(spec),
        "step": launcher.step,
        "python": spec.python,
        "user_variables": [name for name, _ in spec.env],
        "signal": RawShell(spec.signal) if spec.signal_before is not None else None,
        "lead": spec.signal_before,
        "ignore_signal": launcher.ignore_signal,
        "own_codes": launcher.own_codes,
        "training": RawShell(wrap(_rank_command(launcher.training(spec)))),
    }


def _rank_cpus(spec: JobSpec, profile: ClusterProfile, layout: TaskLayout) -> tuple[str, ...]:
    """Return the CPUs of each rank of a node, empty if the job may get other CPUs or chooses its own."""
    node = choose_destination(spec.resources, profile).node
    option_names = {name.replace("-", "_") for name in spec.launcher_options}
    is_chosen = spec.resources.cpus_per_task is not None or not option_names.isdisjoint(
        {"numa_binding", "cpu_bind"}
    )
    if node is None or is_chosen or layout.one_process or layout.gpus_per_node != node.gpu_count:
        return ()
    return node.rank_cpus if layout.ranks_per_node == len(node.rank_cpus) else ()


def _choose_end_options(
    spec: JobSpec, profile: ClusterProfile, launcher: Launcher, *, shrinks: bool
) -> list[str]:
    """Return sbatch's options on what happens when a node fails."""
    requeue = "requeue" if _may_requeue(spec, profile, launcher) else "no-requeue"
    keeps_other_nodes = launcher.elastic(spec) or shrinks or spec.spare_nodes
    return [requeue, "no-kill"] if keeps_other_nodes else [requeue]


def _may_requeue(spec: JobSpec, profile: ClusterProfile, launcher: Launcher) -> bool:
    """Return whether Slurm may requeue the job."""
    if profile.slurm.requeue != "allowed":
        return profile.slurm.requeue == "required"
    return spec.requeued or (spec.requeue is None and launcher.resumes(spec))


def _supervisor_command(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, launcher: Launcher, directory: str
) -> tuple[str, ...]:
    """Return the supervisor's command line."""
    words = ["python3", f"{directory}/supervisor", f"--nodes={layout.nodes}"]
    if isinstance(directory, RawShell):
        words[1] = RawShell(f"{directory}/supervisor")
    if launcher.least_nodes(spec, layout) < layout.nodes:
        words.append(f"--least-nodes={launcher.least_nodes(spec, layout)}")
    words.append(f"--world-size={layout.world_size}")
    if spec.health_check is not False and spec.acts_on_failures:
        words.append("--health-check")
    restarts = _RESTARTS if spec.restarted else 0
    words.append(f"--max-restarts={restarts if spec.max_restarts is None else spec.max_restarts}")
    hang_timeout = spec.hang_timeout if spec.acts_on_failures else -1  # a hang is only reported
    if hang_timeout:
        words.append(f"--hang-timeout={hang_timeout}")
    if spec.total_time:
        words.append(f"--total-time={spec.total_time}")
    if layout.time:
        words.append(f"--time-limit={layout.time.seconds}")
    words.append(f"--python={spec.python}")
    if profile.slurm.start_now:
        words.append("--start-now")
    words += _continuation_option(spec, profile)
    if not isinstance(directory, RawShell):
        words.append(f"--script={directory}/script.sbatch")
    return tuple(words)


def _continuation_option(spec: JobSpec, profile: ClusterProfile) -> list[str]:
    """Return the option for how the supervisor continues the run in a new job, empty for a requeue.

    Without ``--requeue``, Slurm requeues no job by itself; the supervisor permits its own requeues.
    """
    method = profile.slurm.go_on_by or "requeue"
    if method == "requeue" and (profile.slurm.requeue == "forbidden" or spec.requeue is False):
        method = "afterany"
    return [] if method == "requeue" else [f"--go-on-by={method}"]


def _environment_values(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, launcher: Launcher
) -> dict[str, Any]:
    setup = profile.environment
    fabric_setup = profile.fabric.setup if profile.fabric and layout.nodes > 1 else ()
    return {
        "modules": setup.modules,
        "profile_setup": tuple(RawShell(line) for line in (*setup.setup, *fabric_setup)),
        "user_setup": tuple(RawShell(line) for line in spec.setup),
        "teardown": tuple(RawShell(line.rstrip("\n")) for line in (*spec.teardown, *setup.teardown)),
        "activate": spec.activate if spec.activate and not _is_conda(spec.activate) else None,
        "conda": _conda_values(spec.activate) if spec.activate and _is_conda(spec.activate) else None,
        "variables": _exported_variables(spec, profile, layout, launcher.variables(spec, layout)),
    }


def _is_conda(folder: str) -> bool:
    return (Path(folder) / "conda-meta").is_dir()


def _conda_values(folder: str) -> dict[str, str]:
    path = Path(folder)
    base = path.parent.parent if path.parent.name == "envs" else path
    return {"base": str(base), "environment": folder}


def _exported_variables(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, launcher_variables: Mapping[str, Variable]
) -> list[dict[str, str]]:
    """Return the variables to export. Later sources override earlier ones.

    The order is: fabric, ``launcher_variables``, profile, default OMP_NUM_THREADS, the user's variables.
    """
    variables: dict[str, Variable] = {}
    if layout.nodes > 1 and profile.fabric:
        variables.update(_expand_profile_variables(profile.fabric.environment))
    variables.update(launcher_variables)
    variables.update(_expand_profile_variables(profile.environment.variables))
    if layout.cpus_per_rank and "OMP_NUM_THREADS" not in variables:
        node = choose_destination(spec.resources, profile).node
        cores = max(1, layout.cpus_per_rank // (node.threads_per_core if node else 1))
        variables["OMP_NUM_THREADS"] = Variable(value=str(cores), why="one thread per core of a rank")
    elif layout.ranks_per_node > 1 and not layout.gpus_per_node and "OMP_NUM_THREADS" not in variables:
        variables["OMP_NUM_THREADS"] = Variable(value="1", why="each rank has one CPU")
    later_names = {variable["name"] for variable in _variables_of_addresses(spec)}
    for name, value in spec.env:
        variables.pop(name, None)
        if name not in later_names:
            variables[name] = Variable(value=value)
    return [
        {
            "name": RawShell(name),
            "value": variable.value,
            "comment": RawShell(f" # {comment_text(variable.why)}" if variable.why else ""),
        }
        for name, variable in variables.items()
    ]


def _variables_of_addresses(spec: JobSpec) -> list[dict[str, str]]:
    """Return the user's variables that refer to addresses of roles, which each attempt replaces."""
    return [
        {"name": RawShell(name), "value": quote_with_references(value)}
        for name, value in spec.env
        if spec.other_roles and has_references(value)
    ]


def _expand_profile_variables(variables: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return the variables of a profile with references to other variables expanded on the cluster."""
    return {
        name: replace(variable, value=quote_with_variables(variable.value))
        for name, variable in variables.items()
    }


def _live_script(spec: JobSpec, run_place: RunPlace) -> str | None:
    """Return the training script if it is outside the run directory, where the user may still change it."""
    if isinstance(run_place.directory, RawShell) or spec.module:
        return None
    run_dir_prefix = f"{run_place.directory}/"
    return (
        None
        if spec.work_dir.startswith(run_dir_prefix) or spec.script.startswith(run_dir_prefix)
        else spec.script
    )


def training_command(spec: JobSpec) -> tuple[str, ...]:
    """Return the command of one rank: the interpreter and script, the module, or the executable itself."""
    quote_argument = quote_with_references if spec.other_roles else quote_with_job_values
    args = tuple(map(quote_argument, spec.args))
    if spec.module:
        return (spec.python, "-m", spec.script, *args)
    if spec.script.endswith(".py"):
        return (spec.python, spec.script, *args)
    executable = spec.script if "/" in spec.script else f"./{spec.script}"
    return (executable, *args)


def _rank_command(spec: JobSpec) -> tuple[str, ...]:
    """Return the command of a rank's shell: the training command, wrapped by the trial program in a sweep."""
    if spec.trials is None:
        return training_command(spec)
    python_options = ("-BES",) if spec.trials.plain else ()  # Optuna is in the environment
    env_options = tuple(f"--env={name}" for name in spec.trials.env)
    return (
        spec.python,
        *python_options,
        RawShell('"$DTSLURM_TRIALS/trial.py"'),
        *env_options,
        "--",
        *training_command(spec),
    )


def _step_words(
    spec: JobSpec,
    profile: ClusterProfile,
    layout: TaskLayout,
    launcher: Launcher,
    directives: Directives,
    *,
    shrinks: bool,
) -> tuple[str, ...]:
    """Return the srun command of the training step.

    Args:
        shrinks: the step may start on fewer nodes than the job began with.
    """
    tasks_per_node = launcher.tasks_per_node(layout)
    # The failure of a trial must not end the other trials of its array task.
    independent_trials = spec.trials is not None and spec.trials.per_task > 1
    end_options = _ELASTIC_END_OPTIONS if launcher.elastic(spec) or independent_trials else _END_OPTIONS
    srun = _srun_words(profile, layout, tasks_per_node, directives, launcher.mpi(spec), end_options)
    if shrinks:
        tasks = "$nodes" if tasks_per_node == 1 else f"$((nodes * {tasks_per_node}))"
        srun = (srun[0], RawShell('--nodes="$nodes"'), RawShell(f'--ntasks="{tasks}"'), *srun[3:])
    if launcher.started_by(spec) == "srun":
        srun = (*srun, *launcher.passed_on(spec))
    return (*srun[:1], *_OVERLAP_OPTIONS, *srun[1:]) if spec.supervised else srun


def _srun_words(
    profile: ClusterProfile,
    layout: TaskLayout,
    tasks_per_node: int,
    directives: Directives,
    mpi: str | None,
    end_options: tuple[str, ...] = _END_OPTIONS,
) -> tuple[str, ...]:
    slurm_rules = profile.slurm
    words = ["srun", f"--nodes={layout.nodes}", f"--ntasks={layout.nodes * tasks_per_node}"]
    words.append(f"--ntasks-per-node={tasks_per_node}")
    if "cpus-per-task" in directives:
        words.append(RawShell('--cpus-per-task="$SLURM_CPUS_PER_TASK"'))
    if layout.gpus_per_node and slurm_rules.gpu_bind:
        words.append(f"--gpu-bind={slurm_rules.gpu_bind}")
    if slurm_rules.cpu_bind:
        words.append(f"--cpu-bind={slurm_rules.cpu_bind}")
    if slurm_rules.distribution or tasks_per_node > 1:
        words.append(f"--distribution={slurm_rules.distribution or 'block'}")
    if mpi_type := slurm_rules.mpi if mpi is None else mpi:
        words.append(f"--mpi={mpi_type}")
    words += [*end_options, RawShell('--output="$logs/node-%n.log"')]
    return (*words, *slurm_rules.srun_options)


def _output_copies(spec: JobSpec) -> dict[str, RawShell]:
    """Return the paths to which the script copies its output and its errors."""
    patterns = {"output": spec.output, "error": spec.error}
    return {name: fill_in_pattern(path, spec.work_dir) for name, path in patterns.items() if path}


def _fabric_check_values(
    spec: JobSpec,
    profile: ClusterProfile,
    layout: TaskLayout,
    directives: Directives,
    container_parts: ContainerParts,
) -> dict[str, str]:
    """Return the template values of the network check, which runs one srun task per rank."""
    fabric = profile.fabric if layout.nodes > 1 else None
    expected_busbw = (fabric and fabric.expected_busbw_gbs) or 0
    kind = fabric.kind if fabric and fabric.kind not in {"ethernet", "loopback"} else "any"
    srun = []
    for word in _srun_words(profile, layout, layout.ranks_per_node, directives, mpi=""):
        if word.startswith("--cpus-per-task="):  # a task of an agent has the CPUs of several ranks
            srun.append(f"--cpus-per-task={cpus_per_task(layout, layout.ranks_per_node) or 1}")
        elif word.startswith("--output="):
            srun.append(RawShell('--output="$logs/fabric-check.log"'))
        else:
            srun.append(word)
    if "cpus-per-task" not in directives and profile.scheduler == "slurm":
        srun.append("--overcommit")  # the job may have fewer CPUs than ranks
    program = _embed_program("probe/fabric_check.py")
    result_path, program_path = (
        RawShell('"$DTSLURM_RUN_DIR/fabric.json"'),
        RawShell('"$DTSLURM_RUN_DIR/fabric_check.py"'),
    )
    words = (
        *srun,
        *container_parts.words(),
        spec.python,
        program_path,
        result_path,
        f"{expected_busbw:g}",
        kind,
    )
    return {"program": program["text"], "end": program["end"], "srun": RawShell(wrap(words))}


def _embed_program(name: str) -> dict[str, str]:
    """Return the text of a program of ``dtslurm/worker``, and the line that ends it in a script."""
    text = assets.worker(name).read_text("utf-8")
    return {"text": RawShell(text.rstrip("\n")), "end": RawShell(heredoc_end(text, "END_OF_PYTHON"))}


def _task_files(
    engine: Engine,
    spec: JobSpec,
    layout: TaskLayout,
    launcher: Launcher,
    values: Mapping[str, object],
    roles: Iterable[tuple[str, str]],
) -> list[dict[str, str]]:
    """Return the files that the script writes for its tasks, each with a heredoc delimiter.

    Args:
        roles: names and texts of the scripts of roles.
    """
    rank_words = ("bash", RawShell('"$DTSLURM_RUN_DIR/rank.sh"'))
    training = _rank_command(launcher.training(spec))
    command = launcher.command(spec, layout, rank_words if launcher.agent else training)
    context = {**values, "command": RawShell(wrap(command))}
    if not launcher.agent:
        context["training"] = context["command"]
    files = []
    if launcher.agent:
        files.append(("rank.sh", "#!/bin/bash\n" + engine.render("rank.sh.j2", context)))
    task = engine.render(launcher.partial, context)
    task_head = engine.render("staging/task.sh.j2", context) if spec.stage_in else ""
    if spec.stage_out and spec.signal_before is not None and values["claim"]:
        task_head += engine.render("staging/watch.sh.j2", context)
    if spec.sample and values["claim"]:  # only a submitted run directory contains the sampler
        mpirun = "start" in launcher.options and launcher.option(spec, "start") == "mpirun"
        local_rank = RawShell("OMPI_COMM_WORLD_LOCAL_RANK" if mpirun else "SLURM_LOCALID")
        event = _independence_event(spec, layout, launcher)
        task_head += engine.render(
            "sampler.sh.j2", {**context, "local_rank": local_rank, "apart": RawShell(event)}
        )
    files.append(("task.sh", insert_after_comments(task, task_head)))
    if spec.supervised:
        files.append(("step.sh", engine.render("attempt/step.sh.j2", context)))
    files += roles
    return [
        {"name": RawShell(name), "text": RawShell(text.rstrip("\n")), "end": RawShell(heredoc_end(text))}
        for name, text in files
    ]


def _independence_event(spec: JobSpec, layout: TaskLayout, launcher: Launcher) -> str:
    """Return the event to record if ranks train independently, empty if this is not checked."""
    if (
        layout.world_size < 2
        or launcher.one_process
        or (spec.trials is not None and spec.trials.per_task > 1)
    ):
        return ""
    if launcher.framework == "torch" or spec.launcher == "deepspeed":
        return "not_distributed"
    return "ranks_apart" if launcher.name == "srun" else ""
