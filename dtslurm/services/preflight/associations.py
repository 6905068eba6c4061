"""The limits of the user's accounts and QOS: queried from accounting in the preflight, cached for a day."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from dtslurm.errors import StoreError
from dtslurm.model.jobs.job import Submission
from dtslurm.model.own_files import read_own_file
from dtslurm.scheduler.slurm_checks import find_association_problems
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import cache_path
from dtslurm.slurm import commands
from dtslurm.slurm.parse_sacctmgr import associations
from dtslurm.slurm.parse_scontrol import config

_CACHE_TTL_S = 86400.0
_MARK = "association="

# Part of the preflight's shell script. It prints nothing if accounting does not answer.
QUERY = f"""
{{
  timeout 10 {" ".join(commands.show_config())} | grep AccountingStorageEnforce
  timeout 10 {" ".join(commands.show_associations('"$(id -un)"'))}
}} 2>/dev/null </dev/null | sed 's/^/{_MARK}/'
"""


def read_cached_limits(context: Context, cluster: ActiveCluster) -> str | None:
    """Return accounting's answer for the user, cached for at most a day; None if it must be queried."""
    try:
        document = json.loads(read_own_file(_cache_path(context, cluster)))
        is_fresh = 0 <= context.clock() - document["seen_at"] < _CACHE_TTL_S
        return str(document["said"]) if is_fresh else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep_limits(context: Context, cluster: ActiveCluster, output: str) -> str:
    """Return accounting's answer in the output of `QUERY`, and cache it if it lists associations."""
    lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    answer = "\n".join(lines)
    if associations(answer):
        data = json.dumps({"said": answer, "seen_at": context.clock()}).encode()
        with contextlib.suppress(StoreError):  # the next preflight queries accounting again
            context.transport.put(data, str(_cache_path(context, cluster)))
    return answer


def problems(context: Context, cluster: ActiveCluster, submission: Submission, output: str) -> list[str]:
    """Return why accounting would refuse the user's job.

    Args:
        context: its clock decides whether the cached answer is still valid.
        cluster: the cluster.
        submission: the job.
        output: accounting's answer. If it may come from the cache and the job would be refused, accounting is
            queried again first.
    """
    refusals = _find_refusals(submission, output)
    if refusals and read_cached_limits(context, cluster) is not None:
        answer = cluster.transport.run(["sh", "-c", QUERY], timeout=30)
        refusals = _find_refusals(submission, keep_limits(context, cluster, answer.stdout))
    return refusals


def _find_refusals(submission: Submission, output: str) -> list[str]:
    """Return the refusals if Slurm enforces associations; many sites only use them for accounting."""
    enforced = config(output).get("AccountingStorageEnforce", "")
    if not {"associations", "limits", "qos", "safe", "all"} & set(enforced.split(",")):
        return []
    return find_association_problems(submission, associations(output))


def _cache_path(context: Context, cluster: ActiveCluster) -> Path:
    return cache_path(context, cluster, "accounts")
