"""What a user asked for, in the user's own words, before anything is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from dtslurm.model.project import Project


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The options of ``submit`` and ``render``; sizes and times still as written."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    cluster: str | None = None
    job_name: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
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
    launcher_options: tuple[str, ...] = ()
    container: str | None = None
    container_mounts: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    signal: str | None = None
    signal_before: int | None = None
    fabric_check: bool | None = None
    sbatch: tuple[str, ...] = ()
    template: str | None = None
    python: str | None = None
    run_root: str | None = None
    chdir: str | None = None
    snapshot: bool | None = None
    code_include: tuple[str, ...] = ()
    code_exclude: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    transport: str | None = None
    no_check: bool | None = None
    once: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict)

    def with_defaults(self, project: Project) -> JobRequest:
        """Return the request with the project's defaults where the user said nothing."""
        origins = {
            item.name: "command line"
            for item in fields(self)
            if getattr(self, item.name) not in (None, (), {})
        }
        values: dict[str, object] = {}
        for name, value in project.defaults.items():
            if isinstance(value, tuple):
                values[name] = (*value, *getattr(self, name))
            elif getattr(self, name) is None:
                values[name] = value
                origins[name] = str(project.path)
        return replace(self, **values, origins=origins)  # type: ignore[arg-type]
