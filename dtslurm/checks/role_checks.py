"""Check the roles of a run against its job: GPUs and secrets. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.roles import Roles, RoleSpec
from dtslurm.suggestions import suggest_name


def find_unknown_secrets(spec: JobSpec) -> Iterator[str]:
    """Yield a problem for each secret that a role names and the job does not have."""
    if spec.roles is None:
        return
    for role in spec.roles.others:
        for name in role.options.secrets or ():
            if name not in spec.secrets:
                fix = suggest_name(name, spec.secrets) or f"; add it to secrets of {spec.roles.main}"
                yield f"roles.{role.name}.secrets: the job has no secret {name}{fix}"


def find_gpu_conflicts(spec: JobSpec, layout: TaskLayout) -> Iterator[str]:
    """Yield a problem for each role that needs more GPUs than its nodes have, or than others there leave."""
    if spec.roles is None:
        return
    yield from _find_conflicts_beside_ranks(spec.roles, layout)
    for role in spec.roles.others:
        if not role.on:
            yield from _find_conflicts_on(role, spec.roles, layout)


def _find_conflicts_beside_ranks(roles: Roles, layout: TaskLayout) -> Iterator[str]:
    total, ranks = layout.gpus_per_node, layout.ranks_per_node
    names, requested = _sum_guests(roles.main, roles, layout)
    if requested and requested + ranks > total:
        fewer_ranks = f"set ntasks_per_node of {roles.main} to {total - requested}, or " * (requested < total)
        yield (
            f"roles.{names}: {requested} of the {total} GPUs of a node of {roles.main} are requested, which "
            f"runs {ranks} ranks there; {fewer_ranks}use nodes of its own"
        )


def _find_conflicts_on(role: RoleSpec, roles: Roles, layout: TaskLayout) -> Iterator[str]:
    """Yield a problem if the nodes of a role have too few GPUs for it, and the roles that share them."""
    total = layout.gpus_per_node
    per_node = roles.instances_per_node(role, layout.nodes)
    gpus = roles.gpus_per_instance(role, layout.nodes, total)
    names, requested = _sum_guests(role.name, roles, layout)
    if gpus is None:
        if requested:
            fix = f"set gpus of {role.name} to {total - requested}" if requested < total else "request fewer"
            yield (
                f"roles.{names}: {requested} of the {total} GPUs of a node of {role.name} are requested, "
                f"which uses all of them; {fix}"
            )
    elif total and not gpus and role.options.gpus is None:
        yield (
            f"roles.{role.name}: {per_node} instances share the {total} GPUs of a node; set gpus to 0 if "
            "they need none, or give it more nodes"
        )
    elif gpus * per_node + requested > total:
        others = f", and {names} requests {requested}" if requested else ""
        yield (
            f"roles.{role.name}: its instances need {gpus * per_node} GPUs on a node that has {total}{others}"
        )


def _sum_guests(host: str, roles: Roles, layout: TaskLayout) -> tuple[str, int]:
    """Return the roles that share the nodes of a role and request GPUs, and those GPUs on each node."""
    guests = [role for role in roles.others if role.on == host and role.options.gpus]
    requested = sum(
        (role.options.gpus or 0) * roles.instances_per_node(role, layout.nodes) for role in guests
    )
    return " and ".join(role.name for role in guests), requested
