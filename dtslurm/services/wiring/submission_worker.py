"""Who takes submissions in on the far side: one worker for all submissions of this process to a cluster."""

from __future__ import annotations

from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import far_python
from dtslurm.store.delivery import MODULES


def submission_worker_of(context: Context, cluster: ActiveCluster) -> RemoteWorker:
    """Return who takes runs in on a cluster behind SSH.

    Raises:
        CommandNotFound: it has no Python that dtslurm can use.
        TransportError: the cluster cannot be reached to ask for its Python.
    """
    if cluster.transport not in context.workers:
        python = far_python(context, cluster)
        context.workers[cluster.transport] = RemoteWorker(cluster.transport, MODULES, python)
    return context.workers[cluster.transport]
