"""The few things asked of Slurm from inside the job, each with a limit of its own."""

# strptime would load it hours later, when an upgrade of Python may have removed it.
import _strptime  # type: ignore[import-not-found]  # noqa: F401
import os
import re
import signal
import subprocess
import time
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

PATIENCE_S = 20.0
CLOCK_PATIENCE_S = 5.0
CLOCKS_S = 5.0  # by which the controller's clock may differ
LOST_ANSWERS = ("timed out", "Zero Bytes", "Unable to contact")  # of sbatch: there may be a job all the same
LOOK_AGAIN_S = (1.0, 5.0, 15.0, 30.0)
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


# "ahead": by how much the controller's clock is ahead of this node's monotonic one; None if it does not tell.
_clock: Dict[str, Optional[float]] = {}


def measure_clock() -> None:
    """Compare the controller's clock with this node's, to a second.

    A controller that is silent is asked again by the next call.
    """
    if _clock or "DTSLURM_LOCAL_STATE" in os.environ:
        return
    before = time.monotonic()
    code, text = call(["scontrol", "show", "config"], CLOCK_PATIENCE_S)
    stamp = re.search(r"^Configuration data as of (\S+)", text, re.MULTILINE)
    told = seconds_of(stamp.group(1)) if stamp else None
    if told is not None:  # whole seconds, so half a second more on average
        _clock["ahead"] = told + 0.5 - (before + time.monotonic()) / 2
    elif code == 0:
        _clock["ahead"] = None


def now() -> float:
    """Return the time by the controller's clock, where that was measured; else by this node's.

    Slurm's times are compared with this one alone: a node's clock may be wrong by minutes.
    """
    ahead = _clock.get("ahead")
    return time.time() if ahead is None else time.monotonic() + ahead


def clock_skew() -> Optional[float]:
    """Return by how many seconds this node's clock is ahead of the controller's, None if not measured."""
    return None if _clock.get("ahead") is None else time.time() - now()


def show_job(patience: float = PATIENCE_S) -> Dict[str, str]:
    """Return what Slurm says of this job, empty where it does not answer."""
    return _request_job(patience)[0]


def _request_job(patience: float = PATIENCE_S) -> Tuple[Dict[str, str], str]:
    """Return what Slurm says of this job, and the words of a failure."""
    code, text = call(["scontrol", "show", "job", own_id()], patience)
    return (dict(re.findall(r"(?:^|\s)([A-Za-z/]+)=(\S*)", text)), "") if code == 0 else ({}, text)


def seconds_of(stamp: str) -> Optional[float]:
    """Return the epoch seconds of a time that scontrol shows, None for Unknown and the like."""
    try:
        return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def node_states(nodes: Sequence[str], patience: float = PATIENCE_S) -> Dict[str, str]:
    """Return the states of nodes, empty where Slurm does not answer. One request."""
    code, text = call(["scontrol", "show", "node", ",".join(nodes), "-o"], patience)
    return dict(re.findall(r"NodeName=(\S+).*?\bState=(\S+)", text)) if code == 0 else {}


def limit_of(job: Mapping[str, str]) -> Optional[float]:
    """Return when the time limit of this start of a job is reached; None where Slurm does not tell.

    A site may change the limit of a job that runs. Once a job ends, EndTime is when that began.
    """
    if job.get("JobState") == "RUNNING":
        return seconds_of(job.get("EndTime", ""))
    start = seconds_of(job.get("StartTime", ""))
    limit = re.match(r"(?:(\d+)-)?(\d+):(\d+):(\d+)$", job.get("TimeLimit", ""))
    if job.get("JobState") != "COMPLETING" or started_anew(job) or start is None or limit is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in limit.groups())
    return start + ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def bad_nodes(nodes: Sequence[str]) -> Dict[str, str]:
    """Return the nodes that Slurm itself does not want to use, with their states. One request."""
    states = node_states(nodes)
    return {name: state for name, state in states.items() if any(word in state for word in BAD_STATES)}


def gone(state: str, busy: bool = False) -> bool:
    """Tell whether no job can go on with a node in such a state; one that is busy may only answer late."""
    words = set(re.findall("[A-Z_]+", state))  # POWER_DOWN, for one, means later
    return bool(words & {"DOWN", "FAIL", "FAILING"}) or ("NOT_RESPONDING" in words and not busy)


