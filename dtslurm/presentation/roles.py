"""The state of roles as text."""

from __future__ import annotations

from collections import Counter

from dtslurm.model.runs.roles import READY, RoleState
from dtslurm.presentation.node_sets import fold_nodes
from dtslurm.presentation.quantities import pluralize


def describe_role(role: RoleState, *, has_ended: bool) -> str:
    """Describe a role in one line: its instances, nodes, restarts and load.

    Args:
        has_ended: the run has ended, so that the last written state is not the present one.
    """
    instances = role.active
    counts = Counter(instance.state for instance in instances)
    nodes = sorted({instance.node for instance in instances if instance.node})
    if has_ended:
        failed = counts["failed"]
        state_text = f"{failed} of {pluralize(len(instances), 'instance')} failed" if failed else "ended"
    else:
        state_text = f"{role.ready_count} of {len(instances)} ready"
        others = [f"{count} {state}" for state, count in sorted(counts.items()) if state != READY]
        state_text += f" ({', '.join(others)})" if others else ""
    parts = [state_text + (f" on {fold_nodes(','.join(nodes))}" if nodes else "")]
    if role.restarts:
        parts.append(pluralize(role.restarts, "restart"))
    if not has_ended:
        parts += _describe_load(role)
    return ", ".join(parts)


def _describe_load(role: RoleState) -> list[str]:
    rate, waiting = role.total("requests_per_s"), role.total("waiting")
    texts = [f"{rate:.1f} requests/s"] if rate is not None else []
    return [*texts, f"{waiting:.0f} waiting"] if waiting is not None else texts
