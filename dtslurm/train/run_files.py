"""The files of a run that training shares with the job around it: lease, events, metrics."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STALE = 87  # exit code: the run belongs to another attempt; nothing was written


class StaleAttempt(SystemExit):
    """A later attempt of this run has begun: whatever this one would write now is no longer wanted.

    It ends the process with exit code 87 where nothing catches it.
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
    """A run's folder as the job's environment names it; without a job, nothing is read or written.

    Attributes:
        folder: ``$DTSLURM_RUN_DIR``.
        attempt: ``$DTSLURM_ATTEMPT``, this process's own.
        metrics: ``$DTSLURM_METRICS``.
    """

    folder: Path | None = None
    attempt: int = 0
    metrics: Path | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str] | None = None) -> RunFiles:
        """Return what an environment names."""
        env = os.environ if environ is None else environ
        folder, metrics, attempt = (env.get(f"DTSLURM_{name}") for name in ("RUN_DIR", "METRICS", "ATTEMPT"))
        return cls(
            folder=Path(folder) if folder else None,
            attempt=int(attempt) if attempt and attempt.isdigit() else 0,
            metrics=Path(metrics) if metrics else None,
        )

    def leased_to(self) -> int | None:
        """Return the attempt that may write, None if nobody said."""
        if self.folder is None:
            return None
        try:
            return int((self.folder / "attempt").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None

    def check_lease(self) -> None:
        """See that this attempt may still write.

        Raises:
            StaleAttempt: a later one has begun.
        """
        holder = self.leased_to()
        if holder is not None and holder > self.attempt:
            raise StaleAttempt(f"attempt {self.attempt} ends: the run belongs to attempt {holder} now")

    def take_lease(self) -> None:
        """Say that this attempt is the one that writes, unless that is said already.

        Raises:
            StaleAttempt: a later one has begun.
        """
        self.check_lease()
        if self.folder is None or self.leased_to() == self.attempt:
            return
        unfinished = self.folder / f".attempt-{self.attempt}-{os.getpid()}"
        unfinished.write_text(f"{self.attempt}\n", encoding="ascii")
        unfinished.replace(self.folder / "attempt")

    def artifact(self, values: Mapping[str, object], metrics: Mapping[str, Any]) -> None:
        """Append a line to the register of artifacts; numbers among the metrics are told with it."""
        if self.folder is None:
            return
        told = {key: plain(value) for key, value in metrics.items()}
        numbers = {key: value for key, value in told.items() if isinstance(value, int | float)}
        head = {"schema": 1, "time": round(time.time(), 3), "attempt": self.attempt}
        append(self.folder / "artifacts.jsonl", json.dumps({**head, **values, "metrics": numbers}) + "\n")

    def pinned(self, checkpoints: Path) -> frozenset[Path]:
        """Return the artifacts that must be kept: of this run, and of the one whose checkpoints these are.

        Raises:
            OSError, ValueError: that cannot be read, so that nothing may be deleted.
        """
        runs = {checkpoints.parent, self.folder or checkpoints.parent}
        return frozenset(run / str(name) for run in runs for name in _pins(run / "pins.json"))

    def count_saved(self, checkpoints: Path) -> int:
        """Return how many checkpoints of a folder the run's events report as saved.

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
        """Append a line to ``events.jsonl``; a disk that refuses it does not end training."""
        if self.folder is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": name, "attempt": self.attempt, **values})
        append(self.folder / "events.jsonl", line + "\n")


def _reports_save(line: str, checkpoints: Path) -> bool:
    try:
        event = json.loads(line)
        return bool(event["event"] == "checkpoint" and Path(event["path"]).parent == checkpoints)
    except (ValueError, KeyError, TypeError):  # a line that is cut, or of another kind
        return False


def _pins(path: Path) -> list[str]:
    try:
        return list(json.loads(path.read_bytes())["pinned"])
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def append(path: Path, text: str) -> bool:
    """Append in one write, which lines of other processes cannot fall into; return whether it worked."""
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


def plain(value: Any) -> Any:
    """Return what JSON can hold; numbers that it cannot are words, so that nobody takes them for missing."""
    if hasattr(value, "numel"):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | list | dict | type(None)) else str(value)
