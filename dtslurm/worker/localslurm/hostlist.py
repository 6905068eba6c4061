"""Node names folded and unfolded in Slurm's notation: ``local[1-2,4]``."""

import re
from typing import List, Sequence, Tuple

PREFIX = "local"
_BRACKETS = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]")


def split_list(text: str) -> List[str]:
    """Split at the commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def ranges(text: str) -> List[str]:
    """Return the numbers of ``01-03,7`` as text, zero padding kept.

    Raises:
        ValueError: the text is no list of ranges.
    """
    numbers = []
    for part in text.split(","):
        found = re.match(r"(\d+)(?:-(\d+))?$", part.strip())
        if not found:
            raise ValueError("invalid node range [{}]".format(text))
        low, high = found.group(1), found.group(2) or found.group(1)
        if int(high) < int(low) or int(high) - int(low) > 65535:
            raise ValueError("invalid node range [{}]".format(text))
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def _expand_one(text: str) -> List[str]:
    found = _BRACKETS.match(text)
    if not found:
        if "[" in text or "]" in text:
            raise ValueError("invalid node list {!r}".format(text))
        return [text]
    rest = _expand_one(text[found.end() :])
    return [found.group(1) + number + tail for number in ranges(found.group(2)) for tail in rest]


def expand(text: str) -> List[str]:
    """Return every node of a folded list, in the order written.

    Raises:
        ValueError: the list cannot be read.
    """
    return [name for part in split_list(text) for name in _expand_one(part)]


def _spans(numbers: Sequence[int]) -> List[Tuple[int, int]]:
    spans: List[Tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def fold(numbers: Sequence[int]) -> str:
    """Return the emulated nodes of these numbers, folded: ``local1``, ``local[1-2,4]``."""
    if len(set(numbers)) == 1:
        return PREFIX + str(numbers[0])
    words = [str(low) if low == high else "{}-{}".format(low, high) for low, high in _spans(numbers)]
    return "{}[{}]".format(PREFIX, ",".join(words))


def name(number: int) -> str:
    """Return the name of an emulated node; the first is 1."""
    return PREFIX + str(number)


def number_of(node: str) -> int:
    """Return an emulated node's number, 0 if it is none."""
    tail = node[len(PREFIX) :]
    return int(tail) if node.startswith(PREFIX) and tail.isdecimal() else 0


def repeat(counts: Sequence[int]) -> str:
    """Return counts per node as Slurm prints them: ``2(x2),1``."""
    groups: List[Tuple[int, int]] = []
    for count in counts:
        if groups and groups[-1][0] == count:
            groups[-1] = (count, groups[-1][1] + 1)
        else:
            groups.append((count, 1))
    return ",".join(str(count) if times == 1 else "{}(x{})".format(count, times) for count, times in groups)
