"""Finds the log lines that contain one of many words, at little more than the speed of reading.

Most lines of a log differ from others only in their numbers. So a block of a log is searched without digits
and points, each kind of line once, and only kinds of lines that were not seen before. Where a word may occur,
the block itself is searched. Logs whose lines all differ are searched with grep.
"""

import os
import subprocess
from typing import Dict, List, Optional, Set, Tuple

from .lines import Candidate

WHOLE = 64 << 20  # bytes of a log that is read in full; of a larger log, the head and the tail are read
HEAD, TAIL = 1 << 20, 16 << 20
MANY = 2000  # candidate lines of one file; of more, only the first and the last are used
FIRST = 200
PIECE = 1 << 16  # bytes searched together: they stay in the processor's cache
UNLIKE = 8  # a block with a larger share of new kinds of lines (one part in this many) counts as unlike
PATIENCE = 4  # unlike blocks before a file is searched with grep
KNOWN = 50_000  # kinds of lines that are remembered as harmless
NUMBERS = b"0123456789.,:-+"
LINE_ENDS = bytes.maketrans(b"\r", b"\n")


class TooManyLineKinds(Exception):
    """Raised for a log with too many kinds of lines."""


class Search:
    """Searches logs for words, one after the other, and learns which kinds of lines contain none of them.

    Attributes:
        bare: each word, with its form without digits and points.
        harmless: kinds of lines that contain no word.
        unlike: number of blocks of the current file with too many new kinds of lines.
    """

    def __init__(self, words: List[bytes]) -> None:
        self.words = words
        self.bare = [(word, word.translate(LINE_ENDS, NUMBERS)) for word in words]
        self.harmless: Set[bytes] = set()
        self.unlike = 0

    def candidates(self, paths: List[str]) -> Dict[str, List[Candidate]]:
        """Return the lines of each log that contain one of the words."""
        lines_by_path, unlike_paths = {}, []
        for path in paths:
            try:
                lines_by_path[path] = self.of_file(path)
            except TooManyLineKinds:
                unlike_paths.append(path)
            except OSError:
                lines_by_path[path] = []
        if unlike_paths:
            lines_by_path.update(self.of_unlike(unlike_paths))
        return lines_by_path

    def of_file(self, path: str) -> List[Candidate]:
        """Return the lines of one log that contain a word; of a huge log, those in its head and its tail.

        Raises:
            TooManyLineKinds: the log should be searched with grep.
        """
        self.unlike = 0
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= WHOLE:
                return self.within(file.fileno(), 0, size, 1, PATIENCE)
            return self.ends(file.fileno(), size)

    def ends(self, handle: int, size: int) -> List[Candidate]:
        """Return the lines with a word in the head and the tail of a huge log."""
        start, number = after_lines(handle, size - TAIL)
        return self.within(handle, 0, HEAD, 1) + self.within(handle, start, size, number)

    def within(
        self, handle: int, start: int, end: int, number: int, time_limit_s: Optional[int] = None
    ) -> List[Candidate]:
        """Return the lines with a word between two offsets; ``number`` is the number of the first line."""
        matches: List[Candidate] = []
        rest, block_size = b"", PIECE
        while start + len(rest) < end:
            data = os.pread(handle, min(block_size, end - start - len(rest)), start + len(rest))
            if not data:
                break
            data = rest + data
            cut = data.rfind(b"\n") + 1
            if not cut and start + len(data) < end:  # a line longer than a block: read a larger block
                rest, block_size = data, block_size * 2
                continue
            if start + len(data) < end:
                data, rest, block_size = data[:cut], data[cut:], PIECE
            else:
                rest = b""
            possible_words, line_count = self.words_in(data, time_limit_s)
            if possible_words:
                matches += lines_with(data, possible_words, start, number)
                if len(matches) > 2 * MANY:
                    matches = matches[:FIRST] + matches[-MANY:]
            start += len(data)
            number += line_count
        return matches[:FIRST] + matches[FIRST:][-MANY:]

    def words_in(self, data: bytes, time_limit_s: Optional[int]) -> Tuple[List[bytes], int]:
        """Return the words that may occur in a block, and the number of lines that end in it."""
        masked_lines = data.translate(LINE_ENDS, NUMBERS).split(b"\n")
        line_count = data.count(b"\n") if b"\r" in data else len(masked_lines) - 1
        kinds = set(masked_lines) - self.harmless
        if not kinds:
            return [], line_count
        text = b"\n".join(kinds)
        if len(text) > len(data) // UNLIKE + 1000:
            self.unlike += 1
            if time_limit_s is not None and self.unlike > time_limit_s:
                raise TooManyLineKinds
        possible_words = [word for word, bare in self.bare if bare in text]
        if not possible_words and len(self.harmless) < KNOWN:
            self.harmless |= kinds
        return possible_words, line_count

    def of_unlike(self, paths: List[str]) -> Dict[str, List[Candidate]]:
        """Return the lines with a word of logs whose lines all differ."""
        try:
            lines_by_path = by_grep(paths, self.words)
        except OSError:  # grep is not installed
            return {path: self.search_tail(path, WHOLE) for path in paths}
        for path in paths:
            if len(lines_by_path.setdefault(path, [])) >= MANY:  # grep stopped after this many lines
                first = lines_by_path[path][:FIRST]
                last = self.search_tail(path, TAIL)
                lines_by_path[path] = first + [candidate for candidate in last if candidate[1] > first[-1][1]]
        return lines_by_path

    def search_tail(self, path: str, max_bytes: int) -> List[Candidate]:
        """Return the lines with a word in the last ``max_bytes`` of a log, however long its lines are."""
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                start, number = after_lines(file.fileno(), max(0, size - max_bytes))
                return self.within(file.fileno(), start, size, number)
        except OSError:
            return []


