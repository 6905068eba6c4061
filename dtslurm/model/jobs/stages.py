"""Stages of a job file: which comes after which."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

KINDS = ("afterok", "afterany")  # sbatch's words: it succeeded, it is over
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def need(text: str) -> tuple[str, str]:
    """Return (kind of dependency, stage) of an item of ``needs``: ``NAME`` or ``KIND:NAME``.

    Raises:
        ValueError: the kind is none of `KINDS`.
    """
    kind, colon, name = text.rpartition(":")
    if colon and kind not in KINDS:
        raise ValueError(
            f"{text!r}: write a stage's name, or {' or '.join(f'{kind}:NAME' for kind in KINDS)}"
        )
    return kind or "afterok", name


def ordered(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the stages so that each stands after those that it needs, else as they are written.

    Raises:
        ValueError: some need each other; the text names them: ``train → prepare → train``.
    """
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        raise ValueError(" → ".join(reversed(error.args[1]))) from None
    done: list[str] = []
    while len(done) < len(needs):
        done.append(next(name for name in needs if name not in done and set(needs[name]) <= set(done)))
    return done


def before(name: str, needs: Mapping[str, Sequence[str]]) -> set[str]:
    """Return all stages that come before one, by whatever way; ``needs`` has no circle."""
    found = set(needs[name])
    for one in needs[name]:
        found |= before(one, needs)
    return found


def folder_variable(name: str) -> str:
    """Return the variable that holds a stage's run directory in those that come after it."""
    return f"DTSLURM_STAGE_{name.replace('-', '_').upper()}_DIR"
