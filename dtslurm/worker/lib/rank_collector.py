"""Copies the output and the records of a node's ranks from a folder of the node to the node's files.

In a large job each rank writes ``<rank>.log`` and ``<rank>.json`` into a temporary folder of its node. The
node's agent appends new content to ``ranks-<first>.log`` and ``ranks-<first>.jsonl`` (`rank_files`) in the
run directory. These files show how much was copied, so another agent can continue at any time. When the log
and the last record of a rank are complete there, the agent renames the record to ``<rank>.collected``, and
the rank ends.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from typing import Dict, Iterator, List, Optional, Tuple

from .json_records import parse_lines, read_object
from .rank_files import NodeLog, encode_lines, encode_totals

COLLECT_S = 5.0  # the longest time that output waits
ALARM_S = 1.0  # the same, for output with one of these words
ALARMS = (b"Traceback (most", b"Error", b"ERROR", b"FATAL", b"NCCL WARN", b"Segmentation fault", b"Killed")
FIRST_RECORDS_S = 2.0  # the ranks of a node start one after the other
PIECE = 1 << 17  # bytes of one rank that are copied at once
FIRST = ".first"  # a file with the number in the names of the node's files
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class RankCollector:
    """The copying of the files of one attempt's ranks on one node.

    Args:
        folder: the folder of the node, into which the ranks write.
        logs: the folder of the attempt's logs.
        ranks: the folder of the attempt's records.
    """

    def __init__(self, folder: str, logs: str, ranks: str) -> None:
        self.folder, self.logs, self.ranks = folder, logs, ranks
        self._node_log: Optional[NodeLog] = None
        self._known_sizes: Dict[int, int] = {}  # of the ranks' logs when they were last searched for alarms
        self._waiting_since: Dict[int, float] = {}  # when a rank's new output was seen
        self._last_write = -1e9
        self._copied: Dict[int, int] = {}
        self._records: Dict[int, Tuple[int, int]] = {}  # inode and time of the copied records
        self._records_since: Optional[float] = None

    def collect(self, *, final: bool = False) -> bool:
        """Copy what is due, and return whether that succeeded.

        Args:
            final: copy everything, because the ranks have ended.
        """
        names = self._list_names()
        logs = sorted(int(name[:-4]) for name in names if re.match(r"\d+\.log$", name))
        if not logs:
            return True
        records = {rank: self._changed_record(rank) for rank in logs if "{}.json".format(rank) in names}
        ended = [
            rank for rank, record in records.items() if record and record[1].get("exit_code") is not None
        ]
        now = time.monotonic()
        has_due_output = self._has_due_output(logs, now)
        new_records = {rank: record for rank, record in records.items() if record}
        if new_records and self._records_since is None:
            self._records_since = now
        has_due_records = self._records_since is not None and now - self._records_since >= FIRST_RECORDS_S
        if not (final or ended or has_due_output or (new_records and has_due_records)):
            return True
        with contextlib.suppress(OSError), self._locked() as is_locked:
            if not is_locked:
                return False
            first = self._find_first(logs)
            is_complete = True
            if final or ended or has_due_output:
                is_complete = self._copy_logs(first, logs, set(logs) if final else set(ended))
            if new_records:
                self._copy_records(first, {rank: record[0] for rank, record in new_records.items()})
                for rank, record in new_records.items():
                    if rank not in ended or is_complete:
                        self._records[rank] = record[2]
                self._records_since = None
            if is_complete:
                self._confirm(ended)
            return is_complete
        return False

    def _confirm(self, ended_ranks: List[int]) -> None:
        """Let ranks end that wait until their files are copied.

        A rank that another agent has confirmed may delete its files now, so a new file could stay behind.
        """
        for rank in ended_ranks:
            path = os.path.join(self.folder, str(rank))
            with contextlib.suppress(FileNotFoundError):
                os.rename(path + ".json", path + ".collected")

    def clear(self) -> None:
        """Delete the folder of the node."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _list_names(self) -> List[str]:
        try:
            return os.listdir(self.folder)
        except OSError:
            return []

    def _changed_record(self, rank: int) -> "Optional[Tuple[bytes, Dict[str, object], Tuple[int, int]]]":
        """Return a rank's record (its text, its values, its version) if it was not copied yet."""
        path = os.path.join(self.folder, "{}.json".format(rank))
        try:
            status = os.stat(path)
            version = status.st_ino, status.st_mtime_ns
            if self._records.get(rank) == version:
                return None
            with open(path, "rb") as file:
                text = file.read().strip() + b"\n"
        except OSError:
            return None
        values = next(iter(parse_lines([text])), None)
        return (text, values, version) if values else None

    def _has_due_output(self, ranks: List[int], now: float) -> bool:
        """Return whether new output has waited long enough."""
        is_due = False
        for rank in ranks:
            path = os.path.join(self.folder, "{}.log".format(rank))
            try:
                size = os.stat(path).st_size
            except OSError:
                continue
            if size <= self._copied.get(rank, 0):
                continue
            since = self._waiting_since.setdefault(rank, now)
            is_due = is_due or now - since >= COLLECT_S
            known_size = self._known_sizes.get(rank, 0)
            if size > known_size and now - self._last_write >= ALARM_S:
                self._known_sizes[rank] = size
                is_due = is_due or _has_alarm(path, max(known_size - 32, size - PIECE, 0))
        return is_due

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock of the node's files; yield False if another agent holds it."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def _find_first(self, ranks: List[int]) -> int:
        """Return the number in the names of the node's files: its first rank, also after that has ended."""
        path = os.path.join(self.folder, FIRST)
        first = read_object(path).get("first")
        if isinstance(first, int):
            return first
        with open(path, "w") as file:
            json.dump({"first": ranks[0]}, file)
        return ranks[0]

    def _copy_logs(self, first: int, ranks: List[int], ended_ranks: "set[int]") -> bool:
        """Append the ranks' new output to the node's log; return whether that succeeded.

        Args:
            ended_ranks: ranks whose last line may have no newline.
        """
        path = os.path.join(self.logs, "ranks-{}.log".format(first))
        if self._node_log is None:
            self._node_log = NodeLog(path)
        node_log = self._node_log
        descriptor = os.open(path, _FLAGS, 0o600)
        try:
            node_log.look_at(descriptor)
            _truncate(descriptor, node_log.end)
            while True:
                output = {rank: self._next_output(rank, node_log, rank in ended_ranks) for rank in ranks}
                lines = [encode_lines(rank, *new) for rank, new in output.items() if new[0]]
                if not lines:
                    break
                totals = {rank: (groups.size, groups.written) for rank, groups in node_log.groups.items()}
                for rank, (data, written) in output.items():
                    totals[rank] = totals.get(rank, (0, 0.0))[0] + len(data), written
                _append(descriptor, b"".join([*lines, encode_totals(totals)]), node_log.end)
                node_log.look_at(descriptor)
        except OSError:
            return False
        finally:
            os.close(descriptor)
            self._copied = {rank: groups.size for rank, groups in node_log.groups.items()}
            self._last_write = time.monotonic()
            self._waiting_since.clear()
        return True

    def _next_output(self, rank: int, node_log: NodeLog, is_ended: bool) -> Tuple[bytes, float]:
        """Return the next output of a rank for the node's log, and when the rank wrote last (epoch seconds).

        An incomplete line is left for later, unless the rank has ended or the line has waited for long.
        """
        groups = node_log.groups.get(rank)
        try:
            with open(os.path.join(self.folder, "{}.log".format(rank)), "rb") as file:
                written = os.fstat(file.fileno()).st_mtime
                data = os.pread(file.fileno(), PIECE, groups.size if groups else 0)
        except OSError:
            return b"", groups.written if groups else 0.0
        since = self._waiting_since.get(rank)
        has_waited = since is not None and time.monotonic() - since >= COLLECT_S
        complete = data[: data.rfind(b"\n") + 1]
        if not is_ended and len(data) < PIECE and (complete or not has_waited):
            data = complete
        return data, written if data or groups else 0.0

    def _copy_records(self, first: int, records: Dict[int, bytes]) -> None:
        """Append records to those of the node, except records that another agent has appended.

        Raises:
            OSError: they were not appended.
        """
        descriptor = os.open(os.path.join(self.ranks, "ranks-{}.jsonl".format(first)), _FLAGS, 0o600)
        try:
            text = os.pread(descriptor, 1 << 24, 0)
            end = text.rfind(b"\n") + 1
            _truncate(descriptor, end)
            copied_lines = set(text[:end].splitlines(True))
            new = b"".join(record for record in records.values() if record not in copied_lines)
            if new:
                _append(descriptor, new, end)
        finally:
            os.close(descriptor)


def _has_alarm(path: str, offset: int) -> bool:
    """Return whether the new part of a log contains a word that should be seen at once."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        text = os.pread(file.fileno(), PIECE, offset)
        return any(word in text for word in ALARMS)
    return False


def _truncate(descriptor: int, end: int) -> None:
    """Cut off an incomplete line, which an agent wrote as it was killed or as the disk was full."""
    if os.fstat(descriptor).st_size > end:
        os.ftruncate(descriptor, end)


def _append(descriptor: int, data: bytes, end: int) -> None:
    """Append all of the data, or nothing.

    Raises:
        OSError: nothing was appended.
    """
    rest = data
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise
