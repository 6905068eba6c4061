"""Guesses from a measured row's notes and names: framework, network, degrees and the model's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dtslurm.planner.frameworks import NEMO
from dtslurm.planner.layout import Layout
from dtslurm.planner.models.shapes import Attention, ModelShape, Stack

Row = Mapping[str, str]


def with_degrees_of_notes(row: Row) -> Row:
    """Return a row with missing degrees filled in from its notes, such as ``TP4 PP8 VP12 MBS1``."""
    if (row.get("tp") or "").strip() or (row.get("pp") or "").strip():
        return row
    degrees = dict(re.findall(r"\b(TP|PP|VP|MBS|GBS) ?=?(\d{1,5})\b", row.get("notes") or ""))
    keys = {"TP": "tp", "PP": "pp", "VP": "vp", "MBS": "micro_batch", "GBS": "global_batch"}
    if not {"TP", "PP"} <= set(degrees):
        return row
    values_by_column = {keys[word]: value for word, value in degrees.items()}
    return {
        **row,
        **{key: value for key, value in values_by_column.items() if not (row.get(key) or "").strip()},
    }


def guess_framework(row: Row, chip: str, notes: str, assumed: list[str]) -> str:
    """Return the framework of a row's run, inferred from its framework, notes and sharding."""
    sharding = f"{row.get('zero_or_fsdp') or ''} {row.get('framework') or ''}".lower()
    for word, name in (
        ("nanotron", "nanotron"),
        ("torchtitan", "torchtitan"),
        ("maxtext", "jax"),
        ("paxml", "paxml"),
        ("jax", "jax"),
        ("megatron-deepspeed", "megatron-deepspeed"),
    ):
        if word in notes or word in (row.get("model") or "").lower() or word in sharding:
            return _torchtitan_version(row, notes) if name == "torchtitan" else name
    if "megatron-fsdp" in sharding:
        return "megatron"
    if "torchtune" in notes or "fsdp" in sharding or "hsdp" in sharding:
        return _fsdp_variant(notes, assumed)
    if re.search(r"zero-?3|stage ?3|deepspeed", f"{sharding} {notes}"):
        return "deepspeed"
    if re.search(r"transformers|pytorch|timm", row.get("framework") or "", re.IGNORECASE):
        # data parallelism alone, with the operators of FSDP's users
        if precedes_flash_attention(row, chip, notes, []):
            return "fsdp-2022"
        return _fsdp_variant(notes, assumed)
    if precedes_flash_attention(row, chip, notes, assumed):
        return "megatron-2021"
    return _guess_megatron_generation(f"{notes} {sharding}", chip, (row.get("model") or "").lower())


def _torchtitan_version(row: Row, notes: str) -> str:
    if compiles(notes) is False:
        return "torchtitan-eager"
    return "torchtitan-2024" if _is_before_2025(row) else "torchtitan"


def _fsdp_variant(notes: str, assumed: list[str]) -> str:
    """Return torchtune or the kind of PyTorch FSDP: FSDP1 and FSDP2 move the same bytes."""
    if "foundry" in notes:
        return "llm-foundry"
    is_compiled = compiles(notes)
    if is_compiled is None:
        assumed.append("compile not stated: eager")
    if "torchtune" in notes:
        return "torchtune" if is_compiled else "torchtune-eager"
    return "torchtitan" if is_compiled else "fsdp"


def compiles(notes: str) -> bool | None:
    """Return whether the notes state that torch.compile was used; None if they do not state it."""
    if re.search(r"compile ?[=:] ?(no|false|off|0)\b|\b(no|without|w/o) (torch\.)?compile|\beager\b", notes):
        return False
    return True if re.search(r"\bcompiled?\b|torch\.compile", notes) else None


def precedes_flash_attention(row: Row, chip: str, notes: str, assumed: list[str]) -> bool:
    """Return whether Megatron-LM stored attention scores, by its date or by what the notes name.

    Megatron-LM has had flash attention since 2023. A number format is no evidence for or against it.
    """
    if re.search(r"nemo|bridge|dgxc", notes):
        return False  # their generations differ otherwise
    if re.search(r"fused softmax|no flash|without flash|before flash|scores stored", notes):
        return True
    if re.search(r"(?<!no )(?<!without )flash|transformer engine|cudnn", notes):
        return False
    if chip == "V100":
        return True  # FlashAttention needs a newer chip
    text = f"{row.get('framework') or ''} {row.get('read_from') or ''} {row.get('notes') or ''}"
    years = [int(year) for year in re.findall(r"(?<![\d.])(20[12]\d)(?!\d)", text)]
    years += [2000 + int(year) for year in re.findall(r"arxiv:(\d\d)\d\d\.", text.lower())]
    if years:
        return min(years) < 2023
    if chip in {"A100", "A800"} and "core" not in text.lower():
        assumed.append("software date not stated: since 2023, with flash attention")
    return False


