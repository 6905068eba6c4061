"""The content of a project's ``dtslurm.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from dtslurm.model.jobs.options import JobOptions
from dtslurm.model.units import Memory, Walltime
from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Defaults(JobOptions):
    """Default options of ``submit``, which the command line overrides.

    Attributes:
        env: variables to set in the job; a variable without a value gets that of the submitting user.
        launcher_options: options of the launcher; None for an option that takes no value.
        tracking: further settings for trackers: project, group, tags, uri, mode.
    """

    mem: Memory | None = None
    time: Walltime | None = None
    total_time: Walltime | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    launcher_options: Mapping[str, str | None] = field(default_factory=dict)
    tracking: Mapping[str, str] = field(default_factory=dict)

    def written(self) -> dict[str, Any]:
        """Return the options that are set, each in its command line form.

        Sizes and times are text, mappings are tuples of ``NAME=VALUE`` (or ``NAME`` without a value).
        """
        options: dict[str, Any] = {}
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None or value in ((), {}):
                continue
            if isinstance(value, Mapping):
                value = tuple(name if text is None else f"{name}={text}" for name, text in value.items())
            elif isinstance(value, Memory | Walltime):
                value = str(value)
            options[option.name] = value
        return options


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project's file; empty if there is none.

    Attributes:
        cluster: the cluster profile to use.
        options: the ``defaults`` section.
        path: the file, None if there is none.
        origins: the origin of each value, ``"defaults.nodes": "dtslurm.yaml:4"``.
        untrusted: the values that the user must review before a job uses them, ``dtslurm.yaml:7:
            defaults.setup``.
    """

    cluster: str | None = None
    options: Defaults = field(default_factory=Defaults)
    path: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    untrusted: tuple[str, ...] = ()

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that are set, each in its command line form."""
        return self.options.written()
