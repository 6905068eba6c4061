"""The logs and the records of an attempt's ranks: a file for each rank, or for each node of a large job.

A node's log is named after the first rank of the node, such as ``ranks-16.log``. ``17: text`` is a line of
rank 17. ``17+ text`` is the beginning of a line that the rank had not ended yet; the next line of the rank
continues it. Before each group of lines of a rank, ``# 17 1764160000.5`` states when the rank wrote the last.
The last line, ``= 16 0 0.0 17 4096 1764160000.5``, states the length and the end of each rank's output.
``ranks-16.jsonl`` holds the records of the same ranks, of which the last one of a rank counts.
"""

import bisect
import contextlib
import os
import re
import time
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from .json_records import open_file, read_lines, read_object

RANK_LOG = re.compile(r"rank-(\d{1,9})\.log")
NODE_LOG = re.compile(r"ranks-(\d{1,9})\.log")
RANK_RECORD = re.compile(r"(\d{1,9})\.json")
NODE_RECORDS = re.compile(r"ranks-(\d{1,9})\.jsonl")
PIECE = 1 << 20  # bytes of a node's log that are read at once
LARGEST_GROUP = 1 << 18  # bytes of a rank's lines that are decoded at once
REREAD_S = 0.5  # between two looks for new lines in a node's log
_TOTALS_TAIL = 1 << 16  # bytes at the end of a node's log in which the last line is searched
_HEAD = re.compile(rb"^(?:# (\d{1,9}) (\d+(?:\.\d+)?)|= .*)\n", re.MULTILINE)


def encode_lines(rank: int, data: bytes, written_at: float) -> bytes:
    """Return a rank's output as lines of its node's log."""
    head = "# {} {:.3f}\n".format(rank, written_at).encode()
    prefix = "{}: ".format(rank).encode()
    ended, newline, rest = data.rpartition(b"\n")
    lines = prefix + ended.replace(b"\n", b"\n" + prefix) + b"\n" if newline else b""
    return head + lines + ("{}+ ".format(rank).encode() + rest + b"\n" if rest else b"")


def decode_lines(rank: int, lines: bytes) -> bytes:
    """Return a rank's output from its lines in its node's log."""
    whole, part = "{}: ".format(rank).encode(), "{}+ ".format(rank).encode()
    if not lines.startswith(part) and b"\n" + part not in lines:
        return lines[len(whole) :].replace(b"\n" + whole, b"\n")
    return b"".join(
        line[len(part) :] if line.startswith(part) else line[len(whole) :] + b"\n"
        for line in lines.split(b"\n")[:-1]
    )


def decoded_size(rank: int, lines: bytes) -> int:
    """Return the length of `decode_lines`."""
    part = "{}+ ".format(rank).encode()
    parts = lines.count(b"\n" + part) + lines.startswith(part)
    return len(lines) - lines.count(b"\n") * len(part) - parts


def encode_totals(totals: Mapping[int, Tuple[int, float]]) -> bytes:
    """Return the line with the length of each rank's output and the time of its end."""
    words = ["{} {} {:.3f}".format(rank, size, written) for rank, (size, written) in sorted(totals.items())]
    return "= {}\n".format(" ".join(words)).encode()


def read_totals(path: str) -> Dict[int, Tuple[int, float]]:
    """Return the length of each rank's output in a node's log, and the time of its end (epoch seconds).

    Raises:
        OSError: the file cannot be read.
    """
    descriptor = open_file(path)
    try:
        data = os.pread(descriptor, _TOTALS_TAIL, max(0, os.fstat(descriptor).st_size - _TOTALS_TAIL))
    finally:
        os.close(descriptor)
    match = re.search(rb"\n= ([0-9. ]+)\n\Z", data)
    if match:
        words = match.group(1).split()
        return {
            int(words[index]): (int(words[index + 1]), float(words[index + 2]))
            for index in range(0, len(words) - 2, 3)
        }
    node_log = NodeLog(path)  # the agent was killed as it wrote
    node_log.look()
    return {rank: (groups.size, groups.written) for rank, groups in node_log.groups.items()}


class LineGroups:
    """Where a rank's output is in its node's log.

    Attributes:
        starts: the position in the rank's output at which each group of lines begins.
        ranges: where the lines of each group begin and end in the node's log.
        size: length of the rank's output.
        written: when the rank wrote the last of it (epoch seconds).
    """

    __slots__ = ("ranges", "size", "starts", "written")

    def __init__(self) -> None:
        self.starts: List[int] = []
        self.ranges: List[Tuple[int, int]] = []
        self.size = 0
        self.written = 0.0

    def add(self, start: int, end: int, size: int) -> None:
        """Add lines of the node's log that hold this many bytes of the rank's output."""
        if self.ranges and self.ranges[-1][1] == start and end - self.ranges[-1][0] <= LARGEST_GROUP:
            self.ranges[-1] = (self.ranges[-1][0], end)
        else:
            self.starts.append(self.size)
            self.ranges.append((start, end))
        self.size += size


