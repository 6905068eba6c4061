"""What a project's ``dtslurm.yaml`` holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dtslurm.model.units import Memory, Walltime


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Options of ``submit`` that hold where the command line says nothing, by their long names.

    Attributes:
        env: variables to set in the job; one without a value takes the submitting user's.
        signal_before: seconds before the time limit at which training code gets ``signal``.
        launcher_options: options of the launcher's own.
        setup: shell lines to run before training.
        sbatch: options passed on to sbatch unread, as ``--option=value``.
        snapshot: whether the job runs from a copy of the code as it is when it is submitted.
        code_include, code_exclude: what the copy holds beyond or without what git tracks, as in .gitignore.
        secrets: names of variables whose values reach the job in a file of its run directory.
    """

    job_name: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: Memory | None = None
    time: Walltime | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    array: str | None = None
    dependency: str | None = None
    node_type: str | None = None
    launcher: str | None = None
    launcher_options: Mapping[str, str] = field(default_factory=dict)
    container: str | None = None
    container_mounts: tuple[str, ...] = ()
    fabric_check: bool | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    signal: str | None = None
    signal_before: int | None = None
    sbatch: tuple[str, ...] = ()
    template: str | None = None
    python: str | None = None
    run_root: str | None = None
    chdir: str | None = None
    snapshot: bool | None = None
    code_include: tuple[str, ...] = ()
    code_exclude: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project's file; all empty where there is none.

    Attributes:
        cluster: the cluster profile to use.
        options: the ``defaults`` section.
        path: the file, None where there is none.
        origins: where each value came from, ``"defaults.nodes": "dtslurm.yaml:4"``.
    """

    cluster: str | None = None
    options: Defaults = field(default_factory=Defaults)
    path: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that are set, each as the command line would give it.

        Sizes and times are text, mappings tuples of ``NAME=VALUE`` (or ``NAME`` for one without a value).
        """
        given: dict[str, Any] = {}
        for item in fields(self.options):
            value = getattr(self.options, item.name)
            if value is None or value in ((), {}):
                continue
            if isinstance(value, Mapping):
                value = tuple(name if text is None else f"{name}={text}" for name, text in value.items())
            elif isinstance(value, Memory | Walltime):
                value = str(value)
            given[item.name] = value
        return given
