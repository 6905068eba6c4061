"""Check whether the GPUs of the nodes suffice for the roles of a run. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.roles import RoleSpec


def find_gpu_conflicts(spec: JobSpec, layout: TaskLayout) -> Iterator[str]:
    """Yield a problem for each role that requests more GPUs than its nodes have, or than the ranks leave."""
    total = layout.gpus_per_node
    main = spec.roles.main if spec.roles is not None else ""
    for role in spec.other_roles:
        requested = (role.options.gpus or 0) * _instances_per_node(role, layout)
        if role.on == main and requested:
            if requested + layout.ranks_per_node > total:
                yield (
                    f"roles.{role.name}: takes {requested} of the {total} GPUs of a node of {main}, which "
                    f"runs {layout.ranks_per_node} ranks there; set ntasks_per_node of {main} to "
                    f"{max(0, total - requested)}, or give {role.name} nodes of its own"
                )
        elif requested > total:
            yield f"roles.{role.name}: its instances need {requested} GPUs on a node that has {total}"


def _instances_per_node(role: RoleSpec, layout: TaskLayout) -> int:
    if role.on:
        return -(-role.instances // layout.nodes) if role.instances else 1
    return -(-role.instances // max(1, role.nodes))
