"""Looks at the node it runs on, and prints as JSON what a cluster's profile should say of such nodes.

``probe.py REQUEST``: a JSON object with ``peers`` (pairs of another node's name and address), ``disks``
(folders that may be local), ``hosts`` (pairs of name and port outside), ``python`` (the user's interpreter)
and ``limit`` (seconds for each thing that may hang). What cannot be known is absent. Nothing is
written anywhere. Python 3.6 or later, nothing else.
"""

import concurrent.futures
import glob
import json
import os
import re
import resource
import shutil
import socket
import struct
import sys
import time
from typing import Any, Dict, List, Optional, Sequence

from ..sampler_values import contents
from .gpus import Record, gpus, links, numa_of, number, run_tool, tools

MARK = "dtslurm-probe:"
RUNTIMES = ("apptainer", "singularity", "enroot", "podman-hpc", "podman", "shifter", "sarus", "ch-run")
SHARED = re.compile(r"nfs|lustre|gpfs|beegfs|ceph|cvmfs|afs|fuse|panfs|wekafs|vast|pvfs|9p|virtiofs")
LIMITS = {"memlock": "RLIMIT_MEMLOCK", "nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC"}
TORCH = """\
import time
begin = time.time()
import torch
print(torch.__version__, torch.version.cuda, time.time() - begin)
"""


def main(argument: Optional[str] = None) -> None:
    """Look and print."""
    request = json.loads(argument if argument is not None else sys.argv[-1])
    print(MARK + json.dumps(look(request)), flush=True)


def look(request: Dict[str, Any], root: str = "") -> Record:
    """Return all that is found; ``root`` stands before /sys and /proc."""
    limit = float(request.get("limit", 60))
    found = gpus(root)
    record = {
        "schema": 1,
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "numa_nodes": len(glob.glob(root + "/sys/devices/system/node/node[0-9]*")) or None,
        "gpus": found,
        "gpu_tools": tools(root),
        "links": links(found, root),
        "hcas": hcas(root),
        "interfaces": interfaces(root),
        "route": route(request.get("peers", []), root),
        "disks": disks(request.get("disks", []), root),
        "limits": limits(),
        "shm_mib": size_of("/dev/shm"),  # noqa: S108
        "runtimes": [name for name in RUNTIMES if shutil.which(name)],
        "online": online(request.get("hosts", []), min(limit, 5.0)),
        "proxy": any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY")),
        "torch": torch(request.get("python", ""), limit),
    }
    return {key: value for key, value in record.items() if value is not None}


# ---- Network ----


def hcas(root: str = "") -> List[Record]:
    """Return the ports that RDMA goes by: of InfiniBand, RoCE, EFA, Omni-Path, Slingshot."""
    found: List[Record] = []
    for port in sorted(glob.glob(root + "/sys/class/infiniband/*/ports/*"), key=_natural):
        folder = os.path.dirname(os.path.dirname(port))
        rate = re.match(r"^([\d.]+) Gb/sec", contents(os.path.join(port, "rate")))
        state = contents(os.path.join(port, "state")).partition(":")[2].strip()
        adapter: Record = {"name": os.path.basename(folder), "port": os.path.basename(port), "state": state}
        adapter["layer"] = contents(os.path.join(port, "link_layer"))
        adapter["rate_gbps"] = float(rate.group(1)) if rate else None
        adapter["numa"] = numa_of(os.path.join(folder, "device"))
        adapter["model"] = contents(os.path.join(folder, "hca_type")) or contents(
            os.path.join(folder, "board_id")
        )
        names = os.path.join(folder, "device", "net", "*")
        adapter["interfaces"] = sorted(os.path.basename(path) for path in glob.glob(names))
        found.append(adapter)
    for path in sorted(glob.glob(root + "/sys/class/cxi/cxi*"), key=_natural):
        name = os.path.basename(path)
        found.append({"name": name, "layer": "Slingshot", "numa": numa_of(os.path.join(path, "device"))})
    return found


