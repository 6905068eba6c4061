"""The directory of one run, which is authoritative. Files are written to a temporary name and renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from dtslurm.errors import RunExists, StoreError, TransportError
from dtslurm.model.own_files import make_folders
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.values import dataclass
from dtslurm.remote import answers
from dtslurm.store import codec
from dtslurm.transport.base import Transport
from dtslurm.transport.deletion import remove
from dtslurm.worker.lib.disk import sync_folder
from dtslurm.worker.lib.rank_files import find_node_log, open_rank_log, read_records

_SUBMISSION_LOCK = "submitting"
_MAX_ERROR_LENGTH = 300
_RUN_NAME = re.compile(r"once-[0-9a-f]{12}|[A-Za-z0-9_][A-Za-z0-9._-]*-[0-9]{8}-[0-9]{6}-[0-9a-f]{12}")


@dataclass(frozen=True)
class RankRecord:
    """The record of one rank of one attempt: ``ranks/<attempt>/<rank>.json``, or a line of its node.

    Attributes:
        exit_code: None while the rank runs, or if it was killed before it could record an exit code.
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


def is_run_name(name: str) -> bool:
    """Whether a folder name has the form that dtslurm gives to run directories."""
    return _RUN_NAME.fullmatch(name) is not None


class RunDir:
    """The files of one run, or of one task of an array run; or the local copies of them."""

    RECORD = "job.json"
    SCRIPT = "script.sbatch"
    SECRETS = "secrets"
    NOTIFY = "notify.json"  # the addresses of --notify
    OWN = (
        RECORD,
        SCRIPT,
        SECRETS,
        NOTIFY,
        _SUBMISSION_LOCK,
    )  # a copy of a run on another machine excludes these

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def record_path(self) -> Path:
        """The path of ``job.json``."""
        return self.path / self.RECORD

    @property
    def script_path(self) -> Path:
        """The path of ``script.sbatch``."""
        return self.path / self.SCRIPT

    def create(self, transport: Transport, files: Mapping[str, bytes]) -> None:
        """Write a planned run's files atomically, except the secrets, which stay where the job runs.

        The record is durable when this returns. The other files copy those on the cluster and may be lost in
        a power failure.

        Raises:
            RunExists: the folder already exists.
            StoreError: the files cannot be written.
        """
        temp_dir = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            make_folders(temp_dir.parent)
            temp_dir.mkdir(mode=0o700)
            for name, data in files.items():
                if name not in {self.SECRETS, self.RECORD}:
                    _make_folders(temp_dir, PurePosixPath(name).parent)
                    with open(temp_dir / name, "xb", opener=_open_private) as file:
                        file.write(data)
            transport.put(files[self.RECORD], str(temp_dir / self.RECORD))
            temp_dir.rename(self.path)  # atomic; fails if the folder exists
            sync_folder(bytes(self.path.parent))
        except OSError as error:
            with contextlib.suppress(OSError):
                remove(temp_dir, within=self.path.parent)
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                raise RunExists(f"run directory {self.path} already exists") from None
            raise StoreError(f"cannot create {self.path}: {error.strerror}", evidence=[str(error)]) from error

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Hold a lock while the run is submitted. The lock file of a process that died is not locked."""
        path = self.path / _SUBMISSION_LOCK
        try:
            file = path.open("xb", buffering=0)  # unbuffered: a failed write is not repeated on close
        except OSError:  # the lock only saves others a wait
            yield
            return
        with file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(os.uname().nodename.encode())
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    remove(path, within=self.path)

    @contextlib.contextmanager
    def abandoned(self) -> Iterator[bool]:
        """Yield whether a process of this machine died while it was submitting the run.

        At most one caller at a time gets True, until it leaves the context.
        """
        path = self.path / _SUBMISSION_LOCK
        try:
            file = path.open("r+")
        except OSError:
            yield False
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_lock_file = os.path.samestat(os.fstat(file.fileno()), path.stat())
                submitter_died = is_lock_file and file.read() == os.uname().nodename
            except OSError:
                submitter_died = False
            yield submitter_died

    def update(self, transport: Transport, record: JobRecord) -> None:
        """Replace the record, and keep the other fields of the document.

        Raises:
            StoreError: the file cannot be written.
        """
        transport.put(codec.encode({**self.document(), **codec.plain(record)}), str(self.record_path))

    def load(self) -> JobRecord:
        """Return the record.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        return codec.record_from(self.document(), str(self.record_path))

    def document(self) -> dict[str, Any]:
        """Return all fields of ``job.json``.

        Raises:
            StoreError: the file does not exist or cannot be read.
        """
        try:
            return codec.decode(self.record_path.read_bytes(), str(self.record_path))
        except OSError as error:
            raise StoreError(f"cannot read {self.record_path}: {error.strerror}") from error

    def tasks(self) -> dict[str, RunDir]:
        """Return the array tasks that have started, by array index."""
        folder = self.path / "tasks"
        task_folders = [item for item in _list_folder(folder) if item.name.isdecimal()]
        return {item.name: RunDir(item) for item in sorted(task_folders, key=lambda item: int(item.name))}

    def task(self, index: str) -> RunDir | None:
        """Return the folder of an array task, None if the task has not started."""
        folder = self.path / "tasks" / index
        return RunDir(folder) if index.isdecimal() and folder.is_dir() else None

    def attempts(self) -> list[int]:
        """Return the numbers of the attempts that have started, in order."""
        return sorted(
            int(folder.name) for folder in _list_folder(self.path / "logs") if folder.name.isdecimal()
        )

    def logs(self, attempt: int) -> Path:
        """Return the folder of an attempt's logs."""
        return self.path / "logs" / str(attempt)

    def manifest(self, attempt: int) -> dict[str, Any]:
        """Return an attempt's manifest; empty if it is not written yet."""
        return _read_json_object(self.logs(attempt) / "manifest.json")

    def events(self) -> list[dict[str, Any]]:
        """Return the events in order, without incomplete lines."""
        return list(json_lines(self.path / "events.jsonl"))

    def ranks(self, attempt: int) -> list[RankRecord]:
        """Return the rank records of an attempt, sorted by rank."""
        folder = self.path / "ranks" / str(attempt)
        values = sorted(read_records(str(folder)).items())
        records = (_decode_rank_record(value, folder / f"{rank}.error.json") for rank, value in values)
        return [record for record in records if record is not None]

    def rank_log(self, attempt: int, rank: int) -> Path:
        """Return the path of the file with a rank's log: its own, or in a large job that of its node."""
        path = self.logs(attempt) / f"rank-{rank}.log"
        node_log = None if path.exists() else find_node_log(str(path.parent), rank)
        return path if node_log is None else Path(node_log.path)

    def last_output(self, attempt: int, rank: int, size: int) -> bytes:
        """Return up to ``size`` bytes at the end of a rank's log; empty if it cannot be read."""
        with (
            contextlib.suppress(OSError),
            contextlib.closing(open_rank_log(str(self.logs(attempt)), rank)) as log,
        ):
            return log.read(size, max(0, log.size() - size))
        return b""

    def first_failure(self, attempt: int) -> tuple[int, int] | None:
        """Return (rank, exit code) of the rank that failed first in an attempt, None if none was recorded."""
        try:
            fields = (
                (self.path / "ranks" / str(attempt) / "first-failure").read_text(errors="replace").split()
            )
        except OSError:
            return None
        if len(fields) == 2 and fields[0].isdecimal() and fields[1].isdecimal():
            return int(fields[0]), int(fields[1])
        return None

    def first_error(self, attempt: int) -> str:
        """Return the exception at the end of the first failed rank's log; empty if there is none."""
        try:
            text = (self.path / "ranks" / str(attempt) / "first-failure-error").read_text(errors="replace")
        except OSError:
            return ""
        return next(iter(text.splitlines()), "")[:_MAX_ERROR_LENGTH]

    def metrics(self, attempt: int) -> list[dict[str, Any]]:
        """Return the training metrics of an attempt, in order."""
        return list(json_lines(self.path / "metrics" / str(attempt) / "train.jsonl"))


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; skip invalid lines."""
    try:
        lines = path.read_bytes().split(b"\n")  # only a newline ends a line, no other separator of Unicode
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(TransportError):
            yield answers.parse_object(line, path.name)


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        return answers.parse_object(path.read_bytes(), path.name)
    except (OSError, TransportError):
        return {}


def _decode_rank_record(value: Mapping[str, Any], error_path: Path) -> RankRecord | None:
    error = _read_json_object(error_path).get("message")
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
            ended=_whole_or_none(value["ended"]),
            exit_code=_whole_or_none(value["exit_code"]),
            signal=_whole_or_none(value["signal"]),
            error=error if isinstance(error, str) else None,
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _whole_or_none(value: object) -> int | None:
    if value is None or type(value) is int:
        return value
    raise TypeError(f"{value!r} is not a whole number")


def _make_folders(base: Path, folder: PurePosixPath) -> None:
    """Create a folder and its parents below ``base`` with mode 0700."""
    for part in folder.parts:
        base /= part
        base.mkdir(exist_ok=True, mode=0o700)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
