"""Finds and reads this machine's ``slurm.conf``. Neither sends a request to Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

# Debian's paths, and those where slurmd or sackd keep the file that they fetched
_DEFAULT_PATHS = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/var/run/slurm/conf/slurm.conf",
)


def is_configured(sbatch: str, env: Mapping[str, str]) -> bool:
    """Return whether Slurm's commands know a cluster, without a request to Slurm.

    A distribution's sbatch reads slurm.conf in /etc, or in /run where slurmd or sackd fetched the file. An
    sbatch that is installed elsewhere has its own search path, and counts as configured.
    """
    if env.get("SLURM_CONF") or env.get("SLURM_CONF_SERVER"):
        return True
    return not sbatch.startswith(("/usr/bin/", "/bin/")) or any(map(os.path.exists, _DEFAULT_PATHS))


def cluster_name(env: Mapping[str, str]) -> str:
    """Return ClusterName of this machine's slurm.conf; an empty string if the file cannot be read."""
    from dtslurm.slurm import parse_scontrol  # imported late: most commands need no ClusterName

    for path in _candidate_paths(env):
        with contextlib.suppress(OSError):
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            values = {key.lower(): value for key, value in parse_scontrol.config(text).items()}
            return values.get("clustername", "").partition("#")[0].strip()
    return ""


def _candidate_paths(env: Mapping[str, str]) -> list[str]:
    if env.get("SLURM_CONF"):
        return [env["SLURM_CONF"]]
    sbatch = shutil.which("sbatch", path=env.get("PATH"))
    prefix = Path(os.path.realpath(sbatch)).parent.parent if sbatch else Path("/")
    return [str(prefix / "etc/slurm.conf"), str(prefix / "etc/slurm/slurm.conf"), *_DEFAULT_PATHS]
