"""What ``make test-gpu`` trains to measure ``plan``, and what ``plan`` says of each on one GPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtslurm.planner.estimate import Estimate
from dtslurm.services.planning.plan import Plan, PlanRequest, make

Row = dict[str, Any]
STEPS = 5  # that are timed


def _llama(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": vocab > 100_000,
    }


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {**_llama(hidden, ffn, layers, heads, kv_heads, 151936), "model_type": "qwen3", "head_dim": 128}


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


# The published shapes of these names; the mixtures are cut to what 80 GB hold.
MODELS: dict[str, dict[str, Any]] = {
    "llama-160m": _llama(768, 2048, 12, 12, 12, 32000),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    "mixtral-1b": {
        **_llama(1024, 3584, 12, 16, 8, 32000),
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe-1b": {
        **_qwen3(1024, 3072, 12, 16, 4),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "olmoe-3b": {  # half of its sixteen layers
        **_llama(2048, 1024, 8, 16, 16, 50304),
        "model_type": "olmoe",
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
}
TITAN = "torchtitan-0.2 speed"

# Model, sequence length, micro-batch size, recomputation, and the settings that differ from `usual` below.
_ASKED: tuple[tuple[str, int, int, str, dict[str, Any]], ...] = (
    ("llama-160m", 512, 8, "none", {}),
    ("llama-160m", 2048, 8, "none", {}),
    ("llama-160m", 2048, 32, "none", {}),
    ("llama-160m", 8192, 2, "none", {}),
    ("llama-160m", 8192, 4, "full", {}),
    ("qwen3-0.6b", 2048, 1, "none", {}),
    ("qwen3-0.6b", 2048, 4, "none", {}),
    ("qwen3-0.6b", 4096, 4, "none", {}),
    ("qwen3-0.6b", 4096, 4, "full", {}),
    ("qwen3-0.6b", 8192, 2, "full", {}),
    ("llama-3.2-1b", 512, 8, "none", {}),
    ("llama-3.2-1b", 2048, 1, "none", {}),
    ("llama-3.2-1b", 2048, 4, "none", {}),
    ("llama-3.2-1b", 4096, 2, "none", {}),
    ("llama-3.2-1b", 8192, 1, "none", {}),
    ("llama-3.2-1b", 4096, 4, "full", {}),
    ("llama-3.2-1b", 8192, 2, "full", {}),
    ("llama-3.2-1b", 16384, 1, "full", {}),
    ("qwen3-1.7b", 2048, 2, "none", {}),
    ("qwen3-1.7b", 4096, 1, "none", {}),
    ("qwen3-1.7b", 4096, 2, "full", {}),
    ("llama-3.2-3b", 2048, 1, "none", {}),
    ("llama-3.2-3b", 4096, 1, "full", {}),
    ("llama-3.2-3b", 2048, 4, "full", {}),
    ("gpt2-medium", 1024, 8, "none", {}),
    ("gpt2-medium", 1024, 8, "full", {}),
    ("gpt2-medium", 1024, 16, "none", {}),
    ("gpt2-xl", 1024, 4, "none", {}),
    ("gpt2-xl", 1024, 4, "full", {}),
    ("gemma-3-1b", 2048, 2, "none", {}),
    ("gemma-3-1b", 2048, 2, "full", {}),
    ("llama-160m", 2048, 8, "none", {"precision": "fp32"}),
    ("llama-3.2-1b", 2048, 2, "none", {"precision": "fp32"}),
    ("llama-3.2-1b", 2048, 2, "full", {"precision": "fp32"}),
    ("llama-3.2-1b", 2048, 4, "none", {"optimizer": "foreach"}),
    ("llama-3.2-3b", 2048, 1, "none", {"optimizer": "foreach"}),
    ("mixtral-1b", 2048, 2, "none", {}),
    ("mixtral-1b", 2048, 4, "none", {}),
    ("mixtral-1b", 2048, 4, "full", {}),
    ("qwen3-moe-1b", 2048, 2, "none", {}),
    ("qwen3-moe-1b", 2048, 4, "full", {}),
    ("qwen3-moe-1b", 4096, 2, "none", {}),
    ("olmoe-3b", 2048, 1, "none", {}),
    ("olmoe-3b", 2048, 2, "full", {}),
    ("llama-3.2-1b", 2048, 2, "none", {"gbs": 8}),
    ("llama-3.2-3b", 2048, 1, "full", {"gbs": 4}),
    ("llama-160m", 2048, 8, "none", {"framework": "deepspeed", "zero": 1}),
    ("llama-3.2-1b", 2048, 4, "none", {"framework": "deepspeed", "zero": 1}),
    ("llama-3.2-1b", 2048, 4, "none", {"framework": "deepspeed", "zero": 2}),
    ("llama-3.2-1b", 2048, 4, "none", {"framework": "deepspeed", "zero": 3}),
    ("qwen3-0.6b", 4096, 2, "full", {"framework": "deepspeed", "zero": 2}),
)


def configurations() -> list[Row]:
    """Return what is trained, as ``scripts/measure.py`` reads it."""
    usual = {"framework": "fsdp", "zero": 3, "precision": "bf16", "optimizer": "fused", "steps": STEPS}
    return [
        {**usual, "name": name, "model": MODELS[name], "seq_len": tokens, "mbs": size, "gbs": size}
        | {"recompute": recompute}
        | different
        for name, tokens, size, recompute, different in _ASKED
    ]


# The run that `plan` is calibrated on.
CALIBRATED_ON = next(row for row in configurations() if row["name"] == "llama-3.2-1b" and row["mbs"] == 4)


def layout(row: Mapping[str, Any]) -> str:
    """Return the layout as ``plan --layout`` takes it."""
    words = "dp=1,mbs={mbs},gbs={gbs},zero={zero},recompute={recompute}"
    return words.format_map(row)


def plan(row: Mapping[str, Any], gpu: str) -> Plan:
    """Return what ``dtslurm plan`` says of a configuration on one GPU of this name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(row["model"]))
        request = PlanRequest(
            model_config=str(path),
            gpu=gpu,
            gpus_per_node=1,
            nodes=1,
            seq_len=row["seq_len"],
            framework=row["framework"],
            precision=row["precision"],
            layout=layout(row),
        )
        return make(request, Path(folder))


def estimate(row: Mapping[str, Any], gpu: str) -> Estimate:
    """Return the estimate of a configuration's one layout."""
    return plan(row, gpu).chosen[0]


def same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether two rows are of one configuration."""
    return all(row.get(key) == value for key, value in other.items())


def titan_estimate(gpu: str) -> Estimate:
    """Return what ``plan`` expects of torchtitan's run of what it emits: Llama 3.2 1B, 2 x 2048 tokens."""
    row = {"framework": "torchtitan", "precision": "bf16", "zero": 3, "recompute": "none"}
    return estimate({**row, "model": MODELS["llama-3.2-1b"], "seq_len": 2048, "mbs": 2, "gbs": 4}, gpu)
