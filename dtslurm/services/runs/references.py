"""References between runs: runs that they continue, share a job file or sweep with, or read and write in."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from dtslurm.model.jobs.sweep import MEMBERS, TRIALS
from dtslurm.model.runs.record import JobRecord
from dtslurm.store.rundir import RunDir

_FILES = (RunDir.RECORD, TRIALS, MEMBERS)
_WORD = re.compile(r"[A-Za-z0-9._-]+")  # the characters of a run directory's name


def find_direct_references(records: Iterable[JobRecord]) -> dict[str, set[str]]:
    """Return, by token, the tokens of the runs that each run's record or sweep files mention.

    The files are searched for names of run directories, which are unique; a full path has several spellings.
    """
    records = list(records)
    tokens_by_name = {Path(record.run_dir).name: record.token for record in records}
    tokens_by_name |= {record.token: record.token for record in records}
    return {
        record.token: {tokens_by_name[word] for word in _read_words(record) & tokens_by_name.keys()}
        - {record.token}
        for record in records
    }


def find_transitive_references(links: Mapping[str, set[str]], start_tokens: Iterable[str]) -> dict[str, str]:
    """Return every run reachable by references from ``start_tokens``, mapped to a run that refers to it."""
    queue = deque(sorted(start_tokens))
    visited_tokens, referrers = set(queue), {}
    while queue:
        token = queue.popleft()
        for token_found in sorted(links[token] - visited_tokens):
            visited_tokens.add(token_found)
            referrers[token_found] = token
            queue.append(token_found)
    return referrers


def _read_words(record: JobRecord) -> set[str]:
    words: set[str] = set()
    for name in _FILES:
        try:
            text = (Path(record.folder) / name).read_text("utf-8", "replace")
        except OSError:
            continue
        words.update(_WORD.findall(text))
    return words