def routes_evenly(framework: str, notes: str) -> bool:
    """Return whether the run forced even routing to experts, or dropped tokens above an expert's share.

    NVIDIA's performance recipes do so (MegatronTokenDropCallback in NVIDIA/NeMo, scripts/performance;
    moe_router_force_load_balancing in Megatron Bridge), and so do AMD's (AMD-AGI/Primus, examples/megatron).
    """
    even_routing_pattern = r"(force\w*|even)[- ](load[- ])?(balanc|rout)|token[- ]?drop|primus"
    return framework in NEMO or bool(re.search(even_routing_pattern, notes))


def dispatches_once(notes: str) -> bool:
    """Return whether the notes name a dispatcher that sends a token once to a node (DeepEP, HybridEP)."""
    return bool(re.search(r"(?<!no )(?<!without )\b(deep|hybrid)-?ep\b", notes))


def replays_graphs(notes: str) -> bool:
    """Return whether the notes state that the layers were replayed as CUDA graphs."""
    return bool(re.search(r"(?<!no )(?<!without )\bcuda[- ]?graphs?\b", notes))


def expert_tensor(layout: Layout, model: ModelShape, framework: str, notes: str) -> int:
    """Return the expert tensor parallel degree that the notes give, or the framework's usual degree.

    Megatron-LM splits experts by the tensor parallel degree by default (arguments.py:
    expert_tensor_parallel_size); recipes of models with narrow experts set the degree to 1.
    """
    if layout.ep == 1 or layout.tp == 1:
        return 1
    match = re.search(r"\betp ?=? ?(\d{1,2})\b", notes)
    has_narrow_experts = any(stack.experts and stack.experts.ffn < model.hidden for stack in model.stacks)
    degree = (
        int(match[1])
        if match
        else 1
        if has_narrow_experts or not framework.startswith(("megatron", "nemo"))
        else layout.tp
    )
    ranks = layout.tp * layout.cp * layout.dp
    return degree if degree > 0 and ranks % (degree * layout.ep) == 0 else 1


def _is_before_2025(row: Row) -> bool:
    """Return whether the table's address or notes contain a date of 2024 or earlier."""
    return bool(
        re.search(
            r"(?<!\d)202[1-4](?:-?\d\d)?(?!\d)", f"{row.get('read_from') or ''} {row.get('notes') or ''}"
        )
    )


def _guess_megatron_generation(text: str, chip: str, model: str) -> str:
    """Return the generation of Megatron-LM or NeMo that a table was measured with.

    The launcher's configurations for A100 disable flash attention and Transformer Engine
    (NVIDIA/NeMo-Framework-Launcher, conf/training/gpt3). The tables of Megatron Bridge, from container 25.09
    on, use recipes that dispatch tokens to experts by DeepEP or HybridEP. Earlier recipes, plain recipes, and
    those of gpt-oss before 26.06 do not (scripts/performance/configs/gpt_oss: no flex dispatcher).
    """
    if "launcher" in text and chip in {"A100", "A800"}:
        return "nemo-2023"
    tuned_pattern = (
        r"megatron[-_ ]bridge|(?<!no )(deepep|hybridep)|(nemo|container)[ :v]*(25\.(09|1\d)|2[6-9]\.\d\d)"
    )
    container_match = re.search(r"(?:nemo|container)[ :v]*(2\d\.\d\d)", text)
    is_untuned_gpt_oss = "gpt-oss" in model and (container_match is None or container_match[1] < "26.06")
    if re.search(tuned_pattern, text) and not is_untuned_gpt_oss:
        return "nemo"
    if "deepseek" in model and chip in {"H100", "H200", "H800"} and re.search(r"nemo|dgxc", text):
        return "nemo-2025"  # its recipe uses DeepEP there (nemo/collections/llm/recipes/deepseek_v3.py)
    return "nemo-2024" if re.search(r"nemo|dgxc|bridge", text) else "megatron"


