"""The state of a run's roles, as its supervisor last wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.values import dataclass

READY, REMOVED = "ready", "removed"


@dataclass(frozen=True, kw_only=True)
class InstanceState:
    """One instance of a role.

    Attributes:
        state: waiting, starting, ready, unresponsive, ended, failed or removed.
        start: the number of its current start, -1 before the first.
        restarts: how many starts followed a failure.
        changed: when its state changed, in seconds since the epoch on the node of the supervisor.
        ports: its ports by name, as far as they are known.
        url: the URL of its first port, empty if it is unknown.
        load: running and waiting requests, and ``requests_per_s``, as far as the instance states them.
    """

    number: int
    state: str = "waiting"
    node: str = ""
    start: int = -1
    restarts: int = 0
    changed: float | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    url: str = ""
    load: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoleState:
    """A role and its instances.

    Attributes:
        component: the number of the job's component that has its nodes; 0 is that of the main role.
    """

    name: str
    instances: tuple[InstanceState, ...] = ()
    component: int = 0

    @property
    def active(self) -> tuple[InstanceState, ...]:
        """The instances that were not removed by a change of scale."""
        return tuple(instance for instance in self.instances if instance.state != REMOVED)

    @property
    def ready_count(self) -> int:
        """The number of instances that are ready."""
        return sum(instance.state == READY for instance in self.active)

    @property
    def restarts(self) -> int:
        """The number of restarts of all instances."""
        return sum(instance.restarts for instance in self.instances)

    def total(self, quantity: str) -> float | None:
        """Return the sum of a load over all instances; None if no instance states it."""
        values = [instance.load[quantity] for instance in self.active if quantity in instance.load]
        return sum(values) if values else None
