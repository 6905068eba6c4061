"""What a project's ``dtslurm.yaml`` holds."""

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
    """Options of ``submit`` that hold where the command line says nothing.

    Attributes:
        env: variables to set in the job; one without a value takes the submitting user's.
        launcher_options: options of the launcher; without a value, one that takes none.
        tracking: what trackers are told besides: project, group, tags, uri, mode.
    """

    mem: Memory | None = None
    time: Walltime | None = None
    total_time: Walltime | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    launcher_options: Mapping[str, str | None] = field(default_factory=dict)
    tracking: Mapping[str, str] = field(default_factory=dict)

    def written(self) -> dict[str, Any]:
        """Return what is set, each as the command line would give it.

        Sizes and times are text, mappings tuples of ``NAME=VALUE`` (or ``NAME`` for one without a value).
        """
        given: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None or value in ((), {}):
                continue
            if isinstance(value, Mapping):
                value = tuple(name if text is None else f"{name}={text}" for name, text in value.items())
            elif isinstance(value, Memory | Walltime):
                value = str(value)
            given[item.name] = value
        return given


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project's file; all empty where there is none.

    Attributes:
        cluster: the cluster profile to use.
        options: the ``defaults`` section.
        path: the file, None where there is none.
        origins: where each value came from, ``"defaults.nodes": "dtslurm.yaml:4"``.
        untrusted: what the user must look through before a job has it, ``dtslurm.yaml:7: defaults.setup``.
    """

    cluster: str | None = None
    options: Defaults = field(default_factory=Defaults)
    path: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    untrusted: tuple[str, ...] = ()

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that are set, each as the command line would give it."""
        return self.options.written()
