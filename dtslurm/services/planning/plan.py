"""Plans a training run: resolves model and machine, runs the planner, and returns values to display."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path

from dtslurm.errors import RequestInvalid
from dtslurm.model.cluster import ClusterProfile, NodeType
from dtslurm.model.paths import expand_home
from dtslurm.model.values import dataclass
from dtslurm.planner import constants as shipped
from dtslurm.planner import explain, hardware
from dtslurm.planner.calibrate import Measurement
from dtslurm.planner.constants import Constants
from dtslurm.planner.divide import find_layout_problems
from dtslurm.planner.estimate import Estimate
from dtslurm.planner.frameworks import FRAMEWORKS
from dtslurm.planner.hardware import Machine
from dtslurm.planner.intervals import Interval, classify, interval, tie_factor
from dtslurm.planner.layout import Layout, LayoutProblem, parse_layout
from dtslurm.planner.models import presets
from dtslurm.planner.models.huggingface import ConfigProblem, read_config
from dtslurm.planner.models.shapes import ModelShape
from dtslurm.planner.search import SearchResult, TrainingTask, default_batch, rank_measured, scaling, search
from dtslurm.suggestions import list_nearest, suggest_name

PRECISIONS = ("bf16", "fp16", "fp8", "fp32")
SEARCHED = ("megatron", "nemo", "torchtitan", "fsdp", "deepspeed")
LARGEST_NODES, LARGEST_SEQ, LARGEST_BATCH = 100_000, 16_777_216, 10_000_000


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The user's options; None means the profile's, the model's or a customary value."""

    model: str | None = None
    model_config: str | None = None
    cluster: str | None = None
    node_type: str | None = None
    gpu: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    seq_len: int | None = None
    gbs: int | None = None
    framework: str | None = None
    precision: str = "bf16"
    layout: str | None = None
    tokens: float | None = None
    price: float | None = None
    currency: str = ""
    watts: float | None = None
    scaling: bool = False
    emit: str | None = None
    top: int = 5


@dataclass(frozen=True)
class Plan:
    """The result of planning.

    Attributes:
        task: the model, machine and sizes that were planned for.
        chosen: the estimates of the best layouts, best first; one entry if the user gave a layout.
        why, others, warnings: lines of text for the user.
        unfit: if nothing fits, the reason and what would fit.
        curve: (nodes, estimate or None), if requested.
        notes: the assumptions.
        tried: the number of layouts that were estimated.
        tokens: the number of training tokens, if given.
        cluster, node_type: the profile of the plan, and its node type if requested.
        interval: the 80 % interval of the predicted times.
        ties: numbers of the layouts in ``chosen`` that cannot be distinguished from the first.
        request: the options of the plan.
    """

    task: TrainingTask
    chosen: tuple[Estimate, ...]
    why: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    curve: tuple[tuple[int, Estimate | None], ...] = ()
    notes: tuple[str, ...] = ()
    tried: int = 0
    tokens: float | None = None
    cluster: str | None = None
    node_type: str | None = None
    interval: Interval = Interval(1.0)
    ties: tuple[int, ...] = ()
    request: PlanRequest = PlanRequest()


@dataclass(frozen=True, kw_only=True)
class ClusterRuns:
    """Values from the runs in a cluster's calibration file.

    Attributes:
        constants: the planner's constants, with the factors measured on the cluster.
        timed: the number of runs with this GPU, framework and precision whose step time was measured.
        step_s: measured seconds of a step of this very task, by the layout's text.
        failures: why layouts of this very task failed, by their text.
    """

    constants: Constants
    timed: int = 0
    step_s: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)


def make(request: PlanRequest, cwd: Path) -> Plan:
    """Return the plan.

    Raises:
        RequestInvalid: with every problem of the request.
    """
    problems: list[str] = []
    notes: list[str] = []
    model = read_model(cwd, request, problems)
    machine, profile = read_machine(cwd, request, problems, notes)
    _check_numbers(request, problems)
    layout = _read_layout(request, problems)
    if machine is not None and request.precision == "fp8" and not machine.gpu.fp8_tflops:
        problems.append(
            f"--precision fp8: {machine.gpu.name} has no 8-bit matrix units; bf16 or fp16 is valid"
        )
    if problems or model is None or machine is None:
        raise RequestInvalid(problems)
    precision = request.precision
    if precision == "bf16" and not machine.gpu.has_bf16:
        precision = "fp16"
        notes.append(f"{machine.gpu.name} does not support bf16: planned for fp16")
    seq_len = request.seq_len or (1 if model.generic else min(model.seq_len, 4096))
    gbs = request.gbs or (layout.gbs if layout else default_batch(model, seq_len, machine.gpus))
    if request.gbs is None and layout is None:
        notes.append(f"global batch {gbs} sequences ({gbs * seq_len:,} tokens), a common size; --gbs sets it")
    framework = request.framework or _choose_framework(request, model)
    task = TrainingTask(model, machine, seq_len, gbs, framework, precision)
    runs = ClusterRuns(constants=shipped.default())
    if profile is not None:
        runs = _read_cluster_runs(profile, cwd, task, notes)
    notes += model.assumptions
    if layout is not None:
        plan = _plan_layout(task, layout, request, runs)
    else:
        plan = _search_layouts(task, request, runs)
    kind = classify(machine.gpu, precision, mixture=model.is_moe)
    return replace(
        plan,
        notes=tuple(notes),
        tokens=request.tokens,
        cluster=profile.stem if profile is not None else None,
        node_type=request.node_type if profile is not None else None,
        interval=interval(kind, runs.timed),
        request=request,
    )


