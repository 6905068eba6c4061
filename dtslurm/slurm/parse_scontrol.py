"""Reads what ``scontrol show`` prints: jobs, partitions, nodes, configuration."""

from __future__ import annotations

import re

from dtslurm.model.runs.state import JobStatus
from dtslurm.model.units import Memory, Walltime
from dtslurm.model.values import dataclass
from dtslurm.slurm import arrays, fields
from dtslurm.slurm.parse import Listing, status

_RECORD = {
    kind: re.compile(rf"^{kind}=", re.MULTILINE)
    for kind in ("JobId", "PartitionName", "NodeName", "DownNodes")
}
_NAME = re.compile(r" ?\bJobName=(.*?)\s+(?:(?:HetJobIdSet|SLUID)=\S+\s+)*UserId=", re.DOTALL)
_USER = re.compile(r"\bUserId=[^\s(]*\((\d+)\)")
_COMMENT = re.compile(r"\sComment=(.*?)\s+(?:ExtraInfo|Extra|StdErr|SystemComment)=", re.DOTALL)


def _records(output: str, kind: str) -> list[str]:
    """Cut the output where a record begins; names may hold newlines, so lines mean nothing."""
    starts = [found.start() for found in _RECORD[kind].finditer(output)]
    return [output[start:end] for start, end in zip(starts, [*starts[1:], None], strict=False)]


def _value(record: str, key: str) -> str:
    """Return a key's value where it stands first: what comes later may be text of a user's own."""
    found = re.search(rf"(?:^|\s){re.escape(key)}=(\S*)", record)
    return fields.text(found[1]) if found else ""


def jobs(output: str, *, uid: int | None = None, observed_at: float = 0.0) -> Listing:
    """Read ``scontrol -o show job``; with ``uid``, only that user's jobs."""
    listing = Listing()
    for record in _records(output, "JobId"):
        user = _USER.search(record)
        job = _job(record, observed_at)
        if not user or not _value(record, "JobState") or not arrays.valid(job.job_id):
            listing.skipped.append(record[:200])
        elif uid is None or int(user[1]) == uid:
            listing.jobs.append(job)
    return listing


def _job(record: str, observed_at: float) -> JobStatus:
    name = _NAME.search(record)
    rest = record[name.end() :] if name else record  # a name may hold anything, "JobState=" too
    comment = _COMMENT.search(rest)
    raw_id, array, task = (_value(record, key) for key in ("JobId", "ArrayJobId", "ArrayTaskId"))
    het, offset = _value(record, "HetJobId"), _value(record, "HetJobOffset")
    job_id = raw_id
    if array and task:
        job_id = f"{array}_{task}" if task.isdecimal() else f"{array}_[{task}]"
    elif het and offset:
        job_id = f"{het}+{offset}"
    values = {
        "raw_id": raw_id,
        "job_id": job_id,
        "raw_state": _value(rest, "JobState"),
        "exit": fields.exit_code(_value(rest, "ExitCode")),
        "submit_time": fields.epoch(_value(rest, "SubmitTime")),
        "start_time": fields.epoch(_value(rest, "StartTime")),
        "end_time": fields.epoch(_value(rest, "EndTime")),
        "nodes": fields.count(_value(rest, "NumNodes")),
        "restarts": fields.count(_value(rest, "Restarts")),
        "partition": _value(rest, "Partition"),
        "nodelist": _value(rest, "NodeList"),
        "reason": _value(rest, "Reason"),
        "comment": comment[1].strip() if comment else "",
        "name": name[1] if name else "",
    }
    return status(values, "scontrol", observed_at)


@dataclass(frozen=True, kw_only=True)
class PartitionInfo:
    """One partition and its limits; None is "no limit", an empty tuple "everybody"."""

    name: str
    default: bool = False
    state: str = ""
    max_time: Walltime | None = None
    max_nodes: int | None = None
    total_nodes: int | None = None
    allow_accounts: tuple[str, ...] = ()
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    deny_qos: tuple[str, ...] = ()
    qos: str = ""
    exclusive: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """One node; ``gpus`` are (Slurm's type or empty, count), ``address`` what other nodes reach it by."""

    name: str
    partitions: tuple[str, ...] = ()
    cpus: int | None = None
    sockets: int | None = None
    cores_per_socket: int | None = None
    threads_per_core: int = 1
    memory: Memory | None = None
    gpus: tuple[tuple[str, int], ...] = ()
    state: str = ""
    features: tuple[str, ...] = ()
    address: str = ""


