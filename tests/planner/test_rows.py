"""Measured rows: parsing, assumptions, scoring, and the error of the planner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.tables import rows
from dtslurm.planner import constants
from dtslurm.planner.divide import cut_by_cost
from dtslurm.planner.measured.cells import RowImpossible, RowUnanswerable
from dtslurm.planner.measured.choice import kendall_tau, measure_choice_losses
from dtslurm.planner.measured.evaluate import crashes, evaluate, measured_memory, predict_row
from dtslurm.planner.measured.guesses import guess_fabric, likely_heads, node_of
from dtslurm.planner.measured.rows import read_row
from dtslurm.planner.models import presets
from tests.planner.conftest import SHIPPED

COLUMNS = (
    "source row_id model params_b layers hidden heads kv_heads ffn vocab seq_len gpu gpus tp pp cp ep vp dp "
    "micro_batch global_batch recompute precision tokens_per_s_per_gpu notes status"
)
VALUES = (
    "lab 1 llama3-8b 8.03 32 4096 32 8 14336 128256 8192 H100-80-SXM 8 1 1 2 1 1 4 "
    "1 128 none bf16 10500 NeMo ok"
)
ROW = {
    **dict(zip(COLUMNS.split(), VALUES.split(), strict=True)),
    "zero_or_fsdp": "ZeRO-1 (distributed optimizer)",
}


def test_a_measured_row_is_parsed() -> None:
    case = read_row(ROW)
    assert str(case.layout) == "tp=1,pp=1,dp=4,cp=2,mbs=1,gbs=128,zero=1"
    assert case.framework == "nemo-2024"
    assert case.model.params == pytest.approx(8.03e9, rel=1e-3)
    assert case.model.stacks[0].gated
    assert case.assumed == ()


@pytest.mark.parametrize(
    ("changed", "framework"),
    [
        ({"zero_or_fsdp": "FSDP2 FULL_SHARD", "framework": "torchtitan"}, "torchtitan"),
        ({"zero_or_fsdp": "FSDP FULL_SHARD", "notes": ""}, "fsdp"),
        ({"zero_or_fsdp": "ZeRO-3", "notes": ""}, "deepspeed"),
        ({"notes": "JAX MaxText"}, "jax"),
        (
            {"gpu": "A100-80-SXM", "precision": "fp16", "notes": "", "framework": "Megatron-LM 2021"},
            "megatron-2021",
        ),
        ({"framework": "PyTorch FSDP"}, "fsdp"),
        ({"framework": "LLM Foundry", "zero_or_fsdp": "FSDP FULL_SHARD", "notes": ""}, "llm-foundry"),
        ({"framework": "Megatron-DeepSpeed"}, "megatron-deepspeed"),
        ({"framework": "NeMo 25.04"}, "nemo-2024"),
        ({"notes": "NeMo container 25.11"}, "nemo"),
        ({"framework": "Megatron Bridge", "notes": ""}, "nemo"),
        ({"framework": "Megatron Bridge", "model": "gpt-oss-120b", "notes": "container 26.04"}, "nemo-2024"),
        ({"framework": "Megatron Bridge", "model": "gpt-oss-120b", "notes": "container 26.06.01"}, "nemo"),
        ({"framework": "NeMo launcher", "gpu": "A100-80-SXM", "notes": ""}, "nemo-2023"),
        ({"notes": "Paxml"}, "paxml"),
        ({"notes": "torchtitan", "read_from": "benchmarks/llama3_h100_202412.md"}, "torchtitan-2024"),
        ({"notes": "torchtitan", "read_from": "benchmarks/llama3-8b_h200_202506.md"}, "torchtitan"),
        ({"notes": ""}, "megatron"),
        ({"framework": "Transformers", "zero_or_fsdp": "none", "notes": "torch 2.4"}, "fsdp"),
        ({"framework": "Transformers", "zero_or_fsdp": "none", "notes": "December 2022"}, "fsdp-2022"),
        ({"framework": "timm", "zero_or_fsdp": "none", "notes": "without flash attention"}, "fsdp-2022"),
        ({"framework": "torchtune", "zero_or_fsdp": "none", "notes": "compile=yes"}, "torchtune"),
        ({"framework": "torchtune", "zero_or_fsdp": "FSDP", "notes": "LoRA"}, "torchtune-eager"),
        ({"framework": "Transformers", "zero_or_fsdp": "none", "notes": "DeepSpeed ZeRO-2"}, "deepspeed"),
        ({"framework": "Megatron-LM", "notes": "no DeepEP"}, "megatron"),
    ],
)
def test_the_framework_is_derived_from_the_row(changed: dict[str, str], framework: str) -> None:
    assert read_row({**ROW, **changed}).framework == framework


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpu": "TPUv4"}, "'TPUv4' is not known"),
        ({"gpus": ""}, "gpus is not given"),
        ({"gpus": "x"}, "gpus should be a number"),
        ({"gpus": "-8"}, "gpus should be a positive whole number"),
        ({"gpus": "n/a"}, "gpus is not given"),
        ({"tp": "3"}, "does not divide 8 GPUs"),
        ({"task": "inference"}, "is no training"),
        ({"hidden": "", "params_b": "", "model": "secret"}, "hidden is not given"),
    ],
)
def test_a_row_that_cannot_be_predicted_gives_the_reason(changed: dict[str, str], said: str) -> None:
    with pytest.raises(RowUnanswerable, match=said):
        read_row({**ROW, **changed})


def test_more_stages_than_layers_are_impossible() -> None:
    row = {**ROW, "pp": "64", "cp": "1", "gpus": "64", "dp": "1"}
    with pytest.raises(RowImpossible):
        read_row(row)
    assert not predict_row(row, SHIPPED).fits


@pytest.mark.parametrize(
    ("changed", "causal", "vocab", "head"),
    [
        ({"model": "GPT of 350 M"}, True, 30522, True),
        ({"model": "BERT of 350 M"}, False, 30522, True),
        ({"model": "RoBERTa of 350 M", "task": "question answering"}, False, 30522, False),
        ({"model": "ViT-L/16", "task": "image classification"}, False, 0, False),
        ({"model": "BERT-large", "task": "sequence classification"}, False, 30522, False),
    ],
)
def test_encoders_attend_both_ways_and_tasks_without_words_have_no_head(
    changed: dict[str, str], causal: bool, vocab: int, head: bool
) -> None:
    shape = {"hidden": "1024", "heads": "16", "kv_heads": "16", "layers": "24", "ffn": "4096"}
    model = read_row(
        {**ROW, **shape, "params_b": "0.35", "vocab": "30522", "seq_len": "512", **changed}
    ).model
    assert model.stacks[0].attention.causal is causal
    assert not model.stacks[0].gated
    assert (model.vocab, model.head) == (vocab, head)


def test_a_missing_micro_batch_is_listed_as_assumption() -> None:
    assumed = read_row({**ROW, "recompute": "", "micro_batch": ""}).assumed
    assert any("micro-batch not stated" in line for line in assumed)


@pytest.mark.parametrize(
    ("convention", "ratio"),
    [("NVIDIA full-attn model FLOPs", 1.0), ("NVIDIA model FLOPs, causal attention", 0.89)],
)
def test_flops_follow_the_convention_of_the_table(convention: str, ratio: float) -> None:
    result = predict_row({**ROW, "flops_convention": convention}, SHIPPED)
    assert result.tflops is not None
    assert result.estimate is not None
    assert result.tflops / result.estimate.tflops_per_gpu == pytest.approx(ratio, abs=0.03)


def test_printed_gigabytes_are_1e9_bytes() -> None:
    assert measured_memory({"mem_gib": "80", "mem_kind": "peak allocated, GB as printed"}) == pytest.approx(
        74.5, abs=0.1
    )
    assert measured_memory({"mem_gib": "80", "mem_kind": "torch max_reserved GiB"}) == 80


def test_the_loss_of_a_choice_is_the_measured_difference_to_the_best() -> None:
    group = [
        {**ROW, "row_id": "a", "tp": "1", "cp": "1", "dp": "8", "tokens_per_s_per_gpu": "8000"},
        {**ROW, "row_id": "b", "tp": "2", "cp": "1", "dp": "4", "tokens_per_s_per_gpu": "10000"},
        {**ROW, "row_id": "c", "tp": "8", "cp": "1", "dp": "1", "tokens_per_s_per_gpu": "4000"},
    ]
    [choice] = measure_choice_losses(evaluate(group, SHIPPED))
    assert choice.best == "b"
    assert choice.loss == pytest.approx({"a": 0.2, "b": 0.0, "c": 0.6}[choice.chosen])
    assert -1 <= choice.tau <= 1


def test_layouts_of_different_frameworks_are_not_compared() -> None:
    degrees = ({"tp": "1", "dp": "8"}, {"tp": "2", "dp": "4"}, {"tp": "8", "dp": "1"})
    group = [{**ROW, "cp": "1", **degree} for degree in degrees]
    assert len(measure_choice_losses(evaluate(group, SHIPPED))) == 1
    group[0] = {**group[0], "notes": "Megatron-LM"}
    assert measure_choice_losses(evaluate(group, SHIPPED)) == []


@pytest.mark.parametrize(
    ("predicted", "measured", "tau"),
    [
        ([1, 2, 3], [10, 20, 30], 1),
        ([3, 2, 1], [10, 20, 30], -1),
        ([1, 3, 2], [10, 20, 30], 1 / 3),
        ([1], [1], 0),
    ],
)
def test_kendall_tau_counts_pairs_in_order(predicted: list[float], measured: list[float], tau: float) -> None:
    assert kendall_tau(predicted, measured) == pytest.approx(tau)


def test_every_constant_names_its_source() -> None:
    for name, entry in constants.entries().items():
        assert len(str(entry["source"])) > 10, name


def test_out_of_memory_rows_are_predicted_as_not_fitting() -> None:
    result = crashes(evaluate([row for row in rows() if row["mem_gib"] or row["status"] != "ok"], SHIPPED))
    rejected, crashed, kept, succeeded = result
    assert rejected / crashed > 0.8
    assert kept / succeeded > 0.95


@pytest.mark.parametrize(
    ("said", "fabric"),
    [
        ("AWS EFA (8x H100 per node)", "efa"),
        ("mixed_precision=default", "infiniband"),
        ("1600 Gb/s RoCE per node", "roce"),
        ("4x Omni-Path 100", "omnipath"),
    ],
)
def test_the_fabric_is_derived_from_its_description(said: str, fabric: str) -> None:
    assert guess_fabric(said) == fabric


CELLS = st.sampled_from(
    ["", "0", "-1", "nan", "inf", "x", "3", "7", "1.5", "1e9", "999999999", "full", "shard 0"]
)


@given(changed=st.dictionaries(st.sampled_from(sorted(ROW)), CELLS, max_size=5))
def test_any_row_is_predicted_or_gives_a_reason(changed: dict[str, str]) -> None:
    result = predict_row({**ROW, **changed}, SHIPPED)
    assert result.estimate is not None or result.reason


@given(changed=st.dictionaries(st.sampled_from(sorted(ROW)), CELLS, max_size=5))
def test_any_row_of_a_mixture_is_predicted_or_gives_a_reason(changed: dict[str, str]) -> None:
    result = predict_row({**ROW, "model": "qwen3-30b-a3b", "layers": "48", **changed}, SHIPPED)
    assert result.estimate is not None or result.reason


def test_an_inferred_recompute_setting_is_replaced_by_the_setting_that_fits() -> None:
    row = {
        "model": "GPT", "layers": "24", "hidden": "2048", "heads": "16", "vocab": "50257",
        "gpu": "A100-80-SXM",
        "gpus": "8", "seq_len": "1024", "tp": "1", "pp": "1", "dp": "8", "micro_batch": "8",
        "global_batch": "128", "recompute": "full", "precision": "fp16", "zero_or_fsdp": "none",
    }  # fmt: skip
    assert read_row(row).layout.recompute == "full"
    guessed = read_row({**row, "notes": "recompute from use_checkpoint=true in all validation configs"})
    assert guessed.layout.recompute == "none"
    assert any("recompute not stated" in text for text in guessed.assumed)


def test_a_dense_model_known_only_by_its_size_is_assumed() -> None:
    row = {"model": "Skylark-40B", "gpu": "A100-40GB", "gpus": "384", "seq_len": "2048", "tp": "8", "pp": "4",
           "micro_batch": "1", "global_batch": "1152"}  # fmt: skip
    case = read_row(row)
    assert case.model.params == pytest.approx(40e9, rel=0.1)
    assert any("shape of Skylark-40B not stated" in text for text in case.assumed)
    for other in ("Jamba-52B", "Some-30B-A3B", "unknown"):
        with pytest.raises(RowUnanswerable, match="is not known, and hidden is not given"):
            read_row({**row, "model": other})


def test_degrees_in_the_notes_are_used() -> None:
    row = {"model": "gpt3-175b", "gpu": "A100-80GB", "gpus": "64", "seq_len": "2048", "tp": "", "pp": "",
           "notes": "yaml of that commit: TP4 PP8 VP12 MBS1 GBS2048"}  # fmt: skip
    layout = read_row(row).layout
    assert (layout.tp, layout.pp, layout.vp, layout.dp, layout.mbs, layout.gbs) == (4, 8, 12, 2, 1, 2048)
    assert read_row({**row, "tp": "8", "pp": "8"}).layout.tp == 8


def test_unstated_expert_parallelism_is_chosen_so_that_the_model_fits() -> None:
    row = {"model": "deepseek-v3", "gpu": "H100-80GB", "gpus": "2048", "seq_len": "4096", "tp": "1",
           "pp": "16", "micro_batch": "1", "global_batch": "15360", "precision": "fp8"}  # fmt: skip
    result = predict_row(row, SHIPPED)
    assert result.case is not None
    assert result.case.layout.ep > 1
    assert any(text.startswith("ep not stated") for text in result.case.assumed)
    assert read_row({**row, "ep": "64"}).layout.ep == 64


@pytest.mark.parametrize(
    ("fabric", "node"),
    [
        ("8x HDR200 IB (SuperPOD)", (None, 25)),
        ("4x Omni-Path 100 (400 Gb/s per node), dedicated", (None, 6.25)),
        ("400 Gb/s RDMA per GPU", (None, 50)),
        ("DGX H100 (8x400G)", (None, 50)),
        ("4x HDR IB, 4 GPUs per node", (4, 25)),
        ("Slingshot-11, 4 x 200 Gb/s per node, 4 GPUs/node", (4, 25)),
        ("4x GH200-96GB per node, InfiniBand between nodes", (4, None)),
        ("NVSwitch", (None, None)),
        ("0 GPUs per node", (None, None)),
    ],
)
def test_the_adapters_of_a_node_are_divided_among_its_gpus(
    fabric: str, node: tuple[int | None, float | None]
) -> None:
    assert node_of({"fabric": fabric}, 8, "") == node


@pytest.mark.parametrize(("hidden", "heads"), [(4096, 32), (12288, 96), (14400, 120), (2880, 20), (1, 1)])
def test_unstated_heads_divide_the_hidden_size(hidden: int, heads: int) -> None:
    assert likely_heads(hidden) == heads


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seq_len": "8k"}, "8192"),
        ({"seq_len": "8,192"}, "8192"),
        ({"seq_len": "~4096*"}, "4096"),
        ({"seq_len": ""}, "4096"),
        ({"seq_len": "n/a"}, "4096"),
    ],
)
def test_sequence_lengths_are_parsed_in_table_notation(changed: dict[str, str], said: str) -> None:
    case = read_row({**ROW, **changed})
    assert case.seq_len == int(said)
    assert bool(case.assumed) == (changed["seq_len"] in {"", "n/a"})


@pytest.mark.parametrize("word", ["0", "-", "None", "unknown"])
def test_words_for_nothing_leave_a_degree_unstated(word: str) -> None:
    assert read_row({**ROW, "vp": word, "ep": word}).layout == read_row({**ROW, "vp": "", "ep": ""}).layout


@pytest.mark.parametrize("task", ["finetune", "continued pretraining", "SFT"])
def test_every_task_that_trains_all_weights_is_predicted(task: str) -> None:
    assert read_row({**ROW, "task": task}).layout == read_row(ROW).layout


def test_megatron_fsdp_on_grace_offloads_activations() -> None:
    row = {**ROW, "model": "llama3-70b", "layers": "80", "hidden": "8192", "heads": "64", "ffn": "28672",
           "params_b": "70.6", "gpu": "GB200", "gpus": "64", "cp": "1", "dp": "64", "global_batch": "128",
           "micro_batch": "2", "recompute": "", "zero_or_fsdp": "Megatron-FSDP (shard 64)"}  # fmt: skip
    case = read_row(row)
    assert case.layout.recompute == "none"
    assert case.assumed == ("recompute not stated: none, activations in host memory",)
    assert read_row({**row, "gpu": "H100-80-SXM"}).layout.recompute == "full"


def test_frozen_weights_have_no_gradients() -> None:
    whole, frozen = (read_row({**ROW, "task": task}) for task in ("pretrain", "lora"))
    assert frozen.frozen
    assert read_row({**ROW, "notes": "NeMo LoRA"}).frozen
    assert not read_row({**ROW, "notes": "exploration"}).frozen
    all_terms, few = (case.estimate(SHIPPED) for case in (whole, frozen))
    assert 0.6 < few.time.total / all_terms.time.total < 0.8  # two thirds of the products remain
    assert few.memory.terms["optimizer"] == few.memory.terms["gradients"] == few.time.terms["dp_comm"] == 0
    shape = whole.model
    assert shape.flops_per_token(8192) - shape.flops_per_token(8192, frozen=True) == 2 * shape.matmul_params


MIXTURE = {**ROW, "model": "grok-1", "params_b": "314", "layers": "64", "hidden": "6144", "heads": "48",
           "ffn": "32768", "gpus": "512", "tp": "4", "pp": "8", "ep": "8", "cp": "1", "dp": "16",
           "global_batch": "1024"}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "etp"),
    [
        ({}, 4),  # Megatron-LM's default: as far as all else
        ({"notes": "NeMo; ETP=1"}, 1),
        ({"notes": "NeMo; ETP=2"}, 2),
        ({"notes": "torchtitan"}, 1),
        ({"tp": "1", "dp": "64"}, 1),
        ({"model": "deepseek-v3", "layers": "61", "hidden": "7168", "heads": "128", "tp": "4"}, 1),  # narrow
    ],
)
def test_expert_tensor_parallelism_follows_the_notes_or_the_default(
    changed: dict[str, str], etp: int
) -> None:
    assert read_row({**MIXTURE, **changed}).layout.etp == etp


@pytest.mark.parametrize(
    ("notes", "even"),
    [
        ("Megatron-LM", False),
        ("Megatron-LM; forced-balanced routing", True),
        ("Megatron-LM; token drop", True),
        ("NeMo 25.04", True),
        ("AMD Primus", True),
    ],
)
def test_routing_is_uneven_unless_the_notes_say_otherwise(notes: str, even: bool) -> None:
    case = read_row({**MIXTURE, "notes": notes})
    assert case.even is even
    assert not read_row({**ROW, "notes": notes}).even  # no mixture


def test_nanotron_rejects_an_empty_pipeline_stage() -> None:
    small = presets.preset("llama-3.2-1b")
    assert small.layers == 16
    assert [cut_by_cost(small, pp) for pp in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert cut_by_cost(small, 16) < 16
    deep = presets.preset("llama-2-7b")  # a head of less than one layer
    assert cut_by_cost(deep, 16) == 16
    row = {**ROW, "model": "llama-3.2-1b", "layers": "16", "hidden": "2048", "heads": "32", "kv_heads": "8",
           "ffn": "8192", "params_b": "1.24", "gpus": "32", "pp": "16", "cp": "1", "dp": "2"}  # fmt: skip
    with pytest.raises(RowImpossible, match="of the 16 stages"):
        read_row({**row, "notes": "nanotron"})
    assert read_row(row).layout.pp == 16


def test_unstated_batch_sizes_get_usual_values() -> None:
    open_row = {**ROW, "micro_batch": "", "global_batch": ""}
    layout = read_row(open_row).layout
    assert layout.gbs * 8192 >= 2**20 > layout.mbs * layout.dp * 8192
    assert read_row({**open_row, "micro_batch": "2"}).layout.gbs == 8


@pytest.mark.parametrize("sharding", ["HSDP", "hsdp (shard 8)"])
def test_hybrid_sharding_is_read_as_fsdp(sharding: str) -> None:
    case = read_row({**ROW, "zero_or_fsdp": sharding, "notes": "", "tp": "", "pp": ""})
    assert (case.framework, case.layout.zero) == ("fsdp", 3)


def test_unstated_degrees_are_predicted_even_if_nothing_fits() -> None:
    row = {**ROW, "model": "gpt3-175b", "params_b": "175", "layers": "96", "hidden": "12288", "heads": "96",
           "kv_heads": "96", "ffn": "49152", "cp": "", "tp": "", "pp": "", "dp": "",
           "zero_or_fsdp": ""}  # fmt: skip
    result = predict_row(row, SHIPPED)
    assert result.estimate is not None
    assert not result.fits


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Llama-4-Scout", 107.8),
        ("meta-llama/Llama-4-Maverick", 400.7),
        ("GLM-4.5-Air", 106.9),
        ("Falcon-180B", 178.6),
        ("MT-NLG 530B", 529.6),
        ("Apertus-70B", 70.6),
        ("allenai/OLMoE-1B-7B", 6.92),
    ],
)
def test_published_model_names_are_known(name: str, params: float) -> None:
    preset = presets.find_preset(name)
    assert preset is not None
    assert preset.params == pytest.approx(params * 1e9, rel=2e-3)


@pytest.mark.parametrize(
    ("notes", "schedule"),
    [
        ("schedule=1F1B", "1f1b"),
        ("schedule=zbv-formatted", "zbv"),
        ("schedule=zero-bubble", "zb1p"),
        ("zero bubble pipeline", "zb1p"),
        ("GPipe", "gpipe"),
        ("schedule=interleaved 1F1B", "1f1b"),
        ("nothing of it", "1f1b"),
    ],
)
def test_pipeline_schedules_are_read_from_the_notes(notes: str, schedule: str) -> None:
    assert read_row({**ROW, "pp": "2", "cp": "1", "notes": notes}).layout.schedule == schedule


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("deepseek-v3 (4 layers)", 4),
        ("DeepSeek-V3 [proxy]", 61),
        ("deepseek-v3, 8 layers", 8),
        ("deepseek-v3 with 12 layers", 12),
        ("mixtral-8x7b (2-layer proxy)", 2),
    ],
)
def test_a_remark_in_a_model_name_keeps_the_preset(name: str, layers: int) -> None:
    row = {"model": name, "gpu": "H100", "gpus": "64", "tp": "1", "pp": "1", "ep": "8", "micro_batch": "1"}
    model = read_row(row).model
    assert model.is_moe
    assert model.layers == layers


def test_a_preset_with_fewer_layers_keeps_its_dense_lead_layers() -> None:
    row = {"model": "deepseek-v3 (5 layers)", "gpu": "H100", "gpus": "64", "tp": "1", "pp": "1", "ep": "8"}
    stacks = read_row(row).model.stacks
    assert [(stack.count, bool(stack.experts)) for stack in stacks] == [(3, False), (2, True)]


SHAPE = {"layers": "24", "hidden": "2048", "heads": "16", "ffn": "1408", "vocab": "50304", "params_b": ""}


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "Someone-8B-A2B"},
        {"model": "Someone-MoE-16B"},
        {"model": "Someone", "notes": "64 experts"},
        {"model": "Someone", "ep": "8"},
        {"model": "llama3-8b", **dict.fromkeys(SHAPE, ""), "ep": "8"},
    ],
)
def test_a_mixture_without_stated_experts_is_not_predicted_as_dense(changed: dict[str, str]) -> None:
    with pytest.raises(RowUnanswerable, match=r"experts are not stated|is not known"):
        read_row({**ROW, **SHAPE, "ep": "1", **changed})


@pytest.mark.parametrize(
    ("notes", "experts"),
    [
        ("MoE 64 experts top-6 +2 shared", (64, 6, 2 * 1408)),
        ("64 experts, top 6", (64, 6, 0)),
        ("top-2 of 8 experts", (8, 2, 0)),
        ("64 routed experts (top-6)", (64, 6, 0)),
    ],
)
def test_experts_stated_in_the_notes_are_used(notes: str, experts: tuple[int, int, int]) -> None:
    case = read_row({**ROW, **SHAPE, "model": "Someone", "notes": notes})
    result = case.model.stacks[0].experts
    assert result is not None
    assert (result.count, result.top_k, result.shared_ffn) == experts
    assert "dense lead layers not stated: none" in case.assumed


def test_dense_lead_layers_stated_in_the_notes_are_used() -> None:
    case = read_row({**ROW, **SHAPE, "model": "Someone", "notes": "64 experts top-6; first 2 layers dense"})
    assert [(stack.count, bool(stack.experts)) for stack in case.model.stacks] == [(2, False), (22, True)]
    assert not any("lead" in text for text in case.assumed)


@pytest.mark.parametrize(
    ("notes", "tied", "is_assumed"),
    [("untied embeddings", False, False), ("tied embeddings", True, False), ("", True, True)],
)
def test_tied_embeddings_are_read_or_assumed(notes: str, tied: bool, is_assumed: bool) -> None:
    case = read_row({**ROW, **SHAPE, "model": "Someone", "ffn": "8192", "notes": notes})
    assert case.model.tied is tied
    assert any(text.startswith("embeddings not stated") for text in case.assumed) is is_assumed


def test_columns_that_agree_with_a_preset_give_the_preset() -> None:
    case = read_row({**ROW, "layers": "8", "params_b": "", "vocab": "128512"})
    assert (case.model.layers, case.model.vocab, case.model.tied) == (8, 128512, False)
    assert case.assumed == ()


@pytest.mark.parametrize(
    ("changed", "framework", "said"),
    [
        ({"zero_or_fsdp": "FSDP2", "notes": "Hugging Face transformers, eager"}, "fsdp", ""),
        ({"zero_or_fsdp": "FSDP2", "notes": "accelerate"}, "fsdp", "compile not stated: eager"),
        ({"zero_or_fsdp": "FSDP2", "notes": "with torch.compile"}, "torchtitan", ""),
        ({"zero_or_fsdp": "FSDP2", "notes": "torchtitan; compile=no"}, "torchtitan-eager", ""),
        ({"zero_or_fsdp": "FSDP2", "notes": "torchtitan; compile=yes"}, "torchtitan", ""),
    ],
)
def test_fsdp2_is_read_as_torchtitan_only_if_stated(
    changed: dict[str, str], framework: str, said: str
) -> None:
    case = read_row({**ROW, **changed})
    assert case.framework == framework
    assert any("compile not stated" in text for text in case.assumed) is bool(said)


@pytest.mark.parametrize(
    ("changed", "framework", "is_assumed"),
    [
        ({"precision": "fp16"}, "megatron", True),  # a number format tells nothing about the software
        ({"precision": "bf16"}, "megatron", True),
        ({"precision": "fp16", "framework": "Megatron-LM 2021"}, "megatron-2021", False),
        ({"precision": "bf16", "notes": "arXiv:2104.04473"}, "megatron-2021", False),
        ({"precision": "bf16", "notes": "no flash attention"}, "megatron-2021", False),
        ({"precision": "fp16", "notes": "Megatron-LM 2025"}, "megatron", False),
        ({"precision": "fp16", "notes": "flash attention"}, "megatron", False),
        ({"gpu": "V100-32GB", "precision": "fp16"}, "megatron-2021", False),
    ],
)
def test_the_version_of_megatron_is_read_or_assumed(
    changed: dict[str, str], framework: str, is_assumed: bool
) -> None:
    case = read_row({**ROW, "gpu": "A100-80-SXM", "notes": "", **changed})
    assert case.framework == framework
    assert any("software date not stated" in text for text in case.assumed) is is_assumed


@pytest.mark.parametrize(
    ("notes", "once"),
    [
        ("Megatron-LM, DeepEP", True),
        ("torchtitan; deepep", True),
        ("torchtitan, no DeepEP", False),
        ("", False),
    ],
)
def test_deepep_in_the_notes_is_used_in_every_framework(notes: str, once: bool) -> None:
    row = {"model": "deepseek-v3", "gpu": "H100-80GB", "gpus": "512", "seq_len": "4096", "tp": "1", "pp": "8",
           "ep": "64", "micro_batch": "1", "global_batch": "4096", "zero_or_fsdp": "ZeRO-1"}  # fmt: skip
    case = read_row({**row, "notes": notes})
    assert case.dispatches_once is once
    plain = read_row({**row, "notes": notes.lower().replace("deepep", "x")})
    if once and case.framework == plain.framework:
        assert case.estimate(SHIPPED).time.terms["ep_comm"] < plain.estimate(SHIPPED).time.terms["ep_comm"]


@pytest.mark.parametrize(
    ("stated", "mode"),
    [
        ("selective mlp", "mlp"),
        ("selective mlp+core_attn", "mlp"),
        ("selective mla_up_proj+mlp", "selective"),
        ("selective moe_act", "selective"),
        ("selective (op)", "selective"),
        ("full", "full"),
    ],
)
def test_recomputed_modules_are_read(stated: str, mode: str) -> None:
    assert read_row({**ROW, "recompute": stated}).layout.recompute == mode


@pytest.mark.parametrize(
    ("notes", "graphs"),
    [
        ("NeMo, CUDA graphs", True),
        ("cuda graph of the whole step", True),
        ("no CUDA graphs", False),
        ("", False),
    ],
)
def test_cuda_graphs_in_the_notes_are_used_in_every_framework(notes: str, graphs: bool) -> None:
    small = {**ROW, "seq_len": "512", "notes": notes}
    case = read_row(small)
    assert case.graphs is graphs
    plain = read_row({**small, "notes": notes.lower().replace("cuda graph", "x")})
    waits = [item.estimate(SHIPPED).time.terms["launch"] for item in (case, plain)]
    assert waits[0] < 0.5 * waits[1] if graphs else waits[0] == waits[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens_per_s_per_gpu": "", "tflops_per_gpu": "400"}, "FLOPs of attention not stated"),
        ({"mem_gib": "60"}, "kind of memory not stated"),
        (
            {"mem_gib": "60", "mem_kind": "peak allocated", "pp": "2", "cp": "1"},
            "stage of the memory not stated",
        ),
    ],
)
def test_the_meaning_of_a_measured_figure_is_listed_as_assumption(changed: dict[str, str], said: str) -> None:
    case = read_row({**ROW, **changed})
    assert any(text.startswith(said) for text in case.assumed)
    assert not case.assumes_layout
    stated = {"flops_convention": "full attention, no recompute", "mem_kind": "peak allocated of rank 0"}
    assert not any(text.startswith(said) for text in read_row({**ROW, **changed, **stated}).assumed)
