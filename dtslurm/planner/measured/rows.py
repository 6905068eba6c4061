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
from dtslurm.planner.layout import RECOMPUTE, Layout, Recompute
from dtslurm.planner.measured.guesses import (
    Row,
    expert_tensor,
    guess_fabric,
    guess_framework,
    guessed_model,
    likely_heads,
    node_of,
    routes_evenly,
    with_degrees_of_notes,
)
from dtslurm.planner.measured.row_words import (
    precision_of,
    recompute_of,
    says_recompute,
    schedule_of,
    sharding_of,
)
from dtslurm.planner.models.presets import find_preset
from dtslurm.planner.models.shapes import Attention, Experts, ModelShape, Stack
from dtslurm.planner.step import Setting


class RowImpossible(ValueError):
    """The row's layout cannot run; the message gives the reason."""


class RowUnanswerable(ValueError):
    """The row lacks a value that the estimate depends on; the message names the value."""


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
            )
        )


USUAL_LENGTH = 4096  # tokens of a sequence if the table gives no length
# texts that mean an empty cell
MISSING = {"", "-", "?", "na", "n/a", "nan", "none", "null", "unknown", "auto", "0"}
COUNTS = (
    "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gpus", "micro_batch", "global_batch",
    "tp", "pp", "cp", "ep", "vp", "dp",
)  # fmt: skip


def _clear_missing_counts(row: Row) -> Row:
    """Return a row with empty counts where the cell has 0 or a word for a missing value."""
    cleared = {key: "" for key in COUNTS if (row.get(key) or "").strip().lower() in MISSING}
    return {**row, **cleared}


def parse_count(row: Row, key: str, default: int | None = None) -> int:
    """Parse a positive whole number in a row.

    The number may have commas between thousands, or a suffix as in ``8k``, which is 8192.

    Raises:
        RowUnanswerable: the value is missing without a default, or is not a positive whole number.
    """
    text = (row.get(key) or "").strip()
    if not text:
        if default is None:
            raise RowUnanswerable(f"{key} is not given")
        return default
    plain = text.replace(",", "").strip("~*≈ ").lower()
    try:
        value = float(plain.removesuffix("k")) * (1024 if plain.endswith("k") else 1)
    except ValueError:
        raise RowUnanswerable(f"{key} should be a number, not {text!r}") from None
    if not 1 <= value < 1e9 or value != int(value):
        raise RowUnanswerable(f"{key} should be a positive whole number, not {text!r}")
    return int(value)


def real(row: Row, key: str) -> float | None:
    """Parse a positive number in a row; return None if the cell is empty or not a positive number."""
    try:
        value = float(row.get(key) or "")
    except ValueError:
        return None
    return value if 0 < value < 1e18 else None


def read_row(row: Row) -> MeasuredRow:
    """Parse a row, and fill in missing values by assumptions.

    Raises:
        RowUnanswerable: a value that the estimate depends on is missing or contradicts other values.
    """
    assumed: list[str] = []
    task = (row.get("task") or "").lower()
    if re.search(r"infer|generat|prefill|decod", task):
        raise RowUnanswerable(f"task {row.get('task')} is no training")
    gpu = find_gpu(row.get("gpu") or "")
    if gpu is None:
        raise RowUnanswerable(f"the GPU {row.get('gpu')!r} is not known")
    notes = f"{row.get('notes') or ''} {row.get('source') or ''}".lower()
    frozen = bool(re.search(r"\b(q?lora|peft|adapters?)\b", f"{task} {notes}"))
    row = with_degrees_of_notes(_clear_missing_counts(row))
    precision = precision_of(row, gpu.fp8_tflops > 0)
    framework = guess_framework(row, gpu.chip, precision, notes)
    seq_len = parse_count(row, "seq_len", USUAL_LENGTH)
    model = read_model(row, seq_len, notes)
    assumed += model.assumptions
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
        model, row_machine, layout, seq_len, framework, precision, (), frozen, routes_tokens_evenly
    )
    if model.is_moe and not (row.get("ep") or "").strip():
        measured = _assume_expert_degree(measured, assumed)
    if model.is_moe:
        measured = replace(
            measured,
            layout=replace(measured.layout, etp=expert_tensor(measured.layout, model, framework, notes)),
        )
    if not (row.get("tp") or row.get("pp") or "").strip() and framework in SPLITTING:
        measured = _assume_degrees(measured, assumed)
    elif not (row.get("micro_batch") or "").strip():
        measured = _assume_micro_batch(measured, assumed, known=says_recompute(row))
    elif not says_recompute(row) and framework != "nanotron":  # nanotron's benchmarks recompute nothing
        measured = _assume_recompute(measured, assumed)
    return replace(measured, assumed=tuple(assumed))


def _assume_degrees(case: MeasuredRow, assumed: list[str]) -> MeasuredRow:
    """For a row without degrees, choose the fastest layout of the same batch, like a tuned run."""
    from dtslurm.planner import constants
    from dtslurm.planner.search import TrainingTask, search

    task = TrainingTask(
        case.model, case.machine, case.seq_len, case.layout.gbs, case.framework, case.precision
    )
    search_result = search(task, constants.default(), keep=1)
    layouts = [estimate.layout for estimate in search_result.ranked[:1]] or [
        layout for layout, _ in search_result.tight[:1]
    ]
    layout = layouts[0] if layouts else case.layout  # data parallelism alone, if no layout divides the batch
    assumed.append(f"degrees not stated: {layout}")
    return replace(case, layout=layout)


def _assume_expert_degree(case: MeasuredRow, assumed: list[str]) -> MeasuredRow:
    """For a row without ``ep``, distribute the experts over the fewest GPUs on which they fit."""
    from dtslurm.planner import constants

    estimator = case.estimator(constants.default())
    count = min(stack.experts.count for stack in case.model.stacks if stack.experts)
    ranks = case.layout.gpus // case.layout.pp
    for ep in (size for size in divisors(count, ranks) if ranks % size == 0):
        layout = replace(case.layout, ep=ep)
        if estimator.memory(replace(layout, recompute="full")).total <= case.machine.gpu.memory_gib:
            assumed.append(f"ep not stated: {ep}")
            return replace(case, layout=layout)
    return case


def _assume_micro_batch(case: MeasuredRow, assumed: list[str], *, known: bool) -> MeasuredRow:
    """For a row without a micro-batch, choose the fastest one that fits, like a tuned run."""
    from dtslurm.planner import constants

    estimator = case.estimator(constants.default())
    modes = (case.layout.recompute,) if known else RECOMPUTE
    best: tuple[float, Layout] | None = None
    for mode in modes:
        for size in (1, 2, 4, 8, 16, 32, 64):
            layout = replace(case.layout, mbs=size, recompute=mode)
            if case.layout.gbs % (size * case.layout.dp) and size > 1:
                continue
            if estimator.memory(layout).total > case.machine.gpu.memory_gib and size > 1:
                continue
            time = estimator.timer.step(layout).total
            if best is None or time < best[0]:
                best = (time, layout)
        if best is not None and estimator.memory(best[1]).total <= UNSTATED * case.machine.gpu.memory_gib:
            break
    assert best is not None  # noqa: S101 - one sequence at a time is always tried
    assumed.append(f"micro-batch not stated: {best[1].mbs}")
    return replace(case, layout=best[1])


SPLITTING = {"megatron", "megatron-2021", "megatron-deepspeed"} | NEMO
UNSTATED = 1.25  # tables that leave out recomputation leave out gradient precision and offload as well


def _assume_recompute(case: MeasuredRow, assumed: list[str]) -> MeasuredRow:
    """For a row without recomputation, choose the least recomputation that fits in memory."""
    from dtslurm.planner import constants

    if case.framework == "paxml":
        # The default is SAVE_NOTHING; Paxml's 5B saves products (paxml/contrib/gpu/scripts_gpu/configs.py).
        mode: Recompute = "full" if case.model.params > 20e9 else "selective"
        assumed.append(f"recompute not stated: {mode}")
        return replace(case, layout=replace(case.layout, recompute=mode))
    if case.framework == "megatron" and case.layout.zero == 3 and case.machine.gpu.chip in {"GB200", "GB300"}:
        # NVIDIA's recipes offload layers to the host: cpu_offloading_num_layers (Megatron-Bridge, perf).
        assumed.append("recompute not stated: none, activations in host memory")
        return replace(case, layout=replace(case.layout, recompute="none"))
    estimator = case.estimator(constants.default())
    memory_limits = {"none": UNSTATED, "selective": 1.5 * UNSTATED, "full": float("inf")}
    for mode in RECOMPUTE:
        layout = replace(case.layout, recompute=mode)
        if estimator.memory(layout).total <= memory_limits[mode] * case.machine.gpu.memory_gib:
            break
    assumed.append(f"recompute not stated: {mode}")
    return replace(case, layout=layout)


def read_model(row: Row, seq_len: int, notes: str) -> ModelShape:
    """Return a row's model: a preset for MoE models and rows without shape columns, else the columns' model.

    Raises:
        RowUnanswerable: the model is unknown and the columns do not describe it.
    """
    name = row.get("model") or "model"
    preset = find_preset(name)
    layers = (row.get("layers") or "").strip()
    if preset is not None and (preset.is_moe or not layers or not row.get("hidden")):
        return preset.with_layers(parse_count(row, "layers")) if layers else preset
    if not (row.get("hidden") or "").strip():
        given = parse_count(row, "layers") if layers else None
        guess = guessed_model(name, real(row, "params_b"), given, parse_count(row, "vocab", 50304), seq_len)
        if guess is None or parse_count(row, "ep", 1) > 1:
            raise RowUnanswerable(f"the model {name!r} is not known, and hidden is not given")
        return guess
    hidden, heads = (
        parse_count(row, "hidden"),
        parse_count(row, "heads", likely_heads(parse_count(row, "hidden"))),
    )
    vocab = parse_count(row, "vocab", 50257)
    ffn = parse_count(row, "ffn", 4 * hidden)
    kv_heads = parse_count(row, "kv_heads", heads)
    experts = re.search(r"moe (\d+) experts top-(\d+)", notes)
    params = real(row, "params_b")
    shapes: list[ModelShape] = []
    for gated in (True, False):
        count = parse_count(row, "layers", 0 if params else None) if layers else 0
        if not layers and params is None:
            raise RowUnanswerable("neither layers nor params_b is given")
        head_width = hidden // heads if hidden % heads == 0 else 128
        stack = Stack(
            max(1, count),
            Attention(heads, kv_heads, head_width, head_width),
            ffn,
            gated,
            experts=Experts(int(experts[1]), int(experts[2]), ffn) if experts else None,
        )
        if not layers and params is not None:
            count = max(1, round((params * 1e9 - vocab * hidden) / stack.params(hidden)))
            stack = replace(stack, count=count)
        shapes += [
            ModelShape(name, hidden, (stack,), vocab=vocab, seq_len=seq_len, tied=tied)
            for tied in (True, False)
        ]
    if params is None:
        llama_like = ffn % (4 * hidden) != 0
        return next(shape for shape in shapes if shape.stacks[0].gated == llama_like)
    return min(shapes, key=lambda shape: abs(shape.params - params * 1e9))


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
