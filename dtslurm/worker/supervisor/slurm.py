"""Slurm commands that the supervisor runs inside the job, each with a timeout."""

# strptime would import this module hours later, when an upgrade of Python may have removed it.
import _strptime  # type: ignore[import-not-found]  # noqa: F401
import itertools
import os
import re
import signal
import subprocess
import time
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

PATIENCE_S = 20.0
CLOCK_PATIENCE_S = 5.0
CLOCKS_S = 5.0  # tolerance between times of the controller
# Messages of sbatch after which the job may exist nevertheless.
LOST_ANSWERS = ("timed out", "Zero Bytes", "Unable to contact")
LOOK_AGAIN_S = (1.0, 5.0, 15.0, 30.0)
LONGEST_LIST = 1 << 16  # characters of a list of host names; longer ones are shortened
BAD_STATES = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "POWER", "REBOOT")


def call(
    argv: Sequence[str], patience: float = PATIENCE_S, environ: Optional[Mapping[str, str]] = None
) -> Tuple[int, str]:
    """Return (exit code, output) of a command; code -1 if it could not be run or did not answer in time."""
    environ = os.environ if environ is None else environ
    environment = {key: value for key, value in environ.items() if key != "SLURM_TIME_FORMAT"}
    try:
        completed = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=patience,
            env=environment,
            check=False,
            preexec_fn=_ignore_sigterm,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return completed.returncode, completed.stdout.decode("utf-8", "replace").strip()


def _ignore_sigterm() -> None:
    """Let a command survive the TERM that Slurm sends to all processes of a job that it ends or requeues."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def own_id() -> str:
    """Return this job's id; of an array, this task's id, because the base id means all tasks."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return "{}_{}".format(array, task) if array and task else os.environ.get("SLURM_JOB_ID", "")


def component_nodelists() -> List[str]:
    """Return the node list of each component of this job, the first of which runs the batch script.

    A job that is not heterogeneous has one component.
    """
    size = os.environ.get("SLURM_HET_SIZE", "")
    numbers = range(int(size) if size.isdigit() else 0)
    nodelists = [os.environ.get("SLURM_JOB_NODELIST_HET_GROUP_{}".format(number), "") for number in numbers]
    return [nodelist for nodelist in nodelists if nodelist] or [os.environ.get("SLURM_JOB_NODELIST", "")]


def component_of(node: str) -> int:
    """Return the number of the component that has a node, 0 for a job that is not heterogeneous."""
    nodelists = component_nodelists()
    return next((number for number in range(1, len(nodelists)) if node in hostnames(nodelists[number])), 0)


def component_id(number: int) -> str:
    """Return the job id of a component, under which Slurm lists its steps."""
    return os.environ.get("SLURM_JOB_ID_HET_GROUP_{}".format(number), "")


def step_in_allocation() -> str:
    """Return the id of the step that runs this batch script in an allocation, empty in a job of its own."""
    return os.environ.get("DTSLURM_STEP_ID", "")


def can_requeue() -> bool:
    """Return whether the job may be requeued: an allocation belongs to its user, not to one of its runs."""
    return os.environ.get("SLURM_JOB_ID") is not None and not step_in_allocation()


def hostnames(nodelist: str) -> List[str]:
    """Return the host names in a node list."""
    code, text = call(["scontrol", "show", "hostnames", nodelist])
    return text.split() if code == 0 else [nodelist]


def join_hostnames(nodes: Sequence[str]) -> str:
    """Return a node list for a command line, in the order of the nodes.

    Linux limits a single argument to 128 KiB: the names of thousands of nodes are written as ranges.
    """
    text = ",".join(nodes)
    return text if len(text) <= LONGEST_LIST else ",".join(_fold_hostnames(nodes))


