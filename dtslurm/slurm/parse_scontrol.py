"""Parsers of the output of ``scontrol show``: jobs, partitions, nodes, configuration."""

from __future__ import annotations

import re

from dtslurm.model.runs.allocation import HeldAllocation
from dtslurm.model.runs.state import JobStatus
from dtslurm.model.units import Memory, Walltime
from dtslurm.model.values import dataclass
from dtslurm.slurm import arrays, fields
from dtslurm.slurm.parse import Listing, status

_RECORD_START = {
    kind: re.compile(rf"^{kind}=", re.MULTILINE)
    for kind in ("JobId", "PartitionName", "NodeName", "DownNodes")
}
_JOB_NAME = re.compile(r" ?\bJobName=(.*?)\s+(?:(?:HetJobIdSet|SLUID)=\S+\s+)*UserId=", re.DOTALL)
_USER_ID = re.compile(r"\bUserId=[^\s(]*\((\d+)\)")
_COMMENT = re.compile(r"\sComment=(.*?)\s+(?:ExtraInfo|Extra|StdErr|SystemComment)=", re.DOTALL)


def _split_records(output: str, kind: str) -> list[str]:
    """Split the output where records start. Names may contain newlines, so lines are not records."""
    starts = [match.start() for match in _RECORD_START[kind].finditer(output)]
    return [output[start:end] for start, end in zip(starts, [*starts[1:], None], strict=False)]


def _get_value(record: str, key: str) -> str:
    """Return the first value of a key, because later occurrences may be in text that a user wrote."""
    match = re.search(rf"(?:^|\s){re.escape(key)}=(\S*)", record)
    return fields.text(match[1]) if match else ""


def jobs(output: str, *, uid: int | None = None, observed_at: float = 0.0) -> Listing:
    """Parse ``scontrol -o show job``; with ``uid``, return only that user's jobs."""
    listing = Listing()
    for record in _split_records(output, "JobId"):
        user = _USER_ID.search(record)
        job = _parse_job(record, observed_at)
        if not user or not _get_value(record, "JobState") or not arrays.is_valid_job_id(job.job_id):
            listing.skipped.append(record[:200])
        elif uid is None or int(user[1]) == uid:
            listing.jobs.append(job)
    return listing


def _parse_job(record: str, observed_at: float) -> JobStatus:
    name = _JOB_NAME.search(record)
    fields_text = record[name.end() :] if name else record  # a name may contain any text, even "JobState="
    comment = _COMMENT.search(fields_text)
    raw_id, array_id, task_id = (_get_value(record, key) for key in ("JobId", "ArrayJobId", "ArrayTaskId"))
    het_job_id, het_job_offset = _get_value(record, "HetJobId"), _get_value(record, "HetJobOffset")
    job_id = raw_id
    if array_id and task_id:
        job_id = f"{array_id}_{task_id}" if task_id.isdecimal() else f"{array_id}_[{task_id}]"
    elif het_job_id and het_job_offset:
        job_id = f"{het_job_id}+{het_job_offset}"
    values = {
        "raw_id": raw_id,
        "job_id": job_id,
        "raw_state": _get_value(fields_text, "JobState"),
        "exit": fields.exit_code(_get_value(fields_text, "ExitCode")),
        "submit_time": fields.epoch(_get_value(fields_text, "SubmitTime")),
        "start_time": fields.epoch(_get_value(fields_text, "StartTime")),
        "end_time": fields.epoch(_get_value(fields_text, "EndTime")),
        "preempted_at": fields.epoch(_get_value(fields_text, "PreemptTime")),
        "nodes": fields.count(_get_value(fields_text, "NumNodes")),
        "restarts": fields.count(_get_value(fields_text, "Restarts")),
        "partition": _get_value(fields_text, "Partition"),
        "nodelist": _get_value(fields_text, "NodeList"),
        "reason": _get_value(fields_text, "Reason"),
        "comment": comment[1].strip() if comment else "",
        "name": name[1] if name else "",
    }
    return status(values, "scontrol", observed_at)


