"""What the user's accounts and QOS allow: asked of accounting in the preflight, kept for a day."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from dtslurm.errors import StoreError
from dtslurm.model.jobs.job import Submission
from dtslurm.model.own_files import read_own_file
from dtslurm.scheduler.slurm_checks import association_problems
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import cache_path
from dtslurm.slurm import commands
from dtslurm.slurm.parse_sacctmgr import associations
from dtslurm.slurm.parse_scontrol import config

_KEPT_S = 86400.0
_MARK = "association="

# For a shell that has other things to ask, too. Where accounting does not answer, nothing is known.
LOOK = f"""
{{
  timeout 10 {" ".join(commands.show_config())} | grep AccountingStorageEnforce
  timeout 10 {" ".join(commands.show_associations('"$(id -un)"'))}
}} 2>/dev/null </dev/null | sed 's/^/{_MARK}/'
"""


def kept(context: Context, cluster: ActiveCluster) -> str | None:
    """Return what accounting said of the user in the last day, None if it must be asked."""
    try:
        known = json.loads(read_own_file(_path(context, cluster)))
        fresh = 0 <= context.clock() - known["seen_at"] < _KEPT_S
        return str(known["said"]) if fresh else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep_limits(context: Context, cluster: ActiveCluster, output: str) -> str:
    """Return what accounting said in the output of `LOOK`, and keep it."""
    lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    said = "\n".join(lines)
    if associations(said):
        data = json.dumps({"said": said, "seen_at": context.clock()}).encode()
        with contextlib.suppress(StoreError):  # it is asked again next time
            context.transport.put(data, str(_path(context, cluster)))
    return said


def problems(context: Context, cluster: ActiveCluster, submission: Submission, said: str) -> list[str]:
    """Return why accounting would not let the user queue this.

    Args:
        said: what it said just now, or in the last day: what is refused by that is asked again first.
    """
    found = _problems(submission, said)
    if found and kept(context, cluster) is not None:
        answer = cluster.transport.run(["sh", "-c", LOOK], timeout=30)
        found = _problems(submission, keep_limits(context, cluster, answer.stdout))
    return found


def _problems(submission: Submission, said: str) -> list[str]:
    """Return what is refused where Slurm holds to associations at all; many sites only keep accounts."""
    enforced = config(said).get("AccountingStorageEnforce", "")
    if not {"associations", "limits", "qos", "safe", "all"} & set(enforced.split(",")):
        return []
    return association_problems(submission, associations(said))


def _path(context: Context, cluster: ActiveCluster) -> Path:
    return cache_path(context, cluster, "accounts")