def _fold_hostnames(nodes: Sequence[str]) -> List[str]:
    """Return host names with their numbers as ranges, such as ``n[001-120]``; neighbors stay neighbors."""
    ranges: List[Tuple[str, int, int, int]] = []  # prefix, digits, first and last number
    for node in nodes:
        match = re.match(r"(.*\D)(\d{1,9})$", node)
        prefix, digits = match.groups() if match else (node, "")
        number = int(digits or 0)
        if digits and ranges and ranges[-1][:2] == (prefix, len(digits)) and ranges[-1][3] == number - 1:
            ranges[-1] = (prefix, len(digits), ranges[-1][2], number)
        else:
            ranges.append((prefix, len(digits), number, number))
    texts: List[str] = []
    for prefix, group in itertools.groupby(ranges, key=lambda item: item[:2]):
        parts = [
            "{:0{width}}".format(first, width=prefix[1])
            if first == last
            else "{:0{width}}-{:0{width}}".format(first, last, width=prefix[1])
            for _, _, first, last in group
        ]
        texts += [prefix[0]] * len(parts) if not prefix[1] else ["{}[{}]".format(prefix[0], ",".join(parts))]
    return texts


# "ahead": seconds by which the controller's clock is ahead of this node's monotonic clock; None if unknown.
_clock: Dict[str, Optional[float]] = {}


def measure_clock() -> None:
    """Compare the controller's clock with this node's, to a second.

    If the controller does not answer, the next call tries again.
    """
    if _clock or "DTSLURM_LOCAL_STATE" in os.environ:
        return
    started_at = time.monotonic()
    code, text = call(["scontrol", "show", "config"], CLOCK_PATIENCE_S)
    match = re.search(r"^Configuration data as of (\S+)", text, re.MULTILINE)
    controller_time = seconds_of(match.group(1)) if match else None
    if controller_time is not None:  # the stamp has whole seconds: add the mean remainder of 0.5 s
        _clock["ahead"] = controller_time + 0.5 - (started_at + time.monotonic()) / 2
    elif code == 0:
        _clock["ahead"] = None


def now() -> float:
    """Return the time by the controller's clock if that was measured, else by this node's.

    Times from Slurm are compared only with this time, because a node's clock may be wrong by minutes.
    """
    ahead = _clock.get("ahead")
    return time.time() if ahead is None else time.monotonic() + ahead


def clock_skew() -> Optional[float]:
    """Return by how many seconds this node's clock is ahead of the controller's, None if not measured."""
    return None if _clock.get("ahead") is None else time.time() - now()


def show_job(patience: float = PATIENCE_S) -> Dict[str, str]:
    """Return the fields of this job from ``scontrol show job``, empty if Slurm does not answer."""
    return _request_job(patience)[0]


def _request_job(patience: float = PATIENCE_S) -> Tuple[Dict[str, str], str]:
    """Return the fields of this job from ``scontrol show job``, and the error message if that failed."""
    components, text = _request_components(patience)
    return (components[0] if components else {}), text


def _request_components(patience: float = PATIENCE_S) -> Tuple[List[Dict[str, str]], str]:
    """Return the fields of each component of this job in order, and the error message if that failed."""
    code, text = call(["scontrol", "show", "job", own_id()], patience)
    if code != 0:
        return [], text
    records = ["JobId=" + record for record in ("\n" + text).split("\nJobId=")[1:]] or [text]
    components = [dict(re.findall(r"(?:^|\s)([A-Za-z/]+)=(\S*)", record)) for record in records]
    return sorted(components, key=lambda fields: int(fields.get("HetJobOffset") or 0)), ""


def seconds_of(stamp: str) -> Optional[float]:
    """Return the epoch seconds of a time in scontrol's format, None for Unknown and similar values."""
    try:
        return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def node_states(nodes: Sequence[str], patience: float = PATIENCE_S) -> Dict[str, str]:
    """Return the states of nodes, empty if Slurm does not answer. One request."""
    code, text = call(["scontrol", "show", "node", join_hostnames(nodes), "-o"], patience)
    return dict(re.findall(r"NodeName=(\S+).*?\bState=(\S+)", text)) if code == 0 else {}


