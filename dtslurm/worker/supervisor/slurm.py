"""The few things asked of Slurm from inside the job, each with a limit of its own."""

import os
import re
import signal
import subprocess
import time
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

PATIENCE_S = 20.0
BAD_STATES = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "POWER", "REBOOT")


def call(
    argv: Sequence[str], patience: float = PATIENCE_S, environ: Optional[Mapping[str, str]] = None
) -> Tuple[int, str]:
    """Return (exit code, output) of a command; code -1 where it could not be run or did not answer."""
    environ = os.environ if environ is None else environ
    environment = {key: value for key, value in environ.items() if key != "SLURM_TIME_FORMAT"}
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=patience,
            env=environment,
            check=False,
            preexec_fn=_deaf,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def _deaf() -> None:
    """Let a question outlive the TERM that Slurm sends to everything of a job that it ends or requeues."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def own_id() -> str:
    """Return this job's id, of an array its one task's: the base id alone would mean all of them."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return "{}_{}".format(array, task) if array and task else os.environ.get("SLURM_JOB_ID", "")


def hostnames(nodelist: str) -> List[str]:
    """Return the single names in a node list."""
    code, text = call(["scontrol", "show", "hostnames", nodelist])
    return text.split() if code == 0 else [nodelist]


def show_job() -> Dict[str, str]:
    """Return what Slurm says of this job, empty where it does not answer."""
    code, text = call(["scontrol", "show", "job", own_id()])
    return dict(re.findall(r"(?:^|\s)([A-Za-z/]+)=(\S*)", text)) if code == 0 else {}


def seconds_of(stamp: str) -> Optional[float]:
    """Return the epoch seconds of a time that scontrol shows, None for Unknown and the like."""
    try:
        return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def bad_nodes(nodes: Sequence[str]) -> Dict[str, str]:
    """Return the nodes that Slurm itself does not want to use, with their states. One request."""
    code, text = call(["scontrol", "show", "node", ",".join(nodes), "-o"])
    if code != 0:
        return {}
    states = re.findall(r"NodeName=(\S+).*?\bState=(\S+)", text)
    return {name: state for name, state in states if any(word in state for word in BAD_STATES)}


def gone(state: str, busy: bool = False) -> bool:
    """Tell whether no job can go on with a node in such a state; one that is busy may only answer late."""
    words = set(re.findall("[A-Z_]+", state))  # POWER_DOWN, for one, means later
    return bool(words & {"DOWN", "FAIL", "FAILING"}) or ("NOT_RESPONDING" in words and not busy)


def requeue(until: float) -> Tuple[bool, str]:
    """Get a new start of this job until Slurm takes it or time is up; return whether, and words of it.

    Slurm gives one by itself to the job of a node that is down, and may take a request whose answer is lost:
    a further one would end that new start.
    """
    pause = 1.0
    while True:
        job = show_job()
        if job.get("JobState", "").startswith("CANCELLED"):
            return False, "the job was cancelled, and a requeue would bring it back"
        if started_anew(job):
            return True, "Slurm had queued it again"
        code, text = call(["scontrol", "requeue", own_id()])
        if code == 0:
            return True, ""
        for words in ("disabled", "Invalid job id", "not permitted", "Access/permission"):
            if words in text:
                return False, text
        if time.time() + pause > until:
            return False, text
        time.sleep(pause)
        pause = min(30.0, pause * 2)


def started_anew(job: Mapping[str, str]) -> bool:
    """Tell whether what Slurm shows of this job is a later start than the one this process belongs to."""
    own, shown = os.environ.get("SLURM_RESTART_COUNT", "0"), job.get("Restarts", "")
    return shown.isdigit() and own.isdigit() and int(shown) > int(own)


def excluded() -> List[str]:
    """Return what this job was told to keep off, as node lists."""
    text = show_job().get("ExcNodeList", "")
    return [] if text in ("", "(null)") else [text]


def exclude(nodes: Sequence[str]) -> Tuple[bool, str]:
    """Keep the next start of this job, now pending, from some nodes, and from those it keeps off already."""
    code, text = -1, ""
    nodes = [*excluded(), *nodes]
    for _ in range(5):
        code, text = call(["scontrol", "update", "JobId=" + own_id(), "ExcNodeList=" + ",".join(nodes)])
        if code == 0:
            break
        time.sleep(0.5)
    return code == 0, text


def successor(script: str, options: Sequence[str]) -> Tuple[Optional[str], str]:
    """Queue the script once more; return the new job's id, or None with sbatch's words."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "SBATCH_", "DTSLURM_")) or key == "SLURM_CONF"
    }
    code, text = call(["sbatch", "--parsable", *options, script], 150.0, environment)
    job = text.splitlines()[-1].split(";")[0] if text else ""
    return (job, "") if code == 0 and job.isdigit() else (None, text)
