"""Look at this machine and the cluster in use, and say what works."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dtslurm
from dtslurm.errors import DtslurmError, StoreError
from dtslurm.services.context import Cluster, Context
from dtslurm.services.place import run_root

_SLURM_COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol")


@dataclass(frozen=True)
class Finding:
    """One thing looked at; ``ok`` is None where it is neither good nor bad."""

    what: str
    found: str
    ok: bool | None = None
    hint: str = ""


def examine(context: Context, cluster_name: str | None) -> list[Finding]:
    """Return what was found, in the order of looking."""
    findings = [
        Finding("dtslurm", f"{dtslurm.__version__} at {Path(dtslurm.__file__).parent}"),
        Finding("python", f"{platform.python_version()} at {sys.executable}"),
        _index(context),
    ]
    try:
        cluster = context.cluster(cluster_name)
    except DtslurmError as error:
        return [*findings, Finding("cluster", error.message, ok=False, hint=error.hint)]
    findings.append(Finding("cluster", f"{cluster.name} ({cluster.chosen_by})", ok=True))
    findings += _run_root(context, cluster)
    findings += _queue(context, cluster)
    return findings


def _index(context: Context) -> Finding:
    try:
        count = len(context.index.run_dirs(limit=1_000_000))
    except StoreError as error:
        return Finding("index of runs", error.message, ok=False, hint=error.hint)
    return Finding("index of runs", f"{count} runs", ok=True)


def _run_root(context: Context, cluster: Cluster) -> Iterator[Finding]:
    written = context.env.get("DTSLURM_RUN_ROOT") or cluster.profile.paths.run_root
    try:
        root = Path(run_root(context, written))
    except DtslurmError as error:
        yield Finding("run root", error.message, ok=False)
        return
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    yield Finding("run root", f"{root} ({free / 2**30:.1f} GiB free)", ok=free > 2**20)


def _queue(context: Context, cluster: Cluster) -> Iterator[Finding]:
    if cluster.profile.scheduler == "slurm":
        for command in _SLURM_COMMANDS:
            path = shutil.which(command, path=context.env.get("PATH"))
            yield Finding(command, path or "not on PATH", ok=path is not None)
    try:
        profile = context.live_cluster(cluster.name).profile
    except DtslurmError as error:
        yield Finding("scheduler", error.message, ok=False, hint=error.hint)
        return
    kinds = ", ".join(sorted(profile.node_types)) or "no node types known"
    yield Finding("scheduler", f"answers; {kinds}", ok=True)
