"""What the parts of ``sampler.py`` share: small readers of files, and which GPUs are a job's."""

import contextlib
import json
import os
import re
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

HIP = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
Record = Dict[str, Any]


def contents(path: str) -> str:
    """Return a small file's text, empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def json_object(path: str) -> Record:
    """Return the JSON object in a small file, empty where there is none."""
    try:
        value = json.loads(contents(path))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def processes() -> Iterator[Tuple[int, List[str]]]:
    """Yield this user's processes, with the fields of their stat file from the state on."""
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
    """Return the number in a file, None where there is none."""
    text = contents(path)
    return int(text) if text.isdigit() else None


def decimal(text: str) -> Optional[float]:
    """Return a number, None for ``[N/A]`` and the like."""
    return float(text) if re.match(r"^-?\d+(\.\d+)?$", text) else None


def known(values: Record) -> Record:
    """Return a record without what is not known."""
    return {key: value for key, value in values.items() if value is not None}


def numbers(text: str) -> List[int]:
    """Return the numbers in a list such as ``0,2-4``."""
    found: List[int] = []
    for part in text.split(","):
        match = re.match(r"^(\d+)(?:-(\d+))?$", part.strip())
        if match:
            found += range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)
    return found


def chosen(found: List[Record], env: Mapping[str, str], asked: int) -> List[Record]:
    """Return those of the visible GPUs that are this job's.

    Where Slurm keeps others' devices away, all that can be seen are; else what it says decides. Its numbers
    are those of the device files; CUDA_VISIBLE_DEVICES may also hold (the first letters of) UUIDs.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES", "").strip()
    words = [word.strip() for word in visible.split(",") if word.strip()]
    if any(word.startswith("MIG-") for word in words):
        return []
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        ids = numbers(env.get(name, ""))
        if ids and len(found) <= len(ids):
            return found
        mine = [gpu for gpu in found if gpu.get("minor", gpu["index"]) in ids]
        if ids and len(mine) == len(ids):
            return mine
    if words and all(word.isdigit() for word in words):
        return [gpu for gpu in found if str(gpu["index"]) in words]
    if any(word.startswith("GPU-") for word in words):
        return [gpu for gpu in found if any(gpu["uuid"].startswith(word) for word in words)]
    return found if asked and not words and "CUDA_VISIBLE_DEVICES" not in env else []


def mig_devices(env: Mapping[str, str]) -> List[Record]:
    """Return the parts of GPUs that are this job's."""
    words = [word.strip() for word in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    parts = [word for word in words if word.startswith("MIG-")]
    return [{"index": number, "uuid": word} for number, word in enumerate(parts)]
