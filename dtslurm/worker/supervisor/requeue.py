"""Continue the job in a new start: by requeue, or in a successor job if the site forbids requeuing."""

import os
from typing import Any, List, Optional, Sequence, Tuple

from . import slurm

PATIENCE_S = 300.0  # how long to retry while the controller does not answer
SOON_S = 15  # Slurm ignores a StartTime that passes before the last process of this start ends


def continue_job(
    settings: Any, run_dir: str, excluded: Sequence[str], limit_at: Optional[float]
) -> Tuple[str, str]:
    """Arrange a new start of the job without the excluded nodes.

    Returns:
        How the job continues (requeue, afterany or singleton; empty if it does not), and a message about it.
    """
    if not slurm.can_requeue():
        return "", "a run in an allocation is not requeued; submit it again"
    until = slurm.now() + PATIENCE_S
    if limit_at is not None:
        until = min(until, limit_at)
    if settings.go_on_by != "requeue":
        return _submit_successor(settings, run_dir, excluded, until, limit_at)
    requeued, message = slurm.requeue(until, limit_at)
    if not requeued:
        if "cancelled" in message or not settings.script:
            return "", message
        return _submit_successor(settings, run_dir, excluded, until, limit_at)
    # The job is pending now and Slurm ends this start; the owner may still change how the next one starts.
    messages = [message] if message else []
    if excluded:
        updated, exclusion_note = slurm.exclude(excluded)
        messages += (
            [] if updated else ["Slurm may allocate {} again: {}".format(",".join(excluded), exclusion_note)]
        )
        messages += [exclusion_note] if updated and exclusion_note else []
    messages += _start_soon() if settings.start_now else _describe_delay()
    return "requeue", "; ".join(messages)


def _start_soon() -> List[str]:
    start = "StartTime=now+{}".format(SOON_S)
    code, text = slurm.call(["scontrol", "update", "JobId=" + slurm.own_id(), start])
    if code:
        return ["the job cannot start at once: {}".format(text)]
    return ["Slurm starts the job in {} s".format(SOON_S)]


def _describe_delay() -> List[str]:
    """Describe how long Slurm delays a requeued job: two minutes, unless the site set another time."""
    job = slurm.show_job()
    eligible_at = slurm.seconds_of(job.get("EligibleTime", ""))
    delay_s = eligible_at - slurm.now() if eligible_at is not None else 0.0
    if delay_s < 10.0:
        return []
    update_command = "scontrol update JobId={} StartTime=now".format(slurm.own_id())
    return [
        "Slurm delays the job for {:.0f} s; its owner can shorten the delay with: {}".format(
            delay_s, update_command
        )
    ]


def _submit_successor(
    settings: Any, run_dir: str, excluded: Sequence[str], deadline: float, limit_at: Optional[float]
) -> Tuple[str, str]:
    if os.environ.get("SLURM_ARRAY_TASK_ID"):
        return "", "an array task cannot have a successor job; submit the task again"
    starts_anew, text, job_fields = slurm.new_start(deadline, limit_at)
    if starts_anew is not None:
        return ("requeue" if starts_anew else ""), text
    kind = settings.go_on_by if settings.go_on_by != "requeue" else "afterany"
    sbatch_options = ["--dependency=" + (kind if kind == "singleton" else "afterany:" + slurm.own_id())]
    comment = job_fields.get("Comment", "")
    comment = comment if comment.startswith("dtslurm:") else ""
    if comment:
        sbatch_options.append("--comment=" + comment)  # identifies the new job as part of this run
    names, exclusion_note = slurm.exclusion(job_fields, excluded) if excluded else ([], "")
    if names:
        sbatch_options.append("--exclude=" + ",".join(names))
    job_id, text = slurm.successor(settings.script, sbatch_options, comment)
    if job_id is None:
        return "", text
    claim_link = os.path.join(run_dir, ".claim." + job_id)
    os.symlink("job-" + job_id, claim_link)
    os.replace(claim_link, os.path.join(run_dir, "claim"))
    text = "job {} continues after the end of this job".format(job_id)
    return kind, "; ".join([text, exclusion_note] if exclusion_note else [text])
