"""The content of a job file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.jobs.project import Defaults
from dtslurm.model.jobs.roles import RoleOptions
from dtslurm.model.jobs.sweep import Sweep
from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Work(Defaults):
    """The options of ``submit``, and the script to run.

    Attributes:
        script: the training script, an executable, or a module name if ``module`` is true.
        args: the script's arguments; arguments on the command line follow them.
        sweep: the values of variables to run the script with.
    """

    script: str | None = None
    args: tuple[str, ...] = ()
    module: bool = False
    no_check: bool | None = None
    sweep: Sweep | None = None


@dataclass(frozen=True, kw_only=True)
class Stage(Work):
    """One of several jobs that follow each other; keys that it lacks have the values at the top of the file.

    Attributes:
        needs: the stages that must have succeeded before it starts, ``afterany:NAME`` for one that must only
            be over.
    """

    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RoleKeys(RoleOptions, Work):
    """What runs beside other roles in one job; the role with a script is the main role, and has all keys of a
    job file. Every other role has a command.
    """

    extends: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobFile(Work):
    """A job written down: the options of ``submit``, and what it runs.

    Attributes:
        variables: values that stand elsewhere in the file as ``${name}``; ``--set`` gives others.
        stages: jobs that follow each other, by name.
        roles: what runs together in one job, by name.
    """

    cluster: str | None = None
    transport: str | None = None
    once: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    stages: Mapping[str, Stage] = field(default_factory=dict)
    roles: Mapping[str, RoleKeys] = field(default_factory=dict)
