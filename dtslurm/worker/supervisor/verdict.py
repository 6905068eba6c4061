"""The cause of an attempt's end, by the very rules of ``dtslurm diagnose``.

The reading is ``evidence.py``, the rules are ``rules.zip`` and ``rules.json``, all laid beside this package
when the run was submitted. The rules need Python 3.10; where no such is found, exit codes alone tell.
"""

import json
import os
import subprocess
import sys
from typing import Any, Dict, List, Optional

from ..evidence import evidence
from .files import json_of

PATIENCE_S = 60.0


def verdict_on(
    top: str, run_dir: str, attempt: int, world_size: int, code: int, pythons: List[str]
) -> Dict[str, Any]:
    """Return the verdict on an attempt that has ended; at least ``cause``.

    Args:
        top: where the supervisor's own files are.
        pythons: interpreters that may be of version 3.10 or later, best first.
    """
    rules = json_of(os.path.join(top, "rules.json"))
    try:
        found = evidence.findings(
            {"run_dir": run_dir, "attempt": attempt, "signatures": rules.get("signatures", [])}
        )
    except (OSError, ValueError):
        return by_code(code, None)
    # What other attempts did, and what was decided after them, is no evidence of this one.
    found["events"] = [one for one in found["events"] if one.get("attempt") == attempt]
    request = {
        "found": found,
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
        answer = _judged(python, os.path.join(top, "rules.zip"), request)
        if answer:
            return answer
    return by_code(code, (found.get("first_failures") or [None])[0])


def _judged(python: str, program: str, request: Dict[str, Any]) -> Dict[str, Any]:
    if not python or not os.path.exists(program):
        return {}
    try:
        done = subprocess.run(
            [python, "-I", program],
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=False,
        )
        answer = json.loads(done.stdout.decode())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return answer if isinstance(answer, dict) else {}


def by_code(code: int, first: Optional[List[int]]) -> Dict[str, Any]:
    """Return what an exit code alone tells."""
    rank, own = (first[0], first[1]) if first else (None, code)
    cause = {139: "segfault", 137: "killed", 134: "abort"}.get(own, "exit-code")
    who = "rank {}".format(rank) if rank is not None else "the step"
    return {"cause": cause, "blame": "unknown", "rank": rank, "summary": "{} ended with {}".format(who, own)}
