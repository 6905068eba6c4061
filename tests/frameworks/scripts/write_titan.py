"""Write into the current folder what torchtitan's debug model trains with: a tokenizer, data, a TOML file."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<s>", "</s>"]
TEXTS = [f"The sum of {a} and {b} is {a + b}. " * 4 for a in range(16) for b in range(16)]
TRAINING = """\
[job]
dump_folder = "out"

[metrics]
log_freq = 1
disable_color_printing = true

[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "assets"

[optimizer]
lr = 3e-3

[lr_scheduler]
warmup_steps = 1

[training]
local_batch_size = 2
seq_len = 64
steps = 12
dataset = "c4_test"
mixed_precision_param = "float32"

[parallelism] # its FSDP wants a kind of sum that gloo has not
data_parallel_shard_degree = 1
data_parallel_replicate_degree = 4

[activation_checkpoint]
mode = "none"
"""

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
tokenizer.train_from_iterator(TEXTS, trainer)
assets, data = Path("assets"), Path("tests/assets/c4_test")  # where torchtitan looks for its test data
assets.mkdir()
data.mkdir(parents=True)
tokenizer.save(str(assets / "tokenizer.json"))
(assets / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
(data / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
Path("debug.toml").write_text(TRAINING)
