"""(spec, profile, launcher) to one frozen ``Submission``. Nothing else makes scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dtslurm
from dtslurm.container.base import FOLDER, Runtime
from dtslurm.launch.base import Launcher
from dtslurm.model.cluster import ClusterProfile, Variable
from dtslurm.model.jobs.destination import destination
from dtslurm.model.jobs.job import JobSpec, Submission, TaskLayout
from dtslurm.model.shell import Sh, filled_in, join, with_job_values
from dtslurm.model.values import dataclass
from dtslurm.render.directives import Directives, build, cpus_per_task
from dtslurm.render.engine import Engine, Templates, engine_of
from dtslurm.render.inside import Inside, container_entry
from dtslurm.render.output_paths import fill_in_pattern
from dtslurm.render.staging import staging_values
from dtslurm.render.text import behind_head, check, comment_text, heredoc_end, wrap

_RESTARTS = 3  # where restarts are asked for without a number
_BASE = "base.sbatch.j2"
# When a task fails, the others of the step are ended too; or they go on as they are. Who is done ends nobody:
# rank 0 may save or evaluate long after the others. The site's WaitTime counts where nothing is said.
_ENDS = ("--kill-on-bad-exit=1", "--wait=0")
_ELASTIC_ENDS = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
# An attempt has nodes of its own, and must not wait for what Slurm believes of the one before.
_ON_NODES = (Sh('--nodelist="$SLURM_JOB_NODELIST"'), "--overlap")


@dataclass(frozen=True)
class RunPlace:
    """Where a run keeps its files.

    Attributes:
        directory: the run directory as the script writes it; ``Sh`` if the job's own shell completes it.
        output: value of ``--output``, None to leave Slurm's default.
        token: identity of the submission.
    """

    directory: str
    output: str | None
    token: str

    @property
    def images(self) -> str:
        """The folder of container images that all runs of this run root share."""
        root = self.directory.rpartition("/")[0]
        return Sh(f'{root}/{FOLDER}"') if isinstance(self.directory, Sh) else f"{root}/{FOLDER}"


def render(
    spec: JobSpec,
    profile: ClusterProfile,
    layout: TaskLayout,
    launcher: Launcher,
    place: RunPlace,
    *,
    templates: Templates,
    runtime: Runtime | None = None,
) -> Submission:
    """Return the submission of ``spec`` on ``profile``'s cluster.

    Args:
        templates: where they are.
        runtime: the container runtime, where the job names an image.

    Raises:
        RequestInvalid: a value cannot be held in an sbatch directive.
        RenderError: a template is wrong.
    """
    launcher = launcher.chosen(spec)
    tasks_per_node = launcher.tasks_per_node(layout)
    shrinks = spec.supervised and launcher.least_nodes(spec, layout) < layout.nodes
    directives = build(
        spec,
        profile,
        layout,
        tasks_per_node,
        place.output,
        requeue=_may_requeue(spec, profile, launcher),
        no_kill=launcher.elastic(spec) or shrinks,
    )
    engine = engine_of(templates)
    environment = _environment_values(spec, profile, layout, launcher)
    entry = container_entry(spec, profile, layout, environment["variables"], launcher.step_variables)
    inside = Inside(runtime, entry)
    for name, value in inside.directives().items():
        directives.set(name, value)
    srun = _step_words(spec, profile, layout, launcher, directives, shrinks=shrinks)
    values = {
        **_job_values(spec, profile, layout, launcher),
        "run_dir": place.directory,
        "images": place.images,
        "supervised": spec.supervised,
        "shrinks": shrinks,
        "world": Sh('"$world"') if shrinks else layout.world_size,
        "world_text": Sh("$world") if shrinks else layout.world_size,
        "supervisor": Sh(
            wrap(_supervisor(spec, profile, layout, launcher, place.directory)).replace("\n", "\n    ")
        ),
        "spare_nodes": spec.spare_nodes,
        "secrets": tuple(map(Sh, spec.secrets)),
        "starts_once": not spec.supervised and "no-requeue" in directives,
        "copies": _output_copies(spec) if place.output else {},
        "claim": not isinstance(place.directory, Sh),
        "work_dir": spec.work_dir,
        "live_script": _live_script(spec, place),
        **environment,
        **inside.values(),
        "directives": Sh(directives.text()),
        "export_none": "export" in directives and "--export=NONE" in directives.text(),
        "srun": Sh(wrap((*srun, *inside.words(), "bash", Sh('"$DTSLURM_RUN_DIR/task.sh"')))),
        "srun_cpus": "cpus-per-task" in directives,
        "fabric_check": _fabric_check(spec, profile, layout, directives, inside)
        if spec.fabric_check
        else None,
    }
    values["staging"] = staging_values(
        spec, layout, directives, place.directory, program=values["claim"] is True, shrinks=shrinks
    )
    values["task_files"] = _task_files(engine, spec, layout, launcher, values)
    name = _BASE if spec.template is None else Path(spec.template).name
    script = engine.render(name, values)
    check(script, name)
    return Submission(
        token=place.token,
        cluster=profile.name,
        spec=spec,
        layout=layout,
        run_dir=place.directory,
        script=script.rstrip("\n") + "\n",
    )


def _job_values(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, launcher: Launcher
) -> dict[str, object]:
    restarts = "max_restarts" in launcher.options and launcher.option(spec, "max_restarts") != "0"
    one = layout.world_size == 1
    ranks = "1 rank" if one else f"{layout.world_size} ranks"
    nodes = "1 node" if layout.nodes == 1 else f"{layout.nodes} nodes x {layout.ranks_per_node}"
    return {
        "version": Sh(dtslurm.__version__),
        "cluster": Sh(comment_text(profile.name)),
        "headline": Sh(comment_text(f"{spec.script}: {ranks} ({nodes}) by {launcher.name}")),
        "login_flag": Sh(" -l" if profile.environment.login_shell else ""),
        "array": spec.array is not None,
        "trials": spec.trials is not None,
        "separate_streams": spec.separate_streams,
        "nodes": layout.nodes,
        "world_size": layout.world_size,
        "ranks_per_node": layout.ranks_per_node,
        "gpus_per_node": layout.gpus_per_node,
        "rendezvous": launcher.needs_rendezvous(layout) or spec.fabric_check,
        "head_address": profile.slurm.head_address or None,
        # Job ids of the embedded scheduler are each user's own, process ids the whole machine's.
        "apart": Sh("$$" if profile.scheduler == "local" else "SLURM_JOB_ID"),
        "host_suffix": Sh(profile.slurm.host_suffix or ""),
        "options": {key: launcher.option(spec, key) for key in launcher.options},
        "rank_cpus": Sh(join(_rank_cpus(spec, profile, layout))),
        "passed_on": Sh(join(launcher.passed_on(spec))),
        "restarts": restarts,
        "elastic": launcher.elastic(spec),
        "step": launcher.step,
        "python": spec.python,
        "user_variables": [name for name, _ in spec.env],
        "signal": Sh(spec.signal) if spec.signal_before is not None else None,
        "lead": spec.signal_before,
        "ignore_signal": launcher.ignore_signal,
        "own_codes": launcher.own_codes,
        "training": Sh(wrap(_rank_command(launcher.training(spec)))),
    }


def _rank_cpus(spec: JobSpec, profile: ClusterProfile, layout: TaskLayout) -> tuple[str, ...]:
    """Return the CPUs of each rank of a node; nothing where the job may have others, or names its own."""
    node = destination(spec.resources, profile).node
    options = {name.replace("-", "_") for name in spec.launcher_options}
    chosen = spec.resources.cpus_per_task is not None or not options.isdisjoint({"numa_binding", "cpu_bind"})
    if node is None or chosen or layout.one_process or layout.gpus_per_node != node.gpu_count:
        return ()
    return node.rank_cpus if layout.ranks_per_node == len(node.rank_cpus) else ()


def _may_requeue(spec: JobSpec, profile: ClusterProfile, launcher: Launcher) -> bool:
    """Return whether Slurm may queue the job again."""
    if profile.slurm.requeue != "allowed":
        return profile.slurm.requeue == "required"
    return spec.requeued or (spec.requeue is None and launcher.resumes(spec))


def _supervisor(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, launcher: Launcher, directory: str
) -> tuple[str, ...]:
    """Return the supervisor's command line."""
    words = ["python3", f"{directory}/supervisor", f"--nodes={layout.nodes}"]
    if isinstance(directory, Sh):
        words[1] = Sh(f"{directory}/supervisor")
    if launcher.least_nodes(spec, layout) < layout.nodes:
        words.append(f"--least-nodes={launcher.least_nodes(spec, layout)}")
    words.append(f"--world-size={layout.world_size}")
    if spec.health_check is not False:
        words.append("--health-check")
    restarts = _RESTARTS if spec.restarted else 0
    words.append(f"--max-restarts={restarts if spec.max_restarts is None else spec.max_restarts}")
    if spec.hang_timeout:
        words.append(f"--hang-timeout={spec.hang_timeout}")
    if spec.total_time:
        words.append(f"--total-time={spec.total_time}")
    if layout.time:
        words.append(f"--time-limit={layout.time.seconds}")
    words.append(f"--python={spec.python}")
    if profile.slurm.start_now:
        words.append("--start-now")
    words += _go_on_by(spec, profile)
    if not isinstance(directory, Sh):
        words.append(f"--script={directory}/script.sbatch")
    return tuple(words)


