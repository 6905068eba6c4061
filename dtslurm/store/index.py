"""An index of the user's runs in SQLite, which can be rebuilt from the run directories at any time."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from dtslurm.errors import StoreError
from dtslurm.model.own_files import check_own_file, make_own_folder, read_own_file
from dtslurm.model.runs.record import JobRecord
from dtslurm.store.rundir import RunDir, is_run_name
from dtslurm.transport.deletion import remove

_SCHEMA_VERSION = 1
_MIN_FREE_BYTES = 65536  # bytes that a change of the index may need
_CREATE_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
  token TEXT PRIMARY KEY, cluster TEXT NOT NULL, job_id TEXT, name TEXT NOT NULL,
  run_dir TEXT NOT NULL, created_at REAL NOT NULL, ended INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS runs_by_job ON runs (cluster, job_id);
"""

# The columns are named, because a later version may have added columns with default values.
_INSERT = """
INSERT OR REPLACE INTO runs (token, cluster, job_id, name, run_dir, created_at, ended)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""


def default_path(env: Mapping[str, str] | None = None) -> Path:
    """Return the path of the index: ``$XDG_STATE_HOME/dtslurm/runs.sqlite``."""
    return state_folder(env) / "runs.sqlite"


def state_folder(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder for this machine's records of runs: ``$XDG_STATE_HOME/dtslurm``."""
    env = os.environ if env is None else env
    state = env.get("XDG_STATE_HOME") or str(Path(env.get("HOME") or Path.home()) / ".local" / "state")
    return Path(state) / "dtslurm"


def cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder for data that can be recomputed: ``$XDG_CACHE_HOME/dtslurm``."""
    env = os.environ if env is None else env
    caches = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "~")) / ".cache")
    return Path(caches).expanduser() / "dtslurm"


def explain_unwritable(path: Path) -> str:
    """Return why a file cannot be written; empty if it can, as far as the file system reports quotas."""
    try:
        existing_path = next(candidate for candidate in (path, *path.parents) if candidate.exists())
        if not os.access(existing_path, os.W_OK):
            return f"{existing_path} is read-only"
        space = os.statvfs(existing_path)
    except OSError as error:
        return str(error)
    is_full = space.f_bavail * space.f_frsize < _MIN_FREE_BYTES or (space.f_files > 0 and space.f_favail == 0)
    return f"the file system of {existing_path} is full" if is_full else ""


def note_missing(run_dir: Path) -> None:
    """Note in a run's root that the index lacks the run, so that a later command inserts it."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with suppress(OSError):
        descriptor = os.open(_missing_file(run_dir.parent), flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"{run_dir.name}\n".encode())


def _missing_file(run_root: Path) -> Path:
    return run_root / f".not-indexed-{os.geteuid()}"


class IndexRow(NamedTuple):
    """The index's row of one run.

    Attributes:
        folder: the run directory, or the local copy of it.
        ended: whether the run's record has an end, or its job is no longer in the queue.
    """

    token: str
    cluster: str
    job_id: str | None
    name: str
    folder: Path
    created_at: float
    ended: bool


