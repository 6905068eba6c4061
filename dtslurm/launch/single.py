"""``single``: one process on one node, which may start further processes itself."""

from __future__ import annotations

from dtslurm.launch.base import Launcher
from dtslurm.model.jobs.job import JobSpec, TaskLayout


class Single(Launcher):
    """One process that sees all of the job's GPUs."""

    name = "single"
    summary = "one process on one node"
    partial = "launchers/single.sh.j2"
    one_process = True
    program = ""
    place = ()

    def needs_rendezvous(self, layout: TaskLayout) -> bool:
        """Return False: there are no other ranks."""
        del layout
        return False

    def check(self, spec: JobSpec, layout: TaskLayout) -> list[str]:
        """Return problems: more than one node or process."""
        del spec
        alternative = "use -l torchrun or -l srun"
        problems = []
        if layout.nodes > 1:
            problems.append(f"launcher single runs on one node, not {layout.nodes}; {alternative}")
        if layout.ranks_per_node > 1:
            problems.append(f"launcher single starts one process, not {layout.ranks_per_node}; {alternative}")
        return problems


launcher = Single()