class NodeLog:
    """The log of a node's ranks, with the positions of each rank's lines.

    Attributes:
        inode: of the file that was read last.
        end: end of the complete lines that were read.
        groups: the lines of each rank.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.inode = self.end = 0
        self.groups: Dict[int, LineGroups] = {}
        self._rank: Optional[int] = None
        self._looked = -1e9
        self._decoded: Tuple[Tuple[int, int], bytes] = ((0, 0), b"")

    def records_path(self, folder: str) -> str:
        """Return the path of the records of the same ranks, in the folder of an attempt's records."""
        return os.path.join(folder, os.path.basename(self.path)[: -len(".log")] + ".jsonl")

    def look(self, *, longest_s: float = 0.0) -> None:
        """Read the lines that are new since the last look, unless that was less than the given seconds ago.

        Raises:
            OSError: the file cannot be read.
        """
        now = time.monotonic()
        if now - self._looked < longest_s:
            return
        descriptor = open_file(self.path)
        try:
            self.look_at(descriptor)
        finally:
            os.close(descriptor)
        self._looked = now

    def look_at(self, descriptor: int) -> None:
        """Read the new lines of the open file.

        Raises:
            OSError: the file cannot be read.
        """
        status = os.fstat(descriptor)
        if status.st_ino != self.inode or status.st_size < self.end:
            self.inode, self.end, self.groups, self._rank = status.st_ino, 0, {}, None
            self._decoded = ((0, 0), b"")
        self._read(descriptor, status.st_size)

    def _read(self, descriptor: int, size: int) -> None:
        most = PIECE
        while self.end < size:
            data = os.pread(descriptor, min(most, size - self.end), self.end)
            lines = data[: data.rfind(b"\n") + 1]
            if not lines:
                if len(data) < most:
                    return  # the end of the last line is missing
                most *= 2
                continue
            self._add(lines)
            self.end += len(lines)
            most = PIECE

    def _add(self, data: bytes) -> None:
        """Add complete lines that begin at `end`."""
        begin = lines_begin = 0
        for head in [*_HEAD.finditer(data), None]:
            stop = head.start() if head else len(data)
            if stop > lines_begin and self._rank is not None:
                size = decoded_size(self._rank, data[lines_begin:stop])
                self.groups[self._rank].add(self.end + begin, self.end + stop, size)
            if head:
                # Totals belong to the next group, so that groups of the same rank can be joined.
                begin = begin if self._rank is None and lines_begin == stop else stop
                self._rank, lines_begin = None, head.end()
            if head and head.group(1):
                self._rank = int(head.group(1))
                self.groups.setdefault(self._rank, LineGroups()).written = float(head.group(2))

    def read(self, rank: int, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes of a rank's output.

        Raises:
            OSError: the file cannot be read.
        """
        groups = self.groups.get(rank) or LineGroups()
        output, position = [], max(0, offset)
        end = min(position + size, groups.size)
        while position < end:
            index = bisect.bisect_right(groups.starts, position) - 1
            text = self._decode(rank, groups.ranges[index])
            start = position - groups.starts[index]
            chunk = text[start : start + end - position]
            if not chunk:  # the file was changed by another program
                break
            output.append(chunk)
            position += len(chunk)
        return b"".join(output)

    def _decode(self, rank: int, lines: Tuple[int, int]) -> bytes:
        if self._decoded[0] != lines:
            descriptor = open_file(self.path)
            try:
                data = os.pread(descriptor, lines[1] - lines[0], lines[0])
            finally:
                os.close(descriptor)
            self._decoded = lines, decode_lines(rank, _HEAD.sub(b"", data))
        return self._decoded[1]

    def iterate(self, rank: int) -> Iterator[bytes]:
        """Yield a rank's output in order.

        Raises:
            OSError: the file cannot be read.
        """
        for lines in (self.groups.get(rank) or LineGroups()).ranges:
            yield self._decode(rank, lines)


class OpenLog:
    """A rank's log that is open for reading, whichever file its lines are in.

    Attributes:
        inode: of that file.
    """

    inode = 0

    def size(self) -> int:
        """Return the length of the log."""
        raise NotImplementedError

    def read(self, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes of the log."""
        raise NotImplementedError

    def written(self) -> float:
        """Return when the log was written last (epoch seconds)."""
        raise NotImplementedError

    def is_unchanged(self, offset: int, tail: bytes) -> bool:
        """Return whether the log ends at an offset, after the bytes of ``tail``."""
        return self.read(len(tail) + 1, offset - len(tail)) == tail

    def close(self) -> None:
        """Close the log."""


class PlainLog(OpenLog):
    """A log in a file of its own."""

    __slots__ = ("descriptor", "inode")

    def __init__(self, path: str) -> None:
        self.descriptor = open_file(path)
        self.inode = os.fstat(self.descriptor).st_ino

    def size(self) -> int:
        """Return the length of the log."""
        return os.fstat(self.descriptor).st_size

    def read(self, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes of the log."""
        return os.pread(self.descriptor, size, offset)

    def written(self) -> float:
        """Return when the log was written last (epoch seconds)."""
        return os.fstat(self.descriptor).st_mtime

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


class LogInNodeLog(OpenLog):
    """A log whose lines are in the log of its node."""

    def __init__(self, node_log: NodeLog, rank: int) -> None:
        self.node_log, self.rank = node_log, rank
        node_log.look(longest_s=REREAD_S)
        self.inode = node_log.inode

    def size(self) -> int:
        """Return the length of the log."""
        self.node_log.look(longest_s=REREAD_S)
        groups = self.node_log.groups.get(self.rank)
        return groups.size if groups else 0

    def read(self, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes of the log."""
        self.node_log.look(longest_s=REREAD_S)
        return self.node_log.read(self.rank, size, offset)

    def written(self) -> float:
        """Return when the log was written last (epoch seconds)."""
        groups = self.node_log.groups.get(self.rank)
        return groups.written if groups else 0.0

    def is_unchanged(self, offset: int, tail: bytes) -> bool:
        """Return whether the log ends at an offset."""
        return self.size() == offset and self.inode == self.node_log.inode


def find_node_log(folder: str, rank: int) -> Optional[NodeLog]:
    """Return the log of the node that a rank runs on, None if the rank has written nothing into any.

    The ranks of a node follow each other, unless an option of srun distributes them in another way.
    """
    firsts = sorted(int(match.group(1)) for match in map(NODE_LOG.fullmatch, _names_in(folder)) if match)
    likely = bisect.bisect_right(firsts, rank) - 1
    for index in sorted(range(len(firsts)), key=lambda index: index != likely):
        node_log = NodeLog(os.path.join(folder, "ranks-{}.log".format(firsts[index])))
        with contextlib.suppress(OSError):
            node_log.look()
            if rank in node_log.groups:
                return node_log
    return None


def open_rank_log(folder: str, rank: int) -> OpenLog:
    """Open the log of a rank in the folder of an attempt's logs.

    Raises:
        OSError: the rank has no log, or it cannot be read.
    """
    try:
        return PlainLog(os.path.join(folder, "rank-{}.log".format(rank)))
    except FileNotFoundError:
        node_log = find_node_log(folder, rank)
        if node_log is None:
            raise
        return LogInNodeLog(node_log, rank)


def list_rank_logs(folder: str) -> Dict[int, Tuple[int, float]]:
    """Return the size of each rank's log in a folder, and when it was written last (epoch seconds)."""
    logs: Dict[int, Tuple[int, float]] = {}
    for name in _names_in(folder):
        path = os.path.join(folder, name)
        plain, shared = RANK_LOG.fullmatch(name), NODE_LOG.fullmatch(name)
        with contextlib.suppress(OSError):
            if plain:
                status = os.stat(path)
                logs[int(plain.group(1))] = status.st_size, status.st_mtime
            elif shared:
                for rank, totals in read_totals(path).items():
                    logs.setdefault(rank, totals)
    return logs


def read_records(folder: str, written_since: Optional[float] = None) -> Dict[int, Dict[str, Any]]:
    """Return the record of each rank in the folder of an attempt's records.

    Each has ``written``, the time (epoch seconds) at which its file was written.

    Args:
        written_since: files that were written before are not read.
    """
    records: Dict[int, Dict[str, Any]] = {}
    for name in _names_in(folder):
        plain, shared = RANK_RECORD.fullmatch(name), NODE_RECORDS.fullmatch(name)
        if not plain and not shared:
            continue
        path = os.path.join(folder, name)
        try:
            written = os.stat(path).st_mtime
        except OSError:  # deleted since the folder was listed
            continue
        if written_since is not None and written < written_since:
            continue
        if plain:
            record = read_object(path)
            if record:
                records[int(plain.group(1))] = dict(record, written=written)
        else:
            for record in read_node_records(path).values():
                records.setdefault(record["rank"], dict(record, written=written))
    return records


def read_node_records(path: str) -> Dict[int, Dict[str, Any]]:
    """Return the last record of each rank in the file of a node."""
    records: Dict[int, Dict[str, Any]] = {}
    for record in read_lines(path):
        if type(record.get("rank")) is int:
            records[record["rank"]] = record
    return records


def read_record(folder: str, rank: int) -> Dict[str, Any]:
    """Return the record of one rank in the folder of an attempt's records; empty if there is none."""
    record = read_object(os.path.join(folder, "{}.json".format(rank)))
    if record:
        return record
    firsts = sorted(int(match.group(1)) for match in map(NODE_RECORDS.fullmatch, _names_in(folder)) if match)
    likely = bisect.bisect_right(firsts, rank) - 1
    for index in sorted(range(len(firsts)), key=lambda index: index != likely):
        record = read_node_records(os.path.join(folder, "ranks-{}.jsonl".format(firsts[index]))).get(rank, {})
        if record:
            return record
    return {}


def _names_in(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