def _walltime(value: str) -> Walltime | None:
    try:
        return Walltime.parse_limit(value)
    except ValueError:
        return None


def _names(value: str) -> tuple[str, ...]:
    return () if value in {"", "ALL"} else tuple(name for name in value.split(",") if name)


def _named(value: str) -> str:
    return "" if value == "N/A" else value


def partitions(output: str) -> list[PartitionInfo]:
    """Read ``scontrol -o show partition``."""
    return [
        PartitionInfo(
            name=_value(record, "PartitionName"),
            default=_value(record, "Default") == "YES",
            state=_value(record, "State"),
            max_time=_walltime(_value(record, "MaxTime")),
            max_nodes=fields.count(_value(record, "MaxNodes")),
            total_nodes=fields.count(_value(record, "TotalNodes")),
            allow_accounts=_names(_value(record, "AllowAccounts")),
            deny_accounts=_names(_value(record, "DenyAccounts")),
            allow_qos=_names(_value(record, "AllowQos")),
            deny_qos=_names(_value(record, "DenyQos")),
            qos=_named(_value(record, "QoS")),
            exclusive=_value(record, "OverSubscribe").startswith("EXCLUSIVE"),
        )
        for record in _records(output, "PartitionName")
        if _value(record, "PartitionName")
    ]


def graces(output: str) -> dict[str, int]:
    """Read of ``scontrol -o show partition`` the seconds of grace of each partition that gives any."""
    found = {
        _value(record, "PartitionName"): fields.count(_value(record, "GraceTime")) or 0
        for record in _records(output, "PartitionName")
    }
    return {name: seconds for name, seconds in found.items() if name and seconds}


def nodes(output: str) -> list[NodeInfo]:
    """Read ``scontrol -o show node``."""
    listed = []
    for record in _records(output, "NodeName"):
        memory = fields.count(_value(record, "RealMemory"))
        kept = fields.count(_value(record, "MemSpecLimit")) or 0
        listed.append(
            NodeInfo(
                name=_value(record, "NodeName"),
                partitions=_names(_value(record, "Partitions")),
                # CPUEfctv (22.05 on) leaves out the CPUs that the site keeps for itself.
                cpus=fields.count(_value(record, "CPUEfctv")) or fields.count(_value(record, "CPUTot")),
                sockets=fields.count(_value(record, "Sockets")),
                cores_per_socket=fields.count(_value(record, "CoresPerSocket")),
                threads_per_core=fields.count(_value(record, "ThreadsPerCore")) or 1,
                memory=Memory(memory - kept) if memory and memory > kept else None,
                gpus=gpus(_value(record, "Gres")),
                state=_value(record, "State"),
                features=_names(_value(record, "ActiveFeatures") or _value(record, "AvailableFeatures")),
                address=_value(record, "NodeAddr"),
            )
        )
    return [node for node in listed if node.name]


def gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """Read the GPUs out of a Gres value: ``gpu:a100:8(S:0-1),craynetwork:4`` gives ``(("a100", 8),)``."""
    found = []
    # A comma inside parentheses belongs to its entry: gpu:a100:4(S:0,2).
    for entry in re.findall(r"(?:[^,(]|\([^)]*\)?)+", gres):
        parts = re.sub(r"\([^)]*\)?", "", entry).strip().split(":")
        if parts[0] != "gpu":
            continue
        number = int(parts[-1][:9]) if len(parts) > 1 and parts[-1].isdecimal() else 1
        kind = ":".join(part for part in parts[1:] if part and not part.isdecimal())
        if number:
            found.append((kind, number))
    return tuple(found)


def config(output: str) -> dict[str, str]:
    """Read ``scontrol show config`` as it stands, first occurrence of a key wins."""
    values: dict[str, str] = {}
    for line in output.split("\n"):
        key, sign, value = line.partition("=")
        if sign and key.strip():
            values.setdefault(key.strip(), fields.text(value))
    return values
