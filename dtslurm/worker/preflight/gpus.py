"""Checks the job's GPUs on this node: all respond, memory without errors, links up, not in use by others."""

import contextlib
import ctypes
import os
import re
import subprocess
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ..sampler_amd import Amdgpu, RocmSmi
from ..sampler_nvidia import Nvml
from ..sampler_values import contents
from .findings import BAD, OK, UNKNOWN, WARN, Finding, finding, join_names

PROGRAM_S = 20.0
MOST_LINKS = 18  # NVML_NVLINK_MAX_LINKS
LINKED = ("nvlink", "nvswitch")
IN_USE = 0.1  # share of a GPU's memory in use before the job's own processes run that causes a warning

Gpu = Dict[str, Any]


def gpus(requirements: Mapping[str, Any], env: Mapping[str, str], sysfs: str = "/sys") -> List[Finding]:
    """Check the GPUs.

    Args:
        requirements: ``gpus``, the number that the job has on this node; ``vendor``; ``intra_node``, how they
            are linked according to the profile.
    """
    count = int(requirements.get("gpus") or 0)
    vendor = requirements.get("vendor") or "nvidia"
    if not count:
        return []
    if vendor == "amd":
        return _check_amd(count, env, sysfs)
    if vendor != "nvidia":
        return [finding("gpus", UNKNOWN, "GPUs of {} cannot be checked".format(vendor))]
    try:
        ctypes.CDLL(env.get("DTSLURM_NVML", "libnvidia-ml.so.1"))
    except OSError:
        return _by_program(count)
    try:
        nvml = Nvml(env, count)
    except (OSError, AttributeError):
        return [finding("gpus", BAD, "the NVIDIA driver does not respond: nvmlInit failed")]
    return by_library(nvml, count, str(requirements.get("intra_node") or ""))


# ---- NVIDIA ----


def by_library(nvml: Nvml, count: int, intra_node: str) -> List[Finding]:
    """Check the GPUs with NVIDIA's management library."""
    device_count = ctypes.c_uint()
    nvml.call("nvmlDeviceGetCount_v2", ctypes.byref(device_count))
    responding = nvml.found()
    if len(responding) < device_count.value:
        unresponsive = sorted(set(range(device_count.value)) - {gpu["index"] for gpu in responding})
        return [
            finding("gpus", BAD, "GPU {} does not respond to the driver".format(join_names(unresponsive)))
        ]
    findings = [_check_count(len(nvml.gpus), len(responding), count)]
    memory_errors = [_read_memory_errors(nvml, gpu) for gpu in nvml.gpus if "MIG" not in gpu.get("uuid", "")]
    findings.append(memory(memory_errors))
    findings += links([_count_links(nvml, gpu["handle"]) for gpu in memory_errors], intra_node)
    return findings + in_use(nvml.sample())


def _check_count(job_gpus: int, visible_gpus: int, count: int) -> Finding:
    if job_gpus >= count:
        return finding("gpus", OK, "{} of {} GPUs respond".format(job_gpus, count))
    if visible_gpus < count:
        return finding("gpus", BAD, "{} of {} GPUs respond".format(visible_gpus, count))
    return finding(
        "gpus", WARN, "{} GPUs respond, but the {} GPUs of this job are unknown".format(visible_gpus, count)
    )