def _go_on_by(spec: JobSpec, profile: ClusterProfile) -> list[str]:
    """Return how the supervisor gets the run its next job, where this is not a requeue.

    Without ``--requeue`` Slurm requeues no job by itself; the supervisor allows its own requeues.
    """
    way = profile.slurm.go_on_by or "requeue"
    if way == "requeue" and (profile.slurm.requeue == "forbidden" or spec.requeue is False):
        way = "afterany"
    return [] if way == "requeue" else [f"--go-on-by={way}"]


def _environment_values(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, launcher: Launcher
) -> dict[str, Any]:
    setup = profile.environment
    fabric_setup = profile.fabric.setup if profile.fabric and layout.nodes > 1 else ()
    return {
        "modules": setup.modules,
        "profile_setup": tuple(Sh(line) for line in (*setup.setup, *fabric_setup)),
        "user_setup": tuple(Sh(line) for line in spec.setup),
        "teardown": tuple(Sh(line.rstrip("\n")) for line in (*spec.teardown, *setup.teardown)),
        "activate": spec.activate if spec.activate and not _is_conda(spec.activate) else None,
        "conda": _conda(spec.activate) if spec.activate and _is_conda(spec.activate) else None,
        "variables": _variables(spec, profile, layout, launcher.variables(spec, layout)),
    }