_FRAMEWORK_BY_FORM = {
    "torchrun": "fsdp",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "torchtitan-0.2": "torchtitan",
    "torchtitan-0.3": "torchtitan",
    "accelerate": "fsdp",
}


def _choose_framework(request: PlanRequest, model: ModelShape) -> str:
    """Return the framework to plan for: that of ``--emit``, else Megatron-LM if it trains such models."""
    if request.emit in _FRAMEWORK_BY_FORM:
        return _FRAMEWORK_BY_FORM[request.emit]
    return "megatron" if model.stacks and model.vocab and not model.stacks[0].encoder else "fsdp"


def _plan_layout(task: TrainingTask, layout: Layout, request: PlanRequest, runs: ClusterRuns) -> Plan:
    constants = runs.constants
    layout = replace(layout, sp=layout.sp and layout.tp > 1)
    problems = find_layout_problems(task.model, layout, task.machine.gpus, task.seq_len)
    if problems:
        raise RequestInvalid(problems)
    task = replace(task, gbs=layout.gbs)
    estimate = task.estimator(constants).estimate(layout)
    if str(layout) in runs.step_s:
        estimate = estimate.with_measured_time(runs.step_s[str(layout)])
    unfit: tuple[str, ...] = ()
    if not estimate.fits:
        limit_gib = task.estimator(constants).limit_gib
        unfit = (
            f"it needs {estimate.memory.total:.1f} GiB of GPU memory, and a plan may use {limit_gib:.1f} GiB",
        )
    if str(layout) in runs.failures:
        unfit = (*unfit, f"it failed when it was run: {runs.failures[str(layout)]}")
    return Plan(
        task,
        (estimate,),
        why=tuple(explain.why_best(SearchResult(task, (estimate,), (), 1))),
        warnings=tuple(explain.layout_warnings(task, estimate)),
        unfit=unfit,
        tried=1,
    )


def _search_layouts(task: TrainingTask, request: PlanRequest, runs: ClusterRuns) -> Plan:
    constants = runs.constants
    outcome = search(task, constants)
    factor = tie_factor(mixture=task.model.is_moe)
    running = [item for item in outcome.ranked if str(item.layout) not in runs.failures]
    failed = [
        f"{item.layout}: failed when it was run: {runs.failures[str(item.layout)]}"
        for item in outcome.ranked
        if str(item.layout) in runs.failures
    ]
    outcome = replace(outcome, ranked=rank_measured(running, runs.step_s, factor))
    curve: tuple[tuple[int, Estimate | None], ...] = ()
    if request.scaling:
        node_counts = sorted(
            {*(2**power for power in range(17) if 2**power < task.machine.nodes), task.machine.nodes}
        )
        curve = tuple(scaling(task, constants, node_counts))
    if not outcome.ranked:
        return Plan(
            task,
            (),
            unfit=tuple(failed or explain.what_would_fit(outcome, constants)),
            tried=outcome.tried,
            curve=curve,
        )
    why = explain.why_best(outcome)
    if single_gpu_note := explain.enough_on_one(task, constants):
        why.append(single_gpu_note)
    ties = explain.find_ties(outcome.ranked, factor)
    why += explain.tie_lines(outcome.ranked, ties, factor, request.top)
    return Plan(
        task,
        outcome.ranked[: request.top],
        why=tuple(why),
        others=(*explain.runners_up(outcome), *failed),
        warnings=tuple(explain.warnings(outcome)),
        curve=curve,
        tried=outcome.tried,
        ties=tuple(number for number in ties if number <= request.top),
    )


