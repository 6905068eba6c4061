"""``ray``: a Ray cluster on the job's nodes, with the training script as its driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dtslurm.launch.base import Launcher, LauncherOption
from dtslurm.model.cluster import Variable
from dtslurm.model.jobs.job import JobSpec, TaskLayout


class Ray(Launcher):
    """One task per node runs Ray; the first task also runs the driver, which is rank 0.

    The driver has no step of its own: Ray's step holds the job's memory and GPUs, so a second step would wait
    or be refused. ``ray symmetric-run`` is not used, because it exits with code 0 when ``ray start`` fails,
    and needs exclusive nodes.
    """

    name = "ray"
    summary = "a Ray cluster over the nodes; the script is its driver"
    partial = "launchers/ray.sh.j2"
    step = "steps/ray.sh.j2"
    step_variables = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    one_process = True
    program = "ray start"
    worker_program = "ray_start.py"
    decided = dict.fromkeys(
        (
            *("address", "head", "node_ip_address", "port", "block", "temp_dir", "num_gpus", "num_cpus"),
            *("min_worker_port", "max_worker_port", "include_dashboard", "ray_client_server_port"),
        ),
        "dtslurm sets it from the allocation of the job",
    )
    place = ("RANK", "LOCAL_RANK")
    options: ClassVar = {
        "join_timeout": LauncherOption("300", "time limit in seconds for the nodes to start and join"),
    }

    def variables(self, spec: JobSpec, layout: TaskLayout) -> Mapping[str, Variable]:
        """Return the variable that stops Ray from sending usage statistics from a compute node."""
        del spec, layout
        return {"RAY_USAGE_STATS_ENABLED": Variable(value="0", why="compute nodes often have no internet")}

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: there is only one driver, and Ray itself starts the workers."""
        del spec
        if layout.ranks_per_node > 1:
            return [f"launcher ray starts one driver, not {layout.ranks_per_node}; remove --ntasks-per-node"]
        return []


launcher = Ray()
