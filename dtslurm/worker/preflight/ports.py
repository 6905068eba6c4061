"""Checks of the network adapters that the kernel shows in ``/sys/class/infiniband``."""

import glob
import os
import re
from typing import Any, Dict, List, Mapping, Optional

from ..sampler_values import contents
from .findings import BAD, OK, UNKNOWN, WARN, Finding, finding, join_names

SLACK = 0.95  # the kernel reports rounded rates

Port = Dict[str, Any]


def list_ports(sysfs: str) -> List[Port]:
    """Return every port, with its state and its rate in Gb/s."""
    all_ports = []
    for path in sorted(glob.glob(os.path.join(glob.escape(sysfs), "class/infiniband/*/ports/*"))):
        parts = path.split("/")
        device, number = parts[-3], parts[-1]
        rate = re.match(r"\s*([\d.]+)\s*Gb/sec", contents(os.path.join(path, "rate")))
        all_ports.append(
            {
                "device": device,
                "name": device if number == "1" else "{}:{}".format(device, number),
                "state": contents(os.path.join(path, "state")).partition(":")[2].strip(),
                "physical": contents(os.path.join(path, "phys_state")).partition(":")[2].strip(),
                "rate": float(rate.group(1)) if rate else None,
            }
        )
    return all_ports


def ports(requirements: Mapping[str, Any], sysfs: str = "/sys") -> List[Finding]:
    """Compare the adapters with the profile's description.

    Args:
        requirements: ``hcas``, names of required adapters; ``nic_count`` and ``rate_gbps``, how many must
            be up, and how fast, if no names are given; ``nodes``, the size of the job: a single node can
            do without adapters.
    """
    names = [re.sub(r"^[=^]|:1$", "", str(name)) for name in requirements.get("hcas") or []]
    count = requirements.get("nic_count") if requirements.get("rdma") else None
    all_ports = list_ports(sysfs)
    if not all_ports and not names:
        return [finding("hca", UNKNOWN, "no adapter is visible")] if count else []
    fault = BAD if int(requirements.get("nodes") or 1) > 1 else WARN
    least_rate: Optional[float] = requirements.get("rate_gbps") if requirements.get("rdma") else None
    if names:
        problems = [problem for name in names for problem in _find_problems(name, all_ports, least_rate)]
        return (
            [finding("hca", fault, join_names(problems))]
            if problems
            else [_report_ok(len(names), least_rate)]
        )
    active = [port for port in all_ports if port["state"] == "ACTIVE" and not _is_slow(port, least_rate)]
    if count and len(active) < int(count):
        problems = [
            problem for port in all_ports for problem in _find_problems(port["name"], [port], least_rate)
        ]
        text = "{} of {} adapters are up: {}".format(
            len(active), count, join_names(problems) or "the others are missing"
        )
        return [finding("hca", fault, text)]
    down = ["{} is {}".format(port["name"], port["state"] or "in an unknown state") for port in all_ports]
    down = [text for text, port in zip(down, all_ports) if port["state"] != "ACTIVE"]  # noqa: B905 - as of 3.10
    if down and not count:
        return [finding("hca", WARN if len(down) == len(all_ports) else OK, join_names(down))]
    return [_report_ok(len(active), least_rate)]


def _report_ok(count: int, rate: Optional[float]) -> Finding:
    return finding(
        "hca", OK, "{} adapters are up{}".format(count, " at {:g} Gb/s".format(rate) if rate else "")
    )


def _is_slow(port: Port, rate: Optional[float]) -> bool:
    return bool(rate and port["rate"] is not None and port["rate"] < SLACK * rate)


def _find_problems(name: str, ports: List[Port], rate: Optional[float]) -> List[str]:
    port = next((candidate for candidate in ports if name in (candidate["name"], candidate["device"])), None)
    if port is None:
        return ["{} does not exist".format(name)]
    if port["state"] and port["state"] != "ACTIVE":
        link = ", link {}".format(port["physical"]) if port["physical"] else ""
        return ["{} is {}{}".format(name, port["state"], link)]
    if _is_slow(port, rate):
        return ["{} runs at {:g} of {:g} Gb/s".format(name, port["rate"], rate or 0.0)]
    return []
