"""Reads what ``sacctmgr -n -P show assoc`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dtslurm.model.units import Walltime
from dtslurm.model.values import dataclass
from dtslurm.slurm import fields
from dtslurm.slurm.commands import ASSOCIATION_FIELDS


@dataclass(frozen=True)
class Association:
    """What a user may do under one account; what has no limit is None or not in a mapping.

    Attributes:
        partition: the only partition it is for, empty for all.
        qos: the QOS that may be asked for, empty where the site has none.
        max_submit: jobs that may be queued and running at once.
        max_wall: the longest time limit.
        max_tres: the most of each resource for one job, such as ``{"node": 4, "gres/gpu": 16}``.
        group_tres: the most of each resource for all of the association's jobs together.
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
    """Read the list; a line that is none of it (a banner) is passed over."""
    found = []
    for line in output.split("\n"):
        words = [word.strip() for word in line.split("|")]
        if len(words) != len(ASSOCIATION_FIELDS) or not words[0]:
            continue
        account, partition, qos, jobs, submit, wall, most, group = words
        found.append(
            Association(
                account=account,
                partition=partition,
                qos=tuple(name for name in qos.split(",") if name),
                max_jobs=fields.count(jobs),
                max_submit=fields.count(submit),
                max_wall=_walltime(wall),
                max_tres=_tres(most),
                group_tres=_tres(group),
            )
        )
    return found


def _walltime(value: str) -> Walltime | None:
    try:
        return Walltime.parse_limit(value)
    except ValueError:
        return None


def _tres(value: str) -> dict[str, int]:
    """Read ``node=4,gres/gpu=16``; memory and what is no whole number are left out."""
    pairs = (item.partition("=")[::2] for item in value.split(","))
    return {name: int(amount) for name, amount in pairs if name and amount.isdecimal()}