def _is_conda(folder: str) -> bool:
    return (Path(folder) / "conda-meta").is_dir()


def _conda(folder: str) -> dict[str, str]:
    path = Path(folder)
    base = path.parent.parent if path.parent.name == "envs" else path
    return {"base": str(base), "environment": folder}


def _variables(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, wanted: Mapping[str, Variable]
) -> list[dict[str, str]]:
    """Return what to export: the fabric's, the launcher's, the site's, ours, the user's; the last wins."""
    chosen: dict[str, Variable] = {}
    if layout.nodes > 1 and profile.fabric:
        chosen.update(_of_site(profile.fabric.environment))
    chosen.update(wanted)
    chosen.update(_of_site(profile.environment.variables))
    if layout.cpus_per_rank and "OMP_NUM_THREADS" not in chosen:
        node = destination(spec.resources, profile).node
        cores = max(1, layout.cpus_per_rank // (node.threads_per_core if node else 1))
        chosen["OMP_NUM_THREADS"] = Variable(value=str(cores), why="one thread per core of a rank")
    elif layout.ranks_per_node > 1 and not layout.gpus_per_node and "OMP_NUM_THREADS" not in chosen:
        chosen["OMP_NUM_THREADS"] = Variable(value="1", why="each rank has one CPU")
    for name, value in spec.env:
        chosen.pop(name, None)
        chosen[name] = Variable(value=value)
    return [
        {
            "name": Sh(name),
            "value": variable.value,
            "comment": Sh(f" # {comment_text(variable.why)}" if variable.why else ""),
        }
        for name, variable in chosen.items()
    ]


def _of_site(variables: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return a profile's variables, which may name others; they are of the cluster's side."""
    return {name: replace(one, value=filled_in(one.value)) for name, one in variables.items()}


def _live_script(spec: JobSpec, place: RunPlace) -> str | None:
    """Return the training script of a submission if it is one of the user's own files, which may change."""
    if isinstance(place.directory, Sh) or spec.module:
        return None
    inside = f"{place.directory}/"
    return None if spec.work_dir.startswith(inside) or spec.script.startswith(inside) else spec.script


def training_command(spec: JobSpec) -> tuple[str, ...]:
    """Return what one rank runs: the interpreter and script, the module, or the executable itself."""
    args = tuple(map(with_job_values, spec.args))
    if spec.module:
        return (spec.python, "-m", spec.script, *args)
    if spec.script.endswith(".py"):
        return (spec.python, spec.script, *args)
    executable = spec.script if "/" in spec.script else f"./{spec.script}"
    return (executable, *args)


def _rank_command(spec: JobSpec) -> tuple[str, ...]:
    """Return what a rank's shell runs: what it trains with, for a sweep by a program that fills values in."""
    if spec.trials is None:
        return training_command(spec)
    isolated = ("-BES",) if spec.trials.plain else ()  # Optuna is in the environment
    filled = tuple(f"--env={name}" for name in spec.trials.env)
    return (spec.python, *isolated, Sh('"$DTSLURM_TRIALS/trial.py"'), *filled, "--", *training_command(spec))


def _step_words(
    spec: JobSpec,
    profile: ClusterProfile,
    layout: TaskLayout,
    launcher: Launcher,
    directives: Directives,
    *,
    shrinks: bool,
) -> tuple[str, ...]:
    """Return the srun of the training step.

    Args:
        shrinks: it may start on fewer nodes than the job began with.
    """
    tasks_per_node = launcher.tasks_per_node(layout)
    apart = spec.trials is not None and spec.trials.per_task > 1  # trials, of which none is to end others
    ends = _ELASTIC_ENDS if launcher.elastic(spec) or apart else _ENDS
    srun = _srun_words(profile, layout, tasks_per_node, directives, launcher.mpi(spec), ends)
    if shrinks:
        tasks = "$nodes" if tasks_per_node == 1 else f"$((nodes * {tasks_per_node}))"
        srun = (srun[0], Sh('--nodes="$nodes"'), Sh(f'--ntasks="{tasks}"'), *srun[3:])
    if launcher.started_by(spec) == "srun":
        srun = (*srun, *launcher.passed_on(spec))
    return (*srun[:1], *_ON_NODES, *srun[1:]) if spec.supervised else srun


def _srun_words(
    profile: ClusterProfile,
    layout: TaskLayout,
    tasks_per_node: int,
    directives: Directives,
    mpi: str | None,
    ends: tuple[str, ...] = _ENDS,
) -> tuple[str, ...]:
    customs = profile.slurm
    words = ["srun", f"--nodes={layout.nodes}", f"--ntasks={layout.nodes * tasks_per_node}"]
    words.append(f"--ntasks-per-node={tasks_per_node}")
    if "cpus-per-task" in directives:
        words.append(Sh('--cpus-per-task="$SLURM_CPUS_PER_TASK"'))
    if layout.gpus_per_node and customs.gpu_bind:
        words.append(f"--gpu-bind={customs.gpu_bind}")
    if customs.cpu_bind:
        words.append(f"--cpu-bind={customs.cpu_bind}")
    if customs.distribution or tasks_per_node > 1:
        words.append(f"--distribution={customs.distribution or 'block'}")
    if mpi or customs.mpi:
        words.append(f"--mpi={mpi or customs.mpi}")
    words += [*ends, Sh('--output="$logs/node-%n.log"')]
    return (*words, *customs.srun_options)


def _output_copies(spec: JobSpec) -> dict[str, Sh]:
    """Return where the script writes a copy of its output and of its errors."""
    asked = {"output": spec.output, "error": spec.error}
    return {name: fill_in_pattern(path, spec.work_dir) for name, path in asked.items() if path}


def _fabric_check(
    spec: JobSpec, profile: ClusterProfile, layout: TaskLayout, directives: Directives, inside: Inside
) -> dict[str, str]:
    """Return what the script needs to measure the network: one task for each rank, as if by srun."""
    fabric = profile.fabric if layout.nodes > 1 else None
    expected = (fabric and fabric.expected_busbw_gbs) or 0
    kind = fabric.kind if fabric and fabric.kind not in {"ethernet", "loopback"} else "any"
    srun = []
    for word in _srun_words(profile, layout, layout.ranks_per_node, directives, None):
        if word.startswith("--cpus-per-task="):  # an agent's task has more
            srun.append(f"--cpus-per-task={cpus_per_task(layout, layout.ranks_per_node) or 1}")
        elif word.startswith("--output="):
            srun.append(Sh('--output="$logs/fabric-check.log"'))
        else:
            srun.append(word)
    if "cpus-per-task" not in directives and profile.scheduler == "slurm":
        srun.append("--overcommit")  # there may be fewer CPUs than ranks
    program = Path(dtslurm.__file__).with_name("worker").joinpath("probe/fabric_check.py").read_text("utf-8")
    result, written = Sh('"$DTSLURM_RUN_DIR/fabric.json"'), Sh('"$DTSLURM_RUN_DIR/fabric_check.py"')
    words = (*srun, *inside.words(), spec.python, written, result, f"{expected:g}", kind)
    end = heredoc_end(program, "END_OF_PYTHON")
    return {"program": Sh(program.rstrip("\n")), "end": Sh(end), "srun": Sh(wrap(words))}


def _task_files(
    engine: Engine, spec: JobSpec, layout: TaskLayout, launcher: Launcher, values: Mapping[str, object]
) -> list[dict[str, str]]:
    """Return the files that the script writes for its tasks, each with a heredoc mark it does not hold."""
    rank_words = ("bash", Sh('"$DTSLURM_RUN_DIR/rank.sh"'))
    training = _rank_command(launcher.training(spec))
    command = launcher.command(spec, layout, rank_words if launcher.agent else training)
    context = {**values, "command": Sh(wrap(command))}
    if not launcher.agent:
        context["training"] = context["command"]
    files = []
    if launcher.agent:
        files.append(("rank.sh", "#!/bin/bash\n" + engine.render("rank.sh.j2", context)))
    task = engine.render(launcher.partial, context)
    head = engine.render("staging/task.sh.j2", context) if spec.stage_in else ""
    if spec.stage_out and spec.signal_before is not None and values["claim"]:
        head += engine.render("staging/watch.sh.j2", context)
    if spec.sample and values["claim"]:  # submit puts the program into the run directory
        mpirun = "start" in launcher.options and launcher.option(spec, "start") == "mpirun"
        local_rank = Sh("OMPI_COMM_WORLD_LOCAL_RANK" if mpirun else "SLURM_LOCALID")
        apart = _event_of_ranks_apart(spec, layout, launcher)
        head += engine.render("sampler.sh.j2", {**context, "local_rank": local_rank, "apart": Sh(apart)})
    files.append(("task.sh", behind_head(task, head)))
    if spec.supervised:
        files.append(("step.sh", engine.render("attempt/step.sh.j2", context)))
    return [
        {"name": Sh(name), "text": Sh(text.rstrip("\n")), "end": Sh(heredoc_end(text))}
        for name, text in files
    ]


def _event_of_ranks_apart(spec: JobSpec, layout: TaskLayout, launcher: Launcher) -> str:
    """Return the event to record where ranks train apart, empty where that is not to be looked at."""
    if (
        layout.world_size < 2
        or launcher.one_process
        or (spec.trials is not None and spec.trials.per_task > 1)
    ):
        return ""
    if launcher.framework == "torch" or spec.launcher == "deepspeed":
        return "not_distributed"
    return "ranks_apart" if launcher.name == "srun" else ""
