"""What this machine has: CPUs, memory, GPUs, and which machine it is."""

import os
import re
import shutil
import socket
import subprocess
from typing import Any, Dict, List, Optional

Machine = Dict[str, Any]


def host() -> str:
    """Return this machine's name, by which its jobs are told from those of others that share the home."""
    return socket.gethostname().split(".")[0]


def cpus() -> int:
    """Return how many CPUs this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def memory_mib() -> Optional[int]:
    """Return the machine's memory, or the container's limit if that is lower, in MiB; None if unknown."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    except (ValueError, OSError):
        return None
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdecimal():
            size = min(size, int(text) // 2**20)
    return size or None


def _nvidia_smi(*query: str) -> List[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run(
            [program, *query],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.decode("utf-8", "replace").splitlines()


def _installed_gpus() -> int:
    try:
        devices = [name for name in os.listdir("/dev") if re.match(r"nvidia\d+$", name)]
    except OSError:
        devices = []
    return len(devices) or sum(line.startswith("GPU ") for line in _nvidia_smi("-L"))


def gpus() -> List[str]:
    """Return the GPUs this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    count = _installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not count or visible is None:
        return [str(index) for index in range(count)]
    chosen = []
    for word in visible.split(","):
        index = word.strip()
        # As CUDA does: the first name that is no device hides all that follow.
        if not index or (index.lstrip("-").isdecimal() and not 0 <= int(index) < count):
            break
        chosen.append(index)
    return chosen


def gpu_model() -> Dict[str, Any]:
    """Return the first GPU's ``name`` and ``memory_mib``, without those that are unknown."""
    for line in _nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits"):
        name, _, size = line.rpartition(",")
        model: Dict[str, Any] = {"name": name.strip()}
        if size.strip().isdecimal():
            model["memory_mib"] = int(size)
        return model
    return {}


def detect() -> Machine:
    """Return what this machine has: ``cpus``, ``memory_mib`` (None if unknown) and ``gpus``."""
    return {"cpus": cpus(), "memory_mib": memory_mib(), "gpus": gpus()}