class Index:
    """The index of runs, which finds them by token, job id or name.

    Each call opens the database again, because home folders may be on NFS.

    Attributes:
        permanent: False for a copy that this process uses because the file cannot be written.
    """

    def __init__(self, path: Path, *, permanent: bool = True) -> None:
        self._path = path
        self.permanent = permanent

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            make_own_folder(self._path.parent)
            check_own_file(self._path)
            with closing(sqlite3.connect(self._path, timeout=10)) as connection, connection:
                # No WAL: it needs shared memory between all users of the file on one host, but homes are on
                # NFS or Lustre.
                connection.execute("PRAGMA journal_mode=DELETE")
                connection.execute("PRAGMA synchronous=NORMAL")  # the index can be rebuilt
                if connection.execute("PRAGMA user_version").fetchone()[0] < _SCHEMA_VERSION:
                    connection.executescript(_CREATE_TABLES)
                    connection.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
                    self._path.chmod(0o600)
                yield connection
        except (sqlite3.Error, OSError) as error:
            hint = "set XDG_STATE_HOME to a folder that you can write to"
            if explain_unwritable(self._path):
                hint = f"free space in its file system, or {hint}"
            elif self._path.is_file():
                hint = (
                    "the run directories contain all data; delete the index, and dtslurm builds it again "
                    "from $DTSLURM_RUN_ROOT"
                )
            raise StoreError(f"the index of runs {self._path} failed: {error}", hint=hint) from error

    def put(self, record: JobRecord) -> None:
        """Insert or replace a run's row.

        Raises:
            StoreError: the file cannot be written.
        """
        row = (
            record.token,
            record.cluster,
            record.job_id,
            record.name,
            record.folder,
            record.created_at,
            int(bool(record.final)),
        )
        with self._connection() as connection:
            connection.execute(_INSERT, row)

    def remove(self, token: str) -> None:
        """Delete a run's row.

        Raises:
            StoreError: the file cannot be written.
        """
        with self._connection() as connection:
            connection.execute("DELETE FROM runs WHERE token = ?", (token,))

    def run_dirs(
        self, *, limit: int | None = 50, include_ended: bool = True, cluster: str | None = None
    ) -> list[Path]:
        """Return run directories, newest first; all of them if ``limit`` is None.

        Raises:
            StoreError: the file cannot be read.
        """
        query = """SELECT run_dir FROM runs
            WHERE (?1 OR ended = 0) AND (?2 IS NULL OR cluster = ?2)
            ORDER BY created_at DESC LIMIT ?3"""
        parameters = (include_ended, cluster, -1 if limit is None else limit)
        with self._connection() as connection:
            return [Path(row[0]) for row in connection.execute(query, parameters)]

    def find(self, selector: str, cluster: str | None = None) -> list[Path]:
        """Return run directories whose token, job id or folder name is ``selector``, newest first.

        If there are none, return the runs with that name. A run's name must not hide a job with the same id.

        Raises:
            StoreError: the file cannot be read.
        """
        exact_condition = "token = ?1 OR job_id = ?1 OR substr(run_dir, -length(?1) - 1) = '/' || ?1"
        return self._select_run_dirs(exact_condition, selector, cluster) or self._select_run_dirs(
            "name = ?1", selector, cluster
        )

    def of_job(self, job_id: str, cluster: str | None = None) -> list[Path]:
        """Return the directories of runs with a job id, newest first.

        Raises:
            StoreError: the file cannot be read.
        """
        return self._select_run_dirs("job_id = ?1", job_id, cluster)

    def rows(self, cluster: str | None = None) -> list[IndexRow]:
        """Return the rows of all runs, newest first.

        Raises:
            StoreError: the file cannot be read.
        """
        query = """SELECT token, cluster, job_id, name, run_dir, created_at, ended FROM runs
            WHERE ?1 IS NULL OR cluster = ?1 ORDER BY created_at DESC"""
        with self._connection() as connection:
            return [
                IndexRow(token, row_cluster, job_id, name, Path(folder), created_at, bool(has_ended))
                for token, row_cluster, job_id, name, folder, created_at, has_ended in connection.execute(
                    query, (cluster,)
                )
            ]

    def mark_ended(self, tokens: Iterable[str]) -> None:
        """Mark runs as ended whose records cannot be read.

        Raises:
            StoreError: the file cannot be written.
        """
        with self._connection() as connection:
            connection.executemany(
                "UPDATE runs SET ended = 1 WHERE token = ?", [(token,) for token in tokens]
            )

    def _select_run_dirs(self, condition: str, value: str, cluster: str | None) -> list[Path]:
        query = f"SELECT run_dir, cluster FROM runs WHERE {condition} ORDER BY created_at DESC"  # noqa: S608  conditions are constants
        with self._connection() as connection:
            rows = connection.execute(query, (value,)).fetchall()
        return [Path(run_dir) for run_dir, row_cluster in rows if cluster is None or row_cluster == cluster]

    def job_in(self, run_dir: Path) -> tuple[str, str | None]:
        """Return the cluster and job id of the run in a folder; ``""`` and None if they are unknown.

        Raises:
            StoreError: the file cannot be read.
        """
        with self._connection() as connection:
            rows = connection.execute("SELECT cluster, job_id FROM runs WHERE run_dir = ?", (str(run_dir),))
            return rows.fetchone() or ("", None)

    def insert_missing(self, run_root: Path) -> None:
        """Insert the runs that `note_missing` noted below a run root, and remove the notes.

        Raises:
            StoreError: the file cannot be written; the notes remain.
        """
        path = _missing_file(run_root)
        if not path.exists():
            return
        try:
            names = dict.fromkeys(read_own_file(path).decode("utf-8", "replace").split())
            size = path.stat().st_size
            for name in filter(is_run_name, names):
                try:
                    record = RunDir(run_root / name).load()
                except StoreError:  # the run has been deleted
                    continue
                if Path(record.folder) == run_root / name:
                    self.put(record)
            if path.stat().st_size == size:  # another process may have appended a note
                remove(path, within=run_root)
        except OSError:
            return

    def rebuild(self, run_roots: list[Path]) -> int:
        """Insert all runs below ``run_roots`` into the index; return their number.

        Raises:
            StoreError: the file cannot be written.
        """
        count = 0
        for root in run_roots:
            for path in sorted(root.glob("*/job.json")):
                try:
                    record = RunDir(path.parent).load()
                except StoreError:
                    continue
                self.put(record)
                count += 1
        return count
