"""Probes the node it runs on, and prints as JSON the values of a cluster profile for such nodes.

``probe.py REQUEST``: a JSON object with ``peers`` (pairs of another node's name and address), ``disks``
(folders that may be local), ``hosts`` (pairs of name and port outside), ``python`` (the user's interpreter)
and ``limit`` (seconds for each operation that may hang). Unknown values are absent. Nothing is
written to disk. Requires Python 3.6 or later, and no packages.
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
    """Probe the node and print the record."""
    request = json.loads(argument if argument is not None else sys.argv[-1])
    print(MARK + json.dumps(look(request)), flush=True)


def look(request: Dict[str, Any], root: str = "") -> Record:
    """Return all properties of the node; ``root`` is prefixed to /sys and /proc."""
    limit = float(request.get("limit", 60))
    found_gpus = gpus(root)
    record = {
        "schema": 1,
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "numa_nodes": len(glob.glob(root + "/sys/devices/system/node/node[0-9]*")) or None,
        "gpus": found_gpus,
        "gpu_tools": tools(root),
        "links": links(found_gpus, root),
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
    """Return the ports for RDMA: of InfiniBand, RoCE, EFA, Omni-Path, Slingshot."""
    adapters: List[Record] = []
    for port in sorted(glob.glob(root + "/sys/class/infiniband/*/ports/*"), key=_natural_sort_key):
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
        adapters.append(adapter)
    for path in sorted(glob.glob(root + "/sys/class/cxi/cxi*"), key=_natural_sort_key):
        name = os.path.basename(path)
        adapters.append({"name": name, "layer": "Slingshot", "numa": numa_of(os.path.join(path, "device"))})
    return adapters


def _natural_sort_key(path: str) -> List[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def interfaces(root: str = "") -> List[Record]:
    """Return the network interfaces that are up, without bridges and virtual ones; speed in Mb/s."""
    records = []
    for path in sorted(glob.glob(root + "/sys/class/net/*"), key=_natural_sort_key):
        name = os.path.basename(path)
        is_up = contents(os.path.join(path, "operstate")) in ("up", "unknown")
        if (
            name == "lo"
            or not is_up
            or re.match(r"docker|veth|br-|virbr|ifb|dummy|tun|tap|cali|flannel|cni", name)
        ):
            continue
        speed = number(contents(os.path.join(path, "speed")))
        records.append(
            {
                "name": name,
                "mbps": speed if speed and speed > 0 else None,
                "mtu": number(contents(os.path.join(path, "mtu"))),
                "numa": numa_of(os.path.join(path, "device")),
            }
        )
    return records


def route(peers: Sequence[Sequence[str]], root: str = "") -> Optional[Record]:
    """Return the address and the interface that this node uses to reach a peer; sends no packet."""
    for name, address in peers:
        for host in (name, address):
            try:
                family, _, _, _, remote_address = socket.getaddrinfo(host, 9, 0, socket.SOCK_DGRAM)[0]
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(remote_address)
                    local_address = probe.getsockname()[0]
            except (OSError, UnicodeError):
                continue
            record = {"peer": name, "by": host, "address": local_address, "resolves": host == name}
            return dict(record, interface=interface_to(str(remote_address[0]), local_address, root))
    return None


def interface_to(target_address: str, own_address: str, root: str = "") -> str:
    """Return the interface of the route to an address, by ``ip`` or the kernel's table; empty if unknown."""
    if own_address.startswith("127.") or own_address == "::1":
        return "lo"
    match = re.search(r"\bdev (\S+)", run_tool(["ip", "-o", "route", "get", target_address], 5.0))
    if match:
        return match.group(1)
    try:
        address = struct.unpack("=I", socket.inet_aton(target_address))[0]
    except OSError:
        return ""
    best_prefix, name = -1, ""
    for line in contents(root + "/proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or not int(fields[3], 16) & 1:
            continue
        target, mask = int(fields[1], 16), int(fields[7], 16)
        if address & mask == target and bin(mask).count("1") > best_prefix:
            best_prefix, name = bin(mask).count("1"), fields[0]
    return name


def online(hosts: Sequence[Sequence[Any]], limit: float) -> Dict[str, bool]:
    """Return which hosts accept a connection."""

    def accepts(host: str, port: int) -> bool:
        try:
            socket.create_connection((host, port), limit).close()
        except OSError:
            return False
        return True

    if not hosts:
        return {}
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(lambda pair: accepts(str(pair[0]), int(pair[1])), hosts))
    return {str(host): answer for (host, _), answer in zip(hosts, answers)}  # noqa: B905 - new in 3.10


# ---- Disks, limits, torch ----


def size_of(path: str) -> Optional[int]:
    """Return a file system's size in MiB, None if it cannot be read."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize >> 20


def disks(paths: Sequence[str], root: str = "") -> List[Record]:
    """Return the writable folders with their file systems; the paths may contain variables."""
    mounts = []
    for line in contents(root + "/proc/self/mounts").splitlines():
        fields = line.split(" ")
        if len(fields) > 3:
            mounts.append((fields[1].replace("\\040", " "), fields[2], fields[0]))
    records = []
    for requested in paths:
        path = os.path.expandvars(requested)
        if "$" in path or not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
            continue
        real = os.path.realpath(path)
        parent_mounts = [mount for mount in mounts if (real + "/").startswith(mount[0].rstrip("/") + "/")]
        kind = max(parent_mounts, key=lambda mount: len(mount[0]))[1] if parent_mounts else ""
        try:
            status = os.statvfs(real)
        except OSError:  # a file system that does not answer is unusable
            continue
        record = {"path": requested, "kind": kind, "shared": bool(SHARED.search(kind))}
        record.update(size_mib=size_of(real), free_mib=status.f_bavail * status.f_frsize >> 20)
        records.append(record)
    return records


def limits() -> Dict[str, Any]:
    """Return the soft limits that can break training: a number, or ``unlimited``."""
    soft_limits: Dict[str, Any] = {}
    for name, constant in LIMITS.items():
        soft = resource.getrlimit(getattr(resource, constant))[0]
        soft_limits[name] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    return soft_limits


def torch(python: str, limit: float) -> Optional[Record]:
    """Return torch's version, and the seconds that the first import on this node takes."""
    program = shutil.which(os.path.expanduser(python)) if python else None
    if program is None:
        return None
    started_at = time.monotonic()
    fields = run_tool([program, "-c", TORCH], limit).split()
    if len(fields) != 3:
        timed_out = time.monotonic() - started_at >= limit
        return {"python": program, "seconds": limit, "slow": True} if timed_out else {"python": program}
    return {"python": program, "version": fields[0], "cuda": fields[1], "seconds": round(float(fields[2]), 1)}


if __name__ == "__main__":
    main()
