"""The activations that ``plan`` expects equal those that Hugging Face's models keep."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtslurm.planner.frameworks import FRAMEWORKS
from dtslurm.planner.layout import Layout
from dtslurm.planner.memory import activation_bytes
from dtslurm.planner.models.huggingface import read_config
from tests.frameworks.conftest import SCRIPTS
from tests.frameworks.test_torch_family import llama_python  # noqa: F401 - a fixture

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(900)]

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# Each with how far the plan may be from it. Gemma's norms keep a product in 32 bits more.
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "llama": ({"model_type": "llama"}, 0.01),
    "mistral": ({"model_type": "mistral", "sliding_window": None}, 0.01),
    "qwen3": ({"model_type": "qwen3"}, 0.01),
    "gemma2": ({"model_type": "gemma2"}, 0.12),
    "mixtral": ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, 0.03),
    "qwen3_moe": (
        {
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 192,
        },
        0.03,
    ),
}


def test_planned_activations_match_transformers_models(llama_python: Path, tmp_path: Path) -> None:  # noqa: F811
    models = {name: {**SHAPE, **values} for name, (values, _) in MODELS.items()}
    path = tmp_path / "models.json"
    path.write_text(json.dumps(models))
    argv = [str(llama_python), "-W", "ignore", str(SCRIPTS / "kept_activations.py"), str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * len(MODELS)
    for row in rows:
        shape = read_config(models[row["name"]], row["name"])
        planned, _ = activation_bytes(
            shape.stacks[0], shape.hidden, FRAMEWORKS["fsdp"], Layout(), row["precision"]
        )
        _, far = MODELS[row["name"]]
        assert planned == pytest.approx(row["bytes"], rel=far), row