def _read_memory_errors(nvml: Nvml, gpu: Gpu) -> Gpu:
    handle = gpu["handle"]
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    rows_supported = nvml.call("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
    pages = nvml.number("nvmlDeviceGetRetiredPagesPendingStatus", handle)
    return {
        "index": gpu["index"],
        "handle": handle,
        "uncorrected": nvml.number("nvmlDeviceGetTotalEccErrors", handle, 1, 0, wide=True),
        "pending": rows[2].value if rows_supported else pages,
        "failed": rows[3].value if rows_supported else None,
    }


def memory(gpu_states: List[Gpu]) -> Finding:
    """Judge memory errors: those not corrected since the driver was loaded, and pending repairs."""
    problems = []
    for gpu in gpu_states:
        if gpu.get("failed"):
            problems.append("GPU {} has no spare rows left to repair its memory".format(gpu["index"]))
        elif gpu.get("pending"):
            problems.append("GPU {} must be reset for a repair of its memory".format(gpu["index"]))
        elif gpu.get("uncorrected"):
            text = "GPU {} has {} uncorrected memory errors"
            problems.append(text.format(gpu["index"], gpu["uncorrected"]))
    if problems:
        return finding("ecc", BAD, "; ".join(problems))
    if all(gpu.get("uncorrected") is None and gpu.get("pending") is None for gpu in gpu_states):
        return finding("ecc", UNKNOWN, "memory errors cannot be read")
    return finding("ecc", OK, "no uncorrected memory errors")


def _count_links(nvml: Nvml, handle: Any) -> Tuple[int, int]:
    """Return the number of a GPU's NVLinks that are up, and the number of its NVLinks."""
    up_count = link_count = 0
    for link in range(MOST_LINKS):
        state = nvml.number("nvmlDeviceGetNvLinkState", handle, link)
        if state is not None:
            link_count += 1
            up_count += state
    return up_count, link_count


def links(counts: List[Tuple[int, int]], intra_node: str) -> List[Finding]:
    """Judge NVLinks: (up, all) of each GPU. Some may be unused, but the same number on each GPU."""
    if not any(have for _, have in counts):
        text = "the profile has {}, but the state of the NVLinks cannot be read".format(intra_node)
        return [finding("nvlink", UNKNOWN, text)] if intra_node in LINKED else []
    most = max(up for up, _ in counts)
    if not most and intra_node in LINKED and len(counts) > 1:
        return [finding("nvlink", BAD, "no NVLink is up, but the profile has {}".format(intra_node))]
    fewer = [
        "GPU {} has {} of {}".format(index, up, most) for index, (up, _) in enumerate(counts) if up < most
    ]
    if fewer:
        return [finding("nvlink", BAD, "NVLinks that are up: " + join_names(fewer))]
    return [finding("nvlink", OK, "{} NVLinks are up on each GPU".format(most))]


def in_use(sampled: List[Gpu]) -> List[Finding]:
    """Warn of GPU memory in use before the job has begun: another process was left there."""
    problems = []
    for gpu in sampled:
        used, total = gpu.get("memory_used"), gpu.get("memory_total")
        if used is not None and total and used > IN_USE * total:
            problems.append("GPU {}: {:.1f} GiB".format(gpu.get("index"), used / 2.0**30))
    return [finding("gpu-memory", WARN, "already in use: " + join_names(problems))] if problems else []


FIELDS = (
    "index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure",
)  # fmt: skip


def _by_program(count: int) -> List[Finding]:
    """Check the GPUs with nvidia-smi; old versions do not support remapped rows."""
    output = ""
    for fields in (FIELDS, FIELDS[:2]):
        command = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
        code, output = _run_tool(command)
        if code is None:
            return [finding("gpus", UNKNOWN, "neither NVIDIA's library nor nvidia-smi is installed")]
        if code == 0:
            return by_table(output, count)
        if "not a valid field" not in output:
            break
    last_lines = [text for text in output.splitlines() if text.strip()] or ["no output"]
    return [finding("gpus", BAD, "nvidia-smi failed: " + last_lines[-1])]


def by_table(text: str, count: int) -> List[Finding]:
    """Judge the rows that nvidia-smi printed."""
    rows = [[cell.strip() for cell in row.split(",")] for row in text.splitlines()]
    rows = [row for row in rows if row[0].isdigit()]
    memory_errors = []
    for row in rows:
        index, errors, *repair_flags = [*row, "", "", ""][:4]
        gpu: Gpu = {"index": index, "uncorrected": int(errors) if errors.isdigit() else None}
        for key, word in zip(("pending", "failed"), repair_flags):  # noqa: B905 - strict is new in Python 3.10
            if word.lower() in ("0", "1", "yes", "no"):
                gpu[key] = word.lower() in ("1", "yes")
        memory_errors.append(gpu)
    return [_check_count(len(rows), len(rows), count), memory(memory_errors)]


def _run_tool(words: List[str]) -> Tuple[Optional[int], str]:
    """Return (exit code, output) of a program; code None if the program does not exist."""
    try:
        completed = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROGRAM_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, "no answer within {:.0f} s".format(PROGRAM_S)
    except OSError:
        return None, ""
    return completed.returncode, completed.stdout.decode("utf-8", "replace")


# ---- AMD ----


def _check_amd(count: int, env: Mapping[str, str], sysfs: str) -> List[Finding]:
    drm_dir = os.path.join(sysfs, "class", "drm")
    with contextlib.suppress(OSError):
        all_gpus = Amdgpu({}, count, drm_dir).gpus
        own_gpus = Amdgpu(env, count, drm_dir).gpus
        return [
            _check_count(len(own_gpus), len(all_gpus), count),
            memory([_read_amd_errors(gpu) for gpu in own_gpus]),
        ]
    try:
        samples = RocmSmi(env, count).sample()
    except (OSError, subprocess.SubprocessError):
        return [finding("gpus", UNKNOWN, "neither the driver's files nor rocm-smi exist")]
    return [_check_count(len(samples), len(samples), count)]


def _read_amd_errors(gpu: Gpu) -> Gpu:
    """Return the number of an AMD GPU's uncorrected memory errors, from the driver (``ue:``)."""
    text = contents(os.path.join(gpu["path"], "ras", "umc_err_count"))
    match = re.search(r"^ue:\s*(\d+)", text, re.M)
    return {"index": gpu["index"], "uncorrected": int(match.group(1)) if match else None}
