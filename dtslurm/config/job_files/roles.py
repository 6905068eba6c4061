"""Roles in a job file: the main role's keys are those of the job, every other role is read by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from dtslurm import assets
from dtslurm.config import chain, decode, files, strict_yaml
from dtslurm.config.tree import MappingEntry, Problem, Scalar, Table
from dtslurm.model.jobs import roles
from dtslurm.model.jobs.job_file import Work
from dtslurm.model.jobs.roles import RoleOptions, Roles, RoleSpec
from dtslurm.model.values import dataclass
from dtslurm.suggestions import suggest_name

KEY = "roles"
_READINESS_KINDS = ("http", "tcp", "line", "file")
_AFTER = re.compile(rf"({roles.NAME.pattern})(?: +(ready|started))?")


@dataclass(frozen=True)
class RoleTables:
    """The roles as written.

    Attributes:
        main: the name of the main role.
        entry: the entry ``roles`` of the file.
        main_table: the keys of the main role; ``after`` is its only key that is not an option of the job.
        tables: the tables of the other roles, with the keys of the role that each extends.
    """

    main: str
    entry: MappingEntry
    main_table: Table
    tables: Mapping[str, Table]


def split(root: Table, problems: list[Problem]) -> tuple[Table, RoleTables | None]:
    """Separate the roles from a job file.

    Returns:
        The file with the main role's keys in place of ``roles``, and the roles; None if it has none.
    """
    entry = root.entries.get(KEY)
    if entry is None:
        return root, None
    rest = root._replace(entries={key: value for key, value in root.entries.items() if key != KEY})
    if not isinstance(entry.value, Table) or not entry.value.entries:
        problems.append(Problem(entry.source, entry.line, KEY, "should be a mapping of names to roles"))
        return rest, None
    if (stages := root.entries.get("stages")) is not None:
        problems.append(
            Problem(stages.source, stages.line, "stages", "a file with roles has one job and no stages")
        )
        return rest, None
    tables: dict[str, Table] = {}
    for name, role in entry.value.entries.items():
        problem = _find_name_problem(name, tables)
        if problem:
            problems.append(Problem(role.source, role.line, f"{KEY}.{name}", problem))
        elif not isinstance(role.value, Table):
            problems.append(
                Problem(role.source, role.line, f"{KEY}.{name}", "should be a mapping of keys to values")
            )
        else:
            tables[name] = role.value._replace(line=role.line)
    main = _find_main(entry, tables, problems)
    if main is None:
        return rest, None
    main_table = tables.pop(main)
    job_keys = {key: value for key, value in main_table.entries.items() if key != "after"}
    merged = chain.merge(rest, main_table._replace(entries=job_keys))
    extended = {name: _extend(name, table, problems) for name, table in tables.items()}
    return merged, RoleTables(main, entry, main_table, extended)


def _find_name_problem(name: str, tables: Mapping[str, Table]) -> str:
    if not roles.NAME.fullmatch(name):
        return "a role name may contain only letters, digits, _ and -, and begins with a letter"
    prefix = roles.variable_prefix(name)
    for other in tables:
        if roles.variable_prefix(other) == prefix:
            return f"is too similar to {other!r}: both would set {prefix}_HOSTS"
    return ""


def _find_main(entry: MappingEntry, tables: Mapping[str, Table], problems: list[Problem]) -> str | None:
    """Return the name of the main role; none or several are a problem."""
    names = [name for name, table in tables.items() if "script" in table.entries]
    if len(names) == 1:
        return names[0]
    if problems and not names:
        return None  # the main role may be the one that could not be read
    message = (
        f"{' and '.join(names)} are main roles, as each has a script: only one may have a script, and all "
        "others have a command"
        if names
        else "no role is the main role: one role needs a script, and its end ends the run"
    )
    problems.append(Problem(entry.source, entry.line, KEY, message))
    return None


def _extend(name: str, table: Table, problems: list[Problem]) -> Table:
    """Return a role's table over that of the ready-made role that it extends."""
    entry = table.entries.get("extends")
    if entry is None:
        return table
    own = table._replace(entries={key: value for key, value in table.entries.items() if key != "extends"})
    folder = assets.templates() / "roles"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    base = entry.value.text or "" if isinstance(entry.value, Scalar) else ""
    if base not in names:
        suggestion = suggest_name(base, names) or f" (available: {', '.join(names)})"
        message = f"there is no ready-made role {base!r}{suggestion}"
        problems.append(Problem(entry.source, entry.line, f"{KEY}.{name}.extends", message))
        return own
    path = folder / f"{base}.yaml"
    base_table, base_problems = strict_yaml.parse(files.read(path, path.name), path.name)
    problems += base_problems
    return chain.merge(base_table, own)._replace(source=table.source, line=table.line)


