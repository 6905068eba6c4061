"""Check that a layout divides a model's dimensions and the number of GPUs, or list valid values."""

from __future__ import annotations

from dtslurm.planner.layout import Layout
from dtslurm.planner.models.shapes import ModelShape


def divisors(number: int, limit: int | None = None) -> list[int]:
    """Return the divisors of a number, up to ``limit``."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    all_divisors = sorted({*small, *(number // divisor for divisor in small)})
    return [divisor for divisor in all_divisors if limit is None or divisor <= limit]


def _join(numbers: list[int]) -> str:
    texts = [str(number) for number in numbers]
    return ", ".join(texts if len(texts) <= 10 else [*texts[:9], "…"])


def find_layout_problems(model: ModelShape, layout: Layout, gpus: int | None, seq_len: int) -> list[str]:
    """Return all problems that make a layout impossible for a model, each with valid values."""
    problems = _check_counts(layout, gpus)
    if model.generic:
        if layout.tp > 1 or layout.pp > 1 or layout.cp > 1 or layout.ep > 1:
            problems.append(f"{model.name} is known by its totals alone: only dp can be more than 1")
        return problems
    problems += _check_tensor(model, layout)
    problems += _check_pipeline(model, layout)
    if layout.cp > 1 and seq_len % (2 * layout.cp):
        problems.append(f"cp={layout.cp} needs a sequence that 2·cp = {2 * layout.cp} divides, not {seq_len}")
    problems += _check_experts(model, layout)
    ranks = layout.dp * layout.cp
    if layout.shard and ranks % layout.shard:
        valid = _join(divisors(ranks))
        problems.append(f"shard={layout.shard} does not divide dp·cp = {ranks}; valid: {valid}")
    return problems


def _check_counts(layout: Layout, gpus: int | None) -> list[str]:
    problems: list[str] = []
    if gpus is not None and layout.gpus != gpus:
        gpus_per_replica = layout.tp * layout.pp * layout.cp
        fix = (
            f"dp={gpus // gpus_per_replica}"
            if gpus % gpus_per_replica == 0
            else f"tp·pp·cp that divides {gpus}"
        )
        problems.append(
            f"tp·pp·cp·dp = {layout.tp}·{layout.pp}·{layout.cp}·{layout.dp} = {layout.gpus} GPUs, "
            f"but there are {gpus}; {fix} would fit"
        )
    if layout.gbs % (layout.mbs * layout.dp):
        samples_per_pass = layout.mbs * layout.dp
        next_multiple = max(samples_per_pass, -(-layout.gbs // samples_per_pass) * samples_per_pass)
        problems.append(
            f"gbs={layout.gbs} is not a multiple of mbs·dp = {samples_per_pass}; gbs={next_multiple} would be"
        )
    return problems


def _check_tensor(model: ModelShape, layout: Layout) -> list[str]:
    tp = layout.tp
    heads = {stack.attention.heads for stack in model.stacks}
    problems = [
        f"tp={tp} does not divide the {count} attention heads; valid: {_join(divisors(count))}"
        for count in sorted(heads)
        if count % tp
    ]
    for kv_heads in sorted({stack.attention.kv_heads for stack in model.stacks} - heads):
        if kv_heads % tp and tp % kv_heads:
            valid = [
                degree for degree in divisors(max(heads)) if kv_heads % degree == 0 or degree % kv_heads == 0
            ]
            problems.append(
                f"tp={tp} and the {kv_heads} key-value heads do not divide; valid: {_join(valid)}"
            )
    if model.hidden % tp:
        problems.append(f"tp={tp} does not divide the hidden size {model.hidden}")
    widths = {stack.ffn for stack in model.stacks if not stack.experts}
    problems += [
        f"tp={tp} does not divide the MLP width {ffn}; valid: {_join(divisors(ffn, 64))}"
        for ffn in sorted(widths)
        if ffn % tp
    ]
    return problems


def _check_pipeline(model: ModelShape, layout: Layout) -> list[str]:
    pp = layout.pp
    if pp > 1 and model.stacks[0].encoder:
        return ["pipelines over an encoder and a decoder are not modeled; pp=1 is valid"]
    if pp > model.layers:
        return [f"pp={pp} is more than the {model.layers} layers; valid: 1 to {model.layers}"]
    if not stages_divide(model, pp):
        valid = [stages for stages in range(1, min(model.layers, 128) + 1) if stages_divide(model, stages)]
        return [
            (
                f"pp={pp} divides neither the {model.layers} layers nor {model.layers + 2} (embedding and "
                f"head counted as layers); valid: {_join(valid)}"
            )
        ]
    return _check_interleaving(model, layout)


def _check_interleaving(model: ModelShape, layout: Layout) -> list[str]:
    if layout.vp == 1:
        return []
    if layout.pp == 1:
        return [f"vp={layout.vp} interleaves a pipeline, and pp=1 has none"]
    problems = []
    if not stages_divide(model, layout.pp * layout.vp):
        largest = -(-model.layers // layout.pp) + 1
        valid = [degree for degree in range(1, largest + 1) if stages_divide(model, layout.pp * degree)]
        problems.append(
            f"vp={layout.vp} does not divide the layers of a stage; valid for pp={layout.pp}: {_join(valid)}"
        )
    if layout.micro_batches % layout.pp:
        problems.append(
            f"vp={layout.vp} needs micro-batches in multiples of pp={layout.pp}, and there are "
            f"{layout.micro_batches} (gbs/(mbs·dp))"
        )
    return problems


def _check_experts(model: ModelShape, layout: Layout) -> list[str]:
    counts = sorted({stack.experts.count for stack in model.stacks if stack.experts})
    if layout.ep > 1 and not counts:
        return [f"ep={layout.ep} spreads experts, and {model.name} has none; ep=1 is valid"]
    problems = [
        f"ep={layout.ep} does not divide the {count} experts; valid: {_join(divisors(count))}"
        for count in counts
        if count % layout.ep
    ]
    ranks = layout.tp * layout.cp * layout.dp
    if layout.etp > 1 and layout.ep == 1:
        problems.append(
            f"etp={layout.etp} splits spread experts, and ep=1 spreads none; with it tp splits them"
        )
    elif layout.etp > 1 and ranks % layout.expert_ranks:
        problems.append(
            f"ep·etp = {layout.expert_ranks} does not divide the {ranks} GPUs of a stage; "
            f"valid for ep={layout.ep}: etp = {_join(divisors(max(1, ranks // layout.ep)))}"
        )
    if layout.ep > 1 and ranks % layout.ep:
        problems.append(
            f"ep={layout.ep} does not divide the {ranks} GPUs of a stage; valid: {_join(divisors(ranks))}"
        )
    return problems


def stages_divide(model: ModelShape, stages: int) -> bool:
    """Return whether the layers can be divided evenly over the stages.

    The embedding and the head may each take the place of a layer (Llama 3: 126 = 128 - 2), and so may the
    lighter dense layers at the start of an MoE model (DeepSeek-V3: 61 = 64 - 3).
    """
    layers = model.layers
    extra_layers = (0, 2, 3) if model.is_moe and any(not stack.experts for stack in model.stacks) else (0, 2)
    return any(
        (layers + extra) % stages == 0 and layers + extra >= stages and layers >= stages
        for extra in extra_layers
    )


def cut_by_cost(model: ModelShape, stages: int) -> int:
    """Return the number of pipeline stages that are not empty after nanotron's cut.

    nanotron goes through embedding, layers, head and loss, and starts a new stage when the sum of their costs
    exceeds the even share of the stages so far (nanotron/models/base.py). The cost is the number of
    parameters in matrix products; embedding and loss have none. With many stages and a large vocabulary,
    the last stages are empty.
    """
    stack = model.stacks[-1]
    layer = float(stack.dense_params(model.hidden))
    head = float(model.vocab * model.hidden)
    total = model.layers * layer + head
    stage, cost_so_far = 0, 0.0
    last_used = 0
    for cost in (0.0, *[layer] * model.layers, 0.0, head, 0.0, 0.0):  # norm before the head; cast, loss
        last_used = stage
        cost_so_far += cost
        if stage < stages - 1 and cost_so_far > total * (stage + 1) / stages * (1 + 1e-9):
            stage += 1
    return last_used + 1
