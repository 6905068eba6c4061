"""A new start for the job: by requeue, or by a successor where the site lets no job be requeued."""

import os
import time
from typing import Any, List, Optional, Sequence, Tuple

from . import slurm

PATIENCE_S = 300.0  # a controller that does not answer may come back


def onward(asked: Any, run_dir: str, excluded: Sequence[str], limit_at: Optional[float]) -> Tuple[bool, str]:
    """Get the job a new start without the excluded nodes; return whether it worked, and what to say of it."""
    if asked.go_on_by != "requeue":
        return _successor(asked, run_dir, excluded)
    until = time.time() + PATIENCE_S
    if limit_at is not None:
        until = min(until, limit_at)
    done, words = slurm.requeue(until)
    if not done:
        return (
            (False, words)
            if "cancelled" in words or not asked.script
            else _successor(asked, run_dir, excluded)
        )
    # The job is pending now, and this copy of it is being ended: its owner may still say how it is to start.
    told = [words] if words else []
    if excluded:
        kept, why = slurm.exclude(excluded)
        told += [] if kept else ["it may get {} again: {}".format(",".join(excluded), why)]
    told += _at_once() if asked.start_now else _pause()
    return True, "; ".join(told)


def _at_once() -> List[str]:
    code, text = slurm.call(["scontrol", "update", "JobId=" + slurm.own_id(), "StartTime=now"])
    return ["Slurm lets it start at once"] if code == 0 else ["it cannot start at once: {}".format(text)]


def _pause() -> List[str]:
    """Say how long Slurm holds a requeued job back: two minutes, unless the site set another time."""
    job = slurm.show_job()
    at = slurm.seconds_of(job.get("EligibleTime", ""))
    wait = at - time.time() if at is not None else 0.0
    if wait < 10.0:
        return []
    now = "scontrol update JobId={} StartTime=now".format(slurm.own_id())
    return ["Slurm holds it back for {:.0f} s; who owns it may shorten that: {}".format(wait, now)]


def _successor(asked: Any, run_dir: str, excluded: Sequence[str]) -> Tuple[bool, str]:
    if os.environ.get("SLURM_ARRAY_TASK_ID"):
        return False, "a task of an array gets no successor; submit it again by hand"
    own = os.environ.get("SLURM_JOB_ID", "")
    kind = "singleton" if asked.go_on_by == "singleton" else "afterany:" + own
    words = ["--dependency=" + kind]
    comment = slurm.show_job().get("Comment", "")
    if comment.startswith("dtslurm:"):
        words.append("--comment=" + comment)  # by which the job is known as this run's
    if excluded:
        words.append("--exclude=" + ",".join([*slurm.excluded(), *excluded]))
    job, text = slurm.successor(asked.script, words)
    if job is None:
        return False, text
    draft = os.path.join(run_dir, ".claim." + job)
    os.symlink("job-" + job, draft)
    os.replace(draft, os.path.join(run_dir, "claim"))
    return True, "job {} goes on when this one has ended".format(job)
