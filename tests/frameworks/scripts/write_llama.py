"""Write into the current folder what LLaMA-Factory trains with: a tiny random model, a tokenizer, data."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<pad>"]
ROWS = [
    {"instruction": f"Add {a} and {b}", "input": "", "output": f"The sum is {a + b}."}
    for a in range(8)
    for b in range(8)
]
TRAINING = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "model_name_or_path": "tiny",
    "dataset": "sums",
    "dataset_dir": "data",
    "template": "default",
    "cutoff_len": 64,
    "output_dir": "out",
    "overwrite_output_dir": True,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.01,
    "max_steps": 16,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "ddp_backend": "gloo",
    "dataloader_num_workers": 0,
    "preprocessing_num_workers": 1,
}

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
tokenizer.train_from_iterator([f"{row['instruction']} {row['output']}" for row in ROWS], trainer)
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
)
fast.save_pretrained("tiny")
config = LlamaConfig(
    vocab_size=len(fast),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
)
LlamaForCausalLM(config).save_pretrained("tiny")
Path("data").mkdir(exist_ok=True)
Path("data/sums.json").write_text(json.dumps(ROWS))
Path("data/dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sums.json"}}))
Path("sft.yaml").write_text(json.dumps(TRAINING))  # JSON is YAML
