"""The roles of a run as ``dtslurm submit`` has written them, and the nodes that they get."""

import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ...lib.json_records import read_object

FIRST_PORT, LAST_PORT = 30000, 32767  # below the ports that Linux gives to outgoing connections
READY, STARTED = "ready", "started"
ALONE, WITH_MAIN, NEVER = "alone", "with main", "never"


class RolePlan(NamedTuple):
    """One role beside the main role; see `dtslurm.model.jobs.roles.RoleSpec`.

    Attributes:
        nodes: the nodes that the role has for itself; 0 if it shares those of the role ``on``.
        nodes_per_instance: the nodes of an instance; if there are several, no other instance has them.
        instances: the number of instances; 0 for one on each node of the role ``on``.
        per_node: whether the role has one instance on each of its nodes.
        component: the number of the job's component that has its nodes.
        gpus_per_node: the GPUs that the job has on each of its nodes.
        gpus: the GPUs that each instance has for itself; None if it sees all GPUs of its node.
        within_s: the time limit until an instance is ready.
        silence_s: for how long a ready instance may leave its readiness check unanswered.
        finish_s: how long an instance may continue after the training has succeeded.
        after: (role, ``ready`` or ``started``) for each role that comes first.
    """

    name: str
    nodes: int
    on: str
    instances: int
    nodes_per_instance: int
    per_node: bool
    component: int
    gpus_per_node: int
    gpus: Optional[int]
    ports: Sequence[str]
    http: Optional[str]
    tcp: bool
    line: Optional[str]
    file: Optional[str]
    ready_port: str
    within_s: float
    silence_s: float
    metrics: Optional[str]
    restarts: int
    restart: str
    finish_s: float
    after: Sequence[Tuple[str, str]]

    @property
    def is_server(self) -> bool:
        """Whether an instance is expected to run until the end of the run, so that its end is a failure."""
        return self.http is not None or self.tcp

    @property
    def prefix(self) -> str:
        """The common beginning of the variables with the role's addresses."""
        return "DTSLURM_ROLE_" + self.name.upper().replace("-", "_")


class RolesPlan(NamedTuple):
    """The roles of a run.

    Attributes:
        main_after: (role, ``ready`` or ``started``) for each role that the main role waits for.
        gpus_of_ranks: how many GPUs the ranks use on each node of the main role, the first ones.
    """

    main: str
    main_after: Sequence[Tuple[str, str]]
    gpus_of_ranks: int
    roles: Sequence[RolePlan]


def read_plan(top: str) -> Optional[RolesPlan]:
    """Return the plan beside the supervisor's files, None for a run of one role."""
    document = read_object(os.path.join(top, "roles.json"))
    if not document.get("roles"):
        return None
    return RolesPlan(
        main=str(document["main"]),
        main_after=[(str(name), str(state)) for name, state in document.get("main_after") or []],
        gpus_of_ranks=int(document["gpus_of_ranks"]),
        roles=[_read_role(role) for role in document["roles"]],
    )


def _read_role(values: Dict[str, Any]) -> RolePlan:
    return RolePlan(
        name=str(values["name"]),
        nodes=int(values["nodes"]),
        on=str(values["on"]),
        instances=int(values["instances"]),
        nodes_per_instance=int(values["nodes_per_instance"]),
        per_node=bool(values["per_node"]),
        component=int(values["component"]),
        gpus_per_node=int(values["gpus_per_node"]),
        gpus=values.get("gpus"),
        ports=[str(name) for name in values["ports"]],
        http=values.get("http"),
        tcp=bool(values.get("tcp")),
        line=values.get("line"),
        file=values.get("file"),
        ready_port=str(values["ready_port"]),
        within_s=float(values["within"]),
        silence_s=float(values["silence"]),
        metrics=values.get("metrics"),
        restarts=int(values["restarts"]),
        restart=str(values["restart"]),
        finish_s=float(values["finish"]),
        after=[(str(name), str(state)) for name, state in values["after"]],
    )


def assign_nodes(
    plan: RolesPlan, components: Sequence[Sequence[str]], healthy: Sequence[str], main_nodes: int
) -> Dict[str, List[str]]:
    """Return the nodes of each role, the main role included; nodes that no role gets are spare nodes.

    The main role gets the first healthy nodes, because the batch script runs on the first node. A role of
    which no healthy node is left gets an unhealthy one, as training does.

    Args:
        components: the nodes of each component of the job.
    """
    free = [sorted(nodes, key=lambda name: name not in healthy) for nodes in components]
    assigned = {plan.main: free[0][:main_nodes]}
    free[0] = free[0][main_nodes:]
    for role in plan.roles:
        nodes = free[role.component] if not role.on and role.component < len(free) else []
        assigned[role.name] = nodes[: role.nodes]
        del nodes[: role.nodes]
    for role in plan.roles:
        if role.on:
            assigned[role.name] = list(assigned[role.on])
    return assigned


def first_port(job_id: str, slot: int) -> int:
    """Return the first port to try for a place in the list of all ports of a job.

    Jobs that follow each other begin at different ports, and no two instances of a job at the same one.
    """
    start = int(job_id) * 16 if job_id.isdigit() else 0
    return FIRST_PORT + (start + slot) % (LAST_PORT - FIRST_PORT - 67)
