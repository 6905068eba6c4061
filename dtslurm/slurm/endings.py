"""How a site's Slurm ends jobs and starts them anew, by its configuration: what runs must allow for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

EARLY_S = 60  # by which Slurm may send the early signal before it is asked for, sbatch's manual says


class Truth(NamedTuple):
    """What a site does, the evidence, and what to do about it."""

    what: str
    found: str
    hint: str


def truths(
    config: Mapping[str, str], graces: Mapping[str, int], longest_save: float | None = None
) -> list[Truth]:
    """Return what the site does at preemption, before the time limit, at the end and at a requeue.

    Args:
        config: of ``scontrol show config``.
        graces: seconds of grace by partition, of those that give any.
        longest_save: seconds that the longest checkpoint of late took; None where none is known.
    """
    if not config:
        return []
    return [
        _preemption(config, graces),
        _early_signal(config, longest_save),
        _end(config, longest_save),
        _requeue(config),
    ]


def _preemption(config: Mapping[str, str], graces: Mapping[str, int]) -> Truth:
    mode, kind = config.get("PreemptMode", ""), config.get("PreemptType", "").rpartition("/")[2]
    if kind in ("", "none"):
        return Truth("preemption", "none", "")
    told = ", ".join(f"{seconds} s in {name}" for name, seconds in sorted(graces.items()))
    told = told or ("by QOS" if kind == "qos" else "none")
    user_signal = "send_user_signal" in config.get("PreemptParameters", "")
    hint = "ranks alone are told, by TERM" + (" or the signal asked for" if user_signal else "")
    hint += "; save then and end with 85: --max-restarts requeues the job"
    version = re.match(r"(\d+)\.(\d+)", config.get("SLURM_VERSION", ""))
    if version and (int(version[1]), int(version[2])) < (24, 5):
        hint += ", which this Slurm does not where a job ends in its grace"
    return Truth("preemption", f"PreemptMode={mode} by {kind}, grace: {told}", hint)


def _early_signal(config: Mapping[str, str], longest_save: float | None) -> Truth:
    over = config.get("OverTimeLimit", "0")
    found = f"comes up to {EARLY_S} s before the asked time"
    found += "" if over.startswith("0") else f", OverTimeLimit={over}"
    if longest_save is None:
        return Truth("early signal", found, f"--signal-before: the seconds that a save takes, and {EARLY_S}")
    wanted = round(longest_save + 0.5) + EARLY_S
    hint = f"--signal-before {wanted}: the longest save of your last runs took {longest_save:.1f} s"
    return Truth("early signal", found, hint)


def _end(config: Mapping[str, str], longest_save: float | None) -> Truth:
    found = re.match(r"\d+", config.get("KillWait", ""))
    wait = int(found[0]) if found else 30
    hint = "a save that takes longer after TERM is lost; --signal-before tells training earlier"
    if longest_save is not None and longest_save > wait:
        hint = (
            f"your longest save takes {longest_save:.0f} s: it is lost if it begins at TERM; --signal-before"
        )
    return Truth("end of a job", f"KillWait={wait} s from TERM to KILL", hint)


def _requeue(config: Mapping[str, str]) -> Truth:
    if config.get("JobRequeue") == "0":
        return Truth(
            "requeue", "JobRequeue=0: only jobs that ask for it", "sbatch --requeue, or slurm.go_on_by"
        )
    own = re.search(r"\brequeue_delay=(\d+)", config.get("SchedulerParameters", ""))
    expires = re.search(r"\bcred_expire=(\d+)", config.get("AuthInfo", ""))
    seconds = int(own[1]) if own else int(expires[1]) if expires else 120
    hint = "slurm: {start_now: yes} in the profile shortens that" if seconds > EARLY_S else ""
    return Truth("requeue", f"a requeued job waits {seconds + 1} s", hint)
