"""The diagnosis as a stand-alone program: reads evidence from stdin, writes a verdict to stdout, both JSON.

It is packed with the rest of this folder into the run directory, where the supervisor runs it to find out why
an attempt ended.
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
    """Return the verdict on a request.

    Args:
        request: has the keys ``found``, ``signatures``, ``world_size`` and ``facts``.
    """
    signatures = tuple(
        Signature(**{**fields, **{key: tuple(fields[key]) for key in ("match", "words")}})
        for fields in request["signatures"]
    )
    parsed_findings = findings.read(
        request["found"], [signature.name for signature in signatures], int(request["world_size"])
    )
    return asdict(judge(JobFacts(**request["facts"]), parsed_findings, signatures))


def main() -> None:
    """Read one request from stdin and write its verdict to stdout."""
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
