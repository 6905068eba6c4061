"""The processes of a running job that a user selects: ranks, or instances of roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dtslurm.errors import RequestInvalid
from dtslurm.model.runs.telemetry import RunTelemetry
from dtslurm.model.values import dataclass
from dtslurm.suggestions import suggest_name

_ALIVE = {"starting", "ready", "unresponsive"}


@dataclass(frozen=True, kw_only=True)
class ProcessSelector:
    """The parts of a job that a user selects; the lowest running rank if nothing is given.

    Attributes:
        ranks: the first and the last number of each range of ranks.
        node: a node, of whose ranks the first one is taken.
        role: the name of a role, or NAME/NUMBER for one of its instances.
        all_ranks: whether all running ranks are taken.
    """

    ranks: tuple[tuple[int, int], ...] | None = None
    node: str | None = None
    role: str | None = None
    all_ranks: bool = False


@dataclass(frozen=True, kw_only=True)
class TargetProcess:
    """A process of the job.

    Attributes:
        variables: the variables of its environment that identify it.
        pid: its process id on its node, as recorded.
        ports: the ports of an instance of a role, by name.
        is_starting: whether it is an instance whose ports may not be known yet.
        component: the number of the job's component that has its node.
    """

    label: str
    node: str
    variables: dict[str, str]
    pid: int | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    is_starting: bool = False
    component: int = 0

    def as_json(self) -> dict[str, object]:
        """Return what the program on the node must know."""
        return {"label": self.label, "node": self.node, "variables": self.variables, "pid": self.pid}


def choose_processes(telemetry: RunTelemetry, target: ProcessSelector, name: str) -> list[TargetProcess]:
    """Return the selected processes, the lowest rank first.

    Raises:
        RequestInvalid: the job has no such part, or it does not run.
    """
    if target.role is not None:
        return _choose_instances(telemetry, target.role, name)
    running = {rank.rank: rank for rank in telemetry.ranks.values() if rank.running}
    if not running:
        raise RequestInvalid(
            [f"no rank of job {name} is running"], hint=f"dtslurm status {name} shows what the job does"
        )
    if target.ranks is not None:
        chosen = []
        for first, last in target.ranks:
            found = [rank for rank in running if first <= rank <= last]
            if not found:
                numbers = f"rank {first}" if first == last else f"ranks {first} to {last}"
                raise RequestInvalid(
                    [f"{numbers} of job {name} is not running"],
                    hint=f"of its ranks, {min(running)} to {max(running)} are running",
                )
            chosen += found
        chosen = sorted(set(chosen))
    elif target.node is not None:
        chosen = [number for number, rank in sorted(running.items()) if rank.host == target.node][:1]
        if not chosen:
            hosts = sorted({rank.host for rank in running.values()})
            suggestion = suggest_name(target.node, hosts) or f" (nodes: {', '.join(hosts[:20])})"
            raise RequestInvalid([f"no rank of job {name} runs on {target.node!r}{suggestion}"])
    else:
        chosen = sorted(running) if target.all_ranks else [min(running)]
    return [
        TargetProcess(
            label=str(number),
            node=running[number].host,
            variables={"RANK": str(number)},
            pid=running[number].pid,
        )
        for number in chosen
    ]


def _choose_instances(telemetry: RunTelemetry, text: str, name: str) -> list[TargetProcess]:
    role_name, _, number = text.partition("/")
    roles = {role.name: role for role in telemetry.roles}
    if role_name not in roles:
        known = f" (roles: {', '.join(roles)})" if roles else ""
        suggestion = suggest_name(role_name, list(roles)) or known
        raise RequestInvalid([f"job {name} has no role {role_name!r} beside the main role{suggestion}"])
    processes = [
        TargetProcess(
            label=f"{role_name}/{instance.number}",
            node=instance.node.partition(",")[0],
            variables={"DTSLURM_ROLE": role_name, "DTSLURM_ROLE_INSTANCE": str(instance.number)},
            ports=instance.ports,
            is_starting=instance.state == "starting",
            component=roles[role_name].component,
        )
        for instance in roles[role_name].instances
        if instance.state in _ALIVE and number in {"", str(instance.number)}
    ]
    if not processes:
        raise RequestInvalid([f"no instance of {text} in job {name} is running"])
    return processes
