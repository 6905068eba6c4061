"""Parser of the output of ``sacctmgr -n -P show assoc``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.units import Walltime
from dtslurm.model.values import dataclass
from dtslurm.slurm import fields
from dtslurm.slurm.commands import ASSOCIATION_FIELDS


@dataclass(frozen=True)
class Association:
    """A user's permissions and limits under one account; limits that are not set are None or missing.

    Attributes:
        partition: the partition that the association applies to, empty for all.
        qos: the QOS that the user may request, empty if the site has none.
        max_submit: the number of jobs that may be queued and running at the same time.
        max_wall: the longest time limit.
        max_tres: the most of each resource for one job, such as ``{"node": 4, "gres/gpu": 16}``.
        group_tres: the most of each resource for all jobs of the association together.
    """

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    max_jobs: int | None = None
    max_submit: int | None = None
    max_wall: Walltime | None = None
    max_tres: Mapping[str, int] = field(default_factory=dict)
    group_tres: Mapping[str, int] = field(default_factory=dict)


def associations(output: str) -> list[Association]:
    """Parse the list of associations; other lines, such as a banner, are skipped."""
    rows = []
    for line in output.split("\n"):
        columns = [word.strip() for word in line.split("|")]
        if len(columns) != len(ASSOCIATION_FIELDS) or not columns[0]:
            continue
        account, partition, qos, max_jobs, max_submit, max_wall, max_tres, group_tres = columns
        rows.append(
            Association(
                account=account,
                partition=partition,
                qos=tuple(name for name in qos.split(",") if name),
                max_jobs=fields.count(max_jobs),
                max_submit=fields.count(max_submit),
                max_wall=_parse_walltime(max_wall),
                max_tres=_parse_tres(max_tres),
                group_tres=_parse_tres(group_tres),
            )
        )
    return rows


def _parse_walltime(value: str) -> Walltime | None:
    try:
        return Walltime.parse_limit(value)
    except ValueError:
        return None


def _parse_tres(value: str) -> dict[str, int]:
    """Parse ``node=4,gres/gpu=16``; amounts with a unit, such as memory, are left out."""
    pairs = (item.partition("=")[::2] for item in value.split(","))
    return {name: int(count) for name, count in pairs if name and count.isdecimal()}
