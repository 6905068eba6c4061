"""Measured rows, as tables of published runs give them, turned into what the planner can estimate.

A row names model, GPU, degrees and batch in columns; what a table leaves out is read from the row's notes or
taken as that kind of framework usually runs, and every such assumption is listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dtslurm.planner.constants import Constants
from dtslurm.planner.estimate import Estimate, Estimator
from dtslurm.planner.hardware import Machine, find_gpu, machine
from dtslurm.planner.layout import RECOMPUTE, Layout, Recompute
from dtslurm.planner.presets import find_preset
from dtslurm.planner.shapes import Attention, Experts, ModelShape, Stack

Row = Mapping[str, str]


class RowImpossible(ValueError):
    """The row's layout cannot run at all; the text says why."""


class RowUnanswerable(ValueError):
    """The row lacks something that decides the answer; the text says what."""


@dataclass(frozen=True)
class Case:
    """A row, understood."""

    model: ModelShape
    machine: Machine
    layout: Layout
    seq_len: int
    framework: str
    precision: str
    assumed: tuple[str, ...]

    def estimate(self, constants: Constants) -> Estimate:
        """Return what the planner says of it."""
        made = Estimator(self.model, self.machine, self.seq_len, self.framework, self.precision, constants)
        return made.estimate(self.layout)


def whole(row: Row, key: str, default: int | None = None) -> int:
    """Return a positive whole number of a row.

    Raises:
        RowUnanswerable: it is missing or no such number.
    """
    text = (row.get(key) or "").strip()
    if not text:
        if default is None:
            raise RowUnanswerable(f"{key} is not given")
        return default
    try:
        value = float(text)
    except ValueError:
        raise RowUnanswerable(f"{key} should be a number, not {text!r}") from None
    if not 1 <= value < 1e9 or value != int(value):
        raise RowUnanswerable(f"{key} should be a positive whole number, not {text!r}")
    return int(value)


def real(row: Row, key: str) -> float | None:
    """Return a positive number of a row, None where it is empty or none."""
    try:
        value = float(row.get(key) or "")
    except ValueError:
        return None
    return value if 0 < value < 1e18 else None


