"""Detect the resources of this machine: host name, CPUs, memory and GPUs."""

import os
import re
import shutil
import socket
import subprocess
from typing import Any, Dict, List, Optional

Machine = Dict[str, Any]


def host() -> str:
    """Return this machine's name, which identifies its jobs if machines share a home directory."""
    return socket.gethostname().split(".")[0]


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def memory_mib() -> Optional[int]:
    """Return the machine's memory in MiB, or the container's lower limit; None if unknown."""
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


def _run_nvidia_smi(*query: str) -> List[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        process = subprocess.run(
            [program, *query],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.decode("utf-8", "replace").splitlines()


def _count_installed_gpus() -> int:
    try:
        devices = [name for name in os.listdir("/dev") if re.match(r"nvidia\d+$", name)]
    except OSError:
        devices = []
    return len(devices) or sum(line.startswith("GPU ") for line in _run_nvidia_smi("-L"))


def gpus() -> List[str]:
    """Return the GPUs that this process may use, in the notation of ``CUDA_VISIBLE_DEVICES``."""
    count = _count_installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not count or visible is None:
        return [str(index) for index in range(count)]
    visible_gpus = []
    for word in visible.split(","):
        index = word.strip()
        # As in CUDA, the first invalid entry hides all entries after it.
        if not index or (index.lstrip("-").isdecimal() and not 0 <= int(index) < count):
            break
        visible_gpus.append(index)
    return visible_gpus


def gpu_model() -> Dict[str, Any]:
    """Return the first GPU's ``name`` and ``memory_mib``, without unknown values."""
    for line in _run_nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits"):
        name, _, size = line.rpartition(",")
        model: Dict[str, Any] = {"name": name.strip()}
        if size.strip().isdecimal():
            model["memory_mib"] = int(size)
        return model
    return {}


def detect() -> Machine:
    """Return this machine's ``cpus``, ``memory_mib`` (None if unknown) and ``gpus``."""
    return {"cpus": cpus(), "memory_mib": memory_mib(), "gpus": gpus()}
