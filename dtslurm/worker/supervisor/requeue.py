"""A new start for the job: by requeue, or by a successor where the site lets no job be requeued."""

import os
from typing import Any, List, Optional, Sequence, Tuple

from . import slurm

PATIENCE_S = 300.0  # a controller that does not answer may come back
SOON_S = 15  # Slurm goes by a StartTime only if it is not past when the last process of this start has ended


def onward(asked: Any, run_dir: str, excluded: Sequence[str], limit_at: Optional[float]) -> Tuple[str, str]:
    """Get the job a new start without the excluded nodes.

    Returns:
        By what it gets one (requeue, afterany or singleton), empty if by nothing; and what to say of it.
    """
    until = slurm.now() + PATIENCE_S
    if limit_at is not None:
        until = min(until, limit_at)
    if asked.go_on_by != "requeue":
        return _successor(asked, run_dir, excluded, until, limit_at)
    done, words = slurm.requeue(until, limit_at)
    if not done:
        if "cancelled" in words or not asked.script:
            return "", words
        return _successor(asked, run_dir, excluded, until, limit_at)
    # The job is pending now, and this copy of it is being ended: its owner may still say how it is to start.
    told = [words] if words else []
    if excluded:
        kept, why = slurm.exclude(excluded)
        told += [] if kept else ["it may get {} again: {}".format(",".join(excluded), why)]
        told += [why] if kept and why else []
    told += _soon() if asked.start_now else _pause()
    return "requeue", "; ".join(told)


def _soon() -> List[str]:
    start = "StartTime=now+{}".format(SOON_S)
    code, text = slurm.call(["scontrol", "update", "JobId=" + slurm.own_id(), start])
    if code:
        return ["it cannot start at once: {}".format(text)]
    return ["Slurm lets it start in {} s".format(SOON_S)]


def _pause() -> List[str]:
    """Say how long Slurm holds a requeued job back: two minutes, unless the site set another time."""
    job = slurm.show_job()
    at = slurm.seconds_of(job.get("EligibleTime", ""))
    wait = at - slurm.now() if at is not None else 0.0
    if wait < 10.0:
        return []
    now = "scontrol update JobId={} StartTime=now".format(slurm.own_id())
    return ["Slurm holds it back for {:.0f} s; who owns it may shorten that: {}".format(wait, now)]


def _successor(
    asked: Any, run_dir: str, excluded: Sequence[str], until: float, limit_at: Optional[float]
) -> Tuple[str, str]:
    if os.environ.get("SLURM_ARRAY_TASK_ID"):
        return "", "a task of an array gets no successor; submit it again by hand"
    starts, text, shown = slurm.new_start(until, limit_at)
    if starts is not None:
        return ("requeue" if starts else ""), text
    kind = asked.go_on_by if asked.go_on_by != "requeue" else "afterany"
    words = ["--dependency=" + (kind if kind == "singleton" else "afterany:" + slurm.own_id())]
    comment = shown.get("Comment", "")
    comment = comment if comment.startswith("dtslurm:") else ""
    if comment:
        words.append("--comment=" + comment)  # by which the job is known as this run's
    names, note = slurm.exclusion(shown, excluded) if excluded else ([], "")
    if names:
        words.append("--exclude=" + ",".join(names))
    job, text = slurm.successor(asked.script, words, comment)
    if job is None:
        return "", text
    draft = os.path.join(run_dir, ".claim." + job)
    os.symlink("job-" + job, draft)
    os.replace(draft, os.path.join(run_dir, "claim"))
    text = "job {} goes on when this one has ended".format(job)
    return kind, "; ".join([text, note] if note else [text])
