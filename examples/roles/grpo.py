"""Trains with GRPO of TRL, on completions of the vLLM server of a role: see grpo.yaml.

After a restart it continues from the last checkpoint in ``$DTSLURM_CHECKPOINT_DIR``.
"""

import argparse
import os

from datasets import load_dataset
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward


def main() -> None:
    """Train a model to answer questions of mathematics."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--server", required=True, help="the URL of the vLLM server")
    parser.add_argument("--group-port", type=int, required=True, help="the port of the NCCL group")
    parser.add_argument("--dataset", default="trl-lib/DeepMath-103K")
    options = parser.parse_args()
    folder = os.environ["DTSLURM_CHECKPOINT_DIR"]
    config = GRPOConfig(
        output_dir=folder,
        save_steps=50,
        logging_steps=1,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=options.server,
        vllm_group_port=options.group_port,
    )
    trainer = GRPOTrainer(
        model=options.model,
        args=config,
        reward_funcs=accuracy_reward,
        train_dataset=load_dataset(options.dataset, split="train"),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))


if __name__ == "__main__":
    main()
