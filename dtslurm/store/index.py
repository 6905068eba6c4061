"""An index of this user's runs: SQLite, rebuildable from the run directories at any time."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from dtslurm.errors import StoreError
from dtslurm.model.own_files import check_own_file, make_own_folder
from dtslurm.model.runs.record import JobRecord
from dtslurm.store.rundir import RunDir

_SCHEMA_VERSION = 1
_LEAST_SPACE = 65536  # bytes that a change of the index may take
_CREATE = """
CREATE TABLE IF NOT EXISTS runs (
  token TEXT PRIMARY KEY, cluster TEXT NOT NULL, job_id TEXT, name TEXT NOT NULL,
  run_dir TEXT NOT NULL, created_at REAL NOT NULL, ended INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS runs_by_job ON runs (cluster, job_id);
"""

# Columns by name, as a later version may have added some, with defaults.
_PUT = """
INSERT OR REPLACE INTO runs (token, cluster, job_id, name, run_dir, created_at, ended)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""


def default_path(env: Mapping[str, str] | None = None) -> Path:
    """Return where the index lies: ``$XDG_STATE_HOME/dtslurm/runs.sqlite``."""
    return state_folder(env) / "runs.sqlite"


def state_folder(env: Mapping[str, str] | None = None) -> Path:
    """Return where this machine keeps what it knows of runs: ``$XDG_STATE_HOME/dtslurm``."""
    env = os.environ if env is None else env
    state = env.get("XDG_STATE_HOME") or str(Path(env.get("HOME") or Path.home()) / ".local" / "state")
    return Path(state) / "dtslurm"


def cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """Return where this machine keeps what it can find out anew: ``$XDG_CACHE_HOME/dtslurm``."""
    env = os.environ if env is None else env
    caches = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "~")) / ".cache")
    return Path(caches).expanduser() / "dtslurm"


def explain_unwritable(path: Path) -> str:
    """Return why a file cannot be written; empty if it can, as far as the file system shows quotas."""
    try:
        there = next(one for one in (path, *path.parents) if one.exists())
        if not os.access(there, os.W_OK):
            return f"{there} is read-only"
        space = os.statvfs(there)
    except OSError as error:
        return str(error)
    full = space.f_bavail * space.f_frsize < _LEAST_SPACE or (space.f_files > 0 and space.f_favail == 0)
    return f"the file system of {there} is full" if full else ""


class IndexRow(NamedTuple):
    """What the index knows of one run.

    Attributes:
        folder: the run directory, or this machine's copy of it.
        ended: whether its record has an end, or the queue lists no job of it any more.
    """

    token: str
    cluster: str
    job_id: str | None
    name: str
    folder: Path
    created_at: float
    ended: bool


class Index:
    """Finds runs by token, job id or name. Opened for each call: homes may be NFS, so nothing is held."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            make_own_folder(self._path.parent)
            check_own_file(self._path)
            with closing(sqlite3.connect(self._path, timeout=10)) as connection, connection:
                # No WAL: it needs shared memory of one host, and homes are NFS or Lustre.
                connection.execute("PRAGMA journal_mode=DELETE")
                connection.execute("PRAGMA synchronous=NORMAL")  # it can be made anew
                if connection.execute("PRAGMA user_version").fetchone()[0] < _SCHEMA_VERSION:
                    connection.executescript(_CREATE)
                    connection.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
                    self._path.chmod(0o600)
                yield connection
        except (sqlite3.Error, OSError) as error:
            hint = "set XDG_STATE_HOME to a folder that you may write to"
            if explain_unwritable(self._path):
                hint = f"free some space there, or {hint}"
            elif self._path.is_file():
                hint = "run directories hold the truth; delete it to have it made anew from $DTSLURM_RUN_ROOT"
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
            connection.execute(_PUT, row)

    def remove(self, token: str) -> None:
        """Forget a run.

        Raises:
            StoreError: the file cannot be written.
        """
        with self._connection() as connection:
            connection.execute("DELETE FROM runs WHERE token = ?", (token,))

    def run_dirs(
        self, *, limit: int | None = 50, include_ended: bool = True, cluster: str | None = None
    ) -> list[Path]:
        """Return run directories, newest first; all of them where ``limit`` is None.

        Raises:
            StoreError: the file cannot be read.
        """
        query = """SELECT run_dir FROM runs
            WHERE (?1 OR ended = 0) AND (?2 IS NULL OR cluster = ?2)
            ORDER BY created_at DESC LIMIT ?3"""
        asked = (include_ended, cluster, -1 if limit is None else limit)
        with self._connection() as connection:
            return [Path(row[0]) for row in connection.execute(query, asked)]

    def find(self, selector: str, cluster: str | None = None) -> list[Path]:
        """Return run directories whose token, job id or folder name is ``selector``, newest first.

        Only if there are none, those of the name: a job must not be hidden by a run named like it.

        Raises:
            StoreError: the file cannot be read.
        """
        exact = "token = ?1 OR job_id = ?1 OR substr(run_dir, -length(?1) - 1) = '/' || ?1"
        return self._where(exact, selector, cluster) or self._where("name = ?1", selector, cluster)

    def of_job(self, job_id: str, cluster: str | None = None) -> list[Path]:
        """Return the directories of runs with that job id, newest first.

        Raises:
            StoreError: the file cannot be read.
        """
        return self._where("job_id = ?1", job_id, cluster)

    def rows(self, cluster: str | None = None) -> list[IndexRow]:
        """Return what is known of all runs, newest first.

        Raises:
            StoreError: the file cannot be read.
        """
        query = """SELECT token, cluster, job_id, name, run_dir, created_at, ended FROM runs
            WHERE ?1 IS NULL OR cluster = ?1 ORDER BY created_at DESC"""
        with self._connection() as connection:
            return [
                IndexRow(token, of, job_id, name, Path(folder), created_at, bool(ended))
                for token, of, job_id, name, folder, created_at, ended in connection.execute(
                    query, (cluster,)
                )
            ]

    def mark_ended(self, tokens: Iterable[str]) -> None:
        """Note that runs have ended whose records cannot be read.

        Raises:
            StoreError: the file cannot be written.
        """
        with self._connection() as connection:
            connection.executemany("UPDATE runs SET ended = 1 WHERE token = ?", [(one,) for one in tokens])

    def _where(self, condition: str, word: str, cluster: str | None) -> list[Path]:
        query = f"SELECT run_dir, cluster FROM runs WHERE {condition} ORDER BY created_at DESC"  # noqa: S608
        with self._connection() as connection:
            rows = connection.execute(query, (word,)).fetchall()
        return [Path(run_dir) for run_dir, of in rows if cluster is None or of == cluster]

    def job_in(self, run_dir: Path) -> tuple[str, str | None]:
        """Return the cluster and the job id of the run in a folder, if that is known.

        Raises:
            StoreError: the file cannot be read.
        """
        with self._connection() as connection:
            rows = connection.execute("SELECT cluster, job_id FROM runs WHERE run_dir = ?", (str(run_dir),))
            return rows.fetchone() or ("", None)

    def rebuild(self, run_roots: list[Path]) -> int:
        """Read every run directory below ``run_roots`` into the index; return how many there are.

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
