"""What a user asked for, in the user's own words, before anything is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any

from dtslurm.model.jobs.options import JobOptions
from dtslurm.model.jobs.project import Project
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.values import dataclass

COMMAND_LINE = "command line"  # the origin of what no file says
INTERNAL = {"origins", "payload", "separate_streams", "trials"}  # no options of anybody's


@dataclass(frozen=True, kw_only=True)
class JobRequest(JobOptions):
    """The options of ``submit`` and ``render``; sizes and times still as written.

    Attributes:
        payload: files to put in the run directory, by their path in it; ``script`` may be one of them.
        trials: the tasks of the array are trials of a sweep.
        separate_streams: as in `JobSpec`.
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
    trials: Trials | None = None
    separate_streams: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)

    def with_defaults(self, project: Project) -> JobRequest:
        """Return the request with the project's defaults where the user said nothing."""
        return self.over(project.defaults, dict.fromkeys(project.defaults, str(project.path)))

    def over(self, below: Mapping[str, Any], places: Mapping[str, str]) -> JobRequest:
        """Return the request with the values of ``below`` where it has none, and before it in its lists.

        Args:
            below: values as the command line would give them, by option.
            places: where each of them is written.
        """
        unsaid = {item.name: item.default for item in fields(self) if item.name not in INTERNAL}
        origins = {
            name: self.origins.get(name, COMMAND_LINE)
            for name, default in unsaid.items()
            if getattr(self, name) != default
        }
        values: dict[str, Any] = {}
        for name, value in below.items():
            mine = getattr(self, name)
            if isinstance(value, tuple):
                values[name] = (*value, *mine)
            elif mine == unsaid[name]:
                values[name] = value
            else:
                continue
            origins.setdefault(name, places.get(name, ""))
        return replace(self, **values, origins=origins)
