"""How the trials of a sweep run."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Trials:
    """How a job array runs the trials of a sweep.

    Attributes:
        env: variables of the environment that each trial fills in.
        per_task: how many trials, of one process each, share an array task.
        plain: the program that starts a trial needs nothing but Python.
        token: of the sweep's first submission, empty in that itself.
    """

    env: tuple[str, ...] = ()
    per_task: int = 1
    plain: bool = True
    token: str = ""
