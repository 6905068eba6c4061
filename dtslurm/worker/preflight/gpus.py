"""The job's GPUs on this node: all there, memory sound, links up, nobody else's work on them."""

import contextlib
import ctypes
import os
import re
import subprocess
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ..sampler_amd import Amdgpu, RocmSmi
from ..sampler_nvidia import Nvml
from ..sampler_values import contents
from .findings import BAD, OK, UNKNOWN, WARN, Finding, finding, listed

PROGRAM_S = 20.0
MOST_LINKS = 18  # NVML_NVLINK_MAX_LINKS
LINKED = ("nvlink", "nvswitch")
IN_USE = 0.1  # of a GPU's memory, before anything of this job runs there

Gpu = Dict[str, Any]


def gpus(wanted: Mapping[str, Any], env: Mapping[str, str], sysfs: str = "/sys") -> List[Finding]:
    """Look at the GPUs.

    Args:
        wanted: ``gpus``, how many the job has on this node; ``vendor``; ``intra_node``, what links them.
    """
    count = int(wanted.get("gpus") or 0)
    vendor = wanted.get("vendor") or "nvidia"
    if not count:
        return []
    if vendor == "amd":
        return _amd(count, env, sysfs)
    if vendor != "nvidia":
        return [finding("gpus", UNKNOWN, "no way is known to look at GPUs of {}".format(vendor))]
    try:
        ctypes.CDLL(env.get("DTSLURM_NVML", "libnvidia-ml.so.1"))
    except OSError:
        return _by_program(count)
    try:
        nvml = Nvml(env, count)
    except (OSError, AttributeError):
        return [finding("gpus", BAD, "NVIDIA's driver does not answer: nvmlInit fails")]
    return by_library(nvml, count, str(wanted.get("intra_node") or ""))


# ---- NVIDIA ----


def by_library(nvml: Nvml, count: int, intra_node: str) -> List[Finding]:
    """Judge what NVIDIA's management library tells."""
    there = ctypes.c_uint()
    nvml.call("nvmlDeviceGetCount_v2", ctypes.byref(there))
    answering = nvml.found()
    if len(answering) < there.value:
        silent = sorted(set(range(there.value)) - {gpu["index"] for gpu in answering})
        return [finding("gpus", BAD, "GPU {} does not answer the driver".format(listed(silent)))]
    found = [_counted(len(nvml.gpus), len(answering), count)]
    looked = [_looked_at(nvml, gpu) for gpu in nvml.gpus if "MIG" not in gpu.get("uuid", "")]
    found.append(memory(looked))
    found += links([_links(nvml, gpu["handle"]) for gpu in looked], intra_node)
    return found + in_use(nvml.sample())


def _counted(own: int, seen: int, count: int) -> Finding:
    if own >= count:
        return finding("gpus", OK, "{} of {} GPUs answer".format(own, count))
    if seen < count:
        return finding("gpus", BAD, "{} of {} GPUs answer".format(seen, count))
    return finding(
        "gpus", WARN, "{} GPUs answer, but which {} are this job's is not clear".format(seen, count)
    )


