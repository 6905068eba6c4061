"""torchtitan's trainer, with the flavor that ``plan --emit torchtitan`` asks to register."""

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.train import Trainer, main

llama3_args["llama-3.2-1b"] = TransformerModelArgs(
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim_multiplier=1.5,
    multiple_of=1024,
    rope_theta=500000,
)

if __name__ == "__main__":
    main(Trainer)
