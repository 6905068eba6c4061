"""Asks accounting what jobs held, and reads the answer: one query, whatever the number of jobs."""

from __future__ import annotations

import re

from dtslurm.model.runs.usage import JobUse
from dtslurm.slurm.arrays import valid
from dtslurm.slurm.fields import FIELD_END, count, epoch, text

# Free text stands last: a comment or a name may hold anything. Every column is in Slurm 20.11 and later.
COLUMNS = (
    "JobID", "User", "Account", "Submit", "Start", "End", "TimelimitRaw", "AllocCPUS", "ReqTRES", "AllocTRES",
    "Comment", "JobName",
)  # fmt: skip
_START = re.compile(rf"\d[^{FIELD_END}\s]*{FIELD_END}")
_GPUS = re.compile(r"(?:^|,)gres/gpu(:[^=,]+)?=(\d{1,9})")


def command(since: str, *, everybody: bool = False) -> list[str]:
    """List all runs of the caller's, or everybody's, jobs since then: ``now-30days``, ``2026-01-31``."""
    who = ["-a"] if everybody else []
    words = ["sacct", "-n", "-P", f"--delimiter={FIELD_END}", "-X", "-D", *who]
    return [*words, "-S", since, "-E", "now", "-o", ",".join(COLUMNS)]


def read(output: str) -> list[JobUse]:
    """Return the runs in an answer; a row that makes no sense is left out."""
    rows: list[str] = []
    for line in output.split("\n"):
        if rows and not _START.match(line):  # sacct escapes nothing: it belongs to the name before it
            rows[-1] += "\n" + line
        else:
            rows.append(line)
    found = []
    for row in rows:
        parts = row.split(FIELD_END, len(COLUMNS) - 1)
        values = dict(zip(COLUMNS, parts, strict=False))
        if len(parts) == len(COLUMNS) and valid(values["JobID"]):
            found.append(_use(values))
    return found


def _use(values: dict[str, str]) -> JobUse:
    minutes = count(values["TimelimitRaw"])
    return JobUse(
        job_id=values["JobID"],
        user=text(values["User"]),
        account=text(values["Account"]),
        name=values["JobName"].removesuffix("\n"),
        submit=epoch(values["Submit"]),
        start=epoch(values["Start"]),
        end=epoch(values["End"]),
        limit_s=None if minutes is None else minutes * 60,
        gpus_asked=gpus(values["ReqTRES"]),
        gpus=gpus(values["AllocTRES"]),
        gpu_type=gpu_type(values["AllocTRES"]),
        cpus=count(values["AllocCPUS"]) or 0,
        comment=text(values["Comment"]),
    )


def gpus(tres: str) -> int:
    """Return the GPUs in a list of trackable resources; some sites count them by type only."""
    found = _GPUS.findall(tres)
    whole = [int(number) for kind, number in found if not kind]
    return whole[0] if whole else sum(int(number) for _, number in found)


def gpu_type(tres: str) -> str:
    """Return the type of the GPUs in a list of trackable resources, empty where it tells none or several."""
    kinds = {kind[1:] for kind, _ in _GPUS.findall(tres) if kind}
    return kinds.pop() if len(kinds) == 1 else ""
