"""Matches log lines with signatures, and collects the other evidence in a log."""

import multiprocessing
import os
import re
import tempfile
from typing import Any, Dict, Iterable, Iterator, List, Optional, Pattern, Tuple

from ..lib.rank_files import NODE_LOG, NodeLog
from .lines import PREFIX, SHOWN, Candidate, Lines, last_lines, stamp, training_went_on
from .log_stacks import CRASH, LONGEST, TRACEBACK, tracebacks
from .search import Search

WORKERS = 4  # largest number of processes
WORTHWHILE = 64 << 20  # bytes of logs that justify one process
TOGETHER = 32  # logs per task of a process
ABOUT_NODES = (
    b"dtslurm: health: node "  # printed before training; its quotations about excluded nodes are no cause
)
KEPT = 3  # hits of one signature that are reported for a file: the first, and the last ones


class LogSignature:
    """A kind of log line.

    Attributes:
        number: index of the signature in the request.
        words: a line must contain at least one of these.
        patterns: a line must match at least one of these.
    """

    def __init__(self, number: int, values: Dict[str, Any]) -> None:
        self.number = number
        self.words = [word.encode() for word in values["words"]]
        self.patterns: List[Pattern[str]] = [re.compile(pattern) for pattern in values["match"]]


class SignatureScanner:
    """Searches logs for signatures."""

    def __init__(self, signatures: List[LogSignature]) -> None:
        self.by_word: Dict[bytes, List[LogSignature]] = {}
        for signature in signatures:
            for word in signature.words:
                self.by_word.setdefault(word, []).append(signature)
        self.search = Search(sorted({TRACEBACK, CRASH, *self.by_word}))

    def read(self, paths: List[str]) -> List[Dict[str, Any]]:
        """Return the evidence in these logs, of a node's log for each of its ranks."""
        plain_paths = [path for path in paths if not NODE_LOG.fullmatch(os.path.basename(path))]
        candidates = self.search.candidates(plain_paths)
        evidence = [look(path, candidates[path], self.by_word) for path in plain_paths]
        for path in paths:
            if path not in candidates:
                with tempfile.TemporaryDirectory(prefix="dtslurm-") as folder:
                    evidence += self.read(extract_logs(path, folder))
        return evidence


def scan(paths: List[str], signatures: List[LogSignature]) -> List[Dict[str, Any]]:
    """Return the evidence in the logs, file by file; large logs are read by several processes."""
    scanner = SignatureScanner(signatures)
    size = sum(size_of(path) for path in paths)
    workers = min(WORKERS, len(os.sched_getaffinity(0)), size // WORTHWHILE)
    if workers < 2:
        return scanner.read(paths)
    batches = [paths[start : start + TOGETHER] for start in range(0, len(paths), TOGETHER)]
    try:
        pool = multiprocessing.get_context("fork").Pool(workers, _set_scanner, (scanner,))
    except (OSError, ImportError):  # the process limit is reached, or there are no semaphores
        return scanner.read(paths)
    with pool:
        return [
            evidence
            for evidence_of_batch in pool.imap(_scan_batch, batches)
            for evidence in evidence_of_batch
        ]


_scanners: List[SignatureScanner] = []  # the scanner of a process of the pool


def _set_scanner(reader: SignatureScanner) -> None:
    _scanners[:] = [reader]


def _scan_batch(paths: List[str]) -> List[Dict[str, Any]]:
    return _scanners[0].read(paths)


def extract_logs(path: str, folder: str) -> List[str]:
    """Write the log of each rank in a node's log into a folder, unless the rank has a log of its own."""
    node_log, paths = NodeLog(path), []
    try:
        node_log.look()
        for rank, groups in sorted(node_log.groups.items()):
            name = "rank-{}.log".format(rank)
            if os.path.exists(os.path.join(os.path.dirname(path), name)):
                continue
            paths.append(os.path.join(folder, name))
            with open(paths[-1], "wb") as file:
                for output in node_log.iterate(rank):
                    file.write(output)
            os.utime(paths[-1], (groups.written, groups.written))
    except OSError:  # the file is gone, or the temporary folder is full
        return paths
    return paths


def size_of(path: str) -> int:
    """Return a file's size, 0 if it cannot be read."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def look(path: str, candidates: List[Candidate], by_word: Dict[bytes, List[LogSignature]]) -> Dict[str, Any]:
    """Return the evidence in one log."""
    name = os.path.basename(path)
    match = re.match(r"^rank-(\d+)\.log$", name)
    evidence: Dict[str, Any] = {"file": name, "rank": int(match.group(1)) if match else None}
    try:
        lines = Lines(path)
    except OSError:
        return evidence
    with lines.file:
        status = os.fstat(lines.file.fileno())
        evidence.update(size=lines.size, mtime=status.st_mtime, tail=last_lines(lines))
        if candidates:
            evidence["hits"] = hits(candidates, by_word, lines, status.st_mtime)
            evidence["tracebacks"] = tracebacks(candidates, lines)
    return evidence


def pieces(text: bytes, words: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts of a line to search: a progress bar's states with a word, or the line's beginning."""
    if b"\r" not in text:
        yield text[:LONGEST]
        return
    for part in text.split(b"\r")[-200:]:
        if any(word in part for word in words):
            yield part[:LONGEST]


def hits(
    candidates: List[Candidate], by_word: Dict[bytes, List[LogSignature]], lines: Lines, last_write: float
) -> List[List[Any]]:
    """Return [signature, line number, text, groups, time, count, continued, bytes after] of each hit."""
    by_signature: Dict[int, List[Tuple[int, int, str, Dict[str, str]]]] = {}
    counts: Dict[int, int] = {}
    for number, offset, line in candidates:
        if line.startswith(ABOUT_NODES):
            continue
        possible = {
            signature.number: signature for word in by_word if word in line for signature in by_word[word]
        }
        for _, signature in sorted(possible.items()):
            match = matched(signature, line)
            if match is None:
                continue
            counts[signature.number] = counts.get(signature.number, 0) + 1
            hits_of_signature = by_signature.setdefault(signature.number, [])
            if len(hits_of_signature) >= KEPT:
                del hits_of_signature[1]
            hits_of_signature.append((number, offset, match[0], match[1]))
    rows = []
    for key, hits_of_signature in by_signature.items():
        for number, offset, text, groups in hits_of_signature:
            went_on = training_went_on(lines, offset, offset + len(text) + 1)
            bytes_after = lines.size - offset - len(text)
            rows.append(
                [key, number, text, groups, stamp(text, last_write), counts[key], went_on, bytes_after]
            )
    return sorted(rows, key=lambda hit: (hit[1], hit[0]))


def matched(signature: LogSignature, line: bytes) -> Optional[Tuple[str, Dict[str, str]]]:
    """Return the matching text of the line and the pattern's groups, None without a match."""
    for piece in pieces(line, signature.words):
        text = PREFIX.sub(b"", piece).decode("utf-8", "replace")
        for pattern in signature.patterns:
            match = pattern.search(text)
            if match:
                groups = {key: value.strip() for key, value in match.groupdict().items() if value}
                return text[:SHOWN], groups
    return None
