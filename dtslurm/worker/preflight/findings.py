"""What a check found: its level with the evidence, and how it is told."""

import json
from typing import Any, Dict, Mapping

OK, WARN, BAD, UNKNOWN = "ok", "warn", "bad", "unknown"
MARK = "dtslurm-health: "  # begins each line of ours; a site's prolog may print others
LONGEST = 400

Finding = Dict[str, str]


def finding(check: str, level: str, evidence: str) -> Finding:
    """Return a finding; the evidence becomes one line of printable text."""
    text = "".join(one if one.isprintable() else " " for one in evidence)
    return {"check": check, "level": level, "evidence": text.strip()[:LONGEST]}


def line(values: Mapping[str, Any]) -> bytes:
    """Return the line that tells something to who asked for the look."""
    return MARK.encode() + json.dumps(values).encode() + b"\n"


def parse_object(text: bytes) -> Dict[str, Any]:
    """Return what such a line tells, empty where it is none."""
    mark = MARK.encode()
    if not text.startswith(mark):
        return {}
    try:
        values = json.loads(text[len(mark) :].decode("utf-8", "replace"))
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def listed(names: Any, most: int = 4) -> str:
    """Return a few names in words."""
    names = list(names)
    more = " and {} more".format(len(names) - most) if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