def limit_of(job: Mapping[str, str]) -> Optional[float]:
    """Return when this start of a job reaches its time limit; None if Slurm does not report it.

    A site may change the limit of a running job. In a job that ends, EndTime is when the end began.
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
    """Return the nodes that Slurm itself would not use, with their states. One request."""
    states = node_states(nodes)
    return {name: state for name, state in states.items() if any(word in state for word in BAD_STATES)}


def is_lost(state: str, busy: bool = False) -> bool:
    """Return whether a node in this state ends its jobs; a busy node may only respond late."""
    flags = set(re.findall("[A-Z_]+", state))  # whole words: POWER_DOWN, for example, takes effect later
    return bool(flags & {"DOWN", "FAIL", "FAILING"}) or ("NOT_RESPONDING" in flags and not busy)


def new_start(deadline: float, limit_at: Optional[float]) -> Tuple[Optional[bool], str, Dict[str, str]]:
    """Query this job until Slurm reports whether it starts again, or until the given time.

    Returns:
        Whether the job starts again: True if Slurm has already requeued it, False if it must not or Slurm
        does not answer, None if a requeue is possible; a message; and the job's fields from scontrol.
    """
    pause = 1.0
    while True:
        job, text = _request_job()
        if cancelled(job, limit_at):
            return False, "the job was cancelled, so it is not requeued", job
        if started_anew(job):
            return True, "Slurm had already requeued the job", job
        if job:
            return None, "", job
        if refused(text) or now() + pause > deadline:
            return False, text, job
        time.sleep(pause)
        pause = min(30.0, pause * 2)


def tell_ranks() -> bool:
    """Send TERM to the ranks; return whether that succeeded.

    Uses scancel, because srun kills the ranks on TERM. Sends nothing under the embedded scheduler, whose srun
    forwards TERM; nor in an allocation, where other steps may run.
    """
    if "SLURM_LOCAL_STATE" in os.environ or step_in_allocation():
        return False
    return call(["scancel", "--signal=TERM", own_id()])[0] == 0


def requeue(deadline: float, limit_at: Optional[float] = None) -> Tuple[bool, str]:
    """Requeue this job, retrying until Slurm accepts or the given time; return whether it starts again.

    The second value is a message. Slurm requeues the job of a failed node by itself, and may accept a request
    whose answer is lost: a further request would end that new start. So the job is checked before each
    request.
    """
    pause = 1.0
    while True:
        starts_anew, text, job = new_start(deadline, limit_at)
        if starts_anew is not None:
            return starts_anew, text
        code, text = _requeue_once(disabled=job.get("Requeue") == "0")
        if code == 0:
            return True, ""
        if "pending execution" in text:
            return True, "Slurm had already requeued the job"
        if refused(text) or now() + pause > deadline:
            return False, text
        time.sleep(pause)
        pause = min(30.0, pause * 2)


def _requeue_once(disabled: bool) -> Tuple[int, str]:
    """Requeue this job; return scontrol's exit code and output.

    Requeuing is enabled for this one request if the job was submitted with --no-requeue: Slurm does not
    requeue such a job by itself afterwards either.
    """
    own = "JobId=" + own_id()
    if disabled:
        call(["scontrol", "update", own, "Requeue=1"])
    code, text = call(["scontrol", "requeue", own_id()])
    if disabled:
        call(["scontrol", "update", own, "Requeue=0"])
    return code, text


def refused(text: str) -> bool:
    """Return whether Slurm's message means that a retry cannot succeed."""
    final_messages = ("disabled", "--no-requeue", "Invalid job id", "not permitted", "Access/permission")
    return any(message in text for message in final_messages)


def started_anew(job: Mapping[str, str]) -> bool:
    """Return whether Slurm shows a later start of this job than the one this process belongs to."""
    own_count, shown_count = os.environ.get("SLURM_RESTART_COUNT", "0"), job.get("Restarts", "")
    return shown_count.isdigit() and own_count.isdigit() and int(shown_count) > int(own_count)


