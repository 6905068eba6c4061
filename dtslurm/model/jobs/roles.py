"""The roles of a run: what runs beside the training of its main role, such as inference servers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Literal

from dtslurm.model.shell import JOB_VALUE, quote_with_expansions
from dtslurm.model.units import Walltime
from dtslurm.model.values import dataclass

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
PORT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,19}")
DEFAULT_PORT = "http"
DEFAULT_WITHIN_S = 600
DEFAULT_SILENCE_S = 30
MAX_INSTANCES = 1000  # of a role
ALONE, WITH_MAIN, NEVER = "alone", "with main", "never"
NO_CONTAINER = "none"
# ${role.rollout.urls}, ${port.http} and ${node.rank} stand for values known only in the job.
REFERENCE = re.compile(r"(\$?)\$\{(role|port|node)\.([^{}]*)\}")
_ALL_REFERENCES = re.compile(rf"(\$?)\$(?:{JOB_VALUE}|\{{(role|port|node)\.([^{{}}]*)\}})")
NODE_VARIABLES = {
    "rank": "DTSLURM_NODE_RANK",  # the number of a node among those of its instance
    "count": "DTSLURM_NODE_COUNT",  # how many nodes an instance has
    "head": "DTSLURM_NODE_HEAD",  # the host of the node with number 0
}
_ROLE_REFERENCE = re.compile(rf"({NAME.pattern})\.(hosts|urls|ports)(?:\.({PORT_NAME.pattern}))?")


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """When an instance of a role is ready, and how its health is checked afterwards.

    Attributes:
        http: the path of a GET request that the instance answers with a status below 400.
        tcp: true, or the name of the port that accepts connections.
        line: a regular expression that matches a line of the instance's log.
        file: a path that exists, relative to the run directory.
        within: the time limit until the instance is ready.
        silence: how long an instance that was ready may leave the check unanswered until it is restarted.
    """

    http: str | None = None
    tcp: str | None = None
    line: str | None = None
    file: str | None = None
    within: Walltime | None = None
    silence: Walltime | None = None

    @property
    def silence_s(self) -> int:
        """The time without an answer after which an instance is restarted, in seconds."""
        return DEFAULT_SILENCE_S if self.silence is None else self.silence.seconds

    @property
    def within_s(self) -> int:
        """The time limit in seconds."""
        return DEFAULT_WITHIN_S if self.within is None else self.within.seconds

    @property
    def by_port(self) -> bool:
        """Whether the check connects to a port, so that it also shows whether the instance still responds."""
        return self.http is not None or self.tcp is not None


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """The keys of a role that is not the main role.

    Attributes:
        command: the program and its arguments; no shell interprets them.
        args: arguments that follow those of ``command``.
        nodes: the nodes that this role has for itself.
        nodes_per_instance: the nodes of an instance, on each of which its command runs once.
        on: the role whose nodes this role shares.
        partition: the partition of the role's nodes, if it is not that of the main role.
        node_type: the type of the role's nodes, if it is not that of the main role.
        per: ``node`` starts an instance on each of the role's nodes.
        instances: the number of instances, distributed over the nodes in turn.
        gpus: the GPUs of an instance; see `Roles.gpus_per_instance` for the default.
        ports: names of the ports that an instance opens.
        ready: when an instance is ready; without it, as soon as it has started.
        metrics: the path of an instance's metrics in Prometheus's text format.
        restarts: how often an instance may be restarted.
        restart: ``alone``, ``with main`` to restart the main role as well, or ``never``.
        finish: how long an instance may continue after the training has succeeded, until it ends by itself.
        after: roles that must be ready first, as ``NAME``, ``NAME ready`` or ``NAME started``.
        environment: the folder of a virtual environment to activate.
        container: the image in which the instances run, or ``none``; by default the job's.
        secrets: the secrets of the job that the role gets; by default all.
        setup: shell lines to run before the command.
        env: variables to set.
    """

    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    nodes: int | None = None
    nodes_per_instance: int = 1
    on: str | None = None
    partition: str | None = None
    node_type: str | None = None
    per: Literal["node"] | None = None
    instances: int | None = None
    gpus: int | None = None
    ports: tuple[str, ...] | None = None
    ready: Readiness | None = None
    metrics: str | None = None
    restarts: int = 3
    restart: str = ALONE
    finish: Walltime | None = None
    after: tuple[str, ...] = ()
    environment: str | None = None
    container: str | None = None
    secrets: tuple[str, ...] | None = None
    setup: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """A role beside the main role, checked.

    Attributes:
        options: the keys of the role.
        nodes: the nodes that the role has for itself, 0 if it shares those of ``on``.
        on: the role whose nodes it shares, empty if it has its own.
        instances: the number of instances.
        ports: names of the ports, of which the first is that of the URL.
        restart: ``alone``, ``with main`` or ``never``.
        after: (role, ``ready`` or ``started``) for each role that comes first.
    """

    name: str
    options: RoleOptions
    nodes: int
    on: str
    instances: int
    ports: tuple[str, ...]
    restart: str
    after: tuple[tuple[str, str], ...] = ()

    @property
    def has_component(self) -> bool:
        """Whether its nodes are a component of a heterogeneous job, apart from those of the main role."""
        return not self.on and (self.options.partition is not None or self.options.node_type is not None)

    @property
    def ready(self) -> Readiness:
        """When an instance is ready; without any check, as soon as it has started."""
        return self.options.ready or Readiness()

    @property
    def ready_port(self) -> str:
        """The name of the port that the readiness check connects to."""
        tcp = self.ready.tcp
        return tcp if tcp in self.ports else self.ports[0] if self.ports else ""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of a run.

    Attributes:
        main: the name of the main role, whose end ends the run.
        after: (role, ``ready`` or ``started``) for each role that the main role waits for.
        others: all roles but the main role, in the order of the file.
    """

    main: str
    after: tuple[tuple[str, str], ...] = ()
    others: tuple[RoleSpec, ...] = ()

    @property
    def nodes(self) -> int:
        """The nodes that other roles have for themselves in the main role's component."""
        return sum(role.nodes for role in self.others if not role.has_component)

    @property
    def components(self) -> tuple[RoleSpec, ...]:
        """The roles with a component of their own, in the order of the components, from number 1."""
        return tuple(role for role in self.others if role.has_component)

    def component_of(self, role: RoleSpec) -> int:
        """Return the number of the component that has the nodes of a role; 0 is that of the main role."""
        names = [component.name for component in self.components]
        host = role.on or role.name
        return names.index(host) + 1 if host in names else 0

    def instances_per_node(self, role: RoleSpec, main_nodes: int) -> int:
        """Return how many instances of a role each of its nodes has at most.

        Args:
            main_nodes: the nodes of the main role.
        """
        nodes_of_roles = {self.main: main_nodes, **{other.name: other.nodes for other in self.others}}
        nodes = nodes_of_roles[role.on or role.name] // role.options.nodes_per_instance
        return -(-role.instances // nodes) if role.instances else 1

    def gpus_per_instance(self, role: RoleSpec, main_nodes: int, gpus_per_node: int) -> int | None:
        """Return the GPUs that each instance has for itself; None if it sees all GPUs of its node.

        Several instances on a node of their role share its GPUs equally. An instance that is alone on such a
        node, or that runs on the nodes of another role, sees all GPUs.
        """
        per_node = self.instances_per_node(role, main_nodes)
        if role.options.gpus is not None:
            return role.options.gpus
        return None if role.on or per_node == 1 or not gpus_per_node else gpus_per_node // per_node

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables that every role gets."""
        return ("DTSLURM_ROLE", *(name for role in self.others for name in role_variables(role)))


def variable_prefix(name: str) -> str:
    """Return the common beginning of a role's variables: ``DTSLURM_ROLE_ROLLOUT``."""
    return "DTSLURM_ROLE_" + name.upper().replace("-", "_")


def port_variable(name: str) -> str:
    """Return the variable that gives an instance its port of this name: ``DTSLURM_PORT_HTTP``."""
    return f"DTSLURM_PORT_{name.upper()}"


def role_variables(role: RoleSpec) -> tuple[str, ...]:
    """Return the names of the variables with the addresses of a role's instances."""
    prefix = variable_prefix(role.name)
    by_port = (f"{prefix}_PORTS_{port.upper()}" for port in role.ports)
    return (f"{prefix}_HOSTS", f"{prefix}_URLS", f"{prefix}_PORTS", *by_port)


def reference_variable(kind: str, text: str) -> str | None:
    """Return the variable of a reference such as ``${role.rollout.urls}``; None if it is malformed."""
    if kind == "port":
        return port_variable(text) if PORT_NAME.fullmatch(text) else None
    if kind == "node":
        return NODE_VARIABLES.get(text)
    match = _ROLE_REFERENCE.fullmatch(text)
    if match is None or (match[3] and match[2] != "ports"):
        return None
    return f"{variable_prefix(match[1])}_{match[2].upper()}" + (f"_{match[3].upper()}" if match[3] else "")


def quote_with_references(text: str) -> str:
    """Return an argument as one word in which the shell expands the job's values, and references to roles."""
    return quote_with_expansions(
        text,
        _ALL_REFERENCES,
        lambda match: match[2] or match[3] or reference_variable(match[4], match[5]),
    )


def has_references(text: str) -> bool:
    """Return whether `quote_with_references` replaces a part of a text."""
    return _ALL_REFERENCES.search(text) is not None


def referenced_ports(texts: Iterable[str]) -> list[str]:
    """Return the names of an instance's own ports that texts refer to, each once."""
    matches = (match for text in texts for match in REFERENCE.finditer(text) if not match[1])
    return list(dict.fromkeys(match[3] for match in matches if match[2] == "port"))


def texts_of(options: RoleOptions) -> Sequence[str]:
    """Return the texts of a role in which references are replaced."""
    return (*options.command, *options.args, *(value or "" for value in options.env.values()))
