"""The model of a measured row: a preset, or the shape that the row's columns and notes describe."""

from __future__ import annotations

import re
from dataclasses import replace

from dtslurm.planner.measured.cells import RowUnanswerable, parse_count, real
from dtslurm.planner.measured.guesses import Row, guessed_model, likely_heads
from dtslurm.planner.models.presets import find_preset, layers_in_remark
from dtslurm.planner.models.shapes import Attention, Experts, ModelShape, Stack

_MIXTURE = re.compile(
    r"\bmoe\b|\bmixture|\bexperts?\b|\d+b[-_ ]?a\d|\d+x\d+(\.\d+)?b|top-?\d+ rout", re.IGNORECASE
)
_ENCODER = re.compile(r"\b(ro)?bert[ai]?\b|\b(vi|dei)t\b", re.IGNORECASE)
_IMAGES = re.compile(r"\b(vi|dei)t\b", re.IGNORECASE)
_CLASSIFIES = re.compile(r"classif|question answer|regress", re.IGNORECASE)  # tasks without a head over words


def read_model(row: Row, seq_len: int, notes: str) -> ModelShape:
    """Return a row's model: a preset if the columns agree with it, else the columns' model.

    Raises:
        RowUnanswerable: the model is unknown and the columns do not describe it, or it is a mixture whose
            experts are not stated.
    """
    name = row.get("model") or "model"
    preset = find_preset(name)
    layers = (row.get("layers") or "").strip()
    depth = parse_count(row, "layers") if layers else layers_in_remark(name)
    if preset is not None and (preset.is_moe or not layers or _agrees(row, preset)):
        shape = _with_vocabulary(row, preset.with_layers(depth) if depth else preset)
    elif (row.get("hidden") or "").strip():
        shape = _model_of_columns(row, name, seq_len, notes)
    else:
        guess = guessed_model(name, real(row, "params_b"), depth, parse_count(row, "vocab", 50304), seq_len)
        if guess is None or _seems_mixture(row, notes):
            raise RowUnanswerable(f"the model {name!r} is not known, and hidden is not given")
        shape = guess
    if not shape.is_moe and _seems_mixture(row, notes):
        raise RowUnanswerable(
            f"the model {name!r} is a mixture, and its experts are not stated; "
            "notes such as 'MoE 64 experts top-2' state them"
        )
    return replace(shape, head=False) if _CLASSIFIES.search(row.get("task") or "") else shape


def _agrees(row: Row, preset: ModelShape) -> bool:
    """Return whether the columns of a row describe a dense preset, except for its layers and vocabulary."""
    if preset.generic or not preset.stacks:
        return False
    stack = preset.stacks[0]
    widths = {
        "hidden": preset.hidden,
        "heads": stack.attention.heads,
        "kv_heads": stack.attention.kv_heads,
        "ffn": stack.ffn,
    }
    return all(parse_count(row, key, width) == width for key, width in widths.items())


def _with_vocabulary(row: Row, shape: ModelShape) -> ModelShape:
    return replace(shape, vocab=parse_count(row, "vocab", shape.vocab)) if shape.vocab else shape


def _seems_mixture(row: Row, notes: str) -> bool:
    """Return whether a name, the notes or the expert parallel degree suggest a mixture of experts."""
    if parse_count(row, "ep", 1) > 1:
        return True
    stated = re.sub(r"\b(no|not a?|without) (moe|mixture|experts?)\b", "", notes)
    return bool(_MIXTURE.search(f"{row.get('model') or ''} {stated}"))


def _experts(row: Row, name: str, notes: str, ffn: int) -> Experts | None:
    """Return the experts that notes (``8 experts top-2``, ``top-2 of 8``) or a name (``8x7B``) state."""
    match = re.search(r"(\d+) (?:routed )?experts?,? ?\(?top[- ]?(\d+)", notes)
    count, top_k = (int(match[1]), int(match[2])) if match else (0, 0)
    if match := re.search(r"top[- ]?(\d+) (?:of|out of) (\d+)", notes):
        count, top_k = int(match[2]), int(match[1])
    if not count and (match := re.search(r"\b(\d+)x\d+(?:\.\d+)?b", name, re.IGNORECASE)):
        count, top_k = int(match[1]), 2
    if not 1 <= top_k <= count:
        return None
    shared = re.search(r"(\d+) shared", notes)
    return Experts(count, top_k, ffn, int(shared[1]) * ffn if shared else 0)


