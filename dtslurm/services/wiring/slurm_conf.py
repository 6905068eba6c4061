"""Where this machine's ``slurm.conf`` is, and what it says. Reading it costs Slurm nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

# Debian's, and where slurmd or sackd keep the file that they fetched
_PLACES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf",
    "/var/run/slurm/conf/slurm.conf",
)


def is_configured(sbatch: str, env: Mapping[str, str]) -> bool:
    """Tell whether Slurm's commands know a cluster, without asking it anything.

    A distribution's sbatch looks in /etc, and in /run where slurmd or sackd fetched the file; one
    installed elsewhere has its own idea of where, and is trusted.
    """
    if env.get("SLURM_CONF") or env.get("SLURM_CONF_SERVER"):
        return True
    return not sbatch.startswith(("/usr/bin/", "/bin/")) or any(map(os.path.exists, _PLACES))


def cluster_name(env: Mapping[str, str]) -> str:
    """Return ClusterName of this machine's slurm.conf; an empty word where that cannot be read."""
    from dtslurm.slurm import parse_scontrol  # most commands need no ClusterName

    for path in _paths(env):
        with contextlib.suppress(OSError):
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            values = {key.lower(): value for key, value in parse_scontrol.config(text).items()}
            return values.get("clustername", "").partition("#")[0].strip()
    return ""


def _paths(env: Mapping[str, str]) -> list[str]:
    if env.get("SLURM_CONF"):
        return [env["SLURM_CONF"]]
    sbatch = shutil.which("sbatch", path=env.get("PATH"))
    prefix = Path(os.path.realpath(sbatch)).parent.parent if sbatch else Path("/")
    return [str(prefix / "etc/slurm.conf"), str(prefix / "etc/slurm/slurm.conf"), *_PLACES]
