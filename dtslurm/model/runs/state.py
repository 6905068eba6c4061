"""Job states as in Slurm: a base state and any number of flags (slurm_protocol_defs.c)."""

from __future__ import annotations

import re
from dataclasses import field
from enum import Enum
from functools import lru_cache

from dtslurm.model.values import dataclass


class JobState(str, Enum):
    """Slurm's base states, and UNKNOWN without evidence."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNKNOWN = "UNKNOWN"

    @property
    def ended(self) -> bool:
        """Whether this base state, taken alone, is an end of the job."""
        return self not in {JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.UNKNOWN}


class StateFlag(str, Enum):
    """Slurm's state flags, which qualify a base state; text output shows a flag *instead of* the base."""

    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    EXPEDITING = "EXPEDITING"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    POWER_UP_NODE = "POWER_UP_NODE"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESIZING = "RESIZING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    UPDATE_DB = "UPDATE_DB"


_STATE_BY_SHORT_NAME = {
    "PD": "PENDING", "R": "RUNNING", "S": "SUSPENDED", "CD": "COMPLETED", "CA": "CANCELLED", "F": "FAILED",
    "TO": "TIMEOUT", "NF": "NODE_FAIL", "PR": "PREEMPTED", "BF": "BOOT_FAIL", "DL": "DEADLINE",
    "OOM": "OUT_OF_MEMORY", "CG": "COMPLETING", "CF": "CONFIGURING", "RQ": "REQUEUED", "RF": "REQUEUE_FED",
    "RH": "REQUEUE_HOLD", "RS": "RESIZING", "RD": "RESV_DEL_HOLD", "RV": "REVOKED", "SI": "SIGNALING",
    "SE": "SPECIAL_EXIT", "SO": "STAGE_OUT", "ST": "STOPPED",
}  # fmt: skip

# The base state that a flag printed alone implies: pending, running, or none that is certain.
_BASE_STATE_OF_FLAG = {
    StateFlag.CONFIGURING: JobState.RUNNING,
    StateFlag.EXPEDITING: JobState.PENDING,
    StateFlag.POWER_UP_NODE: JobState.RUNNING,
    StateFlag.REQUEUED: JobState.PENDING,
    StateFlag.REQUEUE_FED: JobState.PENDING,
    StateFlag.REQUEUE_HOLD: JobState.PENDING,
    StateFlag.RESIZING: JobState.RUNNING,
    StateFlag.RESV_DEL_HOLD: JobState.PENDING,
    StateFlag.SIGNALING: JobState.RUNNING,
    StateFlag.SPECIAL_EXIT: JobState.PENDING,
    StateFlag.STOPPED: JobState.SUSPENDED,
}

_NON_FINAL_FLAGS = {
    StateFlag.COMPLETING, StateFlag.REQUEUED, StateFlag.REQUEUE_FED, StateFlag.REQUEUE_HOLD,
    StateFlag.RESIZING, StateFlag.SPECIAL_EXIT, StateFlag.STAGE_OUT, StateFlag.UPDATE_DB,
}  # fmt: skip


@lru_cache(maxsize=1024)  # many jobs share a few states
def read_state(text: str) -> tuple[JobState, frozenset[StateFlag]]:
    """Parse a state as Slurm commands print it: ``RUNNING``, ``CANCELLED by 7``, ``CG``, ``A,B``.

    A word that no known version of Slurm prints gives ``UNKNOWN``; this is never an error.
    """
    base = JobState.UNKNOWN
    flags = set()
    for word in re.split(r"[,+\s]+", re.sub(r" by \d+.*", "", text.strip().upper(), flags=re.IGNORECASE)):
        name = _STATE_BY_SHORT_NAME.get(word, word)
        if name in JobState.__members__:
            base = JobState[name]
        elif name in StateFlag.__members__:
            flags.add(StateFlag[name])
    if base is JobState.UNKNOWN:
        possible_states = {_BASE_STATE_OF_FLAG[flag] for flag in flags if flag in _BASE_STATE_OF_FLAG}
        if len(possible_states) == 1:
            base = possible_states.pop()
    return base, frozenset(flags)


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """An observation of one job or array task.

    Attributes:
        job_id: as Slurm shows it: ``123``, ``123_4``, or ``123_[5-9%2]`` for array tasks that are still
            together.
        raw_id: Slurm's internal job id (an array task gets its own once it starts).
        excluded: the excluded nodes of the job, folded as by Slurm; empty if there are none or they are
            unknown.
        exit_code: the batch script's own exit code, None while unknown.
        signal: the signal that ended the batch script, None if none did.
        submit_time, start_time, end_time: seconds since the epoch, None if unknown.
        preempted_at: when Slurm began to end the job for a job of higher priority, in seconds since the
            epoch; None if Slurm did not, or if scontrol was not queried.
        estimated_start: the scheduler's estimate for a pending job, seconds since the epoch.
        time_left: seconds until the time limit, None if unknown or unlimited.
        time_limit: the time limit of a running job in seconds, None if unknown or unlimited. The site may
            change it.
        restarts: how often the job was requeued, None if unknown.
        source: the source of the observation: ``squeue``, ``sacct``, ``scontrol``, ``local``, ``record``,
            ``none``.
        observed_at: seconds since the epoch on this machine's clock.
    """

    job_id: str
    state: JobState
    raw_id: str = ""
    flags: frozenset[StateFlag] = field(default_factory=frozenset)
    raw_state: str = ""
    reason: str = ""
    name: str = ""
    partition: str = ""
    nodelist: str = ""
    nodes: int | None = None
    excluded: str = ""
    exit_code: int | None = None
    signal: int | None = None
    submit_time: int | None = None
    start_time: int | None = None
    end_time: int | None = None
    preempted_at: int | None = None
    estimated_start: int | None = None
    time_left: int | None = None
    time_limit: int | None = None
    restarts: int | None = None
    comment: str = ""
    source: str = "none"
    observed_at: float = 0.0

    @property
    def whole_id(self) -> str:
        """The job id without the number of a component: ``12`` for ``12+1``, and ``12_3`` for ``12_3``."""
        return self.job_id.partition("+")[0]

    def step_id(self, component: int = 0) -> str:
        """Return the id under which srun starts steps in a component; a heterogeneous job has several."""
        return f"{self.whole_id}+{component}" if "+" in self.job_id else self.raw_id or self.job_id

    @property
    def terminal(self) -> bool:
        """Whether the job has finally ended: an ended base state, and no flag that may requeue it."""
        return self.state.ended and not (self.flags & _NON_FINAL_FLAGS)

    @property
    def unknown(self) -> bool:
        """Whether nothing is known about the state.

        False for a job that squeue shows as COMPLETING: its base state is unknown, but it has not ended.
        """
        return self.state is JobState.UNKNOWN and not self.flags

    @property
    def ok(self) -> bool:
        """Whether the job has completed successfully."""
        return self.terminal and self.state is JobState.COMPLETED

    @property
    def word(self) -> str:
        """The word to show for the state: one of four notable flags if it is set, else the base state."""
        for flag in (
            StateFlag.COMPLETING,
            StateFlag.CONFIGURING,
            StateFlag.REQUEUE_HOLD,
            StateFlag.SPECIAL_EXIT,
        ):
            if flag in self.flags:
                return str(flag.value)
        return str(self.state.value)
