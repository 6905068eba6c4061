"""Measured rows: how they are read, counted and scored; and that the planner is near what was published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner import score
from dtslurm.planner import constants
from dtslurm.planner.evaluate import answer, choices, crashes, evaluate, measured_memory
from dtslurm.planner.rows import RowImpossible, RowUnanswerable, guess_fabric, read_row
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


def test_a_row_is_read_as_it_says() -> None:
    case = read_row(ROW)
    assert str(case.layout) == "tp=1,pp=1,dp=4,cp=2,mbs=1,gbs=128,zero=1"
    assert case.framework == "nemo"
    assert case.model.params == pytest.approx(8.03e9, rel=1e-3)
    assert case.model.stacks[0].gated
    assert case.assumed == ()


@pytest.mark.parametrize(
    ("changed", "framework"),
    [
        ({"zero_or_fsdp": "FSDP2 FULL_SHARD"}, "torchtitan"),
        ({"zero_or_fsdp": "FSDP FULL_SHARD", "notes": ""}, "fsdp"),
        ({"zero_or_fsdp": "ZeRO-3", "notes": ""}, "deepspeed"),
        ({"notes": "JAX MaxText"}, "jax"),
        ({"gpu": "A100-80-SXM", "precision": "fp16", "notes": ""}, "megatron-2021"),
        ({"notes": ""}, "megatron"),
    ],
)
def test_the_framework_is_guessed_from_what_a_row_says(changed: dict[str, str], framework: str) -> None:
    assert read_row({**ROW, **changed}).framework == framework


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpu": "TPUv4"}, "'TPUv4' is not known"),
        ({"gpus": ""}, "gpus is not given"),
        ({"gpus": "x"}, "gpus should be a number"),
        ({"gpus": "-8"}, "gpus should be a positive whole number"),
        ({"tp": "3"}, "does not divide 8 GPUs"),
        ({"task": "lora"}, "which is not modelled"),
        ({"hidden": "", "model": "secret"}, "hidden is not given"),
    ],
)
def test_what_cannot_be_answered_says_why(changed: dict[str, str], said: str) -> None:
    with pytest.raises(RowUnanswerable, match=said):
        read_row({**ROW, **changed})


def test_more_stages_than_layers_cannot_be() -> None:
    row = {**ROW, "pp": "64", "cp": "1", "gpus": "64", "dp": "1"}
    with pytest.raises(RowImpossible):
        read_row(row)
    assert not answer(row, SHIPPED).fits


def test_what_a_row_leaves_open_is_assumed_aloud() -> None:
    assumed = read_row({**ROW, "recompute": "", "micro_batch": ""}).assumed
    assert any("micro-batch not stated" in line for line in assumed)


@pytest.mark.parametrize(
    ("convention", "ratio"),
    [("NVIDIA full-attn model FLOPs", 1.0), ("NVIDIA model FLOPs, causal attention", 0.89)],
)
def test_flops_are_counted_as_the_table_does(convention: str, ratio: float) -> None:
    found = answer({**ROW, "flops_convention": convention}, SHIPPED)
    assert found.tflops is not None
    assert found.estimate is not None
    assert found.tflops / found.estimate.tflops_per_gpu == pytest.approx(ratio, abs=0.03)


def test_gb_as_printed_is_1e9_bytes() -> None:
    assert measured_memory({"mem_gib": "80", "mem_kind": "peak allocated, GB as printed"}) == pytest.approx(
        74.5, abs=0.1
    )
    assert measured_memory({"mem_gib": "80", "mem_kind": "torch max_reserved GiB"}) == 80


def test_choosing_wrongly_costs_what_was_measured() -> None:
    group = [
        {**ROW, "row_id": "a", "tp": "1", "cp": "1", "dp": "8", "tokens_per_s_per_gpu": "8000"},
        {**ROW, "row_id": "b", "tp": "2", "cp": "1", "dp": "4", "tokens_per_s_per_gpu": "10000"},
        {**ROW, "row_id": "c", "tp": "8", "cp": "1", "dp": "1", "tokens_per_s_per_gpu": "4000"},
    ]
    [choice] = choices(evaluate(group, SHIPPED))
    assert choice.best == "b"
    assert choice.loss == pytest.approx({"a": 0.2, "b": 0.0, "c": 0.6}[choice.chosen])


def test_every_constant_names_its_source() -> None:
    for name, entry in constants.entries().items():
        assert len(str(entry["source"])) > 10, name


def test_the_planner_is_near_rows_it_was_not_fitted_on() -> None:
    held = [row for row in score.rows() if not score.fitted_on(row) and row["source"] != "vtrain-single"]
    found = score.throughput(evaluate(held, SHIPPED))
    assert found["rows"] > 300
    assert found["median"] < 0.12
    assert found["p90"] < 0.42


def test_crashes_are_told_from_successes() -> None:
    found = crashes(
        evaluate([row for row in score.rows() if row["mem_gib"] or row["status"] != "ok"], SHIPPED)
    )
    rejected, crashed, kept, succeeded = found
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
def test_a_network_is_known_by_its_word(said: str, fabric: str) -> None:
    assert guess_fabric(said) == fabric


CELLS = st.sampled_from(
    ["", "0", "-1", "nan", "inf", "x", "3", "7", "1.5", "1e9", "999999999", "full", "shard 0"]
)


@given(changed=st.dictionaries(st.sampled_from(sorted(ROW)), CELLS, max_size=5))
def test_any_row_is_answered_or_says_why(changed: dict[str, str]) -> None:
    found = answer({**ROW, **changed}, SHIPPED)
    assert found.estimate is not None or found.reason


@given(changed=st.dictionaries(st.sampled_from(sorted(ROW)), CELLS, max_size=5))
def test_any_row_of_a_mixture_is_answered_or_says_why(changed: dict[str, str]) -> None:
    found = answer({**ROW, "model": "qwen3-30b-a3b", "layers": "48", **changed}, SHIPPED)
    assert found.estimate is not None or found.reason
