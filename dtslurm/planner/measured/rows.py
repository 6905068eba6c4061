"""Conversion of measured rows, from tables of published runs, into settings that the planner can estimate.

A row has columns for model, GPU, parallel degrees and batch. Missing values are read from the row's notes or
set to the usual values of the framework, and every assumption is listed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dtslurm.planner.constants import Constants
from dtslurm.planner.divide import cut_by_cost, divisors
from dtslurm.planner.estimate import Estimate, Estimator
from dtslurm.planner.frameworks import NEMO
from dtslurm.planner.hardware import Machine, find_gpu, machine
from dtslurm.planner.layout import Layout, Recompute
from dtslurm.planner.measured.cells import (
    RowImpossible,
    RowUnanswerable,
    clear_missing_counts,
    parse_count,
    real,
)
from dtslurm.planner.measured.guesses import (
    Row,
    dispatches_once,
    expert_tensor,
    guess_fabric,
    guess_framework,
    node_of,
    replays_graphs,
    routes_evenly,
    with_degrees_of_notes,
)
from dtslurm.planner.measured.row_model import read_model
from dtslurm.planner.measured.row_words import (
    precision_of,
    recompute_of,
    says_recompute,
    schedule_of,
    sharding_of,
)
from dtslurm.planner.models.shapes import ModelShape
from dtslurm.planner.setting import Setting


@dataclass(frozen=True)
class MeasuredRow:
    """A parsed row."""

    model: ModelShape
    machine: Machine
    layout: Layout
    seq_len: int
    framework: str
    precision: str
    assumed: tuple[str, ...]
    frozen: bool = False
    even: bool = False
    dispatches_once: bool = False
    graphs: bool = False

    @property
    def assumes_layout(self) -> bool:
        """Whether the row does not state a degree, a batch size, the sharding or the recomputation."""
        return any(text.startswith(LAYOUT_ASSUMPTIONS) for text in self.assumed)

    def estimate(self, constants: Constants) -> Estimate:
        """Return the planner's estimate for the row."""
        return self.estimator(constants).estimate(self.layout)

    def estimator(self, constants: Constants) -> Estimator:
        """Return an estimator for other layouts of the row's model and machine."""
        return Estimator(
            Setting(
                self.model,
                self.machine,
                self.seq_len,
                self.framework,
                self.precision,
                constants,
                self.frozen,
                self.even,
                self.dispatches_once,
                self.graphs,
            )
        )


LAYOUT_ASSUMPTIONS = (  # how the entries of ``assumed`` start that concern the layout
    "degrees not stated",
    "tp and pp not stated",
    "ep not stated",
    "micro-batch not stated",
    "global_batch not given",
    "gbs below",
    "seq_len not given",
    "sharding not stated",
    "recompute not stated",
)
UNSTATED_MODES: tuple[Recompute, ...] = ("none", "selective", "full")  # tried where a row states no mode
USUAL_LENGTH = 4096  # tokens of a sequence if the table gives no length