def starts_by_itself(job: Mapping[str, str]) -> bool:
    """Return whether Slurm starts this job once more by itself, because its controller was killed.

    A controller that forgot this start considers the job still pending, for a start with the same restart
    count; a controller that received a requeue considers it COMPLETING until this process is gone. A repeated
    start fails.
    """
    is_pending_again = (
        job.get("JobState") == "PENDING" and job.get("Restarts", "").isdigit() and not started_anew(job)
    )
    return is_pending_again or job.get("Reason", "").lower().startswith("launch_failed")


def forgotten(job: Mapping[str, str]) -> bool:
    """Return whether Slurm lost a new start that it had accepted, because its controller was killed."""
    return job.get("JobState") == "RUNNING" and not started_anew(job)


def preempted(job: Mapping[str, str]) -> bool:
    """Return whether a job of higher priority replaces this one."""
    state, preempt_time = job.get("JobState", ""), job.get("PreemptTime", "None")
    return state == "PREEMPTED" or preempt_time not in ("None", "Unknown", "")


def is_ending(job: Mapping[str, str]) -> bool:
    """Return whether Slurm ends this start of the job, for any reason, as far as its fields are known.

    Its processes are ended in any order, so those of a server may end long before this one receives TERM.
    """
    runs = job.get("JobState", "RUNNING") in ("RUNNING", "SUSPENDED", "RESIZING", "CONFIGURING")
    return not runs or started_anew(job) or preempted(job)


def cancelled(job: Mapping[str, str], limit_at: Optional[float]) -> bool:
    """Return whether a person cancelled this job.

    While its processes are being ended Slurm shows COMPLETING for every reason. The job counts as cancelled
    if there is no new start, no preemption, no time limit, and no lost node of a job that may not be
    requeued.
    """
    state = job.get("JobState", "")
    if state != "COMPLETING" or started_anew(job) or preempted(job):
        return state.startswith("CANCELLED")
    if job.get("Requeue") == "0":
        states = bad_nodes(component_nodelists()).values()
        if any(is_lost(node_state, busy=True) for node_state in states):
            return False
    limit_at = limit_of(job) or limit_at
    ended = seconds_of(job.get("EndTime", "")) or now()
    return limit_at is None or ended < limit_at - CLOCKS_S


def excluded_node_lists(job: Mapping[str, str]) -> List[str]:
    """Return the node lists that a job excludes."""
    text = job.get("ExcNodeList", "")
    return [] if text in ("", "(null)") else [text]


def exclude(nodes: Sequence[str]) -> Tuple[bool, str]:
    """Exclude nodes from the next start of this job, which is pending now; see `exclusion`.

    Returns:
        Whether the nodes that the job can spare are excluded; and a message about the others, or a failure.
    """
    code, text = -1, ""
    for _ in range(5):
        job, text = _request_job()
        if job:
            names, text = exclusion(job, nodes)
            if names is not None:
                command = ["scontrol", "update", "JobId=" + own_id(), "ExcNodeList=" + ",".join(names)]
                code, refusal = call(command) if names or excluded_node_lists(job) else (0, "")
                if code == 0:
                    break
                text = refusal
        time.sleep(0.5)
    return code == 0, text


