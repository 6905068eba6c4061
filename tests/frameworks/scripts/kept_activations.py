"""``kept_activations.py CONFIGS.json``: what Hugging Face's models keep for the backward pass.

Of each named configuration, prints a line of JSON with the bytes per token and layer that autograd keeps: the
difference between three layers and one. Memory is counted, not measured, so a CPU will do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS = 256


def kept(values: dict[str, Any], layers: int, dtype: torch.dtype) -> int:
    """Return the bytes of all storages that autograd keeps, but those of parameters."""
    config = AutoConfig.for_model(**{**values, "num_hidden_layers": layers})
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    result: dict[int, Any] = {}  # the storages themselves, so that none is freed and its address used again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            result[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(values["vocab_size"], (1, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in result.values())


torch.manual_seed(0)
for name, values in json.loads(Path(sys.argv[1]).read_text()).items():
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        each = (kept(values, 3, dtype) - kept(values, 1, dtype)) / 2 / TOKENS
        print(json.dumps({"name": name, "precision": precision, "bytes": each}), flush=True)