def read_row(row: Row, constants: Constants | None = None) -> MeasuredRow:
    """Parse a row, and fill in missing values by assumptions.

    Args:
        constants: the constants that select the fastest value of what the row does not state; by default the
            planner's.

    Raises:
        RowUnanswerable: a value that the estimate depends on is missing or contradicts other values.
    """
    if constants is None:
        from dtslurm.planner import constants as shipped

        constants = shipped.default()
    assumed: list[str] = []
    task = (row.get("task") or "").lower()
    if re.search(r"infer|generat|prefill|decod", task):
        raise RowUnanswerable(f"task {row.get('task')} is no training")
    gpu = find_gpu(row.get("gpu") or "")
    if gpu is None:
        raise RowUnanswerable(f"the GPU {row.get('gpu')!r} is not known")
    notes = f"{row.get('notes') or ''} {row.get('framework') or ''}".lower()
    frozen = bool(re.search(r"\b(q?lora|peft|adapters?)\b", f"{task} {notes}"))
    row = with_degrees_of_notes(clear_missing_counts(row))
    precision = precision_of(row, gpu.fp8_tflops > 0)
    framework = guess_framework(row, gpu.chip, notes, assumed)
    seq_len = parse_count(row, "seq_len", USUAL_LENGTH)
    model = read_model(row, seq_len, notes)
    assumed += model.assumptions
    assumed += _unstated_figures(row)
    if not row.get("seq_len"):
        seq_len = min(seq_len, model.seq_len)
        assumed.append(f"seq_len not given: {seq_len}")
    layout = _read_layout(row, model, seq_len, framework, notes, assumed)
    fabric = guess_fabric(row.get("fabric") or notes)
    per_node, nic = node_of(row, gpu.node_gpus, notes)
    row_machine = machine(
        gpu,
        max(1, layout.gpus // (per_node or gpu.node_gpus)),
        gpus_per_node=per_node,
        nic_gbs=nic,
        fabric=fabric,
    )
    routes_tokens_evenly = model.is_moe and routes_evenly(framework, notes)
    measured = MeasuredRow(
        model, row_machine, layout, seq_len, framework, precision, (), frozen, routes_tokens_evenly,
        model.is_moe and dispatches_once(notes), replays_graphs(notes),
    )  # fmt: skip
    if model.is_moe and not (row.get("ep") or "").strip():
        measured = _assume_expert_degree(measured, assumed, constants)
    if model.is_moe:
        measured = replace(
            measured,
            layout=replace(measured.layout, etp=expert_tensor(measured.layout, model, framework, notes)),
        )
    if not (row.get("tp") or row.get("pp") or "").strip() and framework in SPLITTING:
        measured = _assume_degrees(measured, assumed, constants)
    elif not (row.get("micro_batch") or "").strip():
        measured = _assume_micro_batch(measured, assumed, constants, recompute_is_stated=says_recompute(row))
    elif not says_recompute(row) and framework != "nanotron":  # nanotron's benchmarks recompute nothing
        measured = _assume_recompute(measured, assumed, constants)
    return replace(measured, assumed=tuple(assumed))


def _unstated_figures(row: Row) -> list[str]:
    """Return assumptions about what the row's measured figures count, where the row does not state it."""
    assumptions = []
    convention = (row.get("flops_convention") or "").lower()
    if real(row, "tflops_per_gpu") and not real(row, "tokens_per_s_per_gpu"):
        if not re.search(r"causal|full|12", convention) or "not stated" in convention:
            assumptions.append("FLOPs of attention not stated: full attention counts")
        if not re.search(r"recompute|model|hw|mfu|hfu|6n|6\*n|8\*n", convention):
            assumptions.append("FLOPs of recomputation not stated: they do not count")
    if real(row, "mem_gib"):
        kind = (row.get("mem_kind") or "").lower()
        if not re.search(r"alloc|reserv|nvidia-smi|torch|peak", kind):
            assumptions.append("kind of memory not stated: torch's peak of allocated memory")
        if parse_count(row, "pp", 1) > 1 and not re.search(r"rank|stage|max over|all gpus", kind):
            assumptions.append("stage of the memory not stated: the first, of rank 0")
    return assumptions


def _assume_degrees(measured: MeasuredRow, assumed: list[str], constants: Constants) -> MeasuredRow:
    """For a row without degrees, choose the fastest layout of the same batch, like a tuned run."""
    from dtslurm.planner.search import TrainingTask, search

    task = TrainingTask(
        measured.model,
        measured.machine,
        measured.seq_len,
        measured.layout.gbs,
        measured.framework,
        measured.precision,
    )
    search_result = search(task, constants, keep=1)
    layouts = [estimate.layout for estimate in search_result.ranked[:1]] or [
        layout for layout, _ in search_result.tight[:1]
    ]
    layout = (
        layouts[0] if layouts else measured.layout
    )  # data parallelism alone, if no layout divides the batch
    assumed.append(f"degrees not stated: {layout}")
    return replace(measured, layout=layout)


def _assume_expert_degree(measured: MeasuredRow, assumed: list[str], constants: Constants) -> MeasuredRow:
    """For a row without ``ep``, distribute the experts over the fewest GPUs on which they fit."""
    estimator = measured.estimator(constants)
    count = min(stack.experts.count for stack in measured.model.stacks if stack.experts)
    ranks = measured.layout.gpus // measured.layout.pp
    for ep in (size for size in divisors(count, ranks) if ranks % size == 0):
        layout = replace(measured.layout, ep=ep)
        if estimator.memory(replace(layout, recompute="full")).total <= measured.machine.gpu.memory_gib:
            assumed.append(f"ep not stated: {ep}")
            return replace(measured, layout=layout)
    return measured


def _assume_micro_batch(
    measured: MeasuredRow, assumed: list[str], constants: Constants, *, recompute_is_stated: bool
) -> MeasuredRow:
    """For a row without a micro-batch, choose the fastest one that fits, like a tuned run."""
    estimator = measured.estimator(constants)
    modes = (measured.layout.recompute,) if recompute_is_stated else UNSTATED_MODES
    best: tuple[float, Layout] | None = None
    for mode in modes:
        for size in (1, 2, 4, 8, 16, 32, 64):
            layout = replace(measured.layout, mbs=size, recompute=mode)
            if measured.layout.gbs % (size * measured.layout.dp) and size > 1:
                continue
            if estimator.memory(layout).total > measured.machine.gpu.memory_gib and size > 1:
                continue
            time = estimator.timer.step(layout).total
            if best is None or time < best[0]:
                best = (time, layout)
        if best is not None and estimator.memory(best[1]).total <= UNSTATED * measured.machine.gpu.memory_gib:
            break
    assert best is not None  # noqa: S101 - one sequence at a time is always tried
    assumed.append(f"micro-batch not stated: {best[1].mbs}")
    return replace(measured, layout=best[1])


SPLITTING = {"megatron", "megatron-2021", "megatron-deepspeed"} | NEMO
UNSTATED = 1.25  # tables that leave out recomputation leave out gradient precision and offload as well


def _assume_recompute(measured: MeasuredRow, assumed: list[str], constants: Constants) -> MeasuredRow:
    """For a row without recomputation, choose the least recomputation that fits in memory."""
    if measured.framework == "paxml":
        # The default is SAVE_NOTHING; Paxml's 5B saves products (paxml/contrib/gpu/scripts_gpu/configs.py).
        mode: Recompute = "full" if measured.model.params > 20e9 else "selective"
        assumed.append(f"recompute not stated: {mode}")
        return replace(measured, layout=replace(measured.layout, recompute=mode))
    if (
        measured.framework == "megatron"
        and measured.layout.zero == 3
        and measured.machine.gpu.chip in {"GB200", "GB300"}
    ):
        # NVIDIA's recipes offload layers to the host: cpu_offloading_num_layers (Megatron-Bridge, perf).
        assumed.append("recompute not stated: none, activations in host memory")
        return replace(measured, layout=replace(measured.layout, recompute="none"))
    estimator = measured.estimator(constants)
    memory_limits = {"none": UNSTATED, "selective": 1.5 * UNSTATED, "full": float("inf")}
    for mode in UNSTATED_MODES:
        layout = replace(measured.layout, recompute=mode)
        if estimator.memory(layout).total <= memory_limits[mode] * measured.machine.gpu.memory_gib:
            break
    assumed.append(f"recompute not stated: {mode}")
    return replace(measured, layout=layout)


def _read_layout(
    row: Row, model: ModelShape, seq_len: int, framework: str, notes: str, assumed: list[str]
) -> Layout:
    tp, pp, cp, dp = _read_degrees(row, model, framework, assumed)
    mbs, gbs = _read_batch(row, model, seq_len, (pp, dp), assumed)
    if gbs < dp and cp > 1 and dp % gbs == 0:
        cp, dp = cp * dp // gbs, gbs
        assumed.append(f"gbs below dp: cp={cp}")
    if gbs < mbs * dp:
        mbs = max(1, gbs // dp)
        assumed.append(f"gbs below mbs·dp: mbs={mbs}")
    zero, shard = sharding_of((row.get("zero_or_fsdp") or "").lower(), framework, dp * cp, assumed)
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=max(1, parse_count(row, "ep", 1)),
        dp=dp,
        vp=parse_count(row, "vp", 1) if pp > 1 else 1,
        mbs=mbs,
        gbs=gbs,
        zero=zero,
        shard=shard,
        recompute=recompute_of(row),
        sp=tp > 1 and _uses_sequence_parallelism(row, framework),
        schedule=schedule_of(notes),
    )


def _read_degrees(
    row: Row, model: ModelShape, framework: str, assumed: list[str]
) -> tuple[int, int, int, int]:
    """Return the degrees tp, pp, cp and dp of a row.

    Raises:
        RowImpossible: the model cannot be split into that many stages or tensor-parallel ranks.
        RowUnanswerable: the degrees do not divide the number of GPUs.
    """
    gpus = parse_count(row, "gpus")
    if not any((row.get(key) or "").strip() for key in ("tp", "pp")):
        assumed.append("tp and pp not stated: none, or the fastest that fits where the model needs them")
    tp, pp, cp = parse_count(row, "tp", 1), parse_count(row, "pp", 1), parse_count(row, "cp", 1)
    if gpus % (tp * pp * cp):
        raise RowUnanswerable(f"tp·pp·cp = {tp * pp * cp} does not divide {gpus} GPUs")
    if pp > model.layers or tp > 64:
        raise RowImpossible(f"pp={pp} over {model.layers} layers cannot be")
    if framework == "nanotron" and pp > 1 and cut_by_cost(model, pp) < pp:
        filled_stages = cut_by_cost(model, pp)
        raise RowImpossible(
            f"nanotron fills {filled_stages} of the {pp} stages and leaves the others without a layer"
        )
    return tp, pp, cp, gpus // (tp * pp * cp)


def _read_batch(
    row: Row, model: ModelShape, seq_len: int, degrees: tuple[int, int], assumed: list[str]
) -> tuple[int, int]:
    """Return the micro-batch and the global batch of a row for the given degrees pp and dp."""
    pp, dp = degrees
    mbs = parse_count(row, "micro_batch", 1)
    usual = mbs * dp * (1 if pp == 1 else 8 * pp)
    if not (row.get("micro_batch") or "").strip() and not model.generic:
        from dtslurm.planner.search import default_batch

        usual = max(usual, default_batch(model, seq_len, parse_count(row, "gpus")) // dp * dp)
    gbs = parse_count(row, "global_batch", usual)
    if not row.get("global_batch"):
        assumed.append(f"global_batch not given: {gbs}")
    return mbs, gbs


def _uses_sequence_parallelism(row: Row, framework: str) -> bool:
    recompute_text = (row.get("recompute") or "").lower()
    is_default = framework not in {"megatron-2021", "megatron-deepspeed"}
    return "no sp" not in recompute_text and (is_default or "sp" in recompute_text.split("+"))
