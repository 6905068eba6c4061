"""Stages of a job file and the dependencies between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

KINDS = ("afterok", "afterany")  # as in sbatch: after success, after any end
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def parse_need(text: str) -> tuple[str, str]:
    """Return (kind of dependency, stage) for an item of ``needs``: ``NAME`` or ``KIND:NAME``.

    Raises:
        ValueError: the kind is not in `KINDS`.
    """
    kind, colon, name = text.rpartition(":")
    if colon and kind not in KINDS:
        raise ValueError(
            f"{text!r}: write a stage's name, or {' or '.join(f'{known_kind}:NAME' for known_kind in KINDS)}"
        )
    return kind or "afterok", name


def order_stages(dependencies: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the stages in dependency order, otherwise in their written order.

    Raises:
        ValueError: the dependencies have a cycle; the text shows it: ``train → prepare → train``.
    """
    try:
        TopologicalSorter(dependencies).prepare()
    except CycleError as error:
        raise ValueError(" → ".join(reversed(error.args[1]))) from None
    order: list[str] = []
    while len(order) < len(dependencies):
        order.append(
            next(name for name in dependencies if name not in order and set(dependencies[name]) <= set(order))
        )
    return order


def find_ancestors(name: str, dependencies: Mapping[str, Sequence[str]]) -> set[str]:
    """Return all stages that a stage depends on, directly or indirectly; there must be no cycle."""
    ancestors = set(dependencies[name])
    for stage in dependencies[name]:
        ancestors |= find_ancestors(stage, dependencies)
    return ancestors


def folder_variable(name: str) -> str:
    """Return the name of the variable with a stage's run directory, for the stages after it."""
    return f"DTSLURM_STAGE_{name.replace('-', '_').upper()}_DIR"
