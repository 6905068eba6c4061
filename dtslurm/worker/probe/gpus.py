"""What accelerators a node has, and how they are joined. Part of ``probe.py``. Python 3.6 or later."""

import glob
import os
import re
import shutil
import subprocess
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..sampler_values import contents

Record = Dict[str, Any]

_QUERY = ("index", "name", "memory.total", "pci.bus_id", "driver_version")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def run_tool(argv: Sequence[str], limit: float = 30.0) -> str:
    """Return what a program prints, empty where it is not there, fails or takes too long."""
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def number(text: str) -> Optional[int]:
    """Return a whole number, None for anything else."""
    return int(text) if re.match(r"^-?\d{1,18}$", text) else None


def numa_of(device: str) -> Optional[int]:
    """Return the NUMA node of a device's folder below /sys; the kernel says -1 where there is but one."""
    found = number(contents(os.path.join(device, "numa_node")))
    return found if found is not None and found >= 0 else None


def gpus(root: str = "") -> List[Record]:
    """Return the GPUs that this job may use; memory in MiB. ``root`` stands before /sys and /proc."""
    return _nvidia(root) or _amd(root)


def tools(root: str = "") -> List[str]:
    """Return what could tell of GPUs here, if there were any."""
    found = [name for name in ("nvidia-smi", "rocm-smi") if shutil.which(name)]
    return found + (["amdgpu"] if os.path.isdir(root + "/sys/module/amdgpu") else [])


def _nvidia(root: str) -> List[Record]:
    rows = run_tool(["nvidia-smi", "--query-gpu=" + ",".join(_QUERY), "--format=csv,noheader,nounits"])
    found = []
    for line in rows.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_QUERY) or not cells[0].isdigit():
            continue
        bus = cells[3].lower()
        bus = bus[-12:] if len(bus) > 12 else bus  # 00000000:0F:00.0, and the kernel's 0000:0f:00.0
        gpu = {"index": int(cells[0]), "name": cells[1], "memory_mib": number(cells[2].split(".")[0])}
        gpu.update(vendor="nvidia", bus=bus, driver=cells[4])
        gpu["numa"] = numa_of(os.path.join(root + "/sys/bus/pci/devices", bus))
        found.append(gpu)
    return found


def _amd(root: str) -> List[Record]:
    found: List[Record] = []
    cards = glob.glob(root + "/sys/class/drm/card*/device/mem_info_vram_total")
    for path in sorted(map(os.path.dirname, cards), key=os.path.realpath):
        memory = number(contents(os.path.join(path, "mem_info_vram_total")))
        gpu = {"index": len(found), "name": contents(os.path.join(path, "product_name")), "vendor": "amd"}
        gpu.update(memory_mib=memory >> 20 if memory else None, numa=numa_of(path))
        gpu["bus"] = os.path.basename(os.path.realpath(path))
        found.append(gpu)
    return found


def links(found: Sequence[Record], root: str = "") -> Record:
    """Return how GPUs are joined: ``kind``, and GB/s of one direction of each GPU where that is told."""
    if len(found) < 2:
        return {}
    if found[0]["vendor"] == "amd":
        words = run_tool(["rocm-smi", "--showtopotype"])
        kinds = set(re.findall(r"\b(XGMI|PCIE)\b", words.split("GPU0", 1)[-1]))
        return {"kind": "xgmi" if "XGMI" in kinds else "pcie"} if kinds else {}
    pairs = matrix(run_tool(["nvidia-smi", "topo", "-m"]))
    if not pairs:
        return {}
    joined = [int(word[2:]) for word in pairs if re.match(r"^NV\d+$", word)]
    if not joined:
        return {"kind": "pcie"}
    if len(joined) < len(pairs):
        return {"kind": "nvlink", "links": max(joined), "all": False}
    speeds = re.findall(
        r"^\s*Link \d+: ([\d.]+) GB/s", run_tool(["nvidia-smi", "nvlink", "-s", "-i", "0"]), re.M
    )
    switch = bool(glob.glob(root + "/proc/driver/nvidia-nvswitch/devices/*")) or len(found) > 4
    link: Record = {"kind": "nvswitch" if switch else "nvlink", "links": max(joined), "all": True}
    if speeds:
        link["gbs"] = round(sum(map(float, speeds)), 1)
    return link


def matrix(text: str) -> List[str]:
    """Return the words between each two GPUs in ``nvidia-smi topo -m``: ``NV12``, ``SYS``, ``PIX``…"""
    rows = [line.split() for line in _ANSI.sub("", text).splitlines()]
    head: Tuple[str, ...] = ()
    words = []
    for row in rows:
        if not head and row and row[0] == "GPU0" and row[1:2] == ["GPU1"]:
            head = tuple(row)
        elif head and row and re.match(r"^GPU\d+$", row[0]):
            own = number(row[0][3:])
            cells = row[1 : 1 + len([name for name in head if name.startswith("GPU") and name[3:].isdigit()])]
            words += [cell for place, cell in enumerate(cells) if place != own]
    return words
