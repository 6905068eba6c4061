"""Fit a small network on the GPU by JAX, in the group that dtslurm's launcher describes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

jax.distributed.initialize()
device = jax.local_devices()[0]
print(f"version {jax.__version__} on {device.platform}:{device.id} world {jax.process_count()}", flush=True)
keys = jax.random.split(jax.random.PRNGKey(0), 3)
inputs = jax.random.normal(keys[0], (256, 32))
target = inputs.sum(axis=1, keepdims=True)
weights = [0.1 * jax.random.normal(keys[1], (32, 256)), 0.1 * jax.random.normal(keys[2], (256, 1))]


def loss_of(weights: list[jax.Array]) -> jax.Array:
    return jnp.mean((jax.nn.gelu(inputs @ weights[0]) @ weights[1] - target) ** 2)


@jax.jit
def step(weights: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    loss, slopes = jax.value_and_grad(loss_of)(weights)
    return [weight - 0.01 * slope for weight, slope in zip(weights, slopes, strict=True)], loss


for number in range(30):
    weights, loss = step(weights)
    print(f"step {number} loss {float(loss):.6f}", flush=True)
