"""The addresses of a run's other roles, as its supervisor keeps them up to date."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from dtslurm.errors import RequestInvalid

_FILE = "roles.json"
_READ_S = 0.5  # the file is read at most so often
_POLL_S = 0.2


@dataclass(frozen=True)
class RoleInstance:
    """An instance of a role.

    Attributes:
        state: ``ready``, ``starting``, ``unresponsive``, ``waiting``, ``ended`` or ``failed``.
        start: the number of its current start; it changes when the instance is restarted.
        url: the URL of its first port, empty while it is unknown.
        ports: its ports by name.
    """

    number: int
    state: str
    start: int
    host: str
    url: str
    ports: dict[str, int]


class Role:
    """Another role of this run, such as the inference servers of a trainer.

    ::

        rollout = train.Role("rollout")
        rollout.wait()
        for url in rollout.urls:
            ...

    Args:
        name: the role's name in the job file.
        run_dir: the run directory; by default that of this process.

    Raises:
        RequestInvalid: this process does not belong to a run, or the run has no such role.
    """

    def __init__(self, name: str, run_dir: str | None = None) -> None:
        folder = run_dir or os.environ.get("DTSLURM_RUN_DIR")
        if not folder:
            raise RequestInvalid(
                [f"role {name!r}: this process does not belong to a run of dtslurm"],
                hint="submit the job file that has the role with dtslurm submit",
            )
        self.name = name
        self._path = Path(folder) / _FILE
        self._read_at = float("-inf")
        self._instances: list[RoleInstance] = []
        names = [str(role.get("name")) for role in self._read_roles()]
        if names and name not in names:
            raise RequestInvalid([f"the run has no role {name!r} beside this one, only {', '.join(names)}"])

    @property
    def instances(self) -> list[RoleInstance]:
        """All instances, as of at most half a second ago."""
        now = time.monotonic()
        if now - self._read_at >= _READ_S:
            self._read_at = now
            for role in self._read_roles():
                entries = role.get("instances")
                if role.get("name") == self.name and isinstance(entries, list):
                    self._instances = [
                        _read_instance(values)
                        for values in entries
                        if isinstance(values, dict) and values.get("state") != "removed"
                    ]
        return self._instances

    @property
    def urls(self) -> list[str]:
        """The URLs of the instances that are ready now."""
        return [instance.url for instance in self.instances if instance.state == "ready" and instance.url]

    def wait(self, timeout: float = 600.0, min_count: int | None = None) -> list[str]:
        """Wait until instances are ready, and return their URLs.

        Args:
            timeout: seconds to wait at most.
            min_count: the number of instances that suffices; by default all.

        Raises:
            TimeoutError: too few instances were ready in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            instances = self.instances
            ready = [instance for instance in instances if instance.state == "ready"]
            if instances and len(ready) >= (len(instances) if min_count is None else min_count):
                return [instance.url for instance in ready]
            if time.monotonic() >= deadline:
                states = ", ".join(f"{self.name}-{item.number} {item.state}" for item in instances)
                state_text = states or "it has not started"
                raise TimeoutError(f"role {self.name!r} was not ready within {timeout:.0f} s: {state_text}")
            time.sleep(_POLL_S)

    def _read_roles(self) -> list[dict[str, object]]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # the supervisor has not written it yet
            return []
        roles = document.get("roles") if isinstance(document, dict) else None
        return [role for role in roles if isinstance(role, dict)] if isinstance(roles, list) else []


def _read_instance(values: dict[str, object]) -> RoleInstance:
    ports = values.get("ports")
    return RoleInstance(
        number=_read_number(values.get("instance")),
        state=str(values.get("state")),
        start=_read_number(values.get("start")),
        host=str(values.get("host") or ""),
        url=str(values.get("url") or ""),
        ports={str(name): port for name, port in ports.items()} if isinstance(ports, dict) else {},
    )


def _read_number(value: object) -> int:
    return value if isinstance(value, int) else 0
