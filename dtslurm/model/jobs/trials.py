"""How the trials of a sweep run as array tasks."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Trials:
    """How a job array runs the trials of a sweep.

    Attributes:
        env: the environment variables in which each trial substitutes the sweep's variables.
        per_task: the number of trials, of one process each, that share an array task.
        plain: whether the program that starts a trial needs only Python.
        token: the token of the sweep's first submission, empty in the first submission itself.
    """

    env: tuple[str, ...] = ()
    per_task: int = 1
    plain: bool = True
    token: str = ""
