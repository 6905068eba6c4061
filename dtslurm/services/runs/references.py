"""Which runs others name: what they go on from, what they belong to, and where they read and write."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from dtslurm.model.jobs.sweep import MEMBERS, TRIALS
from dtslurm.model.runs.record import JobRecord
from dtslurm.store.rundir import RunDir

_FILES = (RunDir.RECORD, TRIALS, MEMBERS)
_WORD = re.compile(r"[A-Za-z0-9._-]+")  # what a run directory's name is made of


def find_direct_references(records: Iterable[JobRecord]) -> dict[str, set[str]]:
    """Return the runs that each run names anywhere in what is written of it; all are tokens.

    Names of run directories are unique: they are looked for, as one path may be written in several ways.
    """
    records = list(records)
    owners = {Path(record.run_dir).name: record.token for record in records}
    owners |= {record.token: record.token for record in records}
    return {
        record.token: {owners[word] for word in _words(record) & owners.keys()} - {record.token}
        for record in records
    }


def find_transitive_references(links: Mapping[str, set[str]], begin: Iterable[str]) -> dict[str, str]:
    """Return every run that those at the beginning name, or that such a run names, with which named it."""
    waiting = deque(sorted(begin))
    seen, found = set(waiting), {}
    while waiting:
        one = waiting.popleft()
        for other in sorted(links[one] - seen):
            seen.add(other)
            found[other] = one
            waiting.append(other)
    return found


def _words(record: JobRecord) -> set[str]:
    words: set[str] = set()
    for name in _FILES:
        try:
            text = (Path(record.folder) / name).read_text("utf-8", "replace")
        except OSError:
            continue
        words.update(_WORD.findall(text))
    return words
