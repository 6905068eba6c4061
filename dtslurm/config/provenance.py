"""Which document each value of a profile is from: the ``# source:`` lines at the head of its file.

A line reads ``# source: TITLE (PLACE), YYYY-MM`` and stands for the whole file, or ends in ``: KEY, KEY`` and
stands for those keys and what is below them. The longest key that fits a value tells its source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"# source: (?P<title>.+?, (?P<date>20\d\d(-\d\d)?))(: (?P<keys>[\w.+-]+(, [\w.+-]+)*))?")
_URL = re.compile(r"\s+- (https?://\S+(?: \(.+?\))?)\s+# (20\d\d(?:-\d\d)?)")


class SourceDocument(NamedTuple):
    """A document, when it was read, and what it tells: dotted keys, none of them for the whole file."""

    title: str
    date: str
    keys: tuple[str, ...] = ()


def read(text: str) -> list[SourceDocument]:
    """Return the sources that a profile's text names; lines that are no such source are left out."""
    found = []
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            keys = tuple(match["keys"].split(", ")) if match["keys"] else ()
            found.append(SourceDocument(match["title"], match["date"], keys))
    return found or [SourceDocument(f"{url}, {date}", date) for url, date in _URL.findall(text)]


def of(key: str, sources: Iterable[SourceDocument]) -> tuple[SourceDocument, ...]:
    """Return what tells the value of a dotted key: the nearest that names it, else the file's."""
    fits = [(_nearness(key, source), source) for source in sources]
    best = max((nearness for nearness, _ in fits if nearness is not None), default=None)
    return tuple(source for nearness, source in fits if nearness is not None and nearness == best)


def select_origins(origins: Mapping[str, str], files: Iterable[Path]) -> dict[str, str]:
    """Return the source of every value that has one, by its dotted key.

    Args:
        origins: ``"slurm.partition": "perlmutter.yaml:12"``, as profiles are loaded with.
        files: the files that were read for it.
    """
    by_name = {}
    for path in files:
        if path.is_file():
            by_name[path.name] = read(path.read_text(encoding="utf-8", errors="replace"))
    found = {}
    for key, place in origins.items():
        name = Path(place.rpartition(":")[0]).name
        if sources := of(key, by_name.get(name, ())):
            found[key] = "; ".join(source.title for source in sources)
    return found


def _nearness(key: str, source: SourceDocument) -> int | None:
    """Return how much of a key a source names, 0 for one of the whole file, None if it is of others."""
    if not source.keys:
        return 0
    named = [one for one in source.keys if key == one or key.startswith(f"{one}.")]
    return max((len(one) for one in named), default=None)