def read_row(row: Row) -> Case:
    """Return what a row describes.

    Raises:
        RowUnanswerable: something that decides the answer is missing or contradicts the rest.
    """
    assumed: list[str] = []
    if row.get("task") not in {None, "", "pretrain", "sft"}:
        raise RowUnanswerable(
            f"task {row.get('task')} trains a part of the weights only, which is not modelled"
        )
    gpu = find_gpu(row.get("gpu") or "")
    if gpu is None:
        raise RowUnanswerable(f"the GPU {row.get('gpu')!r} is not known")
    notes = f"{row.get('notes') or ''} {row.get('source') or ''}".lower()
    if "lora" in notes.split():
        raise RowUnanswerable("LoRA trains a part of the weights only, which is not modelled")
    precision = _precision(row, gpu.fp8_tflops > 0)
    framework = guess_framework(row, gpu.chip, precision, notes)
    seq_len = whole(row, "seq_len")
    model = read_model(row, seq_len, notes)
    layout = _layout(row, model, framework, notes, assumed)
    fabric = guess_fabric(row.get("fabric") or notes)
    per_node, nic = _node(row, gpu.node_gpus, notes)
    made = machine(
        gpu,
        max(1, layout.gpus // (per_node or gpu.node_gpus)),
        gpus_per_node=per_node,
        nic_gbs=nic,
        fabric=fabric,
    )
    case = Case(model, made, layout, seq_len, framework, precision, ())
    if not (row.get("tp") or row.get("pp") or "").strip() and framework in SPLITTING:
        case = _settle_degrees(case, assumed)
    elif not (row.get("micro_batch") or "").strip():
        case = _settle_micro_batch(case, assumed, known=bool((row.get("recompute") or "").strip()))
    elif (
        not (row.get("recompute") or "").strip() and framework != "nanotron"
    ):  # whose benchmarks recompute nothing
        case = _settle_recompute(case, assumed)
    return replace(case, assumed=tuple(assumed))


def _settle_degrees(case: Case, assumed: list[str]) -> Case:
    """Where a table names no degrees: the fastest layout of the same batch, as if it had been tuned."""
    from dtslurm.planner import constants
    from dtslurm.planner.search import Task, search

    task = Task(case.model, case.machine, case.seq_len, case.layout.gbs, case.framework, case.precision)
    found = search(task, constants.default(), keep=1)
    if not found.ranked:
        raise RowUnanswerable("tp and pp are not given, and no layout of this batch fits")
    assumed.append(f"degrees not stated: {found.ranked[0].layout}")
    return replace(case, layout=found.ranked[0].layout)


def _settle_micro_batch(case: Case, assumed: list[str], *, known: bool) -> Case:
    """Where a table gives no micro-batch: the fastest that fits, as if it had been tuned."""
    from dtslurm.planner import constants

    made = Estimator(
        case.model, case.machine, case.seq_len, case.framework, case.precision, constants.default()
    )
    modes = (case.layout.recompute,) if known else RECOMPUTE
    best: tuple[float, Layout] | None = None
    for mode in modes:
        for size in (1, 2, 4, 8, 16, 32, 64):
            layout = replace(case.layout, mbs=size, recompute=mode)
            if case.layout.gbs % (size * case.layout.dp) and size > 1:
                continue
            if made.memory(layout).total > case.machine.gpu.memory_gib and size > 1:
                continue
            time = made.timer.step(layout).total
            if best is None or time < best[0]:
                best = (time, layout)
        if best is not None and made.memory(best[1]).total <= UNSTATED * case.machine.gpu.memory_gib:
            break
    assert best is not None  # noqa: S101 - one sequence at a time is always tried
    assumed.append(f"micro-batch not stated: {best[1].mbs}")
    return replace(case, layout=best[1])


SPLITTING = {"megatron", "nemo", "megatron-2021"}
UNSTATED = 1.25  # tables that leave out recomputation leave out gradient precision and offload as well


def _settle_recompute(case: Case, assumed: list[str]) -> Case:
    """Where a table does not say what was recomputed: nothing if that fits, else the least that does."""
    from dtslurm.planner import constants

    made = Estimator(
        case.model, case.machine, case.seq_len, case.framework, case.precision, constants.default()
    )
    allowed = {"none": UNSTATED, "selective": 1.5 * UNSTATED, "full": float("inf")}
    for mode in RECOMPUTE:
        layout = replace(case.layout, recompute=mode)
        if made.memory(layout).total <= allowed[mode] * case.machine.gpu.memory_gib:
            break
    assumed.append(f"recompute not stated: {mode}")
    return replace(case, layout=layout)


def _precision(row: Row, has_fp8: bool) -> str:
    text = (row.get("precision") or "").lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text and has_fp8:
        return "fp8"
    if text in {"fp32", "tf32"}:
        return "fp32"
    return "fp16" if "fp16" in text else "bf16"


def guess_framework(row: Row, chip: str, precision: str, notes: str) -> str:
    """Return the framework a row was run with, from its notes and its way of sharding."""
    zero = (row.get("zero_or_fsdp") or "").lower()
    for word, name in (
        ("nanotron", "nanotron"),
        ("torchtitan", "torchtitan"),
        ("maxtext", "jax"),
        ("paxml", "jax"),
        ("jax", "jax"),
        ("megatron-deepspeed", "megatron-2021"),
    ):
        if word in notes or word in (row.get("model") or "").lower() or word in zero:
            return name
    old = chip == "V100" or (chip in {"A100", "A800"} and precision == "fp16")
    if "fsdp2" in zero:
        return "torchtitan"
    if "megatron-fsdp" in zero:
        return "megatron"
    if "fsdp" in zero:
        return "fsdp"
    if re.search(r"zero-?3|stage ?3|deepspeed", f"{zero} {notes}"):
        return "deepspeed"
    if old:
        return "megatron-2021"
    return "nemo" if re.search(r"nemo|dgxc|mbridge|bridge", notes) else "megatron"


def guess_fabric(text: str) -> str:
    """Return the profile's word for the network a table names."""
    low = text.lower()
    for word, name in (
        ("efa", "efa"),
        ("roce", "roce"),
        ("slingshot", "slingshot"),
        ("omni-path", "omnipath"),
        ("ethernet", "ethernet"),
        ("tcpx", "tcpx"),
    ):
        if re.search(rf"\b{word}", low):
            return name
    return "infiniband"


def _node(row: Row, usual: int, notes: str) -> tuple[int | None, float | None]:
    """Return GPUs per node and GB/s of network per GPU, where the row tells."""
    fabric = row.get("fabric") or ""
    per_node = None
    found = re.search(r"(\d+)[- ]?GPU(?:s)?(?:/| per |-)(?:node)", f"{fabric} {notes}", re.IGNORECASE)
    if found:
        per_node = int(found[1])
    nic = None
    if found := re.search(r"(?:(\d+)x )?(\d{2,4}) ?Gb(?:/|p)s .*per node", fabric, re.IGNORECASE):
        nic = float(found[1] or 1) * float(found[2]) / 8 / (per_node or usual)
    elif found := re.search(r"(\d{2,4}) ?Gb(?:/|p)s .*per GPU", fabric, re.IGNORECASE):
        nic = float(found[1]) / 8
    return per_node, nic


def read_model(row: Row, seq_len: int, notes: str) -> ModelShape:
    """Return a row's model: a preset for mixtures and rows without columns, else what the columns say."""
    name = row.get("model") or "model"
    preset = find_preset(name)
    layers = (row.get("layers") or "").strip()
    if preset is not None and (preset.is_moe or not layers or not row.get("hidden")):
        return preset.with_layers(whole(row, "layers")) if layers else preset
    hidden, heads = whole(row, "hidden"), whole(row, "heads", max(1, whole(row, "hidden") // 128))
    vocab = whole(row, "vocab", 50257)
    ffn = whole(row, "ffn", 4 * hidden)
    kv = whole(row, "kv_heads", heads)
    experts = re.search(r"moe (\d+) experts top-(\d+)", notes)
    params = real(row, "params_b")
    shapes: list[ModelShape] = []
    for gated in (True, False):
        count = whole(row, "layers", 0 if params else None) if layers else 0
        if not layers and params is None:
            raise RowUnanswerable("neither layers nor params_b is given")
        width = hidden // heads if hidden % heads == 0 else 128
        stack = Stack(
            max(1, count),
            Attention(heads, kv, width, width),
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
        return next(s for s in shapes if s.stacks[0].gated == llama_like)
    return min(shapes, key=lambda shape: abs(shape.params - params * 1e9))


def _layout(row: Row, model: ModelShape, framework: str, notes: str, assumed: list[str]) -> Layout:
    gpus = whole(row, "gpus")
    stated = {key: (row.get(key) or "").strip() for key in ("tp", "pp", "cp", "ep", "dp")}
    zero_text = (row.get("zero_or_fsdp") or "").lower()
    if not stated["tp"] and not stated["pp"]:
        assumed.append("tp and pp not stated: none, or the fastest that fits where the model needs them")
    tp, pp, cp = whole(row, "tp", 1), whole(row, "pp", 1), whole(row, "cp", 1)
    if gpus % (tp * pp * cp):
        raise RowUnanswerable(f"tp·pp·cp = {tp * pp * cp} does not divide {gpus} GPUs")
    dp = gpus // (tp * pp * cp)
    if pp > model.layers or tp > 64:
        raise RowImpossible(f"pp={pp} over {model.layers} layers cannot be")
    per_rank = whole(row, "micro_batch", 1)
    gbs = whole(row, "global_batch", per_rank * dp * (1 if pp == 1 else 4 * pp))
    if not row.get("global_batch"):
        assumed.append(f"global_batch not given: {gbs}")
    if gbs < dp and cp > 1 and dp % gbs == 0:
        cp, dp = cp * dp // gbs, gbs
        assumed.append(f"gbs below dp: cp={cp}")
    if gbs < per_rank * dp:
        per_rank = max(1, gbs // dp)
        assumed.append(f"gbs below mbs·dp: mbs={per_rank}")
    zero, shard = _sharding(zero_text, framework, dp * cp, assumed)
    recompute = _recompute((row.get("recompute") or "").lower())
    sp = framework != "megatron-2021" or "sp" in (row.get("recompute") or "").lower().split("+")
    if "no sp" in (row.get("recompute") or "").lower():
        sp = False
    vp = whole(row, "vp", 1)
    schedule = "zbv" if "schedule=zbv" in notes else "1f1b"
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=max(1, whole(row, "ep", 1)),
        dp=dp,
        vp=vp if pp > 1 else 1,
        mbs=per_rank,
        gbs=gbs,
        zero=zero,
        shard=shard,
        recompute=recompute,
        sp=sp and tp > 1,
        schedule=schedule,
    )


def _sharding(text: str, framework: str, ranks: int, assumed: list[str]) -> tuple[int, int]:
    shard = 0
    if found := re.search(r"(?:shard(?: group)?|within node) \(?(\d+)", text) or re.search(
        r"\(shard (\d+)\)", text
    ):
        shard = min(int(found[1]), ranks)
    if "none" in text or text in {"ddp", "dp"}:
        return 0, 0
    if "grad_op" in text or "zero-2" in text or "zero2" in text:
        return 2, shard
    if "fsdp" in text or "zero-3" in text or "zero3" in text or "shard group" in text or "hsdp" in text:
        return 3, shard
    if "zero-1" in text or "zero1" in text or "distributed optimizer" in text or "bf16_optimizer" in text:
        return 1, shard
    if not text:
        zero = 3 if framework in {"fsdp", "torchtitan", "jax"} else 1
        assumed.append(f"sharding not stated: ZeRO-{zero}")
        return zero, 0
    return (0, 0)


def _recompute(text: str) -> Recompute:
    if text.startswith("full"):
        return "full"
    if text.startswith("selective") and text != "selective mlp":
        return "selective"
    return "none"
