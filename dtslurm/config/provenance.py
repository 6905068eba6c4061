"""The documents that the values of a profile come from, as the ``# source:`` lines of its file name them.

A line reads ``# source: TITLE (PLACE), YYYY-MM`` and applies to the whole file. With ``: KEY, KEY`` at its
end, it applies to those keys and the keys below them. For each value, the longest matching key counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_SOURCE_LINE = re.compile(
    r"# source: (?P<title>.+?, (?P<date>20\d\d(-\d\d)?))(: (?P<keys>[\w.+-]+(, [\w.+-]+)*))?"
)
_SOURCE_URL = re.compile(r"\s+- (https?://\S+(?: \(.+?\))?)\s+# (20\d\d(?:-\d\d)?)")


class SourceDocument(NamedTuple):
    """A document and the date when it was read; ``keys`` are dotted, and empty for the whole file."""

    title: str
    date: str
    keys: tuple[str, ...] = ()


def read(text: str) -> list[SourceDocument]:
    """Return the sources that a profile's text names; other lines are ignored."""
    documents = []
    for line in text.splitlines():
        if match := _SOURCE_LINE.fullmatch(line):
            keys = tuple(match["keys"].split(", ")) if match["keys"] else ()
            documents.append(SourceDocument(match["title"], match["date"], keys))
    return documents or [SourceDocument(f"{url}, {date}", date) for url, date in _SOURCE_URL.findall(text)]


def find_sources(key: str, sources: Iterable[SourceDocument]) -> tuple[SourceDocument, ...]:
    """Return the sources of a dotted key: those with the longest matching key, else the whole file's."""
    length_and_source = [(_match_length(key, source), source) for source in sources]
    max_length = max((length for length, _ in length_and_source if length is not None), default=None)
    return tuple(
        source for length, source in length_and_source if length is not None and length == max_length
    )


def select_origins(origins: Mapping[str, str], files: Iterable[Path]) -> dict[str, str]:
    """Return the titles of the sources of every value that has some, by dotted key.

    Args:
        origins: the locations of values, ``"slurm.partition": "perlmutter.yaml:12"``, from the loaded
            profile.
        files: the files that the profile was read from.
    """
    documents_by_file = {}
    for path in files:
        if path.is_file():
            documents_by_file[path.name] = read(path.read_text(encoding="utf-8", errors="replace"))
    title_by_key = {}
    for key, location in origins.items():
        name = Path(location.rpartition(":")[0]).name
        if sources := find_sources(key, documents_by_file.get(name, ())):
            title_by_key[key] = "; ".join(source.title for source in sources)
    return title_by_key


def _match_length(key: str, source: SourceDocument) -> int | None:
    """Return the length of a source's longest matching key, 0 for the whole file, None without a match."""
    if not source.keys:
        return 0
    prefixes = [prefix for prefix in source.keys if key == prefix or key.startswith(f"{prefix}.")]
    return max((len(prefix) for prefix in prefixes), default=None)
