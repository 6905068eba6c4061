"""What a measured row leaves to its notes and its names: framework, network, degrees, a model's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dtslurm.planner.frameworks import NEMO
from dtslurm.planner.layout import Layout
from dtslurm.planner.models.shapes import Attention, ModelShape, Stack

Row = Mapping[str, str]


def with_degrees_of_notes(row: Row) -> Row:
    """Return a row whose degrees, where it gives none, are those of its notes: ``TP4 PP8 VP12 MBS1``."""
    if (row.get("tp") or "").strip() or (row.get("pp") or "").strip():
        return row
    found = dict(re.findall(r"\b(TP|PP|VP|MBS|GBS) ?=?(\d{1,5})\b", row.get("notes") or ""))
    keys = {"TP": "tp", "PP": "pp", "VP": "vp", "MBS": "micro_batch", "GBS": "global_batch"}
    if not {"TP", "PP"} <= set(found):
        return row
    said = {keys[word]: value for word, value in found.items()}
    return {**row, **{key: value for key, value in said.items() if not (row.get(key) or "").strip()}}


def guess_framework(row: Row, chip: str, precision: str, notes: str) -> str:
    """Return the framework a row was run with, from its notes and its way of sharding."""
    zero = f"{row.get('zero_or_fsdp') or ''} {row.get('framework') or ''}".lower()
    for word, name in (
        ("nanotron", "nanotron"),
        ("torchtitan", "torchtitan"),
        ("maxtext", "jax"),
        ("paxml", "paxml"),
        ("jax", "jax"),
        ("megatron-deepspeed", "megatron-deepspeed"),
    ):
        if word in notes or word in (row.get("model") or "").lower() or word in zero:
            return f"{name}-2024" if name == "torchtitan" and _before_2025(row) else name
    old = chip == "V100" or (chip in {"A100", "A800"} and precision == "fp16")
    if "fsdp2" in zero:
        return "torchtitan"
    if "megatron-fsdp" in zero:
        return "megatron"
    if "fsdp" in zero or "hsdp" in zero:
        return "llm-foundry" if "foundry" in f"{row.get('source') or ''} {notes}" else "fsdp"
    if re.search(r"zero-?3|stage ?3|deepspeed", f"{zero} {notes}"):
        return "deepspeed"
    if old:
        return "megatron-2021"
    return _megatron(f"{notes} {zero}", chip, (row.get("model") or "").lower())


def routes_evenly(framework: str, notes: str) -> bool:
    """Tell whether a table's mixture was made to use its experts evenly, or dropped tokens above their share.

    NVIDIA's recipes for speed do either (MegatronTokenDropCallback in NVIDIA/NeMo, scripts/performance;
    moe_router_force_load_balancing in Megatron Bridge's), and so do AMD's (AMD-AGI/Primus,
    examples/megatron).
    """
    said = r"(force\w*|even)[- ](load[- ])?(balanc|rout)|token[- ]?drop|primus"
    return framework in NEMO or bool(re.search(said, notes))


def expert_tensor(layout: Layout, model: ModelShape, framework: str, notes: str) -> int:
    """Return how many GPUs split one expert between them: as the notes say, or as is usual.

    Megatron-LM splits experts as far as all else unless told otherwise (arguments.py:
    expert_tensor_parallel_size); recipes of mixtures of narrow experts tell it to leave them whole.
    """
    if layout.ep == 1 or layout.tp == 1:
        return 1
    found = re.search(r"\betp ?=? ?(\d{1,2})\b", notes)
    narrow = any(stack.experts and stack.experts.ffn < model.hidden for stack in model.stacks)
    size = (
        int(found[1])
        if found
        else 1
        if narrow or not framework.startswith(("megatron", "nemo"))
        else layout.tp
    )
    ranks = layout.tp * layout.cp * layout.dp
    return size if size > 0 and ranks % (size * layout.ep) == 0 else 1


def _before_2025(row: Row) -> bool:
    """Tell whether a table's address or notes date it to 2024 or earlier."""
    return bool(
        re.search(
            r"(?<!\d)202[1-4](?:-?\d\d)?(?!\d)", f"{row.get('read_from') or ''} {row.get('notes') or ''}"
        )
    )


