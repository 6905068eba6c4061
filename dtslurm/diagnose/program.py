"""The judgement as a program of its own: values in by stdin, a verdict out by stdout, both JSON.

Packed with the rest of this folder into a run's directory, where the supervisor asks it why an attempt ended.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from dtslurm.diagnose import findings
from dtslurm.diagnose.verdict import judge
from dtslurm.model.runs.diagnosis import JobFacts, Signature


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict on a request: what was ``found``, ``signatures``, ``world_size`` and ``facts``."""
    signatures = tuple(
        Signature(**{**one, **{key: tuple(one[key]) for key in ("match", "words")}})
        for one in request["signatures"]
    )
    found = findings.read(request["found"], [one.name for one in signatures], int(request["world_size"]))
    return asdict(judge(JobFacts(**request["facts"]), found, signatures))


def main() -> None:
    """Answer one request."""
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