def after_lines(handle: int, start: int) -> Tuple[int, int]:
    """Return an offset in a file, at most ``start``, and the number of the line at that offset."""
    number, offset = 1, 0
    while offset < start:
        data = os.pread(handle, min(1 << 20, start - offset), offset)
        if not data:
            break
        number += data.count(b"\n")
        offset += len(data)
    return offset, number


def by_grep(paths: List[str], words: List[bytes]) -> Dict[str, List[Candidate]]:
    """Return the lines that grep finds with one of the words, the first ``MANY`` of each file."""
    argv = ["grep", "-a", "-H", "-Z", "-n", "-b", "-m", str(MANY), "-F", "-f", "-", "--", *paths]
    environment = dict(os.environ, LC_ALL="C")
    grep = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    output = grep.communicate(b"\n".join(words) + b"\n")[0]
    if grep.returncode not in (0, 1, 2):
        raise OSError("grep was killed")
    lines_by_path: Dict[str, List[Candidate]] = {}
    for line in output.split(b"\n"):
        name, separator, rest = line.partition(b"\0")
        if not separator:
            continue
        number, offset, text = rest.split(b":", 2)
        lines_by_path.setdefault(os.fsdecode(name), []).append((int(number), int(offset), text))
    return lines_by_path


def lines_with(data: bytes, words: List[bytes], offset: int, number: int) -> List[Candidate]:
    """Return the lines of ``data`` with one of the words; it starts at ``offset`` and line ``number``."""
    starts = set()
    for word in words:
        position = data.find(word)
        while position >= 0:
            starts.add(data.rfind(b"\n", 0, position) + 1)
            line_end = data.find(b"\n", position)
            position = data.find(word, line_end) if line_end >= 0 else -1
    candidates, counted_to = [], 0
    for start in sorted(starts):
        number += data.count(b"\n", counted_to, start)
        counted_to = start
        end = data.find(b"\n", start)
        candidates.append((number, offset + start, data[start : end if end >= 0 else len(data)]))
    return candidates
