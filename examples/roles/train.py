"""Trains on samples that the role ``generator`` generates: every rank fetches its own over HTTP.

A request that fails is repeated, with the addresses of the instances that are ready then.
"""

import argparse
import http.client
import time
import urllib.request

import torch
import torch.distributed as dist

from dtslurm import train


def fetch_sample(generator: train.Role, prompt: int, seed: int) -> float:
    """Return a sample, as soon as an instance answers."""
    while True:
        urls = generator.urls
        if urls:
            url = f"{urls[(prompt + seed) % len(urls)]}/sample?prompt={prompt}&seed={seed}"
            try:
                with urllib.request.urlopen(url, timeout=2) as answer:
                    return float(answer.read())
            except (OSError, http.client.HTTPException):
                pass  # it is being restarted, perhaps in the middle of an answer
        time.sleep(0.2)


def main() -> None:
    """Train a single weight towards the mean of the samples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds after each step")
    options = parser.parse_args()
    generator = train.Role("generator")
    print("generators:", *generator.wait(), flush=True)
    dist.init_process_group("gloo")
    weight = torch.zeros(1, dtype=torch.float64)
    for step in range(options.steps):
        error = weight - fetch_sample(generator, dist.get_rank(), step)
        loss = error**2
        dist.all_reduce(error)
        dist.all_reduce(loss)
        weight -= 0.05 * error
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
        time.sleep(options.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
