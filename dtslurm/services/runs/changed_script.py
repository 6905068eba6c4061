"""Detect attempts that started with a training script that differs from the submitted one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from dtslurm.errors import StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.store.rundir import RunDir


def submitted_hash(record: JobRecord) -> str:
    """Return the SHA-256 of the training script at submission; empty if the record does not contain it."""
    try:
        value = RunDir(Path(record.folder)).document().get("script_sha256")
    except StoreError:
        return ""
    return value if isinstance(value, str) else ""


def is_changed(submitted_digest: str, run: RunDir, attempt: int) -> bool | None:
    """Return whether an attempt started with a script that differs from the submitted one.

    Args:
        submitted_digest: as `submitted_hash` returns it.
        run: the run directory, or the folder of one array task.

    Returns:
        None if a hash is missing: the run starts a module, has a snapshot, or is of an older dtslurm.
    """
    started_hash = run.manifest(attempt).get("script_sha256") if submitted_digest else None
    return started_hash != submitted_digest if isinstance(started_hash, str) and started_hash else None


def describe_changed_script(record: JobRecord, attempts: Sequence[int]) -> str:
    """Return a sentence that names the attempts with a changed script; empty if there are none."""
    if not attempts:
        return ""
    numbers = ", ".join(map(str, attempts))
    time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created_at))
    return (
        f"{Path(record.script).name} has changed since it was submitted (at {time_text}): attempt"
        f"{'s' if len(attempts) > 1 else ''} {numbers} started with the changed file. "
        "--snapshot freezes the code"
    )
