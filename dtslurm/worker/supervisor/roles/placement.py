"""On which nodes and GPUs of the job the instances of roles run."""

import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence

from .instance import ALIVE, REMOVED, Instance
from .plan import RolePlan, RolesPlan, assign_nodes


class RolePlacement:
    """The nodes of the roles, and the choice of nodes and GPUs for each start of an instance.

    Args:
        instances: the instances of each role, removed ones included.

    Attributes:
        nodes: the nodes of each role, the main role included.
    """

    def __init__(self, supervisor: Any, plan: RolesPlan, instances: Mapping[str, Sequence[Instance]]) -> None:
        self._supervisor, self._plan, self._instances = supervisor, plan, instances
        self.nodes: Dict[str, List[str]] = {}

    def assign(self) -> None:
        """Assign the nodes of the job to the roles, healthy ones first."""
        supervisor = self._supervisor
        self.nodes.update(
            assign_nodes(self._plan, supervisor.components, supervisor.healthy(), supervisor.settings.nodes)
        )

    def nodes_of(self, role: RolePlan) -> List[str]:
        """Return the nodes of a role; those of the main role are the nodes of its running attempt."""
        if not role.on:
            return self.nodes[role.name]
        if role.on == self._plan.main:
            return self._supervisor.attempt_nodes or self.nodes[self._plan.main]
        return self.nodes[role.on]

    def choose_nodes(self, instance: Instance) -> List[str]:
        """Return the nodes of the next start: the same as before if they are healthy, else spare nodes."""
        healthy = self._supervisor.healthy()
        own_nodes = self.nodes_of(instance.role)
        if instance.role.nodes_per_instance > 1:
            return self._choose_several_nodes(instance, own_nodes, healthy)
        node = self._choose_node(instance, own_nodes, healthy)
        return [node] if node else []

    def _choose_several_nodes(
        self, instance: Instance, own_nodes: Sequence[str], healthy: Sequence[str]
    ) -> List[str]:
        """Return as many free nodes as the instance needs; empty if too few are left."""
        role = instance.role
        taken = {
            name
            for other in self._instances[role.name]
            if other is not instance and other.state != REMOVED
            for name in other.nodes
        }
        free = [name for name in own_nodes if name not in taken]
        usable = [name for name in [*free, *self.spare_nodes(role)] if name in healthy]
        if not instance.nodes:  # a first start tries unhealthy nodes too, as training does
            usable += [name for name in free if name not in healthy]
        kept = [name for name in instance.nodes if name in usable]
        chosen = [*kept, *(name for name in usable if name not in kept)][: role.nodes_per_instance]
        if len(chosen) < role.nodes_per_instance:
            return []
        lost = [name for name in instance.nodes if name not in chosen]
        self.nodes[role.name] = [name for name in own_nodes if name not in lost]
        self.nodes[role.name] += [name for name in chosen if name not in own_nodes]
        return chosen

    def _choose_node(self, instance: Instance, own_nodes: Sequence[str], healthy: Sequence[str]) -> str:
        """Return the node of an instance that has one node, empty if none can run it."""
        role = instance.role
        if instance.node in healthy and instance.node in own_nodes:
            return instance.node
        usable = [name for name in own_nodes if name in healthy] or (own_nodes if not instance.nodes else [])
        counts = {
            name: sum(
                name in other.nodes and other.state in ALIVE
                for other in self._instances[role.name]
                if other is not instance
            )
            for name in usable
        }
        fitting = [name for name in usable if self._has_gpus_for(instance, name, counts[name])]
        intended = [name for name in fitting if counts[name] < self._per_node(role)]
        spare = self.spare_nodes(role) if role.nodes else []
        if spare and not intended:
            self.nodes[role.name] = [name for name in own_nodes if name in healthy] + [spare[0]]
            return spare[0]
        return min(intended or fitting, key=lambda name: counts[name], default="")

    def _has_gpus_for(self, instance: Instance, node: str, count: int) -> bool:
        """Return whether a node with ``count`` other instances of the role has the GPUs for one more."""
        role = instance.role
        if role.gpus is None:
            return not count or bool(role.on) or not role.gpus_per_node
        return len(self._free_gpus(instance, node)) >= role.gpus

    def _per_node(self, role: RolePlan) -> int:
        """Return how many instances of a role one of its nodes is meant for."""
        count = sum(instance.state != REMOVED for instance in self._instances[role.name])
        return -(-count // max(1, len(self.nodes_of(role))))

    def spare_nodes(self, role: RolePlan) -> List[str]:
        """Return the healthy nodes that no role uses, in the component of the job that has a role's nodes."""
        used = {name for names in self.nodes.values() for name in names}
        used.update(self._supervisor.attempt_nodes)
        healthy, component = self._supervisor.healthy(), self._supervisor.components[role.component]
        return [name for name in component if name in healthy and name not in used]

    def choose_gpus(self, instance: Instance, node: str) -> Optional[List[int]]:
        """Return the GPUs of an instance; None if it may use all GPUs of its node."""
        role = instance.role
        return None if role.gpus is None else sorted(self._free_gpus(instance, node)[: role.gpus])

    def _free_gpus(self, instance: Instance, node: str) -> List[int]:
        """Return the GPUs of a node that no rank and no other instance has for itself.

        An instance on the nodes of another role takes the last ones first, as that role takes the first ones.
        """
        role = instance.role
        taken = {
            number
            for others in self._instances.values()
            for other in others
            if other is not instance and node in other.nodes and other.state in ALIVE
            for number in other.gpus or ()
        }
        first = self._plan.gpus_of_ranks if role.on == self._plan.main else 0
        free = [number for number in range(first, role.gpus_per_node) if number not in taken]
        return free[::-1] if role.on else free

    def count_places(self, role: RolePlan) -> int:
        """Return how many instances the nodes of a role have GPUs for."""
        if not role.gpus_per_node or role.gpus == 0 or (role.gpus is None and role.on):
            return sys.maxsize
        nodes = len(self.nodes_of(role))
        if role.gpus is None:
            return nodes
        host = role.on or role.name
        used = self._plan.gpus_of_ranks if host == self._plan.main else 0
        for other in self._plan.roles:
            if other is not role and host == (other.on or other.name):
                used += (other.gpus or 0) * self._per_node(other)
        return nodes * (max(0, role.gpus_per_node - used) // role.gpus)
