"""One run's directory: the truth about it. Every write is a temp file and a rename."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtslurm.errors import RunExists, StoreError
from dtslurm.model.job import JobRecord
from dtslurm.store import codec
from dtslurm.transport.base import Transport


@dataclass(frozen=True)
class RankRecord:
    """How one rank of one attempt fared (``ranks/<attempt>/<rank>.json``).

    Attributes:
        exit_code: None while the rank runs, or if it was killed before it could be recorded.
        started, ended: seconds since the epoch on the rank's node.
    """

    rank: int
    local_rank: int
    node_rank: int
    host: str
    pid: int
    started: int
    ended: int | None
    exit_code: int | None
    signal: int | None
    error: str | None = None


class RunDir:
    """The files of one run, or of one task of an array run; or this machine's copies of them."""

    RECORD = "job.json"
    SCRIPT = "script.sbatch"

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def record_path(self) -> Path:
        """``job.json``."""
        return self.path / self.RECORD

    @property
    def script_path(self) -> Path:
        """``script.sbatch``."""
        return self.path / self.SCRIPT

    def create(self, transport: Transport, files: Mapping[str, bytes]) -> None:
        """Write a planned run's files, all at once; not the secrets, which stay where the job runs.

        Raises:
            RunExists: the folder is there already.
            StoreError: the disk refused.
        """
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        for name, data in files.items():
            if name != "secrets":
                transport.put(data, str(draft / name))
        try:
            draft.rename(self.path)  # whole or not at all; refused where there is one
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                raise RunExists(f"there is a run in {self.path} already") from None
            raise StoreError(f"cannot make {self.path}: {error.strerror}", evidence=[str(error)]) from error

    def update(self, transport: Transport, record: JobRecord) -> None:
        """Replace the record, keeping the details written when the run was planned.

        Raises:
            StoreError: the disk refused.
        """
        document = codec.decode(self.record_path.read_bytes(), str(self.record_path))
        transport.put(codec.encode({**document, **codec.plain(record)}), str(self.record_path))

    def load(self) -> JobRecord:
        """Return the record.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        return codec.record_from(self.document(), str(self.record_path))

    def document(self) -> dict[str, Any]:
        """Return the whole of ``job.json``.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        try:
            return codec.decode(self.record_path.read_bytes(), str(self.record_path))
        except OSError as error:
            raise StoreError(f"cannot read {self.record_path}: {error.strerror}") from error

    def tasks(self) -> dict[str, RunDir]:
        """Return the array tasks that have started, by array index."""
        folder = self.path / "tasks"
        found = [item for item in _listing(folder) if item.name.isdecimal()]
        return {item.name: RunDir(item) for item in sorted(found, key=lambda item: int(item.name))}

    def attempts(self) -> list[int]:
        """Return the attempts that have started, oldest first."""
        return sorted(int(item.name) for item in _listing(self.path / "logs") if item.name.isdecimal())

    def logs(self, attempt: int) -> Path:
        """Return the folder of an attempt's logs."""
        return self.path / "logs" / str(attempt)

    def manifest(self, attempt: int) -> dict[str, Any]:
        """Return an attempt's manifest, empty while it is not written."""
        return _json_object(self.logs(attempt) / "manifest.json")

    def events(self) -> list[dict[str, Any]]:
        """Return the events in order; a line cut off in the middle is left out."""
        return list(json_lines(self.path / "events.jsonl"))

    def ranks(self, attempt: int) -> list[RankRecord]:
        """Return the rank records of an attempt, by rank."""
        folder = self.path / "ranks" / str(attempt)
        files = [item for item in _listing(folder) if re.fullmatch(r"\d+\.json", item.name)]
        records = (_rank_record(item) for item in sorted(files, key=lambda item: int(item.stem)))
        return [record for record in records if record is not None]

    def first_failure(self, attempt: int) -> tuple[int, int] | None:
        """Return (rank, exit code) of the rank that failed first in an attempt, None if none recorded one."""
        try:
            words = (self.path / "ranks" / str(attempt) / "first-failure").read_text(errors="replace").split()
        except OSError:
            return None
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
            return int(words[0]), int(words[1])
        return None

    def metrics(self, attempt: int) -> list[dict[str, Any]]:
        """Return the training metrics of an attempt, in order."""
        return list(json_lines(self.path / "metrics" / str(attempt) / "train.jsonl"))


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, leaving out what is not one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _listing(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _rank_record(path: Path) -> RankRecord | None:
    value = _json_object(path)
    error = _json_object(path.with_suffix(".error.json")).get("message")
    if isinstance(error, dict):
        error = error.get("message")
    try:
        return RankRecord(
            rank=int(value["rank"]),
            local_rank=int(value["local_rank"]),
            node_rank=int(value["node_rank"]),
            host=str(value["host"]),
            pid=int(value["pid"]),
            started=int(value["started"]),
            ended=value["ended"],
            exit_code=value["exit_code"],
            signal=value["signal"],
            error=error if isinstance(error, str) else None,
        )
    except (KeyError, TypeError, ValueError):
        return None
