"""Converts the JSON of ``roles.json``, which the supervisor of a run with several roles writes."""

from __future__ import annotations

from typing import Any

from dtslurm.model.jobs.roles import NAME, PORT_NAME
from dtslurm.model.runs.roles import InstanceState, RoleState
from dtslurm.worker.lib.json_records import finite_number, whole_number

FILE = "roles.json"
_STATES = {"waiting", "starting", "ready", "unresponsive", "ended", "failed", "removed"}
_MOST = 10_000  # instances of a role
_MAX_TEXT = 200
_MOST_COMPONENTS = 128  # of a heterogeneous job in Slurm
_LARGEST_PORT = 65535
_LOADS = ("running", "waiting", "requests_per_s")


def parse_roles(roles: Any) -> tuple[RoleState, ...]:
    """Return the state of each role, without entries that are malformed; empty if there are none."""
    states = []
    for values in roles if isinstance(roles, list) else ():
        if isinstance(values, dict) and isinstance(name := values.get("name"), str) and NAME.fullmatch(name):
            instances = values.get("instances")
            entries = instances[:_MOST] if isinstance(instances, list) else []
            component = whole_number(values.get("component")) or 0
            states.append(
                RoleState(
                    name=name,
                    instances=tuple(filter(None, map(_read_instance, entries))),
                    component=component if 0 <= component < _MOST_COMPONENTS else 0,
                )
            )
    return tuple(states)


def _read_instance(values: Any) -> InstanceState | None:
    if not isinstance(values, dict):
        return None
    number, start, restarts = (whole_number(values.get(key)) for key in ("instance", "start", "restarts"))
    if number is None or not 0 <= number < _MOST:
        return None
    load = values.get("load")
    numbers = {key: finite_number(load.get(key)) for key in _LOADS} if isinstance(load, dict) else {}
    return InstanceState(
        number=number,
        state=state if (state := values.get("state")) in _STATES else "waiting",
        node=_read_text(values.get("node")),
        start=-1 if start is None else start,
        restarts=max(0, restarts or 0),
        changed=finite_number(values.get("changed")),
        ports=_read_ports(values.get("ports")),
        url=_read_text(values.get("url")),
        load={key: value for key, value in numbers.items() if value is not None},
    )


def _read_ports(value: object) -> dict[str, int]:
    ports = value if isinstance(value, dict) else {}
    numbers = {name: whole_number(ports[name]) for name in ports if isinstance(name, str)}
    return {
        name: number
        for name, number in numbers.items()
        if number is not None and 0 < number <= _LARGEST_PORT and PORT_NAME.fullmatch(name)
    }


def _read_text(value: object) -> str:
    return value[:_MAX_TEXT] if isinstance(value, str) and value.isprintable() else ""