def _looked_at(nvml: Nvml, gpu: Gpu) -> Gpu:
    handle = gpu["handle"]
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    told = nvml.call("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, rows))
    pages = nvml.number("nvmlDeviceGetRetiredPagesPendingStatus", handle)
    return {
        "index": gpu["index"],
        "handle": handle,
        "uncorrected": nvml.number("nvmlDeviceGetTotalEccErrors", handle, 1, 0, wide=True),
        "pending": rows[2].value if told else pages,
        "failed": rows[3].value if told else None,
    }


def memory(looked: List[Gpu]) -> Finding:
    """Judge memory errors: those that could not be corrected since the driver was loaded, and repairs."""
    words = []
    for gpu in looked:
        if gpu.get("failed"):
            words.append("GPU {} has no spare rows left to repair its memory".format(gpu["index"]))
        elif gpu.get("pending"):
            words.append("GPU {} must be reset for a repair of its memory".format(gpu["index"]))
        elif gpu.get("uncorrected"):
            text = "GPU {} has {} uncorrected memory errors"
            words.append(text.format(gpu["index"], gpu["uncorrected"]))
    if words:
        return finding("ecc", BAD, "; ".join(words))
    if all(gpu.get("uncorrected") is None and gpu.get("pending") is None for gpu in looked):
        return finding("ecc", UNKNOWN, "nothing tells of memory errors")
    return finding("ecc", OK, "no uncorrected memory errors")


def _links(nvml: Nvml, handle: Any) -> Tuple[int, int]:
    """Return how many of a GPU's NVLinks are up, and how many it has."""
    up = have = 0
    for link in range(MOST_LINKS):
        state = nvml.number("nvmlDeviceGetNvLinkState", handle, link)
        if state is not None:
            have += 1
            up += state
    return up, have


def links(counts: List[Tuple[int, int]], intra_node: str) -> List[Finding]:
    """Judge NVLinks: (up, all) of each GPU. Not all need be used, but the same number on each GPU."""
    if not any(have for _, have in counts):
        text = "the profile says {}, and no NVLink can be seen".format(intra_node)
        return [finding("nvlink", UNKNOWN, text)] if intra_node in LINKED else []
    most = max(up for up, _ in counts)
    if not most and intra_node in LINKED and len(counts) > 1:
        return [finding("nvlink", BAD, "no NVLink is up, and the profile says {}".format(intra_node))]
    fewer = ["GPU {} has {} of {}".format(at, up, most) for at, (up, _) in enumerate(counts) if up < most]
    if fewer:
        return [finding("nvlink", BAD, "NVLinks that are up: " + listed(fewer))]
    return [finding("nvlink", OK, "{} NVLinks are up on each GPU".format(most))]


def in_use(sampled: List[Gpu]) -> List[Finding]:
    """Tell of GPU memory that is in use before the job has begun: somebody's process was left there."""
    words = []
    for gpu in sampled:
        used, total = gpu.get("memory_used"), gpu.get("memory_total")
        if used is not None and total and used > IN_USE * total:
            words.append("GPU {}: {:.1f} GiB".format(gpu.get("index"), used / 2.0**30))
    return [finding("gpu-memory", WARN, "in use already, of " + listed(words))] if words else []


FIELDS = (
    "index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure",
)  # fmt: skip


def _by_program(count: int) -> List[Finding]:
    """Ask nvidia-smi, where the library cannot be loaded; old ones do not know of remapped rows."""
    said = ""
    for fields in (FIELDS, FIELDS[:2]):
        words = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
        code, said = _output(words)
        if code is None:
            return [finding("gpus", UNKNOWN, "neither NVIDIA's library nor nvidia-smi is there")]
        if code == 0:
            return by_table(said, count)
        if "not a valid field" not in said:
            break
    last = [text for text in said.splitlines() if text.strip()] or ["no words"]
    return [finding("gpus", BAD, "nvidia-smi fails: " + last[-1])]


def by_table(text: str, count: int) -> List[Finding]:
    """Judge the rows that nvidia-smi printed."""
    rows = [[cell.strip() for cell in row.split(",")] for row in text.splitlines()]
    rows = [row for row in rows if row[0].isdigit()]
    looked = []
    for row in rows:
        index, errors, *repairs = [*row, "", "", ""][:4]
        one: Gpu = {"index": index, "uncorrected": int(errors) if errors.isdigit() else None}
        for key, word in zip(("pending", "failed"), repairs):  # noqa: B905 - strict is new in Python 3.10
            if word.lower() in ("0", "1", "yes", "no"):
                one[key] = word.lower() in ("1", "yes")
        looked.append(one)
    return [_counted(len(rows), len(rows), count), memory(looked)]


def _output(words: List[str]) -> Tuple[Optional[int], str]:
    """Return (exit code, output) of a program; code None where there is no such program."""
    try:
        done = subprocess.run(
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
    return done.returncode, done.stdout.decode("utf-8", "replace")


# ---- AMD ----


def _amd(count: int, env: Mapping[str, str], sysfs: str) -> List[Finding]:
    top = os.path.join(sysfs, "class", "drm")
    with contextlib.suppress(OSError):
        there = Amdgpu({}, count, top).gpus
        own = Amdgpu(env, count, top).gpus
        return [_counted(len(own), len(there), count), memory([_errors(gpu) for gpu in own])]
    try:
        seen = RocmSmi(env, count).sample()
    except (OSError, subprocess.SubprocessError):
        return [finding("gpus", UNKNOWN, "neither the driver's files nor rocm-smi are there")]
    return [_counted(len(seen), len(seen), count)]


def _errors(gpu: Gpu) -> Gpu:
    """Return an AMD GPU's uncorrected memory errors, as its driver counts them (``ue:``)."""
    text = contents(os.path.join(gpu["path"], "ras", "umc_err_count"))
    match = re.search(r"^ue:\s*(\d+)", text, re.M)
    return {"index": gpu["index"], "uncorrected": int(match.group(1)) if match else None}
