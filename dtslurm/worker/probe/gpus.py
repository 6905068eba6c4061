"""The accelerators of a node, and how they are linked. Part of ``probe.py``. Python 3.6 or later."""

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
    """Return the output of a program, empty if it does not exist, fails or takes too long."""
    try:
        completed = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return completed.stdout.decode("utf-8", "replace") if completed.returncode == 0 else ""


def number(text: str) -> Optional[int]:
    """Return a whole number, None for any other text."""
    return int(text) if re.match(r"^-?\d{1,18}$", text) else None


def numa_of(device: str) -> Optional[int]:
    """Return the NUMA node of a device's folder below /sys; None if the kernel reports -1 (a single node)."""
    numa_node = number(contents(os.path.join(device, "numa_node")))
    return numa_node if numa_node is not None and numa_node >= 0 else None


def gpus(root: str = "") -> List[Record]:
    """Return the GPUs that this job may use; memory in MiB. ``root`` is prefixed to /sys and /proc."""
    return _list_nvidia_gpus(root) or _list_amd_gpus(root)


def tools(root: str = "") -> List[str]:
    """Return the tools and drivers on this node that could report GPUs."""
    names = [name for name in ("nvidia-smi", "rocm-smi") if shutil.which(name)]
    return names + (["amdgpu"] if os.path.isdir(root + "/sys/module/amdgpu") else [])


def _list_nvidia_gpus(root: str) -> List[Record]:
    output = run_tool(["nvidia-smi", "--query-gpu=" + ",".join(_QUERY), "--format=csv,noheader,nounits"])
    found_gpus = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_QUERY) or not cells[0].isdigit():
            continue
        bus = cells[3].lower()
        bus = bus[-12:] if len(bus) > 12 else bus  # nvidia-smi's 00000000:0F:00.0, the kernel's 0000:0f:00.0
        gpu = {"index": int(cells[0]), "name": cells[1], "memory_mib": number(cells[2].split(".")[0])}
        gpu.update(vendor="nvidia", bus=bus, driver=cells[4])
        gpu["numa"] = numa_of(os.path.join(root + "/sys/bus/pci/devices", bus))
        found_gpus.append(gpu)
    return found_gpus


def _list_amd_gpus(root: str) -> List[Record]:
    found_gpus: List[Record] = []
    cards = glob.glob(root + "/sys/class/drm/card*/device/mem_info_vram_total")
    for path in sorted(map(os.path.dirname, cards), key=os.path.realpath):
        memory = number(contents(os.path.join(path, "mem_info_vram_total")))
        gpu = {
            "index": len(found_gpus),
            "name": contents(os.path.join(path, "product_name")),
            "vendor": "amd",
        }
        gpu.update(memory_mib=memory >> 20 if memory else None, numa=numa_of(path))
        gpu["bus"] = os.path.basename(os.path.realpath(path))
        found_gpus.append(gpu)
    return found_gpus


def links(gpu_list: Sequence[Record], root: str = "") -> Record:
    """Return how GPUs are linked: ``kind``, and each GPU's GB/s in one direction if that is reported."""
    if len(gpu_list) < 2:
        return {}
    if gpu_list[0]["vendor"] == "amd":
        topology = run_tool(["rocm-smi", "--showtopotype"])
        kinds = set(re.findall(r"\b(XGMI|PCIE)\b", topology.split("GPU0", 1)[-1]))
        return {"kind": "xgmi" if "XGMI" in kinds else "pcie"} if kinds else {}
    pair_links = matrix(run_tool(["nvidia-smi", "topo", "-m"]))
    if not pair_links:
        return {}
    nvlink_counts = [int(word[2:]) for word in pair_links if re.match(r"^NV\d+$", word)]
    if not nvlink_counts:
        return {"kind": "pcie"}
    if len(nvlink_counts) < len(pair_links):
        return {"kind": "nvlink", "links": max(nvlink_counts), "all": False}
    speeds = re.findall(
        r"^\s*Link \d+: ([\d.]+) GB/s", run_tool(["nvidia-smi", "nvlink", "-s", "-i", "0"]), re.M
    )
    has_switch = bool(glob.glob(root + "/proc/driver/nvidia-nvswitch/devices/*")) or len(gpu_list) > 4
    link: Record = {"kind": "nvswitch" if has_switch else "nvlink", "links": max(nvlink_counts), "all": True}
    if speeds:
        link["gbs"] = round(sum(map(float, speeds)), 1)
    return link


def matrix(text: str) -> List[str]:
    """Return the link type of each pair of GPUs in ``nvidia-smi topo -m``: ``NV12``, ``SYS``, ``PIX``…"""
    rows = [line.split() for line in _ANSI.sub("", text).splitlines()]
    header: Tuple[str, ...] = ()
    link_types = []
    for row in rows:
        if not header and row and row[0] == "GPU0" and row[1:2] == ["GPU1"]:
            header = tuple(row)
        elif header and row and re.match(r"^GPU\d+$", row[0]):
            own_index = number(row[0][3:])
            cells = row[
                1 : 1 + len([name for name in header if name.startswith("GPU") and name[3:].isdigit()])
            ]
            link_types += [cell for index, cell in enumerate(cells) if index != own_index]
    return link_types