def _megatron(text: str, chip: str, model: str) -> str:
    """Return which generation of Megatron's descendants a table is of.

    The launcher's configurations for A100 leave flash attention and Transformer Engine off
    (NVIDIA/NeMo-Framework-Launcher, conf/training/gpt3). The tables of Megatron Bridge, from container 25.09
    on, are of recipes that dispatch to experts by DeepEP or HybridEP; earlier ones and plain recipes are not,
    nor are gpt-oss's before 26.06 (scripts/performance/configs/gpt_oss: no flex dispatcher).
    """
    if "launcher" in text and chip in {"A100", "A800"}:
        return "nemo-2023"
    tuned = r"megatron[-_ ]bridge|deepep|hybridep|(nemo|container)[ :v]*(25\.(09|1\d)|2[6-9]\.\d\d)"
    late = re.search(r"(?:nemo|container)[ :v]*(2\d\.\d\d)", text)
    plain = "gpt-oss" in model and (late is None or late[1] < "26.06")
    if re.search(tuned, text) and not plain:
        return "nemo"
    if "deepseek" in model and chip in {"H100", "H200", "H800"} and re.search(r"nemo|dgxc", text):
        return "nemo-2025"  # its recipe uses DeepEP there (nemo/collections/llm/recipes/deepseek_v3.py)
    return "nemo-2024" if re.search(r"nemo|dgxc|bridge", text) else "megatron"


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


def node_of(row: Row, usual: int, notes: str) -> tuple[int | None, float | None]:
    """Return GPUs per node and GB/s of network per GPU, where the row tells."""
    fabric = row.get("fabric") or ""
    per_node = None
    text = f"{fabric} {notes}"
    found = re.search(r"\b(\d{1,2})[- ]?GPUs?(?:/| per | a |-)node", text, re.IGNORECASE) or re.search(
        r"\b(\d{1,2}) ?x ?(?:A|B|H|GH|V|MI)\d{2,3}\w*(?:-\d+GB)? (?:per|a) node", text, re.IGNORECASE
    )
    if found and int(found[1]):
        per_node = int(found[1])
    nic = None
    share = 8 * (per_node or usual)  # bits to bytes, a node's adapters over its GPUs
    if found := re.search(r"(\d{2,4}) ?Gb(?:it)?(?:/|p)s\b.*per GPU", fabric, re.IGNORECASE):
        nic = float(found[1]) / 8
    elif found := re.search(
        r"(?:(\d+) ?x ?)?(\d{2,4}) ?Gb(?:it)?(?:/|p)s\b.*per node", fabric, re.IGNORECASE
    ):
        nic = float(found[1] or 1) * float(found[2]) / share
    elif found := _ADAPTERS.search(fabric):
        speed = found["speed"] or _GENERATIONS.get((found["kind"] or "").upper())
        nic = int(found["count"]) * float(speed) / share if speed else None
    return per_node, nic


_GENERATIONS = {"FDR": 56, "EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800, "OPA": 100}
_ADAPTERS = re.compile(  # 8x NDR400, 4x HDR, 8x400G, 4 x Slingshot-200
    r"\b(?P<count>\d{1,2}) ?x ?(?P<kind>FDR|EDR|HDR|NDR|XDR|OPA|Slingshot|CX)?[- ]?(?P<speed>\d{2,3})?"
    r"(?= ?(?:G\b|Gb|IB|InfiniBand|NIC|\)|,|$))",
    re.IGNORECASE,
)


_NO_DECODER = re.compile(
    r"mamba|jamba|zamba|hybrid|nemotron[-_ ]?(h\b|3|nano)|moe|\d+b[-_ ]?a\d|x\d+b|v4", re.IGNORECASE
)


def likely_heads(hidden: int) -> int:
    """Return a number of attention heads for a hidden size: one that divides it, about 128 wide each."""
    near = max(1, round(hidden / 128))
    return min((n for n in range(1, 2 * near + 1) if hidden % n == 0), key=lambda n: abs(n - near))


def guessed_model(
    name: str, params: float | None, layers: int | None, vocab: int, seq_len: int
) -> ModelShape | None:
    """Return a dense decoder of a model's size, 128 times as wide as deep; None where none is likely."""
    said = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)[-_ ]?b(?![a-z])", name, re.IGNORECASE)
    params = params or (float(said[1]) if said else None)
    if params is None or _NO_DECODER.search(name) or not 0.05 <= params <= 2000:
        return None
    layers = layers or max(2, round((params * 1e9 / 12 / 128**2) ** (1 / 3)))
    hidden = max(128, round((params * 1e9 / 12 / layers) ** 0.5 / 128) * 128)
    stack = Stack(layers, Attention(hidden // 128, hidden // 128, 128, 128), 4 * hidden, gated=False)
    assumed = (
        f"the shape of {name} not stated: {layers} layers of {hidden}, as models of its size usually are",
    )
    return ModelShape(name, hidden, (stack,), vocab=vocab, seq_len=seq_len, tied=True, assumptions=assumed)