def read(
    tables: RoleTables, substituted: Mapping[str, Table], main: Work, problems: list[Problem]
) -> Roles | None:
    """Return the checked roles; None after a problem.

    Args:
        substituted: the tables of the other roles, with the file's variables substituted.
        main: the keys of the main role.
    """
    options: dict[str, RoleOptions] = {}
    count = len(problems)
    for name, table in substituted.items():
        role_options, role_problems = decode.read(RoleOptions, table)
        problems += [problem._replace(key=f"{KEY}.{name}.{problem.key}") for problem in role_problems]
        if role_options is not None:
            options[name] = role_options
    if len(problems) > count:
        return None
    checker = _Checker(tables, substituted, options, problems)
    other_roles = tuple(checker.build(name) for name in options)
    main_after = checker.main_order(other_roles)
    for problem in _find_shared_variables(other_roles):
        checker.report(problem[0], "ports", problem[1])
    roles_by_name = {role.name: role for role in other_roles}
    for key, texts in (("args", main.args), ("env", [value or "" for value in main.env.values()])):
        checker.check_references(tables.main, key, texts, roles_by_name, ())
    checker.check_cycles(other_roles, main_after)
    return None if len(problems) > count else Roles(main=tables.main, after=main_after, others=other_roles)


def _find_shared_variables(other_roles: tuple[RoleSpec, ...]) -> Iterator[tuple[str, str]]:
    """Yield (role, message) for roles and ports whose variables would have the same name."""
    role_by_variable: dict[str, str] = {}
    for role in other_roles:
        for variable in roles.role_variables(role):
            other = role_by_variable.setdefault(variable, role.name)
            if other != role.name:
                yield role.name, f"would set {variable}, which is a variable of {other!r}; rename one of them"