def new_start(until: float, limit_at: Optional[float]) -> Tuple[Optional[bool], str, Dict[str, str]]:
    """Ask until Slurm tells what becomes of this job, or time is up.

    Returns:
        Whether it starts anew: True if it does already, False if it must not or Slurm does not tell, None if
        it would when asked to; words of that; and what Slurm shows of the job.
    """
    pause = 1.0
    while True:
        job, text = _request_job()
        if cancelled(job, limit_at):
            return False, "the job was cancelled, and a new start would bring it back", job
        if started_anew(job):
            return True, "Slurm had queued it again", job
        if job:
            return None, "", job
        if refused(text) or now() + pause > until:
            return False, text, job
        time.sleep(pause)
        pause = min(30.0, pause * 2)


def tell_ranks() -> bool:
    """Send TERM to the ranks; srun takes one for a wish to kill them, but for the embedded scheduler's."""
    if "SLURM_LOCAL_STATE" in os.environ:
        return False
    return call(["scancel", "--signal=TERM", own_id()])[0] == 0


def requeue(until: float, limit_at: Optional[float] = None) -> Tuple[bool, str]:
    """Get a new start of this job until Slurm takes it or time is up; return whether, and words of it.

    Slurm gives one by itself to the job of a node that is down, and may take a request whose answer is lost:
    a further one would end that new start. So none is made without a look at the job.
    """
    pause = 1.0
    while True:
        starts, text, job = new_start(until, limit_at)
        if starts is not None:
            return starts, text
        code, text = _requeue_once(disabled=job.get("Requeue") == "0")
        if code == 0:
            return True, ""
        if "pending execution" in text:
            return True, "Slurm had queued it again"
        if refused(text) or now() + pause > until:
            return False, text
        time.sleep(pause)
        pause = min(30.0, pause * 2)


def _requeue_once(disabled: bool) -> Tuple[int, str]:
    """Requeue this job; return scontrol's exit code and words.

    A job that was submitted with --no-requeue is allowed this one requeue: Slurm makes none by itself after
    that either.
    """
    own = "JobId=" + own_id()
    if disabled:
        call(["scontrol", "update", own, "Requeue=1"])
    code, text = call(["scontrol", "requeue", own_id()])
    if disabled:
        call(["scontrol", "update", own, "Requeue=0"])
    return code, text


def refused(text: str) -> bool:
    """Tell whether Slurm's words are its last."""
    last = ("disabled", "--no-requeue", "Invalid job id", "not permitted", "Access/permission")
    return any(words in text for words in last)


def started_anew(job: Mapping[str, str]) -> bool:
    """Tell whether what Slurm shows of this job is a later start than the one this process belongs to."""
    own, shown = os.environ.get("SLURM_RESTART_COUNT", "0"), job.get("Restarts", "")
    return shown.isdigit() and own.isdigit() and int(shown) > int(own)


def starts_by_itself(job: Mapping[str, str]) -> bool:
    """Tell whether Slurm starts this job once more by itself, as its controller was killed.

    One that forgot this start takes the job to wait still, for a start that is counted no further; one that
    is asked for another takes it to be COMPLETING until this process is gone. A start made twice fails.
    """
    waits = job.get("JobState") == "PENDING" and job.get("Restarts", "").isdigit() and not started_anew(job)
    return waits or job.get("Reason", "").lower().startswith("launch_failed")


def forgotten(job: Mapping[str, str]) -> bool:
    """Tell whether a new start that Slurm had agreed to is not on its mind: its controller was killed."""
    return job.get("JobState") == "RUNNING" and not started_anew(job)


def preempted(job: Mapping[str, str]) -> bool:
    """Tell whether a job of higher priority takes this one's place."""
    state, at = job.get("JobState", ""), job.get("PreemptTime", "None")
    return state == "PREEMPTED" or at not in ("None", "Unknown", "")


def cancelled(job: Mapping[str, str], limit_at: Optional[float]) -> bool:
    """Tell whether somebody cancelled this job.

    While its processes are being ended Slurm shows COMPLETING, whatever it ends them for: then it is neither
    a new start, nor preemption, nor the time limit, nor a lost node's job that may not be requeued.
    """
    state = job.get("JobState", "")
    if state != "COMPLETING" or started_anew(job) or preempted(job):
        return state.startswith("CANCELLED")
    if job.get("Requeue") == "0":
        states = bad_nodes([os.environ.get("SLURM_JOB_NODELIST", "")]).values()
        if any(gone(one, busy=True) for one in states):
            return False
    limit_at = limit_of(job) or limit_at
    ended = seconds_of(job.get("EndTime", "")) or now()
    return limit_at is None or ended < limit_at - CLOCKS_S


