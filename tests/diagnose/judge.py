"""Diagnoses a run directory as ``dtslurm diagnose`` does, in this process."""

from __future__ import annotations

from pathlib import Path

from dtslurm.config import signatures
from dtslurm.diagnose import findings
from dtslurm.diagnose.verdict import judge
from dtslurm.model.runs.diagnosis import JobFacts, Verdict
from dtslurm.worker.evidence import evidence

SIGNATURES = signatures.load(Path("/"), {})


def verdict(folder: Path, facts: JobFacts, batch: Path | None = None) -> Verdict:
    """Return the verdict on the first attempt of the run in ``folder``."""
    request = {
        "run_dir": str(folder),
        "attempt": 0,
        "extra": [str(batch or folder / "logs" / "batch.log")],
        "signatures": [{"words": item.words, "match": item.match} for item in SIGNATURES],
    }
    result = evidence.findings(request)
    return judge(
        facts, findings.read(result, [item.name for item in SIGNATURES], facts.world_size), SIGNATURES
    )