def guess_fabric(text: str) -> str:
    """Return the cluster profile's name of the network that a table names, ``infiniband`` by default."""
    lower_text = text.lower()
    for word, name in (
        ("efa", "efa"),
        ("roce", "roce"),
        ("slingshot", "slingshot"),
        ("omni-path", "omnipath"),
        ("ethernet", "ethernet"),
        ("tcpx", "tcpx"),
    ):
        if re.search(rf"\b{word}", lower_text):
            return name
    return "infiniband"


def node_of(row: Row, default_per_node: int, notes: str) -> tuple[int | None, float | None]:
    """Return GPUs per node and network GB/s per GPU; each is None if the row does not give it."""
    fabric = row.get("fabric") or ""
    per_node = None
    text = f"{fabric} {notes}"
    match = re.search(r"\b(\d{1,2})[- ]?GPUs?(?:/| per | a |-)node", text, re.IGNORECASE) or re.search(
        r"\b(\d{1,2}) ?x ?(?:A|B|H|GH|V|MI)\d{2,3}\w*(?:-\d+GB)? (?:per|a) node", text, re.IGNORECASE
    )
    if match and int(match[1]):
        per_node = int(match[1])
    nic = None
    bits_per_node_gpu = 8 * (
        per_node or default_per_node
    )  # converts Gbit/s of a node's adapters to GB/s per GPU
    if match := re.search(r"(\d{2,4}) ?Gb(?:it)?(?:/|p)s\b.*per GPU", fabric, re.IGNORECASE):
        nic = float(match[1]) / 8
    elif match := re.search(
        r"(?:(\d+) ?x ?)?(\d{2,4}) ?Gb(?:it)?(?:/|p)s\b.*per node", fabric, re.IGNORECASE
    ):
        nic = float(match[1] or 1) * float(match[2]) / bits_per_node_gpu
    elif match := _ADAPTER_PATTERN.search(fabric):
        gbit_per_s = match["speed"] or _GBIT_BY_GENERATION.get((match["kind"] or "").upper())
        nic = int(match["count"]) * float(gbit_per_s) / bits_per_node_gpu if gbit_per_s else None
    return per_node, nic


_GBIT_BY_GENERATION = {"FDR": 56, "EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800, "OPA": 100}
_ADAPTER_PATTERN = re.compile(  # 8x NDR400, 4x HDR, 8x400G, 4 x Slingshot-200
    r"\b(?P<count>\d{1,2}) ?x ?(?P<kind>FDR|EDR|HDR|NDR|XDR|OPA|Slingshot|CX)?[- ]?(?P<speed>\d{2,3})?"
    r"(?= ?(?:G\b|Gb|IB|InfiniBand|NIC|\)|,|$))",
    re.IGNORECASE,
)


_NOT_DENSE_DECODER = re.compile(
    r"mamba|jamba|zamba|hybrid|nemotron[-_ ]?(h\b|3|nano)|moe|\d+b[-_ ]?a\d|x\d+b|v4", re.IGNORECASE
)


def likely_heads(hidden_size: int) -> int:
    """Return a number of attention heads that divides the hidden size, with heads of about 128 columns."""
    target = max(1, round(hidden_size / 128))
    return min(
        (n for n in range(1, 2 * target + 1) if hidden_size % n == 0),
        key=lambda n: abs(n - target),
    )


def guessed_model(
    name: str, params: float | None, layers: int | None, vocab: int, seq_len: int
) -> ModelShape | None:
    """Return a dense decoder of the model's size, 128 times as wide as deep; None for other models."""
    size_match = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)[-_ ]?b(?![a-z])", name, re.IGNORECASE)
    params = params or (float(size_match[1]) if size_match else None)
    if params is None or _NOT_DENSE_DECODER.search(name) or not 0.05 <= params <= 2000:
        return None
    layers = layers or max(2, round((params * 1e9 / 12 / 128**2) ** (1 / 3)))
    hidden = max(128, round((params * 1e9 / 12 / layers) ** 0.5 / 128) * 128)
    stack = Stack(layers, Attention(hidden // 128, hidden // 128, 128, 128), 4 * hidden, gated=False)
    assumptions = (
        f"the shape of {name} not stated: {layers} layers of {hidden}, as models of its size usually are",
    )
    return ModelShape(
        name, hidden, (stack,), vocab=vocab, seq_len=seq_len, tied=True, assumptions=assumptions
    )