def _stacks(
    row: Row, layers: int, attention: Attention, gated: bool, experts: Experts | None
) -> tuple[Stack, ...]:
    ffn = parse_count(row, "ffn", 4 * parse_count(row, "hidden"))
    if experts is None:
        return (Stack(layers, attention, ffn, gated),)
    dense = min(layers - 1, _lead_layers((row.get("notes") or "").lower()) or 0)
    mixture = Stack(layers - dense, attention, ffn, gated, experts=experts)
    if dense <= 0:
        return (mixture,)
    lead = Stack(dense, attention, experts.top_k * ffn + experts.shared_ffn, gated)
    return (lead, mixture)


def _lead_layers(notes: str) -> int | None:
    """Return the number of dense layers before the layers with experts; None if the notes do not state it."""
    match = re.search(
        r"(?:first )?(\d+) (?:layers? )?dense|(?:first|lead)[a-z]* (\d+) layers? (?:are |is )?dense", notes
    )
    return int(match[1] or match[2]) if match else None


def _model_of_columns(row: Row, name: str, seq_len: int, notes: str) -> ModelShape:
    hidden = parse_count(row, "hidden")
    heads = parse_count(row, "heads", likely_heads(hidden))
    kv_heads = parse_count(row, "kv_heads", heads)
    is_encoder = bool(_ENCODER.search(name))
    vocab = 0 if _IMAGES.search(name) else parse_count(row, "vocab", 50257)
    ffn = parse_count(row, "ffn", 4 * hidden)
    params = real(row, "params_b")
    head_width = hidden // heads if hidden % heads == 0 else 128
    attention = Attention(
        heads,
        kv_heads,
        head_width,
        head_width,
        qkv_bias=is_encoder,
        out_bias=is_encoder,
        causal=not is_encoder,
    )
    experts = _experts(row, name, notes, ffn)
    layers = (row.get("layers") or "").strip()
    if not layers and params is None:
        raise RowUnanswerable("neither layers nor params_b is given")
    tied_stated = _states_tied(notes)
    shapes: list[ModelShape] = []
    for gated in (True, False):
        if layers:
            count = parse_count(row, "layers")
        else:
            layer = Stack(1, attention, ffn, gated, experts=experts).params(hidden)
            count = max(1, round(((params or 0.0) * 1e9 - vocab * hidden) / layer))
        stacks = _stacks(row, count, attention, gated, experts)
        shapes += [
            ModelShape(name, hidden, stacks, vocab=vocab, seq_len=seq_len, tied=tied)
            for tied in ((True, False) if tied_stated is None else (tied_stated,))
        ]
    if params is None:
        is_llama_like = ffn % (4 * hidden) != 0
        shape = next(shape for shape in shapes if shape.stacks[0].gated == is_llama_like)
    else:
        shape = min(shapes, key=lambda shape: abs(shape.params - params * 1e9))
    return replace(shape, assumptions=_assumptions(shape, notes, params, tied_stated))


def _states_tied(notes: str) -> bool | None:
    """Return whether embedding and head share a matrix; None if the notes do not state it."""
    if re.search(r"\b(un|not |non-?)tied|untie\b", notes):
        return False
    return True if re.search(r"\btied?\b|\bshared embeddings?\b", notes) else None


def _assumptions(
    shape: ModelShape, notes: str, params: float | None, tied_stated: bool | None
) -> tuple[str, ...]:
    lines = []
    if tied_stated is None:
        reason = ", closest to params_b" if params is not None else ""
        lines.append(f"embeddings not stated: {'tied' if shape.tied else 'untied'}{reason}")
    if shape.is_moe and _lead_layers(notes) is None:
        lines.append("dense lead layers not stated: none")
    return tuple(lines)
