"""The user's options as written, before they are validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any

from dtslurm.model.jobs.options import JobOptions, Placement
from dtslurm.model.jobs.project import Project
from dtslurm.model.jobs.roles import Roles
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.values import dataclass

COMMAND_LINE = "command line"  # the origin of values that no file sets
INTERNAL = {
    "allocation",
    "idle_limit",
    "origins",
    "payload",
    "roles",
    "separate_streams",
    "trials",
}  # fields that are no options of the user's


@dataclass(frozen=True, kw_only=True)
class JobRequest(JobOptions):
    """The options of ``submit`` and ``render``; sizes and times are still text.

    Attributes:
        payload: the content of files to put in the run directory, by their path in it; ``script`` may be one
            of them.
        roles: the roles that run beside the script; set by a job file only.
        trials: the trials of a sweep, which are the tasks of the job array.
        separate_streams, idle_limit: see `JobSpec`.
        allocation: the id of the user's running job in which the run starts; None for a job of its own.
        origins: where the value of an option was set, by option.
    """

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    cluster: str | None = None
    mem: str | None = None
    time: str | None = None
    total_time: str | None = None
    env: tuple[str, ...] = ()
    launcher_options: tuple[str, ...] = ()
    tracking: tuple[str, ...] = ()
    transport: str | None = None
    no_check: bool | None = None
    once: str | None = None
    payload: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    roles: Roles | None = None
    trials: Trials | None = None
    separate_streams: bool = False
    allocation: str | None = None
    idle_limit: int | None = None
    origins: Mapping[str, str] = field(default_factory=dict)

    def with_defaults(self, project: Project) -> JobRequest:
        """Return the request with the project's defaults for the options that the user did not set."""
        defaults = project.defaults
        if self.idle_limit is not None:  # the job runs no script, to which the other options would apply
            names = {"cluster", "mem", "time", "sbatch", *(item.name for item in fields(Placement))}
            defaults = {name: value for name, value in defaults.items() if name in names}
        return self.over(defaults, dict.fromkeys(project.defaults, str(project.path)))

    def over(self, base: Mapping[str, Any], places: Mapping[str, str]) -> JobRequest:
        """Return the request with values from ``base`` for unset options, and prepended to its lists.

        Args:
            base: values of the type that the command line produces, by option.
            places: where each value was set, by option.
        """
        defaults = {item.name: item.default for item in fields(self) if item.name not in INTERNAL}
        origins = {
            name: self.origins.get(name, COMMAND_LINE)
            for name, default in defaults.items()
            if getattr(self, name) != default
        }
        values: dict[str, Any] = {}
        for name, value in base.items():
            own_value = getattr(self, name)
            if isinstance(value, tuple):
                values[name] = (*value, *own_value)
            elif own_value == defaults[name]:
                values[name] = value
            else:
                continue
            origins.setdefault(name, places.get(name, ""))
        return replace(self, **values, origins=origins)
