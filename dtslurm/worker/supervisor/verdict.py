"""The cause of an attempt's end, found with the rules of ``dtslurm diagnose``.

``evidence.py`` reads the evidence; ``rules.zip`` and ``rules.json`` hold the rules. All were installed beside
this package at submission. The rules need Python 3.10; without such an interpreter, exit codes alone decide.
"""

import json
import os
import subprocess
import sys
from typing import Any, Dict, List, Optional

from ..evidence import evidence
from ..lib.json_records import read_object

PATIENCE_S = 60.0


def verdict_on(
    top: str, run_dir: str, attempt: int, world_size: int, code: int, pythons: List[str]
) -> Dict[str, Any]:
    """Return the verdict on an attempt that has ended; at least ``cause``.

    Args:
        top: the path of the supervisor's own files.
        pythons: interpreters that may be of version 3.10 or later, best first.
    """
    rules = read_object(os.path.join(top, "rules.json"))
    try:
        findings = evidence.findings(
            {"run_dir": run_dir, "attempt": attempt, "signatures": rules.get("signatures", [])}
        )
    except (OSError, ValueError):
        return by_code(code, None)
    # Events of other attempts, and decisions after them, are no evidence about this attempt.
    findings["events"] = [event for event in findings["events"] if event.get("attempt") == attempt]
    request = {
        "found": findings,
        "signatures": rules.get("signatures", []),
        "world_size": world_size,
        "facts": {
            "state": "FAILED",
            "over": True,
            "exit_code": code,
            "world_size": world_size,
            "attempt": attempt,
        },
    }
    for python in [sys.executable, *pythons]:
        verdict = _apply_rules(python, os.path.join(top, "rules.zip"), request)
        if verdict:
            return verdict
    return by_code(code, (findings.get("first_failures") or [None])[0])


def _apply_rules(python: str, program: str, request: Dict[str, Any]) -> Dict[str, Any]:
    if not python or not os.path.exists(program):
        return {}
    try:
        completed = subprocess.run(
            [python, "-I", program],
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=False,
        )
        verdict = json.loads(completed.stdout.decode())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return verdict if isinstance(verdict, dict) else {}


def by_code(code: int, first: Optional[List[int]]) -> Dict[str, Any]:
    """Return the verdict that follows from an exit code alone."""
    rank, rank_code = (first[0], first[1]) if first else (None, code)
    cause = {139: "segfault", 137: "killed", 134: "abort"}.get(rank_code, "exit-code")
    subject = "rank {}".format(rank) if rank is not None else "the step"
    return {
        "cause": cause,
        "blame": "unknown",
        "rank": rank,
        "summary": "{} ended with {}".format(subject, rank_code),
    }
