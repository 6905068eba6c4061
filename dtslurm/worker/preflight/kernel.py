"""Error reports of NVIDIA's driver (Xid) in the kernel's log, where that may be read."""

import re
import subprocess
from typing import List, Optional, Tuple

from .findings import BAD, OK, UNKNOWN, WARN, Finding, finding, listed

# Which ask for a reset of the GPU, a reboot or a repair (NVIDIA's Xid catalogue, recommended actions). Others
# are the application's doing (13, 31, 43), or were put right by the driver (63, 92, 94).
SEVERE = frozenset(
    (48, 54, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158, 168)
)  # fmt: skip
LINK = 74
FRESH_S, OLD_S = 3600.0, 86400.0
PROGRAM_S = 10.0
XID = re.compile(r"\[\s*(\d+\.\d+)\].*NVRM: Xid \(([^)]*)\): (\d+)(.*)")


def kernel_log() -> List[Finding]:
    """Look for recent Xids."""
    try:
        done = subprocess.run(
            ["dmesg"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=PROGRAM_S, check=False,
        )  # fmt: skip
        with open("/proc/uptime") as file:
            up = float(file.read().split()[0])
    except (OSError, ValueError, subprocess.SubprocessError):
        return [finding("xid", UNKNOWN, "the kernel's log cannot be read")]
    if done.returncode != 0:
        return [finding("xid", UNKNOWN, "the kernel's log may not be read")]
    return [judged(done.stdout.decode("utf-8", "replace"), up)]


def judged(log: str, up: float) -> Finding:
    """Judge the Xids in a kernel's log at ``up`` seconds after the node's start.

    A severe one of the last hour makes the node bad. Since an older one somebody may have reset the GPU: it
    is told, for a day.
    """
    seen: List[Tuple[float, int, str]] = []
    for line in log.splitlines():
        match = XID.search(line)
        if match:
            number = int(match.group(3))
            age = up - float(match.group(1))
            if age <= OLD_S and (number in SEVERE or number == LINK):
                text = "Xid {} of {}{}".format(number, match.group(2), match.group(4).rstrip())
                seen.append((age, number, "{}, {}".format(text, ago(age))))
    fresh = [text for age, number, text in seen if age <= FRESH_S and number in SEVERE]
    if fresh:
        return finding("xid", BAD, listed(fresh[-2:]))
    if seen:
        return finding("xid", WARN, listed([text for _, _, text in seen[-2:]]))
    return finding("xid", OK, "no Xid that asks for a reset within a day")


def ago(seconds: Optional[float]) -> str:
    """Return how long ago something was, in words."""
    minutes = max(0.0, seconds or 0.0) / 60
    return "{:.0f} min ago".format(minutes) if minutes < 120 else "{:.0f} h ago".format(minutes / 60)
