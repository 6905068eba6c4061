"""Whether an attempt started with another training script than the one that was submitted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from dtslurm.errors import StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.store.rundir import RunDir


def submitted_hash(record: JobRecord) -> str:
    """Return the SHA-256 of the script when a run was submitted, empty if its record does not have it."""
    try:
        value = RunDir(Path(record.folder)).document().get("script_sha256")
    except StoreError:
        return ""
    return value if isinstance(value, str) else ""


def is_changed(submitted: str, run: RunDir, attempt: int) -> bool | None:
    """Return whether an attempt started with another script than the submitted one.

    Args:
        submitted: as `submitted_hash` returns it.
        run: the run's folder, or that of one array task.

    Returns:
        None if a hash is missing: that of a module, of a snapshot, or of a run of an older dtslurm.
    """
    started = run.manifest(attempt).get("script_sha256") if submitted else None
    return started != submitted if isinstance(started, str) and started else None


def describe_changed_script(record: JobRecord, attempts: Sequence[int]) -> str:
    """Return a sentence about the attempts that started with a changed script, empty if there are none."""
    if not attempts:
        return ""
    numbers = ", ".join(map(str, attempts))
    submitted = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created_at))
    return (
        f"{Path(record.script).name} has changed since it was submitted (at {submitted}): attempt"
        f"{'s' if len(attempts) > 1 else ''} {numbers} started with the changed file. "
        "--snapshot freezes the code"
    )
