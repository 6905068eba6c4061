"""Parameter counts of presets and configs, compared with published checkpoints."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.planner.hardware import DATA
from dtslurm.planner.models import presets
from dtslurm.planner.models.huggingface import KNOWN, ConfigProblem, read_config

# source: the safetensors index or model card of each checkpoint on huggingface.co (total parameters)
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "deepseek-v2-lite": 15_706_484_224,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680,
    "bloom-176b": 176_247_271_424,
    "gemma-2-9b": 9_241_705_984,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "t5-base": 222_903_552,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "resnet-50": 25_557_032,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_match_the_published_checkpoints(name: str, count: int) -> None:
    assert presets.preset(name).params == count


# model cards and safetensors indexes on huggingface.co; multi-token prediction and rounding are left out
CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text("utf-8"))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parameter_counts_of_other_families_match_published_configs(name: str) -> None:
    shape = read_config(CONFIGS[name]["config"], name)
    assert shape.params == pytest.approx(CONFIGS[name]["parameters"], rel=0.01)


@pytest.mark.parametrize(
    ("changed", "windows"),
    [
        ({"model_type": "gpt_oss", "sliding_window": 128}, [(12, 128), (12, None)]),
        ({"layer_types": ["sliding_attention"] * 20 + ["full_attention"] * 4}, [(20, 128), (4, None)]),
        ({"sliding_window_pattern": 6}, [(20, 128), (4, None)]),
        ({"model_type": "mistral"}, [(24, 128)]),
        ({"use_sliding_window": False}, [(24, None)]),
    ],
)
def test_attention_windows_apply_to_the_configured_layers(
    changed: dict[str, object], windows: list[tuple[int, int | None]]
) -> None:
    values = {**presets.config("gpt-oss-20b"), "model_type": "qwen3_moe", "sliding_window": 128, **changed}
    shape = read_config(values, "model")
    assert [(stack.count, stack.attention.window) for stack in shape.stacks] == windows


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3-8b"),
        ("Llama3-70B", "llama-3-70b"),
        ("llama31-8b", "llama-3-8b"),
        ("LLaMA-65B", "llama-65b"),
        ("GPT-175B", "gpt3-175b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
    ],
)
def test_a_model_is_found_in_every_spelling(spelt: str, name: str) -> None:
    result = presets.find_preset(spelt)
    assert result is not None
    assert result.name == name


def test_every_preset_can_be_read() -> None:
    for name in presets.names():
        assert presets.preset(name).params > 0


def test_flops_of_gpt3_match_the_megatron_paper() -> None:
    # Narayanan et al. 2021 (arXiv:2104.04473), Eq. 3 without recomputation: 72 B s l h^2 (1 + s/6h + V/12lh)
    shape = presets.preset("gpt3-175b")
    layers, hidden, seq, vocab = 96, 12288, 2048, 51200
    expected = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert shape.flops_per_token(seq) == pytest.approx(expected, rel=1e-9)


def test_causal_attention_counts_half_of_the_flops() -> None:
    shape = presets.preset("llama-3-8b")
    assert shape.attention_flops(8192, causal=True) == shape.attention_flops(8192, causal=False) / 2


def test_with_layers_keeps_the_first_layers() -> None:
    shape = presets.preset("deepseek-v3").with_layers(5)
    assert [stack.count for stack in shape.stacks] == [3, 2]
    assert shape.layers == 5


def llama_config(**changed: object) -> dict[str, object]:
    path = DATA / "models.json"
    return {**json.loads(path.read_text())["llama-3-8b"], **changed}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "one JSON object"),
        ({}, "model_type is missing"),
        ({"model_type": "mamba9"}, "'mamba9' is not known; known are"),
        (llama_config(hidden_size=None), "hidden_size is missing"),
        (llama_config(hidden_size=-4096), "hidden_size should be 1 to"),
        (llama_config(hidden_size="big"), "hidden_size should be a whole number, not 'big'"),
        (llama_config(hidden_size=4096.5), "whole number"),
        (llama_config(num_hidden_layers=0), "num_hidden_layers should be 1 to"),
        (llama_config(num_hidden_layers=10**9), "num_hidden_layers should be 1 to 100000"),
        (
            llama_config(num_attention_heads=30),
            "num_attention_heads 30 does not divide hidden_size 4096; 32 would",
        ),
        (llama_config(num_key_value_heads=5), "num_key_value_heads 5 does not divide num_attention_heads 32"),
        (llama_config(vocab_size=True), "vocab_size should be a whole number"),
        (llama_config(tie_word_embeddings="yes"), "should be true or false"),
        ({"model_type": "generic", "parameters": -1}, "parameters should be a positive number"),
    ],
)
def test_an_invalid_config_is_reported(values: object, said: str) -> None:
    with pytest.raises(ConfigProblem) as caught:
        read_config(values, "model")
    assert said in "\n".join(caught.value.problems)


def test_all_problems_of_a_config_are_reported_together() -> None:
    with pytest.raises(ConfigProblem) as caught:
        read_config(llama_config(hidden_size=0, vocab_size="x", num_hidden_layers=-1), "model")
    assert len(caught.value.problems) == 3


def test_an_unknown_architecture_lists_the_known_architectures() -> None:
    with pytest.raises(ConfigProblem) as caught:
        read_config({"model_type": "rwkv"}, "model")
    assert all(name in caught.value.problems[0] for name in KNOWN)


def test_the_text_model_of_a_multimodal_config_is_used() -> None:
    shape = read_config({"model_type": "llava", "text_config": llama_config()}, "model")
    assert shape.params == PUBLISHED["llama-3-8b"]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10**12),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)
FIELDS = sorted({name for preset in presets.names() for name in presets.config(preset)})


@given(kind=st.sampled_from(KNOWN), changed=st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_config_is_a_model_or_a_list_of_problems(kind: str, changed: dict[str, object]) -> None:
    try:
        shape = read_config({**changed, "model_type": kind}, "model")
    except ConfigProblem as error:
        assert error.problems  # noqa: PT017 - both ends are right
    else:
        assert shape.params > 0


@given(
    name=st.sampled_from(presets.names()),
    changed=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
)
def test_any_changed_preset_is_a_model_or_a_list_of_problems(name: str, changed: dict[str, object]) -> None:
    with contextlib.suppress(ConfigProblem):
        assert read_config({**presets.config(name), **changed}, "model").params > 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-7b", 6.74),
        ("llama-13b", 13.0),
        ("llama-33b", 32.5),
        ("llama-65b", 65.3),
        ("codellama-34b", 33.7),
        ("yi-34b", 34.4),
        ("mistral-large-123b", 122.6),
        ("qwen2.5-14b", 14.8),
        ("qwen2.5-32b", 32.8),
        ("qwen3-14b", 14.8),
        ("qwen3-32b", 32.8),
        ("qwen2-57b-a14b", 57.4),
        ("qwen1.5-moe-a2.7b", 14.3),
        ("qwen3-coder-480b-a35b", 480),
        ("deepseek-v2", 235.7),
        ("kimi-k2", 1026),
        ("opt-66b", 66),
        ("pythia-12b", 11.85),
        ("mpt-30b", 29.96),
    ],
)
def test_parameter_counts_match_the_names_of_the_models(name: str, billions: float) -> None:
    assert presets.preset(name).params == pytest.approx(billions * 1e9, rel=0.01)
