"""Whether a layout divides a model and a machine, and what would where it does not."""

from __future__ import annotations

from dtslurm.planner.layout import Layout
from dtslurm.planner.models.shapes import ModelShape


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number, up to ``most``."""
    small = [count for count in range(1, int(number**0.5) + 1) if number % count == 0]
    both = sorted({*small, *(number // count for count in small)})
    return [count for count in both if most is None or count <= most]


def _valid(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 10 else [*shown[:9], "…"])


def problems_of(model: ModelShape, layout: Layout, gpus: int | None, seq_len: int) -> list[str]:
    """Return everything that makes a layout impossible for a model, each with what would be valid."""
    found = _counts(layout, gpus)
    if model.generic:
        if layout.tp > 1 or layout.pp > 1 or layout.cp > 1 or layout.ep > 1:
            found.append(f"{model.name} is known by its totals alone: only dp can be more than 1")
        return found
    found += _tensor(model, layout)
    found += _pipeline(model, layout)
    if layout.cp > 1 and seq_len % (2 * layout.cp):
        found.append(f"cp={layout.cp} needs a sequence that 2·cp = {2 * layout.cp} divides, not {seq_len}")
    found += _experts(model, layout)
    ranks = layout.dp * layout.cp
    if layout.shard and ranks % layout.shard:
        valid = _valid(divisors(ranks))
        found.append(f"shard={layout.shard} does not divide dp·cp = {ranks}; valid: {valid}")
    return found


def _counts(layout: Layout, gpus: int | None) -> list[str]:
    found: list[str] = []
    if gpus is not None and layout.gpus != gpus:
        product = layout.tp * layout.pp * layout.cp
        fix = f"dp={gpus // product}" if gpus % product == 0 else f"tp·pp·cp that divides {gpus}"
        found.append(
            f"tp·pp·cp·dp = {layout.tp}·{layout.pp}·{layout.cp}·{layout.dp} = {layout.gpus} GPUs, "
            f"but there are {gpus}; {fix} would fit"
        )
    if layout.gbs % (layout.mbs * layout.dp):
        step = layout.mbs * layout.dp
        above = max(step, -(-layout.gbs // step) * step)
        found.append(f"gbs={layout.gbs} is not a multiple of mbs·dp = {step}; gbs={above} would be")
    return found


def _tensor(model: ModelShape, layout: Layout) -> list[str]:
    tp = layout.tp
    heads = {stack.attention.heads for stack in model.stacks}
    found = [
        f"tp={tp} does not divide the {count} attention heads; valid: {_valid(divisors(count))}"
        for count in sorted(heads)
        if count % tp
    ]
    for kv in sorted({stack.attention.kv_heads for stack in model.stacks} - heads):
        if kv % tp and tp % kv:
            valid = [d for d in divisors(max(heads)) if kv % d == 0 or d % kv == 0]
            found.append(f"tp={tp} and the {kv} key-value heads do not divide; valid: {_valid(valid)}")
    if model.hidden % tp:
        found.append(f"tp={tp} does not divide the hidden size {model.hidden}")
    widths = {stack.ffn for stack in model.stacks if not stack.experts}
    found += [
        f"tp={tp} does not divide the MLP width {ffn}; valid: {_valid(divisors(ffn, 64))}"
        for ffn in sorted(widths)
        if ffn % tp
    ]
    return found


def _pipeline(model: ModelShape, layout: Layout) -> list[str]:
    pp = layout.pp
    if pp > 1 and model.stacks[0].encoder:
        return ["pipelines over an encoder and a decoder are not modelled; pp=1 is valid"]
    if pp > model.layers:
        return [f"pp={pp} is more than the {model.layers} layers; valid: 1 to {model.layers}"]
    if not stages_divide(model, pp):
        valid = [p for p in range(1, min(model.layers, 128) + 1) if stages_divide(model, p)]
        return [
            (
                f"pp={pp} divides neither the {model.layers} layers nor {model.layers + 2} (embedding and "
                f"head counted as layers); valid: {_valid(valid)}"
            )
        ]
    return _interleaving(model, layout)


def _interleaving(model: ModelShape, layout: Layout) -> list[str]:
    if layout.vp == 1:
        return []
    if layout.pp == 1:
        return [f"vp={layout.vp} interleaves a pipeline, and pp=1 has none"]
    found = []
    if not stages_divide(model, layout.pp * layout.vp):
        most = -(-model.layers // layout.pp) + 1
        valid = [v for v in range(1, most + 1) if stages_divide(model, layout.pp * v)]
        found.append(
            f"vp={layout.vp} does not divide the layers of a stage; valid for pp={layout.pp}: {_valid(valid)}"
        )
    if layout.micro_batches % layout.pp:
        found.append(
            f"vp={layout.vp} needs micro-batches in multiples of pp={layout.pp}, and there are "
            f"{layout.micro_batches} (gbs/(mbs·dp))"
        )
    return found


def _experts(model: ModelShape, layout: Layout) -> list[str]:
    counts = sorted({stack.experts.count for stack in model.stacks if stack.experts})
    if layout.ep > 1 and not counts:
        return [f"ep={layout.ep} spreads experts, and {model.name} has none; ep=1 is valid"]
    found = [
        f"ep={layout.ep} does not divide the {count} experts; valid: {_valid(divisors(count))}"
        for count in counts
        if count % layout.ep
    ]
    ranks = layout.tp * layout.cp * layout.dp
    if layout.etp > 1 and layout.ep == 1:
        found.append(f"etp={layout.etp} splits spread experts, and ep=1 spreads none; with it tp splits them")
    elif layout.etp > 1 and ranks % layout.expert_ranks:
        found.append(
            f"ep·etp = {layout.expert_ranks} does not divide the {ranks} GPUs of a stage; "
            f"valid for ep={layout.ep}: etp = {_valid(divisors(max(1, ranks // layout.ep)))}"
        )
    if layout.ep > 1 and ranks % layout.ep:
        found.append(
            f"ep={layout.ep} does not divide the {ranks} GPUs of a stage; valid: {_valid(divisors(ranks))}"
        )
    return found


def stages_divide(model: ModelShape, stages: int) -> bool:
    """Tell whether layers spread over stages, each as full as the others.

    The embedding and the head may take a layer's place each (Llama 3: 126 = 128 - 2), and so may the lighter
    dense layers a mixture begins with (DeepSeek-V3: 61 = 64 - 3).
    """
    layers = model.layers
    spare = (0, 2, 3) if model.is_moe and any(not stack.experts for stack in model.stacks) else (0, 2)
    return any(
        (layers + extra) % stages == 0 and layers + extra >= stages and layers >= stages for extra in spare
    )


def cut_by_cost(model: ModelShape, stages: int) -> int:
    """Return how many of a pipeline's stages get anything where nanotron cuts it.

    It walks over embedding, layers, head and loss and starts a stage once the sum of their costs has passed
    the last one's even share (nanotron/models/base.py); costs are parameters in matrix products, of the
    embedding and the loss none. Many stages and a large vocabulary leave the last ones empty.
    """
    stack = model.stacks[-1]
    layer = float(stack.dense_params(model.hidden))
    head = float(model.vocab * model.hidden)
    total = model.layers * layer + head
    stage, done = 0, 0.0
    last = 0
    for cost in (0.0, *[layer] * model.layers, 0.0, head, 0.0, 0.0):  # norm before the head; cast, loss
        last = stage
        done += cost
        if stage < stages - 1 and done > total * (stage + 1) / stages * (1 + 1e-9):
            stage += 1
    return last + 1
