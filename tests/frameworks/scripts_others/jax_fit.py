import common
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

jax.distributed.initialize(heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
common.listen()
print("devices", jax.device_count(), "local", jax.local_device_count(), flush=True)


def mean(numbers: list[float]) -> list[float]:
    rows = multihost_utils.process_allgather(jnp.asarray(numbers))
    return [float(value) for value in rows.reshape(jax.process_count(), -1).mean(axis=0)]


common.fit(jax.process_index(), jax.process_count(), mean)
