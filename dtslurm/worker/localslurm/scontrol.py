"""``scontrol`` inside a job of the embedded scheduler: expand host lists, requeue jobs, and show a job."""

import os
import signal
import sys
import time
from typing import List, Optional, Tuple

from . import hostlist, queue
from .options import Refused
from .state import Record, State
from .values import job_id

OFFERED = "it offers: show hostnames [LIST], show job [ID], requeue ID"


def _expand_hostnames(words: List[str]) -> List[str]:
    text = words[0] if words else os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST")
    if not text:
        raise Refused(["no host list is given, and SLURM_JOB_NODELIST is not set"])
    return hostlist.expand(text)


def _find_records(state: State, text: str) -> List[Record]:
    job, task = job_id(text)
    records = queue.find_records(state, job, task)
    if not records and task is None:
        record = state.load(job)
        records = [record] if record else []
    if not records:
        raise Refused(["Invalid job id specified: {}".format(text)])
    return records


def _format_time(seconds: Optional[float]) -> str:
    return "Unknown" if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def _format_job(record: Record) -> str:
    array = ""
    if record["array_id"] is not None:
        array = " ArrayJobId={} ArrayTaskId={}".format(record["array_id"], record["array_task"])
    started = record["state"] != "PENDING"
    nodes = hostlist.fold(list(range(1, record["nodes"] + 1))) if started else ""
    limit = record["time_limit"]
    rows: List[List[Tuple[str, object]]] = [
        [
            ("JobState", record["state"]),
            ("Reason", record["reason"].partition(":")[0].replace(" ", "_")),
        ],
        [
            ("Requeue", int(record["requeue"])),
            ("Restarts", record["restarts"]),
            ("ExitCode", "{}:{}".format(record.get("exit_code") or 0, record.get("signal_number") or 0)),
        ],
        [("TimeLimit", "UNLIMITED" if limit is None else "{:02}:{:02}:{:02}".format(*_split_seconds(limit)))],
        [("SubmitTime", _format_time(record["submit_time"]))],
        [
            ("StartTime", _format_time(record.get("start_time"))),
            ("EndTime", _format_time(record.get("end_time"))),
        ],
        [("Partition", record["partition"])],
        [("NodeList", nodes)],
        [
            ("NumNodes", record["nodes"]),
            ("NumCPUs", sum(record["cpus_per_node"])),
            ("NumTasks", record["ntasks"]),
            ("CPUs/Task", record["cpus_per_task"] or 1),
        ],
        [("WorkDir", record["chdir"] or record["submit_dir"])],
        [("Comment", record["comment"])],
    ]
    lines = ["JobId={}{} JobName={}".format(record["id"], array, record["name"])]
    lines += [" ".join("{}={}".format(key, value) for key, value in row) for row in rows]
    return "\n   ".join(lines) + "\n"


def _split_seconds(seconds: int) -> Tuple[int, int, int]:
    return seconds // 3600, seconds // 60 % 60, seconds % 60


def _requeue_jobs(state: State, ids: List[str]) -> None:
    with state.locked():
        for text in ids:
            for record in _find_records(state, text):
                queue.requeue(state, record)
        queue.schedule(state)


def run(state: State, words: List[str]) -> List[str]:
    """Execute a command and return the lines to print.

    Raises:
        Refused: the command failed or is not supported.
        ValueError: a host list or job id cannot be parsed.
    """
    if words[:2] in (["show", "hostnames"], ["show", "hostname"]) and len(words) <= 3:
        return _expand_hostnames(words[2:])
    if words[:2] == ["show", "job"] and len(words) <= 3:
        return [
            _format_job(record)
            for record in _find_records(state, (words[2:] or [os.environ.get("SLURM_JOB_ID", "")])[0])
        ]
    if words[:1] == ["requeue"] and len(words) == 2:
        _requeue_jobs(state, words[1].split(","))
        return []
    command = " ".join(words) or "nothing"
    raise Refused(["the embedded scheduler's scontrol does not offer {!r}; {}".format(command, OFFERED)])


def main() -> None:
    """Run as ``STATE WORDS...``."""
    if sys.argv[3:4] == ["requeue"]:
        # A job that requeues itself is ended as soon as the request is written, with this process.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        lines = run(State(sys.argv[2]), sys.argv[3:])
    except (Refused, ValueError, OSError) as error:
        print("scontrol: error: {}".format(error), file=sys.stderr)
        sys.exit(1)
    for line in lines:
        print(line)
