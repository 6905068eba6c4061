"""Network adapters as the kernel shows them in ``/sys/class/infiniband``."""

import glob
import os
import re
from typing import Any, Dict, List, Mapping, Optional

from ..sampler_values import contents
from .findings import BAD, OK, UNKNOWN, WARN, Finding, finding, listed

SLACK = 0.95  # rates are written rounded

Port = Dict[str, Any]


def seen(sysfs: str) -> List[Port]:
    """Return every port, with its state and its rate in Gb/s."""
    found = []
    for path in sorted(glob.glob(os.path.join(glob.escape(sysfs), "class/infiniband/*/ports/*"))):
        parts = path.split("/")
        device, number = parts[-3], parts[-1]
        rate = re.match(r"\s*([\d.]+)\s*Gb/sec", contents(os.path.join(path, "rate")))
        found.append(
            {
                "device": device,
                "name": device if number == "1" else "{}:{}".format(device, number),
                "state": contents(os.path.join(path, "state")).partition(":")[2].strip(),
                "physical": contents(os.path.join(path, "phys_state")).partition(":")[2].strip(),
                "rate": float(rate.group(1)) if rate else None,
            }
        )
    return found


def ports(wanted: Mapping[str, Any], sysfs: str = "/sys") -> List[Finding]:
    """Judge the adapters against what the profile says of them.

    Args:
        wanted: ``hcas``, names of those that must be there; ``nic_count`` and ``rate_gbps``, how many must be
            up, and how fast, where none is named; ``nodes`` of the job: one alone can do without.
    """
    names = [re.sub(r"^[=^]|:1$", "", str(name)) for name in wanted.get("hcas") or []]
    count = wanted.get("nic_count") if wanted.get("rdma") else None
    found = seen(sysfs)
    if not found and not names:
        return [finding("hca", UNKNOWN, "no adapter can be seen")] if count else []
    fault = BAD if int(wanted.get("nodes") or 1) > 1 else WARN
    rate: Optional[float] = wanted.get("rate_gbps") if wanted.get("rdma") else None
    if names:
        words = [problem for name in names for problem in _problems(name, found, rate)]
        return [finding("hca", fault, listed(words))] if words else [_fine(len(names), rate)]
    up = [port for port in found if port["state"] == "ACTIVE" and not _slow(port, rate)]
    if count and len(up) < int(count):
        words = [problem for port in found for problem in _problems(port["name"], [port], rate)]
        text = "{} of {} adapters are up: {}".format(len(up), count, listed(words) or "the others are gone")
        return [finding("hca", fault, text)]
    down = ["{} is {}".format(port["name"], port["state"] or "in no known state") for port in found]
    down = [text for text, port in zip(down, found) if port["state"] != "ACTIVE"]  # noqa: B905 - as of 3.10
    if down and not count:
        return [finding("hca", WARN if len(down) == len(found) else OK, listed(down))]
    return [_fine(len(up), rate)]


def _fine(count: int, rate: Optional[float]) -> Finding:
    return finding(
        "hca", OK, "{} adapters are up{}".format(count, " at {:g} Gb/s".format(rate) if rate else "")
    )


def _slow(port: Port, rate: Optional[float]) -> bool:
    return bool(rate and port["rate"] is not None and port["rate"] < SLACK * rate)


def _problems(name: str, found: List[Port], rate: Optional[float]) -> List[str]:
    port = next((one for one in found if name in (one["name"], one["device"])), None)
    if port is None:
        return ["{} is not there".format(name)]
    if port["state"] and port["state"] != "ACTIVE":
        link = ", link {}".format(port["physical"]) if port["physical"] else ""
        return ["{} is {}{}".format(name, port["state"], link)]
    if _slow(port, rate):
        return ["{} runs at {:g} of {:g} Gb/s".format(name, port["rate"], rate or 0.0)]
    return []
