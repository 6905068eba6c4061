"""A finding of a check: its level with the evidence, and its format as a line of output."""

import json
from typing import Any, Dict, Mapping

from ..lib import json_records

OK, WARN, BAD, UNKNOWN = "ok", "warn", "bad", "unknown"
MARK = "dtslurm-health: "  # prefix of this program's lines, because a site's prolog may print others
LONGEST = 400

Finding = Dict[str, str]


def finding(check: str, level: str, evidence: str) -> Finding:
    """Return a finding; the evidence is reduced to one line of printable text."""
    text = "".join(character if character.isprintable() else " " for character in evidence)
    return {"check": check, "level": level, "evidence": text.strip()[:LONGEST]}


def line(values: Mapping[str, Any]) -> bytes:
    """Return the output line that carries these values."""
    return MARK.encode() + json.dumps(values).encode() + b"\n"


def parse_object(text: bytes) -> Dict[str, Any]:
    """Return the values in such a line, empty for any other line."""
    prefix = MARK.encode()
    return json_records.parse_object(text[len(prefix) :]) if text.startswith(prefix) else {}


def join_names(names: Any, max_names: int = 4) -> str:
    """Return a list of a few names as text."""
    names = list(names)
    suffix = " and {} more".format(len(names) - max_names) if len(names) > max_names else ""
    return ", ".join(map(str, names[:max_names])) + suffix