def exclusion(job: Mapping[str, str], nodes: Sequence[str]) -> Tuple[Optional[List[str]], str]:
    """Return the nodes to exclude from a start of a job: the owner's, and the run's that it can spare.

    A job that no set of nodes can satisfy is pending for ever. The nodes that were excluded last go first.

    Args:
        nodes: the nodes that this run excludes, in the order in which they were found bad.

    Returns:
        The nodes, None if Slurm does not list the partition's nodes; and a message, empty if there is none.
    """
    components = _request_components()[0] if len(component_nodelists()) > 1 else [job]
    pools = [
        NodePool(fitting_nodes(fields), _count_needed_nodes(number, fields))
        for number, fields in enumerate(components)
    ]
    for number, pool in enumerate(pools):
        if not pool.usable:
            partition = components[number].get("Partition", "")
            return None, "Slurm does not list the nodes of partition {}".format(partition)
    if len(pools) > 1:  # all components together need different nodes
        all_usable = {name for pool in pools for name in pool.usable}
        pools.append(NodePool(all_usable, sum(pool.needed for pool in pools)))
    excluded = [
        name for node_list in excluded_node_lists(job) for name in hostnames(node_list) if name not in nodes
    ]
    required_lists = [fields.get("ReqNodeList", "(null)") for fields in components]
    required = ",".join(node_list for node_list in required_lists if node_list != "(null)")
    fixed = hostnames(required) if required else []
    added: List[str] = []
    for name in reversed([name for name in nodes if name not in fixed]):
        if all(pool.can_spare(name, {*excluded, *added}) for pool in pools):
            added.insert(0, name)
    remaining = [name for name in nodes if name not in added]
    gone = {*excluded, *added}
    pool = next(
        (pool for pool in pools if not all(pool.can_spare(name, gone) for name in remaining)), pools[0]
    )
    reason = (
        "the job requires {}".format(required)
        if set(remaining) & set(fixed)
        else "the job needs {} of {} nodes".format(pool.needed, len(pool.usable - set(excluded)))
    )
    return excluded + added, "{} is not excluded: {}".format(",".join(remaining), reason) if remaining else ""


class NodePool(NamedTuple):
    """The nodes that a component of a job may get, and how many it needs."""

    usable: Set[str]
    needed: int

    def can_spare(self, node: str, excluded: Set[str]) -> bool:
        """Return whether enough nodes are left without a node and the excluded ones."""
        return node not in self.usable or len(self.usable - excluded - {node}) >= self.needed


def _count_needed_nodes(component: int, fields: Mapping[str, str]) -> int:
    """Return the nodes that a component needs.

    In a COMPLETING job, NumNodes counts only the nodes that it has not released yet.
    """
    name = "SLURM_JOB_NUM_NODES"
    size = os.environ.get("{}_HET_GROUP_{}".format(name, component)) or os.environ.get(name)
    return int((re.findall(r"\d+", size or fields.get("NumNodes", "")) or ["1"])[0])


def fitting_nodes(job: Mapping[str, str]) -> Set[str]:
    """Return the nodes of a job's partitions with all its features, empty if Slurm lists none."""
    options = ["--local", "--noheader", "--Node", "--partition=" + job.get("Partition", ""), "--format=%N %f"]
    code, text = call(["sinfo", *options])
    features = job.get("Features", "(null)")
    required_features = set(features.split("&")) if re.match(r"[\w.-]+(&[\w.-]+)*$", features) else set()
    rows = [line.split() for line in text.splitlines()] if code == 0 else []
    return {row[0] for row in rows if row and required_features <= set("".join(row[1:]).split(","))}


def successor(script: str, options: Sequence[str], comment: str) -> Tuple[Optional[str], str]:
    """Submit the script again; return the new job's id, or None with sbatch's output.

    If sbatch's answer is lost, the job is searched by its comment and never submitted again.
    """
    hidden_prefixes = ("SLURM_", "SBATCH_", "SQUEUE_", "DTSLURM_")
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(hidden_prefixes) or key == "SLURM_CONF"
    }
    code, text = call(["sbatch", "--parsable", *options, script], 150.0, environment)
    job = text.splitlines()[-1].split(";")[0] if text else ""
    if code == 0 and job.isdigit():
        return job, ""
    pauses = LOOK_AGAIN_S if code == -1 or any(message in text for message in LOST_ANSWERS) else ()
    for pause in pauses if comment else ():
        time.sleep(pause)
        _, listing = call(["squeue", "--me", "--noheader", "--format=%i %k"], environ=environment)
        rows = [line.split(None, 1) for line in listing.splitlines()]
        own_job_id = int(os.environ.get("SLURM_JOB_ID", "0"))
        for text_id, *comments in rows:
            # The components of a heterogeneous job are listed as 17+0 and 17+1.
            job_id, _, component = text_id.partition("+")
            is_job = job_id.isdigit() and component in ("", "0")
            if comments == [comment] and is_job and int(job_id) > own_job_id:
                return job_id, ""
    return None, text
