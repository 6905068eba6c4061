"""Which lines of a log match a signature, and what else is found in it."""

import multiprocessing
import os
import re
from typing import Any, Dict, Iterable, Iterator, List, Optional, Pattern, Tuple

from .lines import PREFIX, SHOWN, Candidate, Lines, last_lines, stamp, training_went_on
from .log_stacks import CRASH, LONGEST, TRACEBACK, tracebacks
from .search import Search

WORKERS = 4  # processes at most
WORTHWHILE = 64 << 20  # bytes of logs for each of them
TOGETHER = 32  # logs that one of them takes at a time
ABOUT_NODES = (
    b"dtslurm: health: node "  # before training; what it quotes of nodes that are left out is no cause
)
KEPT = 3  # hits of one signature in one file: the first, and the last ones


class LogSignature:
    """One kind of line: ``words`` of which one must be in it, ``patterns`` of which one must match."""

    def __init__(self, number: int, values: Dict[str, Any]) -> None:
        self.number = number
        self.words = [word.encode() for word in values["words"]]
        self.patterns: List[Pattern[str]] = [re.compile(pattern) for pattern in values["match"]]


class SignatureScanner:
    """Looks for signatures in logs."""

    def __init__(self, signatures: List[LogSignature]) -> None:
        self.by_word: Dict[bytes, List[LogSignature]] = {}
        for signature in signatures:
            for word in signature.words:
                self.by_word.setdefault(word, []).append(signature)
        self.search = Search(sorted({TRACEBACK, CRASH, *self.by_word}))

    def read(self, paths: List[str]) -> List[Dict[str, Any]]:
        """Return what stands in some logs."""
        found = self.search.candidates(paths)
        return [look(path, found[path], self.by_word) for path in paths]


def scan(paths: List[str], signatures: List[LogSignature]) -> List[Dict[str, Any]]:
    """Return what stands in the logs, file by file, read by a few processes where that is worth while."""
    reader = SignatureScanner(signatures)
    size = sum(size_of(path) for path in paths)
    workers = min(WORKERS, len(os.sched_getaffinity(0)), size // WORTHWHILE)
    if workers < 2:
        return reader.read(paths)
    parts = [paths[start : start + TOGETHER] for start in range(0, len(paths), TOGETHER)]
    try:
        pool = multiprocessing.get_context("fork").Pool(workers, _set_reader, (reader,))
    except (OSError, ImportError):  # no more processes for us, or no semaphores
        return reader.read(paths)
    with pool:
        return [found for part in pool.imap(_read, parts) for found in part]


_readers: List[SignatureScanner] = []  # of a process of the pool


def _set_reader(reader: SignatureScanner) -> None:
    _readers[:] = [reader]


def _read(paths: List[str]) -> List[Dict[str, Any]]:
    return _readers[0].read(paths)


def size_of(path: str) -> int:
    """Return a file's size, 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def look(path: str, candidates: List[Candidate], by_word: Dict[bytes, List[LogSignature]]) -> Dict[str, Any]:
    """Return the findings in one log."""
    name = os.path.basename(path)
    rank = re.match(r"^rank-(\d+)\.log$", name)
    found: Dict[str, Any] = {"file": name, "rank": int(rank.group(1)) if rank else None}
    try:
        lines = Lines(path)
    except OSError:
        return found
    with lines.file:
        status = os.fstat(lines.file.fileno())
        found.update(size=lines.size, mtime=status.st_mtime, tail=last_lines(lines))
        if candidates:
            found["hits"] = hits(candidates, by_word, lines, status.st_mtime)
            found["tracebacks"] = tracebacks(candidates, lines)
    return found


def pieces(text: bytes, words: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts of a line to look at: a progress bar's states that hold a word, a long line's head."""
    if b"\r" not in text:
        yield text[:LONGEST]
        return
    for part in text.split(b"\r")[-200:]:
        if any(word in part for word in words):
            yield part[:LONGEST]


def hits(
    candidates: List[Candidate], by_word: Dict[bytes, List[LogSignature]], lines: Lines, written: float
) -> List[List[Any]]:
    """Return [signature, line number, text, groups, time, count, went on, bytes after] of what matches."""
    by_signature: Dict[int, List[Tuple[int, int, str, Dict[str, str]]]] = {}
    counts: Dict[int, int] = {}
    for number, offset, line in candidates:
        if line.startswith(ABOUT_NODES):
            continue
        possible = {one.number: one for word in by_word if word in line for one in by_word[word]}
        for _, signature in sorted(possible.items()):
            match = matched(signature, line)
            if match is None:
                continue
            counts[signature.number] = counts.get(signature.number, 0) + 1
            kept = by_signature.setdefault(signature.number, [])
            if len(kept) >= KEPT:
                del kept[1]
            kept.append((number, offset, match[0], match[1]))
    found = []
    for key, kept in by_signature.items():
        for number, offset, text, groups in kept:
            went_on = training_went_on(lines, offset, offset + len(text) + 1)
            after = lines.size - offset - len(text)
            found.append([key, number, text, groups, stamp(text, written), counts[key], went_on, after])
    return sorted(found, key=lambda hit: (hit[1], hit[0]))


def matched(signature: LogSignature, line: bytes) -> Optional[Tuple[str, Dict[str, str]]]:
    """Return the text of the line that a signature matches and its groups, None where it does not."""
    for piece in pieces(line, signature.words):
        text = PREFIX.sub(b"", piece).decode("utf-8", "replace")
        for pattern in signature.patterns:
            match = pattern.search(text)
            if match:
                groups = {key: value.strip() for key, value in match.groupdict().items() if value}
                return text[:SHOWN], groups
    return None
