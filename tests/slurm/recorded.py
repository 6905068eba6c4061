"""Recorded output of several Slurm versions, converted to the requested columns."""

from __future__ import annotations

from pathlib import Path

from dtslurm.slurm.fields import FIELD_END, RECORD_END, SACCT, SQUEUE

DATA = Path(__file__).parent / "data"
VERSIONS = ("20.11.4", "22.05.8", "24.11.5", "26.05.5")

# Names of the recorded squeue columns; they are the headings, except where one heading stands twice.
_SQUEUE = {
    "job_id": 0, "raw_id": 1, "name": 4, "raw_state": 5, "reason": 6, "nodes": 8, "start_time": 12,
}  # fmt: skip


def read(version: str, name: str) -> str:
    return (DATA / version / name).read_bytes().decode("utf-8", "surrogateescape")


def squeue(version: str) -> str:
    """Return the recorded ``squeue -o a|b|c`` in the requested format; missing columns are N/A."""
    records = []
    for line in read(version, "squeue.txt").splitlines()[1:]:
        parts = line.split("|")
        values = [parts[_SQUEUE[item.name]] if item.name in _SQUEUE else "N/A" for item in SQUEUE]
        records.append(FIELD_END.join(values) + RECORD_END)
    return "\n".join(records) + "\n"


def sacct(version: str) -> str:
    """Return the recorded ``sacct -P`` without steps, in the requested format."""
    head, *lines = read(version, "sacct.txt").splitlines()
    records = []
    for line in lines:
        row = dict(zip(head.split("|"), line.split("|"), strict=True))
        if "." not in row["JobIDRaw"]:
            records.append(FIELD_END.join(row.get(item.sacct or "", "") for item in SACCT))
    return "\n".join(records) + "\n"
