"""The worker program that receives submissions on a login node: one per cluster in this process."""

from __future__ import annotations

from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import find_remote_python
from dtslurm.store.delivery import MODULES


def submission_worker_of(context: Context, cluster: ActiveCluster) -> RemoteWorker:
    """Return the worker program that receives runs on a cluster behind SSH; create it at the first call.

    Raises:
        CommandNotFound: the login node has no Python that dtslurm can use.
        TransportError: the login node cannot be reached to find its Python.
    """
    if cluster.transport not in context.workers:
        python = find_remote_python(context, cluster)
        context.workers[cluster.transport] = RemoteWorker(cluster.transport, MODULES, python)
    return context.workers[cluster.transport]
