import os

import common
import tensorflow as tf


class Resolver(tf.distribute.cluster_resolver.SlurmClusterResolver):
    """Both nodes are this machine: here workers of different nodes may not have the same port."""

    def cluster_spec(self):
        base = int(os.environ["MASTER_PORT"])
        workers = super().cluster_spec().as_dict()["worker"]
        apart = [f"{address.rpartition(':')[0]}:{base + index}" for index, address in enumerate(workers)]
        return tf.train.ClusterSpec({"worker": apart})


assert "TF_CONFIG" not in os.environ
resolver = Resolver(port_base=int(os.environ["MASTER_PORT"]))
print("workers", resolver.cluster_spec().as_dict()["worker"], "devices", os.environ["CUDA_VISIBLE_DEVICES"])
strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
world = strategy.num_replicas_in_sync


@tf.function
def averaged(numbers):
    ours = strategy.run(tf.identity, args=(numbers,))
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, ours, axis=None)


def mean(numbers: list[float]) -> list[float]:
    return [float(value) for value in averaged(tf.constant(numbers))]


common.fit(resolver.task_id, world, mean)
common.leave_together(resolver.task_id, world)