class _Checker:
    """Checks the roles of one file, and records the problems with their locations."""

    def __init__(
        self,
        tables: RoleTables,
        substituted: Mapping[str, Table],
        options: Mapping[str, RoleOptions],
        problems: list[Problem],
    ) -> None:
        self._tables, self._substituted, self._options = tables, substituted, options
        self._problems = problems

    def report(self, name: str, key: str, message: str) -> None:
        """Record a problem at a key of a role, or at the role if the file does not have the key."""
        table = self._tables.main_table if name == self._tables.main else self._substituted[name]
        entry = table.entries.get(key.partition(".")[0])
        is_own = entry is not None and entry.source == table.source  # not of a ready-made role
        line = entry.line if entry is not None and is_own else table.line
        self._problems.append(Problem(table.source, line, f"{KEY}.{name}.{key}", message))

    def build(self, name: str) -> RoleSpec:
        """Return a role with the values that follow from its keys."""
        options = self._options[name]
        ports = self._choose_ports(name, options)
        self._check_command(name, options)
        self._check_readiness(name, options, ports)
        self._check_metrics(name, options, ports)
        self._check_component(name, options)
        choose = self._choose_nodes if options.nodes_per_instance == 1 else self._divide_nodes
        nodes, on, instances = choose(name, options)
        role = RoleSpec(
            name=name,
            options=options,
            nodes=nodes,
            on=on,
            instances=instances,
            ports=ports,
            restart=self._read_restart(name, options),
            after=tuple(self._read_after(name, options.after)),
        )
        described = {other: self._describe(other) for other in self._options}
        self.check_references(name, "command", roles.texts_of(options), described, ports)
        return role

    def _describe(self, name: str) -> RoleSpec:
        """Return a role with its ports only, for the checks of references."""
        options = self._options[name]
        ports = self._port_names(options)
        return RoleSpec(name=name, options=options, nodes=0, on="", instances=1, ports=ports, restart="")

    def _check_command(self, name: str, options: RoleOptions) -> None:
        if not options.command:
            self.report(name, "command", "is missing: give a list, such as [vllm, serve, MODEL]")
        elif not options.command[0]:
            self.report(name, "command", "begins with an empty word")
        for variable, value in options.env.items():
            if value is None:
                self.report(name, "env", f"{variable} needs a value; secrets of the job reach all roles")

    def _port_names(self, options: RoleOptions) -> tuple[str, ...]:
        if options.ports is not None:
            return options.ports
        return tuple(roles.referenced_ports(roles.texts_of(options))) or (roles.DEFAULT_PORT,)

    def _choose_ports(self, name: str, options: RoleOptions) -> tuple[str, ...]:
        ports = self._port_names(options)
        for port in ports:
            if not roles.PORT_NAME.fullmatch(port):
                self.report(name, "ports", f"{port!r}: a port name may contain only letters, digits and _")
        folded = [port.upper() for port in ports]
        if len(set(folded)) < len(folded):
            self.report(name, "ports", "contains a name twice")
        return ports

    def _check_readiness(self, name: str, options: RoleOptions, ports: tuple[str, ...]) -> None:
        ready = options.ready
        if ready is None:
            return
        given = [kind for kind in _READINESS_KINDS if getattr(ready, kind) is not None]
        if len(given) != 1:
            problem = f"has {' and '.join(given)}" if given else "has no check"
            self.report(name, "ready", f"{problem}: give one of {', '.join(_READINESS_KINDS)}")
            return
        if ready.by_port and not ports:
            self.report(name, "ready", f"{given[0]} needs a port, and the role has none (ports)")
        if ready.http is not None and not ready.http.startswith("/"):
            self.report(name, "ready.http", f"should be a path such as /health, not {ready.http!r}")
        if ready.tcp is not None and ready.tcp != "true" and ready.tcp not in ports:
            self.report(
                name, "ready.tcp", f"should be true or a port's name ({', '.join(ports)}), not {ready.tcp!r}"
            )
        if ready.line is not None:
            try:
                re.compile(ready.line)
            except re.error as error:
                self.report(name, "ready.line", f"is not a regular expression: {error}")
        if ready.file is not None and ready.file.startswith("/"):
            self.report(name, "ready.file", f"should be a path in the run directory, not {ready.file!r}")
        if ready.silence is not None and not ready.by_port:
            self.report(name, "ready.silence", f"has no effect: {given[0]} is not checked once it has passed")

    def _check_metrics(self, name: str, options: RoleOptions, ports: tuple[str, ...]) -> None:
        if options.metrics is None:
            return
        if not options.metrics.startswith("/"):
            self.report(name, "metrics", f"should be a path such as /metrics, not {options.metrics!r}")
        if not ports:
            self.report(name, "metrics", "needs a port, and the role has none (ports)")

    def _check_component(self, name: str, options: RoleOptions) -> None:
        for key, value in (("partition", options.partition), ("node_type", options.node_type)):
            if value is not None and options.on:
                self.report(
                    name,
                    key,
                    f"a role that shares the nodes of {options.on!r} has none of its own; remove {key}",
                )
            elif value is not None and not value:
                self.report(name, key, "is empty")

    def _choose_nodes(self, name: str, options: RoleOptions) -> tuple[int, str, int]:
        """Return the role's own nodes, the role whose nodes it shares, and the number of instances."""
        on = options.on or ""
        names = [self._tables.main, *(other for other in self._options if other != name)]
        if on and on not in names:
            self.report(name, "on", f"there is no role {on!r}{suggest_name(on, names)}")
            return 0, "", 1
        if on and on != self._tables.main and self._options[on].on:
            self.report(name, "on", f"{on!r} has no nodes of its own; name {self._options[on].on!r}")
        nodes = options.nodes
        if on and nodes:
            self.report(name, "nodes", f"a role that shares the nodes of {on!r} has none of its own; write 0")
            nodes = 0
        if not on and nodes == 0:
            self.report(name, "nodes", "is 0: name the role whose nodes this role shares with on")
        nodes = 0 if on else 1 if nodes is None else nodes
        if options.per and options.instances is not None:
            self.report(name, "instances", "per: node already gives the number of instances")
        if options.instances is not None:
            if options.instances > roles.MAX_INSTANCES:
                self.report(name, "instances", f"should be at most {roles.MAX_INSTANCES}")
            if options.instances < nodes:
                self.report(
                    name,
                    "instances",
                    f"{options.instances} of {nodes} nodes are used: give nodes_per_instance",
                )
            return nodes, on, options.instances
        if options.per and on and on != self._tables.main:
            return nodes, on, self._options[on].nodes or 1
        # On the main role's nodes, 0 instances stand for one on each of its nodes.
        return nodes, on, (0 if options.per and on else 1) if on else max(nodes, 1)

    def _divide_nodes(self, name: str, options: RoleOptions) -> tuple[int, str, int]:
        """Return the same as `_choose_nodes` for a role whose instances have several nodes each."""
        size = options.nodes_per_instance
        nodes = size if options.nodes is None else options.nodes
        if options.on or options.per:
            key = "on" if options.on else "per"
            self.report(
                name, "nodes_per_instance", f"needs nodes of the role's own: give nodes instead of {key}"
            )
        elif nodes < size or nodes % size:
            self.report(name, "nodes", f"{nodes} is no multiple of nodes_per_instance ({size})")
        elif options.instances not in {None, nodes // size}:
            self.report(name, "instances", f"follows from nodes and nodes_per_instance: {nodes // size}")
        elif options.gpus is not None:
            self.report(name, "gpus", "an instance with several nodes has all GPUs of its nodes")
        else:
            return nodes, "", nodes // size
        return 1, "", 1

    def _read_restart(self, name: str, options: RoleOptions) -> str:
        text = options.restart
        if text in {roles.ALONE, roles.NEVER}:
            return text
        if text in {roles.WITH_MAIN, f"with {self._tables.main}"}:
            return roles.WITH_MAIN
        self.report(name, "restart", f"should be alone, with {self._tables.main} or never, not {text!r}")
        return roles.ALONE

    def _read_after(self, name: str, texts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        names = [self._tables.main, *self._options]
        for text in texts:
            match = _AFTER.fullmatch(text.strip())
            if match is None:
                self.report(name, "after", f"{text!r}: write NAME, NAME ready or NAME started")
            elif match[1] not in names:
                self.report(name, "after", f"there is no role {match[1]!r}{suggest_name(match[1], names)}")
            elif match[1] == name:
                self.report(name, "after", "a role cannot come after itself")
            else:
                yield match[1], match[2] or "ready"

    def main_order(self, other_roles: tuple[RoleSpec, ...]) -> tuple[tuple[str, str], ...]:
        """Return which roles the main role waits for: those that it names, by default all."""
        main = self._tables.main
        entry = self._tables.main_table.entries.get("after")
        if entry is None:
            later = {role.name for role in other_roles if any(first == main for first, _ in role.after)}
            return tuple((role.name, "ready") for role in other_roles if role.name not in later)
        options, problems = decode.read(
            RoleOptions, self._tables.main_table._replace(entries={"after": entry})
        )
        self._problems += [problem._replace(key=f"{KEY}.{main}.{problem.key}") for problem in problems]
        return () if options is None else tuple(self._read_after(main, options.after))

    def check_cycles(
        self, other_roles: tuple[RoleSpec, ...], main_after: tuple[tuple[str, str], ...]
    ) -> None:
        """Record a cycle of roles that wait for each other."""
        order = {role.name: [first for first, _ in role.after] for role in other_roles}
        order[self._tables.main] = [first for first, _ in main_after]
        try:
            TopologicalSorter(order).prepare()
        except CycleError as error:
            cycle = " → ".join(reversed(error.args[1]))
            name = next(role for role in error.args[1] if order[role])
            self.report(name, "after", f"the roles wait for each other: {cycle}")

    def check_references(
        self,
        name: str,
        key: str,
        texts: Sequence[str],
        other_roles: Mapping[str, RoleSpec],
        ports: tuple[str, ...],
    ) -> None:
        """Record references to roles and ports that do not exist."""
        for text in texts:
            for match in roles.REFERENCE.finditer(text):
                if not match[1] and (problem := _find_reference_problem(match, name, other_roles, ports)):
                    self.report(name, key, f"{match[0]}: {problem}")


def _find_reference_problem(
    match: re.Match[str], name: str, other_roles: Mapping[str, RoleSpec], ports: tuple[str, ...]
) -> str:
    kind, text = match[2], match[3]
    if kind == "node":
        return _find_node_reference_problem(text, is_main=name not in other_roles)
    if kind == "port":
        if text in ports:
            return ""
        suggestion = suggest_name(text, ports) or f" (ports: {', '.join(ports) or 'none'})"
        return f"{name} has no port {text!r}{suggestion}"
    role, _, rest = text.partition(".")
    if role == name:
        return "a role cannot refer to its own addresses"
    if role not in other_roles:
        return f"there is no role {role!r} with addresses{suggest_name(role, list(other_roles))}"
    if roles.reference_variable(kind, text) is None:
        return f"write role.{role}.hosts, role.{role}.urls or role.{role}.ports"
    port = rest.partition(".")[2]
    if port and port not in other_roles[role].ports:
        return f"{role} has no port {port!r} (ports: {', '.join(other_roles[role].ports) or 'none'})"
    return ""


def _find_node_reference_problem(reference: str, *, is_main: bool) -> str:
    if is_main:
        return "the main role has the variables of its launcher instead, such as $RANK"
    known = ", ".join(f"${{node.{name}}}" for name in roles.NODE_VARIABLES)
    return "" if reference in roles.NODE_VARIABLES else f"there are {known}"