def kept_off(job: Mapping[str, str]) -> List[str]:
    """Return what a job was told to keep off, as node lists."""
    text = job.get("ExcNodeList", "")
    return [] if text in ("", "(null)") else [text]


def exclude(nodes: Sequence[str]) -> Tuple[bool, str]:
    """Keep the next start of this job, now pending, from some nodes; see `exclusion`.

    Returns:
        Whether it is kept off those that it can do without; and a message about the others, or a failure.
    """
    code, text = -1, ""
    for _ in range(5):
        job, text = _request_job()
        if job:
            names, text = exclusion(job, nodes)
            if names is not None:
                argv = ["scontrol", "update", "JobId=" + own_id(), "ExcNodeList=" + ",".join(names)]
                code, refusal = call(argv) if names or kept_off(job) else (0, "")
                if code == 0:
                    break
                text = refusal
        time.sleep(0.5)
    return code == 0, text


def exclusion(job: Mapping[str, str], nodes: Sequence[str]) -> Tuple[Optional[List[str]], str]:
    """Return the nodes to exclude from a start of a job: its owner's, and as many of ours as it can spare.

    A job that no set of nodes can satisfy is pending for ever. The nodes that were excluded last go first.

    Args:
        nodes: those that this run excludes, in the order in which they were found bad.

    Returns:
        None where Slurm does not list the partition's nodes; and a message, empty where there is none.
    """
    fit = fitting_nodes(job)
    if not fit:
        return None, "Slurm does not list the nodes of partition {}".format(job.get("Partition", ""))
    own = [name for text in kept_off(job) for name in hostnames(text) if name not in nodes]
    required = job.get("ReqNodeList", "(null)")
    fixed = [] if required == "(null)" else hostnames(required)
    # Of a job that is COMPLETING, NumNodes counts only the nodes that it has not given back yet.
    size = os.environ.get("SLURM_JOB_NUM_NODES") or job.get("NumNodes", "")
    needed = int((re.findall(r"\d+", size) or ["1"])[0])
    spared: List[str] = []
    for name in reversed([name for name in nodes if name not in fixed]):
        if name not in fit or len(fit - set(own) - set(spared) - {name}) >= needed:
            spared.insert(0, name)
    left = [name for name in nodes if name not in spared]
    why = (
        "it requires {}".format(required)
        if set(left) & set(fixed)
        else "it needs {} of {} nodes".format(needed, len(fit - set(own)))
    )
    return own + spared, "{} stays with the job: {}".format(",".join(left), why) if left else ""


def fitting_nodes(job: Mapping[str, str]) -> Set[str]:
    """Return the nodes of a job's partitions with all its features, empty if Slurm lists none."""
    words = ["--local", "--noheader", "--Node", "--partition=" + job.get("Partition", ""), "--format=%N %f"]
    code, text = call(["sinfo", *words])
    features = job.get("Features", "(null)")
    wanted = set(features.split("&")) if re.match(r"[\w.-]+(&[\w.-]+)*$", features) else set()
    rows = [line.split() for line in text.splitlines()] if code == 0 else []
    return {row[0] for row in rows if row and wanted <= set("".join(row[1:]).split(","))}


def successor(script: str, options: Sequence[str], comment: str) -> Tuple[Optional[str], str]:
    """Queue the script once more; return the new job's id, or None with sbatch's words.

    Where sbatch's answer is lost the job is looked for by its comment, and never asked for again.
    """
    hiding = ("SLURM_", "SBATCH_", "SQUEUE_", "DTSLURM_")
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(hiding) or key == "SLURM_CONF"
    }
    code, text = call(["sbatch", "--parsable", *options, script], 150.0, environment)
    job = text.splitlines()[-1].split(";")[0] if text else ""
    if code == 0 and job.isdigit():
        return job, ""
    pauses = LOOK_AGAIN_S if code == -1 or any(one in text for one in LOST_ANSWERS) else ()
    for pause in pauses if comment else ():
        time.sleep(pause)
        _, listed = call(["squeue", "--me", "--noheader", "--format=%A %k"], environ=environment)
        rows = [line.split(None, 1) for line in listed.splitlines()]
        own = int(os.environ.get("SLURM_JOB_ID", "0"))
        for found, *marks in rows:
            if marks == [comment] and found.isdigit() and int(found) > own:
                return found, ""
    return None, text
