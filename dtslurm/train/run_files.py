"""The files of a run that training shares with the job around it: lease, events, metrics."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STALE = 87  # exit code: the run belongs to a later attempt, and this process wrote nothing


class StaleAttempt(SystemExit):
    """A later attempt of this run has begun, so this attempt must no longer write.

    The exception ends the process with exit code 87 if it is not caught.
    """

    def __init__(self, message: str) -> None:
        super().__init__(STALE)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[type[StaleAttempt], tuple[str]]:
        return StaleAttempt, (self.message,)


@dataclass(frozen=True)
class RunFiles:
    """The files of a run that the job's environment names; outside a job, nothing is read or written.

    Attributes:
        folder: the run directory, ``$DTSLURM_RUN_DIR``.
        attempt: the attempt of this process, ``$DTSLURM_ATTEMPT``.
        metrics: the metrics file, ``$DTSLURM_METRICS``.
    """

    folder: Path | None = None
    attempt: int = 0
    metrics: Path | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str] | None = None) -> RunFiles:
        """Return the run files that an environment names."""
        env = os.environ if environ is None else environ
        folder, metrics, attempt = (env.get(f"DTSLURM_{name}") for name in ("RUN_DIR", "METRICS", "ATTEMPT"))
        return cls(
            folder=Path(folder) if folder else None,
            attempt=int(attempt) if attempt and attempt.isdigit() else 0,
            metrics=Path(metrics) if metrics else None,
        )

    def leased_to(self) -> int | None:
        """Return the attempt that holds the lease and may write, None if there is no lease."""
        if self.folder is None:
            return None
        try:
            return int((self.folder / "attempt").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None

    def check_lease(self) -> None:
        """Check that this attempt may still write.

        Raises:
            StaleAttempt: a later attempt has begun.
        """
        holder = self.leased_to()
        if holder is not None and holder > self.attempt:
            raise StaleAttempt(f"attempt {self.attempt} ends: the run belongs to attempt {holder} now")

    def take_lease(self) -> None:
        """Take the lease for this attempt, unless this attempt already holds it.

        Raises:
            StaleAttempt: a later attempt has begun.
        """
        self.check_lease()
        if self.folder is None or self.leased_to() == self.attempt:
            return
        temporary_path = self.folder / f".attempt-{self.attempt}-{os.getpid()}"
        temporary_path.write_text(f"{self.attempt}\n", encoding="ascii")
        temporary_path.replace(self.folder / "attempt")

    def artifact(self, values: Mapping[str, object], metrics: Mapping[str, Any]) -> None:
        """Append a line with an artifact and its numeric metrics to ``artifacts.jsonl``."""
        if self.folder is None:
            return
        json_metrics = {key: to_json_value(value) for key, value in metrics.items()}
        numbers = {key: value for key, value in json_metrics.items() if isinstance(value, int | float)}
        common_fields = {"schema": 1, "time": round(time.time(), 3), "attempt": self.attempt}
        append(
            self.folder / "artifacts.jsonl",
            json.dumps({**common_fields, **values, "metrics": numbers}) + "\n",
        )

    def pinned(self, checkpoints: Path) -> frozenset[Path]:
        """Return what must not be deleted of this run and of the run that owns the folder ``checkpoints``.

        These are the pinned artifacts, and the checkpoints that a role evaluates now.

        Raises:
            OSError, ValueError: the pins cannot be read; the caller must not delete anything.
        """
        runs = {checkpoints.parent, self.folder or checkpoints.parent}
        pins = {run / str(name) for run in runs for name in _read_pins(run / "pins.json")}
        return frozenset(pins | {path for run in runs for path in _find_evaluated(run)})

    def count_saved(self, checkpoints: Path) -> int:
        """Return the number of checkpoints in a folder that the run's events report as saved.

        Raises:
            OSError: the events cannot be read.
        """
        if self.folder is None:
            return 0
        try:
            lines = (self.folder / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return 0
        return sum(_reports_save(line, checkpoints) for line in lines if '"checkpoint"' in line)

    def event(self, name: str, **values: object) -> None:
        """Append a line to ``events.jsonl``; a write error does not stop training."""
        if self.folder is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": name, "attempt": self.attempt, **values})
        append(self.folder / "events.jsonl", line + "\n")


def _reports_save(line: str, checkpoints: Path) -> bool:
    try:
        event = json.loads(line)
        return bool(event["event"] == "checkpoint" and Path(event["path"]).parent == checkpoints)
    except (ValueError, KeyError, TypeError):  # a truncated line, or a line of another kind
        return False


def _find_evaluated(run: Path) -> Iterator[Path]:
    """Yield the checkpoints that an instance of an evaluator has claimed and still evaluates."""
    claims = sorted((run / "evaluations").glob("*.json"))
    if not claims:
        return
    ended = {row.get("checkpoint") for row in _read_objects(run / "evaluations.jsonl")}
    ended_instances = _find_ended_instances(run)
    for row in (row for claim in claims for row in _read_objects(claim)):
        checkpoint = row.get("checkpoint")
        is_done = checkpoint in ended or row.get("instance") in ended_instances
        if isinstance(checkpoint, str) and not is_done:
            yield run / checkpoint


def _find_ended_instances(run: Path) -> set[str]:
    """Return the names of the instances of roles, such as ``evaluator-0``, that no longer run."""
    return {
        f"{role.get('name')}-{instance.get('instance')}"
        for state in _read_objects(run / "roles.json")
        for role in state.get("roles") or []
        for instance in role.get("instances") or []
        if instance.get("state") in {"removed", "ended", "failed"}
    }


def _read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a file; incomplete lines and a missing file have none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def _read_pins(path: Path) -> list[str]:
    try:
        return list(json.loads(path.read_bytes())["pinned"])
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def append(path: Path, text: str) -> bool:
    """Append text in one write, so that lines of other processes cannot mix in; return whether it worked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def to_json_value(value: Any) -> Any:
    """Return a JSON value; NaN and infinity become text, so that readers do not take them for missing."""
    if hasattr(value, "numel"):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | list | dict | type(None)) else str(value)
