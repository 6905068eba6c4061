"""Checks the kernel's log for errors of NVIDIA's driver (Xid), if the log is readable."""

import re
import subprocess
from typing import List, Optional, Tuple

from .findings import BAD, OK, UNKNOWN, WARN, Finding, finding, join_names

# Xids that require a reset of the GPU, a reboot or a repair (NVIDIA's Xid catalog, recommended actions).
# The application causes others (13, 31, 43), and the driver corrects some (63, 92, 94).
SEVERE = frozenset(
    (48, 54, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158, 168)
)  # fmt: skip
LINK = 74
FRESH_S, OLD_S = 3600.0, 86400.0
PROGRAM_S = 10.0
XID = re.compile(r"\[\s*(\d+\.\d+)\].*NVRM: Xid \(([^)]*)\): (\d+)(.*)")


def kernel_log() -> List[Finding]:
    """Check for recent Xids."""
    try:
        completed = subprocess.run(
            ["dmesg"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=PROGRAM_S, check=False,
        )  # fmt: skip
        with open("/proc/uptime") as file:
            uptime_s = float(file.read().split()[0])
    except (OSError, ValueError, subprocess.SubprocessError):
        return [finding("xid", UNKNOWN, "the kernel log cannot be read")]
    if completed.returncode != 0:
        return [finding("xid", UNKNOWN, "no permission to read the kernel log")]
    return [judged(completed.stdout.decode("utf-8", "replace"), uptime_s)]


def judged(log: str, up: float) -> Finding:
    """Judge the Xids in a kernel's log; ``up`` is the node's uptime in seconds.

    A severe Xid of the last hour makes the node bad. After an older one the GPU may have been reset, so it
    only causes a warning, for a day.
    """
    recent: List[Tuple[float, int, str]] = []
    for line in log.splitlines():
        match = XID.search(line)
        if match:
            number = int(match.group(3))
            age = up - float(match.group(1))
            if age <= OLD_S and (number in SEVERE or number == LINK):
                text = "Xid {} of {}{}".format(number, match.group(2), match.group(4).rstrip())
                recent.append((age, number, "{}, {}".format(text, ago(age))))
    severe = [text for age, number, text in recent if age <= FRESH_S and number in SEVERE]
    if severe:
        return finding("xid", BAD, join_names(severe[-2:]))
    if recent:
        return finding("xid", WARN, join_names([text for _, _, text in recent[-2:]]))
    return finding("xid", OK, "no Xid error that requires a reset within a day")


def ago(seconds: Optional[float]) -> str:
    """Return a duration as text, as the time since an event."""
    minutes = max(0.0, seconds or 0.0) / 60
    return "{:.0f} min ago".format(minutes) if minutes < 120 else "{:.0f} h ago".format(minutes / 60)