def read_model(cwd: Path, request: PlanRequest, problems: list[str]) -> ModelShape | None:
    """Return the model that the request names or describes; None if it appends to ``problems``."""
    name_or_path = request.model_config or request.model
    if name_or_path is None:
        problems.append("name a model, such as llama-3-8b, or give --model-config FILE")
        return None
    path = cwd / expand_home(name_or_path)
    if request.model_config is None:
        preset = presets.find_preset(name_or_path)
        if preset is not None:
            return preset
        if not (name_or_path.endswith(".json") or path.is_dir()):
            preset_names = presets.names()
            problems.append(
                f"no model {name_or_path!r} is known{suggest_name(name_or_path, preset_names)} (available: "
                f"{list_nearest(name_or_path, preset_names)}); --model-config takes any config.json"
            )
            return None
    if path.is_dir():
        path /= "config.json"
    return _read_config(path, name_or_path, problems)


def _read_config(path: Path, name: str, problems: list[str]) -> ModelShape | None:
    try:
        text = path.read_text("utf-8")
        config = json.loads(text)
        return read_config(
            config, Path(name).stem if path.name != "config.json" else path.parent.name or name
        )
    except OSError as error:
        problems.append(f"{name}: {(error.strerror or 'cannot be read').lower()}")
    except UnicodeDecodeError:
        problems.append(f"{name}: is not a text file; a config.json is expected")
    except json.JSONDecodeError as error:
        problems.append(f"{name}:{error.lineno}: is not JSON: {error.msg.lower()}")
    except RecursionError:
        problems.append(f"{name}: is nested too deeply")
    except ConfigProblem as error:
        problems += [f"{name}: {problem}" for problem in error.problems]
    return None


def read_machine(
    cwd: Path, request: PlanRequest, problems: list[str], notes: list[str]
) -> tuple[Machine | None, Path | None]:
    """Return the machine, from ``--gpu`` or from a profile, and the profile's file."""
    nodes = request.nodes if request.nodes is not None else 1
    if request.gpu is not None:
        gpu = hardware.find_gpu(request.gpu)
        if gpu is None:
            problems.append(f"unknown GPU {request.gpu!r}; known GPUs: {', '.join(hardware.gpus())}")
            return None, None
        per_node = request.gpus_per_node
        if nodes < 1 or (per_node is not None and not 1 <= per_node <= 128):
            return None, None  # _check_numbers reports these
        machine = hardware.machine(gpu, nodes, gpus_per_node=per_node)
        notes.append(
            f"{gpu.name}: {gpu.memory_gib:g} GiB, {machine.gpus_per_node} per node, {gpu.nic_gbs:g} "
            "GB/s of network each, as is usual for such nodes"
        )
        return _with_costs(machine, request), None
    return _machine_from_profile(cwd, request, nodes, problems)


def _machine_from_profile(
    cwd: Path, request: PlanRequest, nodes: int, problems: list[str]
) -> tuple[Machine | None, Path | None]:
    from dtslurm.services.wiring.context import (
        Context,  # imported late: it loads profiles and schedulers, which --gpu does not need
    )

    cluster = Context(cwd=cwd).cluster(request.cluster)
    profile = cluster.profile
    if profile.scheduler == "local" and not profile.node_types:
        profile = cluster.scheduler.profile(profile)
    if request.node_type is not None and request.node_type not in profile.node_types:
        type_names = list_nearest(request.node_type, profile.node_types)
        problems.append(
            f"--node-type {request.node_type}: cluster {profile.name} has no such type ({type_names})"
        )
        return None, cluster.path
    node = profile.node_type(request.node_type)
    if node is None or node.gpus is None:
        gpu_types = [name for name, node_type in profile.node_types.items() if node_type.gpus]
        hint = (
            f"--node-type accepts {', '.join(gpu_types)}"
            if gpu_types
            else "name a GPU, as in --gpu H100-80GB"
        )
        problems.append(f"the profile of {profile.name} does not determine the GPUs to plan for; {hint}")
        return None, cluster.path
    memory = node.gpus.memory.gib if node.gpus.memory else None
    gpu = hardware.find_gpu(node.gpus.model, memory)
    if gpu is None:
        problems.append(f"unknown GPU {node.gpus.model!r} in the profile; name a known GPU with --gpu")
        return None, cluster.path
    if memory and not 0.7 < memory / gpu.memory_gib < 1.4:
        gpu = replace(gpu, memory_gib=memory * 0.985)
    per_node = request.gpus_per_node or node.gpus.count
    if per_node > node.gpus.count:
        problems.append(
            f"--gpus-per-node {per_node}: a node of {profile.name} has {node.gpus.count} GPUs; "
            f"valid: 1 to {node.gpus.count}"
        )
    max_nodes = profile.slurm.max_nodes
    if max_nodes is not None and nodes > max_nodes:
        problems.append(
            f"--nodes {nodes}: {profile.name} allows a job at most {max_nodes}; valid: 1 to {max_nodes}"
        )
    if nodes < 1 or per_node < 1:
        return None, cluster.path
    return _build_machine(gpu, nodes, per_node, node, profile, request), cluster.path


