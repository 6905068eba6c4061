"""Trains with TRL's asynchronous GRPO on a CPU: ``train_async.py FOLDER``, until a server has been restarted.

The samples come from the role ``policy``, to which the weights go over HTTP. A server that was restarted has
the weights of its start, so it gets the present ones before it generates.
"""

import http.client
import io
import json
import os
import queue
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from dtslurm import train
from dtslurm.train.roles import RoleInstance

LIKED = 7  # the token that is rewarded
GROUP = 4
LENGTH = 8


def post(url: str, body: bytes) -> dict[str, Any]:
    """Return the answer of a server.

    Raises:
        OSError: it does not answer, or only in part.
    """
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=20) as answer:
            document: dict[str, Any] = json.loads(answer.read())
            return document
    except http.client.HTTPException as error:  # the server ended in the middle of its answer
        raise OSError(str(error)) from error


class Weights:
    """Sends the trainer's weights to all servers, and to a server that was restarted."""

    def __init__(self, policy: train.Role) -> None:
        self.policy, self.version, self.body = policy, 0, b""
        self.sent: dict[tuple[int, int], int] = {}  # version by instance and its start
        self.sent_again = False

    def init_weight_transfer(self) -> None:
        """Wait for the servers."""
        self.policy.wait()

    def pause(self) -> None:
        """Do nothing: a request has either the weights before or those after."""

    resume = destroy = pause

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send the weights to each server that is ready."""
        buffer = io.BytesIO()
        torch.save({name: tensor.cpu().clone() for name, tensor in iterator}, buffer)
        self.body, self.version = buffer.getvalue(), self.version + 1
        for instance in self.policy.instances:
            if instance.state == "ready":
                self.bring_up_to_date(instance)

    def bring_up_to_date(self, instance: RoleInstance) -> bool:
        """Return whether a server has the present weights, which are sent if need be."""
        key = (instance.number, instance.start)
        if self.sent.get(key) != self.version:
            version = self.version
            try:
                post(f"{instance.url}/weights?version={version}", self.body)
            except OSError:
                return False
            if key not in self.sent and instance.start:
                print(f"weights sent again to policy-{instance.number}", flush=True)
                self.sent_again = True
            self.sent[key] = version
        return True


class Rollouts:
    """Fetches samples in a thread: TRL's interface of a rollout worker."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize=64)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._fetch, daemon=True)

    def start(self) -> None:
        """Begin to fetch."""
        self.thread.start()

    def stop(self) -> None:
        """End."""
        self.over.set()

    def update_model_version(self, version: int) -> None:
        """Do nothing: each answer has the version of its weights."""

    def check_health(self, stale_after_s: float) -> None:
        """Do nothing: the supervisor restarts the servers."""

    def _fetch(self) -> None:
        dice = random.Random(0)
        while not self.over.is_set():
            ready = [item for item in self.weights.policy.instances if item.state == "ready"]
            prompt = [dice.randrange(2, 32) for _ in range(4)]
            try:
                instance = dice.choice(ready)
                if not self.weights.bring_up_to_date(instance):
                    continue
                request = {"prompt": prompt, "count": GROUP, "length": LENGTH}
                answer = post(f"{instance.url}/generate", json.dumps(request).encode())
            except (OSError, IndexError):  # it is being restarted
                time.sleep(0.2)
                continue
            self._put(prompt, answer)

    def _put(self, prompt: list[int], answer: dict[str, Any]) -> None:
        completions = answer["completions"]
        rewards = torch.tensor([tokens.count(LIKED) / LENGTH for tokens in completions])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for number, tokens in enumerate(completions):
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=prompt + tokens,
                completion_mask=[0] * len(prompt) + [1] * len(tokens),
                old_log_probs=[0.0] * len(prompt) + answer["log_probs"][number],
                advantage=float(advantages[number]),
                model_version=answer["version"],
                metrics={"reward": float(rewards[number])},
            )
            self.rollout_buffer.put(sample)


class StopAfterRestart(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Ends the training after 30 steps, and after a restarted server has got the weights."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def on_step_end(self, _: Any, state: Any, control: Any, **more: Any) -> None:
        """Tell all ranks what rank 0 knows."""
        over = torch.tensor(float(self.weights.sent_again and state.global_step >= 30))
        torch.distributed.all_reduce(over)
        control.should_training_stop = bool(over.item())


def main() -> None:
    """Train; print the reward of each step."""
    folder = sys.argv[1]
    config = AsyncGRPOConfig(
        output_dir="out",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=8,
        num_generations=GROUP,
        max_completion_length=LENGTH,
        max_steps=400,
        weight_sync_steps=1,
        max_staleness=4,
        learning_rate=2e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    weights = Weights(train.Role("policy"))
    trainer = AsyncGRPOTrainer(
        model=folder,
        reward_funcs=lambda **_: [],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w2"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_worker=Rollouts(weights),
        callbacks=[StopAfterRestart(weights)],
    )
    if trainer.accelerator.is_main_process:
        trainer.weight_transfer = weights
    trainer.train()
    if trainer.accelerator.is_main_process:
        print("rewards", json.dumps([row["reward"] for row in trainer.state.log_history if "reward" in row]))
    # Together and at once: a thread that still runs inside torch aborts an interpreter that winds down.
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
