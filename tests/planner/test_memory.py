"""The memory model: formulas of papers, and properties of any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtslurm.planner.frameworks import FRAMEWORKS, states
from dtslurm.planner.layout import Layout
from dtslurm.planner.memory import (
    GIB,
    MemoryUse,
    activation_bytes,
    held_layers,
    memory_use,
    scores_bytes,
    selected_bytes,
    stage_load,
)
from dtslurm.planner.models import presets
from dtslurm.planner.models.shapes import ModelShape
from dtslurm.planner.setting import Setting
from tests.planner.conftest import SHIPPED, estimator, nodes

SHARDED = ("weights", "gradients", "master_weights", "optimizer")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_sizes_match_the_zero_paper(zero: int) -> None:
    # Rajbhandari et al. 2020, table 1: 16 bytes a parameter: 2 weights, 2 gradients, 12 optimizer. DeepSpeed
    # adds 4 bytes for its own shard of gradients under stages 1 and 2.
    table = states("deepspeed", zero, "fp16")
    kept = sum(size.kept for size in table.values())
    shared = sum(size.shared for size in table.values())
    assert (kept, shared) == {0: (16, 0), 1: (4, 16), 2: (2, 18), 3: (0, 16)}[zero]


def test_megatron_keeps_18_bytes_or_6_and_shares_12() -> None:
    # Megatron-LM docs/dist_optimizer: bf16 weights, fp32 gradients: 18, or 6 + 12/d
    assert sum(size.kept for size in states("megatron", 0, "bf16").values()) == 18
    table = states("megatron", 1, "bf16").values()
    assert (sum(size.kept for size in table), sum(size.shared for size in table)) == (6, 12)


def memory_of(
    model: ModelShape,
    layout: Layout,
    *,
    seq_len: int = 4096,
    framework: str = "megatron",
    precision: str = "bf16",
    frozen: bool = False,
) -> MemoryUse:
    return memory_use(Setting(model, nodes(1), seq_len, framework, precision, SHIPPED, frozen=frozen), layout)


def gpt_activation_bytes(**layout: int | bool) -> tuple[float, float]:
    """Return bytes per token and layer of GPT-3 and of its scores, under Megatron-LM of 2021."""
    shape = presets.preset("gpt3-175b")
    [stack] = shape.stacks
    made = Layout(**layout)  # type: ignore[arg-type]
    kept, _ = activation_bytes(stack, shape.hidden, FRAMEWORKS["megatron-2021"], made)
    return kept, scores_bytes(stack, 1, 2048, FRAMEWORKS["megatron-2021"], made)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_activation_sizes_match_korthikanti(tp: int) -> None:
    # Korthikanti et al. 2022 (arXiv:2205.05198), table 2; h, a, s of GPT-3
    h, a, s = 12288, 96, 2048
    kept, scores = gpt_activation_bytes(tp=tp, sp=True)
    assert kept + scores == pytest.approx(h / tp * (34 + 5 * a * s / h))
    kept, scores = gpt_activation_bytes(tp=tp, sp=False)
    assert kept + scores == pytest.approx(h * (10 + 24 / tp + 5 * a * s / (h * tp)))


def test_selective_checkpointing_of_torchtitan_keeps_every_second_product() -> None:
    # Llama 3 8B: input, keys, output projection, half of the gate's pair and attention's result, 16 bits each
    [stack] = presets.preset("llama-3-8b").stacks
    assert selected_bytes(stack, 4096, Layout()) == 2 * (4096 + 1024 + 4096 + 14336 + 4096)


def test_selective_checkpointing_of_torchtitan_keeps_what_experts_exchange_and_nothing_within_them() -> None:
    # Qwen3 30B-A3B: input, keys, output projection and attention's result; with expert parallelism also the
    # eight copies of a token that are dispatched, and the eight that come back
    [stack] = presets.preset("qwen3-30b-a3b").stacks
    kept = 2 * (2048 + 512 + 2048 + 4096)
    assert selected_bytes(stack, 2048, Layout(dp=8)) == kept
    assert selected_bytes(stack, 2048, Layout(dp=8, ep=8)) == kept + 2 * 8 * 2 * 2048
    assert selected_bytes(stack, 2048, Layout(dp=8, ep=8), 1.5) == kept + 1.5 * 2 * 8 * 2 * 2048


def test_selective_checkpointing_of_a_mixture_under_torchtitan_fits_a_published_run() -> None:
    # pytorch/torchtitan, an issue: 141.8 GiB on 8 B200, with a loss in eight chunks
    layout = Layout(dp=8, mbs=8, gbs=64, zero=3, recompute="selective")
    memory = estimator("qwen3-30b-a3b", seq_len=8192, framework="torchtitan").memory(layout)
    assert 120 < memory.allocated < 170


def test_stages_of_a_pipeline_under_fsdp2_sum_whole_gradients_in_32_bits() -> None:
    shape = presets.preset("llama-3-8b")
    layout = Layout(pp=4, dp=8, gbs=64, zero=3)
    local = stage_load(shape, layout).dense + shape.embedding_params
    for framework in ("torchtitan", "fsdp"):
        terms = memory_of(shape, layout, framework=framework).terms
        assert terms["gradients"] == pytest.approx(4 * local / GIB, rel=1e-4)
        assert terms["optimizer"] == pytest.approx(8 * local / 8 / GIB, rel=1e-4)
    frozen = memory_of(shape, layout, framework="torchtitan", frozen=True)
    assert frozen.terms["gradients"] == 0


def test_tensors_of_a_recomputed_layer_count_once() -> None:
    # one layer under full recomputation: what it keeps and what it computes again are all of its tensors
    shape = replace(presets.preset("llama-3-8b").with_layers(1), vocab=0, head=False)
    none, mlp, full = (
        memory_of(shape, Layout(recompute=mode)).terms["activations"] for mode in ("none", "mlp", "full")
    )
    assert none == pytest.approx(mlp) == pytest.approx(full)


def test_the_recomputation_of_mlps_frees_all_of_an_mlp_but_its_input() -> None:
    dense = presets.preset("llama-3-8b")
    none, mlp = (memory_of(dense, Layout(recompute=mode)).terms["activations"] for mode in ("none", "mlp"))
    one_layer = 4096 * 6 * 14336  # results of the gate and of its partner, and of both, 16 bits each
    assert (none - mlp) * GIB == pytest.approx(31 * one_layer)  # one layer at a time is computed again
    mixture = presets.preset("mixtral-8x7b")
    none, mlp = (memory_of(mixture, Layout(recompute=mode)).terms["activations"] for mode in ("none", "mlp"))
    assert none == mlp


@pytest.mark.parametrize("framework", ["torchtune", "torchtune-eager"])
def test_torchtune_trains_16_bit_weights_without_a_copy_and_computes_the_loss_in_chunks(
    framework: str,
) -> None:
    # pytorch/torchtune, README: Llama 3.2 3B on one A100, fully recomputed: 24.9 GiB
    assert sum(size.kept for size in states(framework, 0, "bf16").values()) == 2 + 2 + 4
    layout = Layout(mbs=2, gbs=2, recompute="full")
    memory = estimator("llama-3.2-3b", framework=framework).memory(layout)
    assert 24 < memory.allocated < 28


def test_nemo_halves_the_optimizer_states_of_latent_mixtures() -> None:
    shape = presets.preset("deepseek-v3")
    layout = Layout(tp=1, pp=8, dp=32, ep=32, gbs=1024, zero=1)
    by_name = {
        name: memory_of(shape, layout, framework=name).terms["optimizer"] for name in ("megatron", "nemo")
    }
    assert by_name["nemo"] == pytest.approx(by_name["megatron"] / 2)


def test_attention_scores_without_dropout_keep_only_the_softmax() -> None:
    [stack] = presets.preset("gpt3-175b").stacks
    kept = scores_bytes(stack, 1, 2048, FRAMEWORKS["nemo-2023"], Layout())
    assert kept == 2 * 96 * 2048


def test_held_layers_match_1f1b_and_interleaved_schedules() -> None:
    layout = Layout(pp=8, gbs=64)
    assert held_layers(96, layout) == 96
    assert held_layers(96, replace(layout, vp=3)) == pytest.approx(96 * (1 + 7 / 24))
    assert held_layers(96, replace(layout, gbs=4)) == 48  # fewer micro-batches than stages
    assert held_layers(96, replace(layout, schedule="gpipe")) == 96 / 8 * 64


def test_the_stages_hold_every_parameter_once() -> None:
    shape = presets.preset("llama-3-70b")
    load = stage_load(shape, Layout(pp=8, gbs=8))
    assert load.dense * 8 == shape.layer_params
    assert load.embeddings == shape.embedding_params
    whole = stage_load(shape, Layout())
    assert whole.dense + whole.embeddings == pytest.approx(shape.params, rel=1e-6)


def test_memory_terms_match_the_parameter_bytes() -> None:
    shape = presets.preset("llama-3-8b")
    memory = estimator().memory(Layout(dp=8, gbs=8, zero=1))
    assert memory.terms["weights"] * GIB == pytest.approx(2 * shape.params, rel=1e-4)
    assert memory.terms["optimizer"] * GIB == pytest.approx(8 * shape.params / 8, rel=1e-4)
    assert memory.allocated < memory.reserved < memory.total


def test_expert_weights_are_divided_by_ep() -> None:
    shape = presets.preset("qwen3-30b-a3b")
    result = estimator("qwen3-30b-a3b").memory(Layout(dp=8, gbs=8, zero=1))
    spread = estimator("qwen3-30b-a3b").memory(Layout(dp=8, ep=8, gbs=8, zero=1))
    fewer = result.terms["weights"] - spread.terms["weights"]
    assert fewer * GIB == pytest.approx(2 * shape.expert_params * 7 / 8, rel=1e-6)


layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 4, 16]),
    mbs=st.sampled_from([1, 2, 4]),
    gbs=st.just(256),
    zero=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "mlp", "full"]),
)
frameworks = st.sampled_from(["megatron", "nemo", "deepspeed", "fsdp", "torchtitan", "megatron-2021"])
EIGHT_B = {name: estimator(framework=name) for name in FRAMEWORKS}


@given(layout=layouts, framework=frameworks)
def test_memory_terms_are_not_negative_and_sum_to_the_total(layout: Layout, framework: str) -> None:
    memory = EIGHT_B[framework].memory(layout)
    assert all(value >= 0 for value in memory.terms.values())
    assert sum(memory.terms.values()) == pytest.approx(memory.total)


@given(layout=layouts, framework=frameworks)
def test_more_ranks_never_need_more_memory_under_zero_3(layout: Layout, framework: str) -> None:
    sharded = replace(layout, zero=3)
    wider = replace(sharded, dp=layout.dp * 2)
    assert EIGHT_B[framework].memory(wider).total <= EIGHT_B[framework].memory(sharded).total * (1 + 1e-9)


@given(layout=layouts, framework=frameworks)
def test_each_higher_zero_stage_keeps_less_state(layout: Layout, framework: str) -> None:
    made = [EIGHT_B[framework].memory(replace(layout, zero=zero)) for zero in (0, 1, 3)]
    held = [sum(memory.terms[name] for name in SHARDED) for memory in made]
    grown = 1.3 if framework == "deepspeed" and layout.dp * layout.cp <= 2 else 1  # its extra gradient shard
    assert held[1] <= held[0] * grown
    assert held[2] <= held[1]


@given(layout=layouts, framework=frameworks)
def test_more_recomputation_keeps_less_activation_memory(layout: Layout, framework: str) -> None:
    none, selective, mlp, full = (
        EIGHT_B[framework].memory(replace(layout, recompute=mode)).terms["activations"]
        for mode in ("none", "selective", "mlp", "full")
    )
    assert selective <= none
    assert mlp <= none
    assert layout.pp * layout.mbs > 4 or full <= none * 1.1


@settings(max_examples=50)
@given(layout=layouts, factor=st.sampled_from([2, 4]))
def test_a_larger_micro_batch_needs_more_memory(layout: Layout, factor: int) -> None:
    larger = replace(layout, mbs=layout.mbs * factor)
    # more per micro-batch, though a pipeline may hold fewer of them
    if larger.micro_batches >= layout.pp:
        assert EIGHT_B["megatron"].memory(larger).total > EIGHT_B["megatron"].memory(layout).total


def test_megatron_deepspeed_keeps_the_states_of_deepspeed() -> None:
    for zero, precision, kept, shared in ((1, "fp16", 4, 16), (1, "bf16", 8, 12), (0, "fp16", 16, 0)):
        result = states("megatron-deepspeed", zero, precision).values()
        assert (sum(size.kept for size in result), sum(size.shared for size in result)) == (kept, shared)


def test_each_kind_of_process_group_adds_context_memory() -> None:
    alone, split = (
        estimator().memory(layout).terms["context"] for layout in (Layout(), Layout(tp=2, pp=2, dp=2, gbs=2))
    )
    assert split == pytest.approx(alone + 3 * SHIPPED["nccl_gib"])


def test_activations_of_hugging_face_llama_match_the_operators() -> None:
    """Bytes per token and layer, counted along modeling_llama.py with 16-bit products."""
    shape = presets.preset("llama-3.2-1b")
    [stack] = shape.stacks
    h, heads, keys, f = 2048, 32 * 64, 8 * 64, 8192
    norms = 2 * (4 * h + 2 * h)  # each: the input in 32 bits, the normalised one in 16
    products = 2 * h + 2 * h  # what q, k and v read; what gate and up read
    attention = 2 * (heads + 2 * keys) + 2 * heads  # what it reads; its result, which the last product reads
    mlp = 4 * 2 * f  # gate, its activation, up, their product
    kept, _ = activation_bytes(stack, h, FRAMEWORKS["fsdp"], Layout())
    assert kept == norms + products + attention + mlp
    fused, _ = activation_bytes(stack, h, FRAMEWORKS["llm-foundry"], Layout())
    assert kept - fused == 8 * h + 2 * f


def test_layer_norms_have_the_same_size_in_eager_and_fused_frameworks() -> None:
    [stack] = presets.preset("gpt2-xl").stacks
    layout = Layout()
    eager, fused = (
        activation_bytes(stack, 1600, FRAMEWORKS[name], layout) for name in ("fsdp", "llm-foundry")
    )
    assert eager == fused


def test_fp32_activations_take_twice_the_memory() -> None:
    terms = {}
    for precision in ("bf16", "fp32"):
        layout = Layout(mbs=4, gbs=8, zero=3, recompute="full")
        shape = presets.preset("llama-3.2-1b")
        terms[precision] = memory_of(
            shape, layout, seq_len=2048, framework="llm-foundry", precision=precision
        ).terms
    assert terms["fp32"]["activations"] == pytest.approx(2 * terms["bf16"]["activations"])
    assert terms["fp32"]["gathered_weights"] == 2 * terms["bf16"]["gathered_weights"]
    assert terms["fp32"]["logits"] == terms["bf16"]["logits"]


def test_gradients_reuse_activation_memory_in_a_single_micro_batch() -> None:
    shape = presets.preset("llama-3.2-1b")
    result, two = (
        memory_of(shape, Layout(mbs=4, gbs=gbs, zero=3), seq_len=2048, framework="fsdp").terms
        for gbs in (4, 8)
    )
    assert result["gradients"] == 0
    assert two["gradients"] == pytest.approx(4 * shape.params / GIB, rel=1e-4)
    assert {name: size for name, size in result.items() if name != "gradients"} == {
        name: size for name, size in two.items() if name != "gradients"
    }
