"""Checks of an instance, over the network or in its files: whether it is ready, responds, and is busy."""

import http.client
import os
import re
import socket
import urllib.request
from typing import Dict, Optional

from .plan import RolePlan

PATIENCE_S = 5.0  # for one answer; a busy server may take seconds
LARGEST_METRICS = 1 << 22
LINE_TAIL = 1 << 20  # bytes at the end of a log in which the line is searched
_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{[^}]*\})?[ \t]+(\S+)")
# The same quantity by the names of vLLM and of SGLang (started with --enable-metrics).
_QUANTITIES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "requests": ("vllm:request_success_total", "sglang:num_requests_total", "http_requests_total"),
}
# Without the proxies of the environment: the nodes reach each other directly.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_ready(role: RolePlan, host: str, ports: Dict[str, int], log: str, run_dir: str) -> bool:
    """Return whether an instance passes its readiness check; without a check, it is ready at once."""
    if role.http is not None:
        return answers_http(host, ports.get(role.ready_port), role.http)
    if role.tcp:
        return accepts(host, ports.get(role.ready_port))
    if role.line is not None:
        return _has_line(log, role.line)
    return role.file is None or os.path.exists(os.path.join(run_dir, role.file))


def answers_http(host: str, port: Optional[int], path: str) -> bool:
    """Return whether a GET request gets an answer with a status below 400, after redirects."""
    try:
        with _OPENER.open("http://{}:{}{}".format(host, port, path), timeout=PATIENCE_S) as answer:
            status: int = answer.getcode()
            return status < 400
    except (OSError, ValueError, http.client.HTTPException):
        return False


def accepts(host: str, port: Optional[int]) -> bool:
    """Return whether a port accepts a connection. The kernel also accepts one for a stopped process."""
    if port is None:
        return False
    try:
        with socket.create_connection((host, port), PATIENCE_S):
            return True
    except OSError:
        return False


def _has_line(log: str, pattern: str) -> bool:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LINE_TAIL))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return False
    return re.search(pattern, text, re.MULTILINE) is not None


def read_load(host: str, port: Optional[int], path: str) -> Dict[str, float]:
    """Return the running, waiting and total requests, as far as an instance states them."""
    try:
        with _OPENER.open("http://{}:{}{}".format(host, port, path), timeout=PATIENCE_S) as answer:
            text = answer.read(LARGEST_METRICS).decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return parse_load(text)


def parse_load(text: str) -> Dict[str, float]:
    """Return the load in a text of Prometheus's format; series of several engines are summed."""
    sums: Dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            try:
                sums[match.group(1)] = sums.get(match.group(1), 0.0) + float(match.group(2))
            except ValueError:
                continue
    load = {}
    for quantity, names in _QUANTITIES.items():
        values = [sums[name] for name in names if name in sums]
        if values:
            load[quantity] = values[0]
    return load