def allocation(output: str, *, uid: int | None, observed_at: float) -> HeldAllocation | None:
    """Parse ``scontrol -d -o show job`` of one job as an allocation; None if it shows no job.

    TRES has no GPUs unless the site accounts for them, so they are those of JOB_GRES.

    Of an array or a heterogeneous job, the first part is returned.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    records = _split_records(output, "JobId")
    found = jobs(records[0], observed_at=observed_at).jobs if records else []
    if not found:
        return None
    user, job = _USER_ID.search(records[0]), found[0]
    name = _JOB_NAME.search(records[0])
    text = records[0][name.end() :] if name else records[0]
    try:
        nodes = tuple(NodeSet(job.nodelist))
    except NodeSetException:
        nodes = ()
    count = max(1, len(nodes))
    return HeldAllocation(
        job=job,
        is_own=uid is None or user is None or int(user[1]) == uid,
        nodes=nodes,
        gpus_per_node=sum(number for _, number in gpus(_get_value(text, "JOB_GRES"))) // count,
        cpus_per_node=(fields.count(_get_value(text, "NumCPUs")) or 0) // count,
        runs=(),
    )


@dataclass(frozen=True, kw_only=True)
class PartitionInfo:
    """A partition and its limits; None means no limit, an empty tuple means all users."""

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
    """A node.

    Attributes:
        gpus: (Slurm's GPU type or "", count) pairs.
        address: the address under which other nodes reach the node.
    """

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


def _parse_walltime(value: str) -> Walltime | None:
    try:
        return Walltime.parse_limit(value)
    except ValueError:
        return None


def _parse_names(value: str) -> tuple[str, ...]:
    return () if value in {"", "ALL"} else tuple(name for name in value.split(",") if name)


def _parse_optional_name(value: str) -> str:
    return "" if value == "N/A" else value


def partitions(output: str) -> list[PartitionInfo]:
    """Parse ``scontrol -o show partition``."""
    return [
        PartitionInfo(
            name=_get_value(record, "PartitionName"),
            default=_get_value(record, "Default") == "YES",
            state=_get_value(record, "State"),
            max_time=_parse_walltime(_get_value(record, "MaxTime")),
            max_nodes=fields.count(_get_value(record, "MaxNodes")),
            total_nodes=fields.count(_get_value(record, "TotalNodes")),
            allow_accounts=_parse_names(_get_value(record, "AllowAccounts")),
            deny_accounts=_parse_names(_get_value(record, "DenyAccounts")),
            allow_qos=_parse_names(_get_value(record, "AllowQos")),
            deny_qos=_parse_names(_get_value(record, "DenyQos")),
            qos=_parse_optional_name(_get_value(record, "QoS")),
            exclusive=_get_value(record, "OverSubscribe").startswith("EXCLUSIVE"),
        )
        for record in _split_records(output, "PartitionName")
        if _get_value(record, "PartitionName")
    ]


def parse_grace_times(output: str) -> dict[str, int]:
    """Parse the grace time in seconds of each partition that has one from ``scontrol -o show partition``."""
    seconds_by_name = {
        _get_value(record, "PartitionName"): fields.count(_get_value(record, "GraceTime")) or 0
        for record in _split_records(output, "PartitionName")
    }
    return {name: seconds for name, seconds in seconds_by_name.items() if name and seconds}


def nodes(output: str) -> list[NodeInfo]:
    """Parse ``scontrol -o show node``."""
    node_rows = []
    for record in _split_records(output, "NodeName"):
        memory = fields.count(_get_value(record, "RealMemory"))
        reserved_memory = fields.count(_get_value(record, "MemSpecLimit")) or 0
        node_rows.append(
            NodeInfo(
                name=_get_value(record, "NodeName"),
                partitions=_parse_names(_get_value(record, "Partitions")),
                # CPUEfctv (since 22.05) excludes the CPUs that the site reserves for the system.
                cpus=fields.count(_get_value(record, "CPUEfctv"))
                or fields.count(_get_value(record, "CPUTot")),
                sockets=fields.count(_get_value(record, "Sockets")),
                cores_per_socket=fields.count(_get_value(record, "CoresPerSocket")),
                threads_per_core=fields.count(_get_value(record, "ThreadsPerCore")) or 1,
                memory=Memory(memory - reserved_memory) if memory and memory > reserved_memory else None,
                gpus=gpus(_get_value(record, "Gres")),
                state=_get_value(record, "State"),
                features=_parse_names(
                    _get_value(record, "ActiveFeatures") or _get_value(record, "AvailableFeatures")
                ),
                address=_get_value(record, "NodeAddr"),
            )
        )
    return [node for node in node_rows if node.name]


def gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """Parse the GPUs of a Gres value: ``gpu:a100:8(S:0-1),craynetwork:4`` gives ``(("a100", 8),)``."""
    gpu_counts = []
    # A comma inside parentheses belongs to its entry: gpu:a100:4(S:0,2).
    for entry in re.findall(r"(?:[^,(]|\([^)]*\)?)+", gres):
        parts = re.sub(r"\([^)]*\)?", "", entry).strip().split(":")
        if parts[0] != "gpu":
            continue
        number = int(parts[-1][:9]) if len(parts) > 1 and parts[-1].isdecimal() else 1
        gpu_type = ":".join(part for part in parts[1:] if part and not part.isdecimal())
        if number:
            gpu_counts.append((gpu_type, number))
    return tuple(gpu_counts)


def config(output: str) -> dict[str, str]:
    """Parse ``scontrol show config`` into unconverted strings; the first occurrence of a key counts."""
    values: dict[str, str] = {}
    for line in output.split("\n"):
        key, separator, value = line.partition("=")
        if separator and key.strip():
            values.setdefault(key.strip(), fields.text(value))
    return values