def _natural(path: str) -> List[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def interfaces(root: str = "") -> List[Record]:
    """Return the network interfaces that are up, bridges and the like left out; speed in Mb/s."""
    found = []
    for path in sorted(glob.glob(root + "/sys/class/net/*"), key=_natural):
        name = os.path.basename(path)
        up = contents(os.path.join(path, "operstate")) in ("up", "unknown")
        if (
            name == "lo"
            or not up
            or re.match(r"docker|veth|br-|virbr|ifb|dummy|tun|tap|cali|flannel|cni", name)
        ):
            continue
        speed = number(contents(os.path.join(path, "speed")))
        found.append(
            {
                "name": name,
                "mbps": speed if speed and speed > 0 else None,
                "mtu": number(contents(os.path.join(path, "mtu"))),
                "numa": numa_of(os.path.join(path, "device")),
            }
        )
    return found


def route(peers: Sequence[Sequence[str]], root: str = "") -> Optional[Record]:
    """Return by which address and interface this node would speak to another one; nothing is sent."""
    for name, address in peers:
        for host in (name, address):
            try:
                kin, _, _, _, there = socket.getaddrinfo(host, 9, 0, socket.SOCK_DGRAM)[0]
                with socket.socket(kin, socket.SOCK_DGRAM) as probe:
                    probe.connect(there)
                    here = probe.getsockname()[0]
            except (OSError, UnicodeError):
                continue
            found = {"peer": name, "by": host, "address": here, "resolves": host == name}
            return dict(found, interface=interface_to(str(there[0]), here, root))
    return None


def interface_to(there: str, here: str, root: str = "") -> str:
    """Return the interface of the route to an address, by ``ip`` or the kernel's table; empty if not told."""
    if here.startswith("127.") or here == "::1":
        return "lo"
    device = re.search(r"\bdev (\S+)", run_tool(["ip", "-o", "route", "get", there], 5.0))
    if device:
        return device.group(1)
    try:
        wanted = struct.unpack("=I", socket.inet_aton(there))[0]
    except OSError:
        return ""
    best, name = -1, ""
    for line in contents(root + "/proc/net/route").splitlines()[1:]:
        words = line.split()
        if len(words) < 8 or not int(words[3], 16) & 1:
            continue
        target, mask = int(words[1], 16), int(words[7], 16)
        if wanted & mask == target and bin(mask).count("1") > best:
            best, name = bin(mask).count("1"), words[0]
    return name


def online(hosts: Sequence[Sequence[Any]], limit: float) -> Dict[str, bool]:
    """Return which hosts outside take a connection."""

    def taken(host: str, port: int) -> bool:
        try:
            socket.create_connection((host, port), limit).close()
        except OSError:
            return False
        return True

    if not hosts:
        return {}
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(lambda pair: taken(str(pair[0]), int(pair[1])), hosts))
    return {str(host): answer for (host, _), answer in zip(hosts, answers)}  # noqa: B905 - new in 3.10


# ---- Disks, limits, torch ----


def size_of(path: str) -> Optional[int]:
    """Return a file system's size in MiB."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize >> 20


def disks(paths: Sequence[str], root: str = "") -> List[Record]:
    """Return the folders that can be written to, and their file systems; paths may have variables."""
    mounts = []
    for line in contents(root + "/proc/self/mounts").splitlines():
        words = line.split(" ")
        if len(words) > 3:
            mounts.append((words[1].replace("\\040", " "), words[2], words[0]))
    found = []
    for written in paths:
        path = os.path.expandvars(written)
        if "$" in path or not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
            continue
        real = os.path.realpath(path)
        above = [mount for mount in mounts if (real + "/").startswith(mount[0].rstrip("/") + "/")]
        kind = max(above, key=lambda mount: len(mount[0]))[1] if above else ""
        try:
            status = os.statvfs(real)
        except OSError:  # a file system that does not answer is none to use
            continue
        record = {"path": written, "kind": kind, "shared": bool(SHARED.search(kind))}
        record.update(size_mib=size_of(real), free_mib=status.f_bavail * status.f_frsize >> 20)
        found.append(record)
    return found


def limits() -> Dict[str, Any]:
    """Return the soft limits that training trips over: a number, or ``unlimited``."""
    found: Dict[str, Any] = {}
    for name, constant in LIMITS.items():
        soft = resource.getrlimit(getattr(resource, constant))[0]
        found[name] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    return found


def torch(python: str, limit: float) -> Optional[Record]:
    """Return torch's version, and the seconds that importing it takes here for the first time."""
    program = shutil.which(python) if python else None
    if program is None:
        return None
    begin = time.monotonic()
    words = run_tool([program, "-c", TORCH], limit).split()
    if len(words) != 3:
        slow = time.monotonic() - begin >= limit
        return {"python": program, "seconds": limit, "slow": True} if slow else {"python": program}
    return {"python": program, "version": words[0], "cuda": words[1], "seconds": round(float(words[2]), 1)}


if __name__ == "__main__":
    main()
