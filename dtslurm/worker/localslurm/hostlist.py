"""Fold and expand node names in Slurm's hostlist notation: ``local[1-2,4]``."""

import re
from typing import List, Sequence, Tuple

PREFIX = "local"
_BRACKETS = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]")


def split_list(text: str) -> List[str]:
    """Split at the commas outside brackets."""
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
    """Expand ``01-03,7`` into numbers as text, keeping the zero padding.

    Raises:
        ValueError: the text is no list of ranges.
    """
    numbers = []
    for part in text.split(","):
        match = re.match(r"(\d+)(?:-(\d+))?$", part.strip())
        if not match:
            raise ValueError("invalid node range [{}]".format(text))
        low, high = match.group(1), match.group(2) or match.group(1)
        if int(high) < int(low) or int(high) - int(low) > 65535:
            raise ValueError("invalid node range [{}]".format(text))
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def _expand_part(text: str) -> List[str]:
    match = _BRACKETS.match(text)
    if not match:
        if "[" in text or "]" in text:
            raise ValueError("invalid node list {!r}".format(text))
        return [text]
    tails = _expand_part(text[match.end() :])
    return [match.group(1) + number + tail for number in ranges(match.group(2)) for tail in tails]


def expand(text: str) -> List[str]:
    """Return every node of a hostlist, in the order written.

    Raises:
        ValueError: the hostlist is invalid.
    """
    return [name for part in split_list(text) for name in _expand_part(part)]


def _find_spans(numbers: Sequence[int]) -> List[Tuple[int, int]]:
    spans: List[Tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def fold(numbers: Sequence[int]) -> str:
    """Return the hostlist of the emulated nodes with these numbers: ``local1``, ``local[1-2,4]``."""
    if len(set(numbers)) == 1:
        return PREFIX + str(numbers[0])
    ranges_text = [
        str(low) if low == high else "{}-{}".format(low, high) for low, high in _find_spans(numbers)
    ]
    return "{}[{}]".format(PREFIX, ",".join(ranges_text))


def name(number: int) -> str:
    """Return the name of an emulated node; numbers start at 1."""
    return PREFIX + str(number)


def number_of(node: str) -> int:
    """Return an emulated node's number, 0 for any other name."""
    tail = node[len(PREFIX) :]
    return int(tail) if node.startswith(PREFIX) and tail.isdecimal() else 0


def repeat(counts: Sequence[int]) -> str:
    """Return counts per node in Slurm's notation: ``2(x2),1``."""
    groups: List[Tuple[int, int]] = []
    for count in counts:
        if groups and groups[-1][0] == count:
            groups[-1] = (count, groups[-1][1] + 1)
        else:
            groups.append((count, 1))
    return ",".join(
        str(count) if repetitions == 1 else "{}(x{})".format(count, repetitions)
        for count, repetitions in groups
    )
