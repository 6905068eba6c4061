"""Finds the lines in logs that hold one of many words, at little more than the speed of reading.

Most lines of a log are like others but for their numbers. So a piece of a log is looked at without digits and
points, each kind of line once, and words are looked for in kinds of lines that were not seen before. Only
where a word may be found, the piece itself is searched; a log whose lines are all unlike is left to grep.
"""

import os
import subprocess
from typing import Dict, List, Optional, Set, Tuple

from .lines import Candidate

WHOLE = 64 << 20  # bytes of a log that is read in full; of a larger one, its head and its tail
HEAD, TAIL = 1 << 20, 16 << 20
MANY = 2000  # candidate lines of one file; of more, its first and its last ones are looked at
FIRST = 200
PIECE = 1 << 16  # bytes looked at together: they stay in the processor's cache
UNLIKE = 8  # a piece of which more than one part in so many are new kinds of lines is not worth sorting out
PATIENCE = 4  # such pieces, before a file is left to grep
KNOWN = 50_000  # kinds of lines that are remembered
NUMBERS = b"0123456789.,:-+"
LINE_ENDS = bytes.maketrans(b"\r", b"\n")


class Unlike(Exception):
    """Too many kinds of lines."""


class Search:
    """Looks for words in one log after the other, and learns what kinds of lines hold none of them."""

    def __init__(self, words: List[bytes]) -> None:
        self.words = words
        self.bare = [(word, word.translate(LINE_ENDS, NUMBERS)) for word in words]
        self.harmless: Set[bytes] = set()
        self.unlike = 0

    def candidates(self, paths: List[str]) -> Dict[str, List[Candidate]]:
        """Return the lines of each log that hold one of the words."""
        found, left = {}, []
        for path in paths:
            try:
                found[path] = self.of_file(path)
            except Unlike:
                left.append(path)
            except OSError:
                found[path] = []
        if left:
            found.update(self.of_unlike(left))
        return found

    def of_file(self, path: str) -> List[Candidate]:
        """Return the lines of one log that hold a word: of a huge one, those in its head and its tail.

        Raises:
            Unlike: its lines are better searched by grep.
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
        self, handle: int, start: int, end: int, number: int, patience: Optional[int] = None
    ) -> List[Candidate]:
        """Return the lines with a word between two offsets; the first line has the ``number``."""
        found: List[Candidate] = []
        rest, piece = b"", PIECE
        while start + len(rest) < end:
            data = os.pread(handle, min(piece, end - start - len(rest)), start + len(rest))
            if not data:
                break
            data = rest + data
            cut = data.rfind(b"\n") + 1
            if not cut and start + len(data) < end:  # a line longer than a piece: take more at a time
                rest, piece = data, piece * 2
                continue
            if start + len(data) < end:
                data, rest, piece = data[:cut], data[cut:], PIECE
            else:
                rest = b""
            words, lines = self.words_in(data, patience)
            if words:
                found += lines_with(data, words, start, number)
                if len(found) > 2 * MANY:
                    found = found[:FIRST] + found[-MANY:]
            start += len(data)
            number += lines
        return found[:FIRST] + found[FIRST:][-MANY:]

    def words_in(self, data: bytes, patience: Optional[int]) -> Tuple[List[bytes], int]:
        """Return the words that may stand in a piece, and how many lines end in it."""
        parts = data.translate(LINE_ENDS, NUMBERS).split(b"\n")
        count = data.count(b"\n") if b"\r" in data else len(parts) - 1
        kinds = set(parts) - self.harmless
        if not kinds:
            return [], count
        text = b"\n".join(kinds)
        if len(text) > len(data) // UNLIKE + 1000:
            self.unlike += 1
            if patience is not None and self.unlike > patience:
                raise Unlike
        words = [word for word, bare in self.bare if bare in text]
        if not words and len(self.harmless) < KNOWN:
            self.harmless |= kinds
        return words, count

    def of_unlike(self, paths: List[str]) -> Dict[str, List[Candidate]]:
        """Return the lines with a word of logs whose lines are all unlike."""
        try:
            found = by_grep(paths, self.words)
        except OSError:  # there is no grep
            return {path: self.patiently(path, WHOLE) for path in paths}
        for path in paths:
            if len(found.setdefault(path, [])) >= MANY:  # grep has stopped there
                first = found[path][:FIRST]
                last = self.patiently(path, TAIL)
                found[path] = first + [item for item in last if item[1] > first[-1][1]]
        return found

    def patiently(self, path: str, most: int) -> List[Candidate]:
        """Return the lines with a word in the last ``most`` bytes of a log whatever it is like."""
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                start, number = after_lines(file.fileno(), max(0, size - most))
                return self.within(file.fileno(), start, size, number)
        except OSError:
            return []


def after_lines(handle: int, start: int) -> Tuple[int, int]:
    """Return an offset in a file with the number of the line it is in."""
    number, at = 1, 0
    while at < start:
        data = os.pread(handle, min(1 << 20, start - at), at)
        if not data:
            break
        number += data.count(b"\n")
        at += len(data)
    return at, number


def by_grep(paths: List[str], words: List[bytes]) -> Dict[str, List[Candidate]]:
    """Return the lines with one of the words, by the program grep, the first ``MANY`` of each file."""
    argv = ["grep", "-a", "-H", "-Z", "-n", "-b", "-m", str(MANY), "-F", "-f", "-", "--", *paths]
    environment = dict(os.environ, LC_ALL="C")
    grep = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    output = grep.communicate(b"\n".join(words) + b"\n")[0]
    if grep.returncode not in (0, 1, 2):
        raise OSError("grep was ended")
    found: Dict[str, List[Candidate]] = {}
    for line in output.split(b"\n"):
        name, separator, rest = line.partition(b"\0")
        if not separator:
            continue
        number, offset, text = rest.split(b":", 2)
        found.setdefault(os.fsdecode(name), []).append((int(number), int(offset), text))
    return found


def lines_with(data: bytes, words: List[bytes], offset: int, number: int) -> List[Candidate]:
    """Return the lines of ``data`` with one of the words; it starts at ``offset`` and line ``number``."""
    starts = set()
    for word in words:
        at = data.find(word)
        while at >= 0:
            starts.add(data.rfind(b"\n", 0, at) + 1)
            after = data.find(b"\n", at)
            at = data.find(word, after) if after >= 0 else -1
    found, seen = [], 0
    for start in sorted(starts):
        number += data.count(b"\n", seen, start)
        seen = start
        end = data.find(b"\n", start)
        found.append((number, offset + start, data[start : end if end >= 0 else len(data)]))
    return found
