"""Helpers of the ``sampler`` modules: readers of small files, and the selection of the job's GPUs."""

import contextlib
import os
import re
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

try:
    from .lib.json_records import parse_object
except ImportError:  # beside this file, in a run directory
    from json_records import parse_object  # type: ignore[import-not-found,no-redef]

HIP = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
PLAIN_NODES = 64  # jobs of more nodes write to the shared file system as little as they can
LARGE_JOB_S = 120.0  # between two writes of the samples, and of the activity, of a node of a large job
Record = Dict[str, Any]


def plain_nodes(env: Mapping[str, str]) -> int:
    """Return the number of nodes up to which a job uses the shared file system as small jobs do."""
    text = env.get("DTSLURM_PLAIN_NODES", "")
    return int(text) if text.isdigit() else PLAIN_NODES


def is_large_job(env: Mapping[str, str]) -> bool:
    """Return whether a step has more nodes than that, by its own environment."""
    count = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES", "")
    return count.isdigit() and int(count) > plain_nodes(env)


def output_position(pid: int) -> Optional[int]:
    """Return the position of a process's standard output in its file, None if it cannot be read.

    A rank's shell and all processes that it starts share one position, so the shell's position also advances
    when training writes. The kernel has the position; the file's size needs a request to the file server.
    """
    match = re.search(r"^pos:\s+(\d+)$", contents("/proc/%d/fdinfo/1" % pid), re.MULTILINE)
    return int(match.group(1)) if match else None


def contents(path: str) -> str:
    """Return the stripped text of a small file, or an empty string if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def json_object(path: str) -> Record:
    """Return the JSON object in a small file, or an empty dictionary if there is none."""
    return parse_object(contents(path))


def rank_record(folder: str, rank: int, first: Optional[int]) -> Record:
    """Return a rank's record; empty if there is none.

    Args:
        folder: the folder of the attempt's records.
        first: the first rank of the node in a large job, where the ranks of a node share a file of records.
    """
    if first is not None:
        for line in reversed(contents(os.path.join(folder, "ranks-%d.jsonl" % first)).splitlines()):
            record = parse_object(line)
            if record.get("rank") == rank:
                return record
    return json_object(os.path.join(folder, "%d.json" % rank))


def processes() -> Iterator[Tuple[int, List[str]]]:
    """Yield the pid of each of this user's processes and its ``stat`` fields, starting at the state."""
    user = os.getuid()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == user:
                fields = contents(entry.path + "/stat").rpartition(")")[2].split()
                if len(fields) > 19:
                    yield int(entry.name), fields


def counter(path: str) -> Optional[int]:
    """Return the non-negative integer in a file, or None if there is none."""
    text = contents(path)
    return int(text) if text.isdigit() else None


def decimal(text: str) -> Optional[float]:
    """Return the number in a text, or None for other text such as ``[N/A]``."""
    return float(text) if re.match(r"^-?\d+(\.\d+)?$", text) else None


def drop_none(values: Record) -> Record:
    """Return a record without the entries that are None."""
    return {key: value for key, value in values.items() if value is not None}


def numbers(text: str) -> List[int]:
    """Return the integers of a list such as ``0,2-4``."""
    values: List[int] = []
    for part in text.split(","):
        match = re.match(r"^(\d+)(?:-(\d+))?$", part.strip())
        if match:
            values += range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)
    return values


def select_job_gpus(visible_gpus: List[Record], env: Mapping[str, str], gpu_count: int) -> List[Record]:
    """Return the GPUs of ``visible_gpus`` that belong to this job.

    If Slurm hides the devices of other jobs, these are all visible GPUs; otherwise the Slurm variables
    decide. Their numbers are those of the device files. CUDA_VISIBLE_DEVICES may also contain UUIDs, or
    prefixes of UUIDs.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES", "").strip()
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    if any(device.startswith("MIG-") for device in devices):
        return []
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        ids = numbers(env.get(name, ""))
        if ids and len(visible_gpus) <= len(ids):
            return visible_gpus
        job_gpus = [gpu for gpu in visible_gpus if gpu.get("minor", gpu["index"]) in ids]
        if ids and len(job_gpus) == len(ids):
            return job_gpus
    if devices and all(device.isdigit() for device in devices):
        return [gpu for gpu in visible_gpus if str(gpu["index"]) in devices]
    if any(device.startswith("GPU-") for device in devices):
        return [gpu for gpu in visible_gpus if any(gpu["uuid"].startswith(device) for device in devices)]
    return visible_gpus if gpu_count and not devices and "CUDA_VISIBLE_DEVICES" not in env else []


def mig_devices(env: Mapping[str, str]) -> List[Record]:
    """Return the MIG devices of this job."""
    devices = [uuid.strip() for uuid in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    mig_uuids = [uuid for uuid in devices if uuid.startswith("MIG-")]
    return [{"index": number, "uuid": uuid} for number, uuid in enumerate(mig_uuids)]
