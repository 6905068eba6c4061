"""Why an instance ended, and whether another start may help."""

import os
import re
import time
from typing import Any, Dict, List

from .. import restart_policy, verdict
from ..files import text_of, try_put

BAD_ARGUMENTS, COMMAND_NOT_FOUND = "bad-arguments", "command-not-found"
# A server that has worked may work again after an exception, unlike training that resumes at the same step.
_TEMPORARY = {"python-exception", "nan-loss", "collective-mismatch"}
HOPELESS = (restart_policy.HOPELESS - _TEMPORARY) | {BAD_ARGUMENTS, COMMAND_NOT_FOUND}
LAST_LINES = 5
_USAGE = re.compile(r"^usage:|unrecognized arguments|arguments are required|invalid choice", re.MULTILINE)


def record_end(folder: str, start: int, node: str, started: float, code: int) -> None:
    """Write the record of an instance's end like a rank's, for the rules of the diagnosis."""
    record = (
        '{{"schema": 1, "rank": 0, "local_rank": 0, "node_rank": 0, "host": "{}", "pid": 0, '
        '"started": {:.0f}, "ended": {:.0f}, "exit_code": {}, "signal": {}}}\n'
    )
    signal = code - 128 if code > 128 else "null"
    ranks = os.path.join(folder, "ranks", str(start))
    try_put(os.path.join(ranks, "0.json"), record.format(node, started, time.time(), code, signal))
    if code:
        try_put(os.path.join(ranks, "first-failure"), "0 {}\n".format(code))


def find_cause(top: str, folder: str, start: int, code: int, pythons: List[str]) -> Dict[str, Any]:
    """Return ``cause`` and ``summary`` of an instance's end, and ``hopeless`` if it would end so again.

    Args:
        top: the path of the supervisor's own files.
        folder: the instance's folder, which has the form of a run directory with one rank.
    """
    last_lines = read_last_lines(folder, start)
    if code == 127:
        findings: Dict[str, Any] = {"cause": COMMAND_NOT_FOUND, "summary": "its command does not exist"}
    elif code == 126:
        findings = {"cause": COMMAND_NOT_FOUND, "summary": "its command cannot be executed"}
    elif code == 2 and _USAGE.search("\n".join(last_lines)):
        findings = {"cause": BAD_ARGUMENTS, "summary": "its program refused its arguments"}
    else:
        findings = verdict.verdict_on(top, folder, start, 1, code, pythons)
        findings["summary"] = str(findings.get("summary") or "").replace("rank 0", "it")
    hopeless = findings.get("cause") in HOPELESS and findings.get("blame") not in ("site", "node")
    return {"cause": findings.get("cause") or "unknown", "summary": findings["summary"], "hopeless": hopeless}


def read_last_lines(folder: str, start: int) -> List[str]:
    """Return the last lines of an instance's log that are not empty."""
    text = text_of(os.path.join(folder, "logs", str(start), "rank-0.log")) or ""
    return [line[:300] for line in text[-65536:].splitlines() if line.strip()][-LAST_LINES:]
