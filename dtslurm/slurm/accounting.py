"""Builds the sacct query for the resource usage of jobs, one query for any number of jobs, and parses it."""

from __future__ import annotations

import re

from dtslurm.model.runs.usage import JobUse
from dtslurm.slurm.arrays import is_valid_job_id
from dtslurm.slurm.fields import FIELD_END, count, epoch, text

# Free text is last: a comment or a name may contain any character, separators included.
# Slurm 20.11 and later has all columns.
COLUMNS = (
    "JobID", "User", "Account", "Submit", "Start", "End", "TimelimitRaw", "AllocCPUS", "ReqTRES", "AllocTRES",
    "Comment", "JobName",
)  # fmt: skip
_ROW_START = re.compile(rf"\d[^{FIELD_END}\s]*{FIELD_END}")
_GPUS = re.compile(r"(?:^|,)gres/gpu(:[^=,]+)?=(\d{1,9})")


def command(start_time: str, *, all_users: bool = False) -> list[str]:
    """Return the sacct command that lists the executions of the caller's jobs, or of all users' jobs.

    Args:
        start_time: the start of the period, as sacct accepts it: ``now-30days``, ``2026-01-31``.
        all_users: include the jobs of all users.
    """
    user_options = ["-a"] if all_users else []
    argv = ["sacct", "-n", "-P", f"--delimiter={FIELD_END}", "-X", "-D", *user_options]
    return [*argv, "-S", start_time, "-E", "now", "-o", ",".join(COLUMNS)]


def read(output: str) -> list[JobUse]:
    """Parse the output of `command`; rows that cannot be parsed are left out."""
    rows: list[str] = []
    for line in output.split("\n"):
        if rows and not _ROW_START.match(line):
            # sacct does not escape newlines: this line continues the name.
            rows[-1] += "\n" + line
        else:
            rows.append(line)
    usages = []
    for row in rows:
        parts = row.split(FIELD_END, len(COLUMNS) - 1)
        values = dict(zip(COLUMNS, parts, strict=False))
        if len(parts) == len(COLUMNS) and is_valid_job_id(values["JobID"]):
            usages.append(_parse_usage(values))
    return usages


def _parse_usage(values: dict[str, str]) -> JobUse:
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
    """Return the number of GPUs in a TRES list; some sites count GPUs only by type."""
    entries = _GPUS.findall(tres)
    untyped_counts = [int(number) for gpu_type, number in entries if not gpu_type]
    return untyped_counts[0] if untyped_counts else sum(int(number) for _, number in entries)


def gpu_type(tres: str) -> str:
    """Return the type of the GPUs in a TRES list, empty if there are no types or several."""
    gpu_types = {kind[1:] for kind, _ in _GPUS.findall(tres) if kind}
    return gpu_types.pop() if len(gpu_types) == 1 else ""
