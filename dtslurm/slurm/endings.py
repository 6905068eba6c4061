"""How a cluster's Slurm ends and requeues jobs according to its configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

EARLY_S = 60  # Slurm may send the --signal up to this many seconds early, according to sbatch's manual


class EndingBehaviour(NamedTuple):
    """One aspect of how the cluster ends jobs.

    Attributes:
        what: the aspect, such as ``preemption``.
        found: the cluster's behavior, with its configuration values as evidence.
        hint: what to do about it.
    """

    what: str
    found: str
    hint: str


def describe_endings(
    config: Mapping[str, str], graces: Mapping[str, int], longest_save: float | None = None
) -> list[EndingBehaviour]:
    """Return how the cluster handles preemption, the early signal, the end of a job and a requeue.

    Args:
        config: the output of ``scontrol show config``.
        graces: the grace time in seconds by partition, for partitions that have one.
        longest_save: the seconds that the longest recent checkpoint took; None if unknown.
    """
    if not config:
        return []
    return [
        _describe_preemption(config, graces),
        _describe_early_signal(config, longest_save),
        _describe_job_end(config, longest_save),
        _describe_requeue(config),
    ]


def _describe_preemption(config: Mapping[str, str], graces: Mapping[str, int]) -> EndingBehaviour:
    mode, preempt_type = config.get("PreemptMode", ""), config.get("PreemptType", "").rpartition("/")[2]
    if preempt_type in ("", "none"):
        return EndingBehaviour("preemption", "none", "")
    grace = ", ".join(f"{seconds} s in {name}" for name, seconds in sorted(graces.items()))
    grace = grace or ("by QOS" if preempt_type == "qos" else "none")
    user_signal = "send_user_signal" in config.get("PreemptParameters", "")
    hint = "only ranks receive a signal: TERM" + (" or the requested signal" if user_signal else "")
    hint += "; save then and end with 85: --max-restarts requeues the job"
    version = re.match(r"(\d+)\.(\d+)", config.get("SLURM_VERSION", ""))
    if version and (int(version[1]), int(version[2])) < (24, 5):
        hint += ", which this Slurm does not where a job ends in its grace"
    return EndingBehaviour("preemption", f"PreemptMode={mode} by {preempt_type}, grace: {grace}", hint)


def _describe_early_signal(config: Mapping[str, str], longest_save: float | None) -> EndingBehaviour:
    over_time_limit = config.get("OverTimeLimit", "0")
    timing = f"comes up to {EARLY_S} s before the requested time"
    timing += "" if over_time_limit.startswith("0") else f", OverTimeLimit={over_time_limit}"
    if longest_save is None:
        return EndingBehaviour(
            "early signal", timing, f"--signal-before: the seconds that a save takes, and {EARLY_S}"
        )
    signal_before_s = round(longest_save + 0.5) + EARLY_S
    hint = f"--signal-before {signal_before_s}: the longest save of your last runs took {longest_save:.1f} s"
    return EndingBehaviour("early signal", timing, hint)


def _describe_job_end(config: Mapping[str, str], longest_save: float | None) -> EndingBehaviour:
    match = re.match(r"\d+", config.get("KillWait", ""))
    kill_wait_s = int(match[0]) if match else 30
    hint = "a save that takes longer after TERM is lost; --signal-before sends a signal earlier"
    if longest_save is not None and longest_save > kill_wait_s:
        hint = (
            f"your longest save takes {longest_save:.0f} s: it is lost if it begins at TERM; --signal-before"
        )
    return EndingBehaviour("end of a job", f"KillWait={kill_wait_s} s from TERM to KILL", hint)


def _describe_requeue(config: Mapping[str, str]) -> EndingBehaviour:
    if config.get("JobRequeue") == "0":
        return EndingBehaviour(
            "requeue", "JobRequeue=0: only jobs that request it", "sbatch --requeue, or slurm.go_on_by"
        )
    requeue_delay = re.search(r"\brequeue_delay=(\d+)", config.get("SchedulerParameters", ""))
    credential_lifetime = re.search(r"\bcred_expire=(\d+)", config.get("AuthInfo", ""))
    seconds = (
        int(requeue_delay[1])
        if requeue_delay
        else int(credential_lifetime[1])
        if credential_lifetime
        else 120
    )
    hint = "slurm: {start_now: yes} in the profile shortens that" if seconds > EARLY_S else ""
    return EndingBehaviour("requeue", f"a requeued job waits {seconds + 1} s", hint)