def _build_machine(
    gpu: hardware.Gpu,
    nodes: int,
    per_node: int,
    node: NodeType,
    profile: ClusterProfile,
    request: PlanRequest,
) -> Machine:
    gpu_count = node.gpus.count if node.gpus else per_node
    nic_gbs = None
    if node.nics and node.nics.count and node.nics.rate_gbps:
        nic_gbs = node.nics.count * node.nics.rate_gbps / 8 / gpu_count
    link_gbs = node.intra_node.bandwidth_gbs if node.intra_node else None
    machine = hardware.machine(
        gpu,
        nodes,
        gpus_per_node=per_node,
        nic_gbs=nic_gbs,
        link_gbs=link_gbs,
        fabric=profile.fabric.kind if profile.fabric else "infiniband",
    )
    machine = _with_costs(machine, request)
    if request.price is None and node.gpus:
        machine = replace(machine, price=node.gpus.price, currency=node.gpus.currency or "")
    return machine


def _with_costs(machine: Machine, request: PlanRequest) -> Machine:
    return replace(machine, price=request.price, currency=request.currency, watts=request.watts)


def _check_numbers(request: PlanRequest, problems: list[str]) -> None:
    limits = {
        "--nodes": (request.nodes, LARGEST_NODES),
        "--gpus-per-node": (request.gpus_per_node, 128),
        "--seq-len": (request.seq_len, LARGEST_SEQ),
        "--gbs": (request.gbs, LARGEST_BATCH),
    }
    for name, (value, highest_count) in limits.items():
        if value is not None and not 1 <= value <= highest_count:
            problems.append(f"{name} should be 1 to {highest_count:,}, not {value}")
    for name, number, highest in (
        ("--tokens", request.tokens, 1e18),
        ("--price", request.price, 1e6),
        ("--watts", request.watts, 1e5),
    ):
        if number is not None and not 0 < number <= highest:
            problems.append(f"{name} should be more than 0 and at most {highest:g}, not {number:g}")
    if request.framework is not None and request.framework not in FRAMEWORKS:
        problems.append(f"--framework should be one of {', '.join(SEARCHED)}, not {request.framework!r}")
    if request.precision not in PRECISIONS:
        problems.append(f"--precision should be one of {', '.join(PRECISIONS)}, not {request.precision!r}")


def _read_layout(request: PlanRequest, problems: list[str]) -> Layout | None:
    if request.layout is None:
        return None
    try:
        return parse_layout(request.layout)
    except LayoutProblem as error:
        problems += [f"--layout: {problem}" for problem in error.problems]
        return None


def _read_cluster_runs(profile: Path, cwd: Path, task: TrainingTask, notes: list[str]) -> ClusterRuns:
    """Return what the cluster's calibration file has for a task, with a note for each factor."""
    from dtslurm.planner import calibrate
    from dtslurm.services.planning.calibrate import SCALED, file_of, read

    path = file_of(profile, cwd, os.environ)
    measurements = read(path)
    kind = (task.machine.gpu.name, task.framework, task.precision)
    factors = calibrate.factors(measurements, *kind)
    for name, quantity in SCALED.items():
        if name in factors:
            notes.append(
                f"{quantity} calibrated with runs of this cluster: x {factors[name]:.2f} ({path.name})"
            )
    timed = [item for item in calibrate.matching_measurements(measurements, *kind) if item.measured_step_s]
    own = {item.layout: item for item in measurements if _is_of_task(item, task)}  # the newest of each
    return ClusterRuns(
        constants=shipped.default().but(factors),
        timed=len(timed),
        step_s={text: item.measured_step_s for text, item in own.items() if item.measured_step_s},
        failures={text: item.failure for text, item in own.items() if item.failure},
    )


def _is_of_task(item: Measurement, task: TrainingTask) -> bool:
    """Return whether a measurement is of a task's own model, machine, sequence length and numbers."""
    machine = task.machine
    return (item.model, item.gpu, item.nodes, item.seq_len, item.framework, item.precision) == (
        task.model.name,
        machine.gpu.name,
        machine.nodes,
        task.seq_len,
        task.framework,
        task.precision,
    )
