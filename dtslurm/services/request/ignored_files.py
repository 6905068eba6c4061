"""Files on the submitting side that git ignores, and that the job's copy of the code therefore lacks."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtslurm.errors import StoreError
from dtslurm.launch.detection.evidence import parsed
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.request.request import JobRequest
from dtslurm.store.rundir import RunDir
from dtslurm.store.snapshot import Snapshot

if TYPE_CHECKING:  # to submit needs no diagnosis
    from dtslurm.model.runs.diagnosis import Verdict

_SHOWN = 3
_LONGEST = 1000  # characters of a path
_WORD = re.compile(r"[^\s=:,;'\"()\[\]{}]+")
_MISSING = re.compile(r"FileNotFoundError|No such file or directory")
_LARGE = "copy large data to the cluster once, and give its path there to the script or to --stage"
_QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"")


def mention_notices(
    folder: Path, request: JobRequest, snapshot: Snapshot, ignored: Sequence[str]
) -> list[str]:
    """Return a warning about ignored files that the script or its arguments mention, if there are any.

    Args:
        folder: where the request was made.
        ignored: what git ignores, relative to the snapshot's root; folders end with ``/``.
    """
    script = folder / request.script
    lost = _mentioned(_words(script, request.args), snapshot, script.parent, ignored)
    taken = {one.path for one in snapshot.files}
    lost = [path for path in lost if not any(f"{one}/".startswith(f"{path.rstrip('/')}/") for one in taken)]
    if not lost:
        return []
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    options = " ".join(f"--code-include {shlex.quote(path)}" for path in lost[:_SHOWN])
    what = f"{', '.join(lost[:_SHOWN])}{more}, which {script.name} or its arguments mention"
    lacks = "the job's copy of the code on the cluster lacks that"
    return [f"git ignores {what}: {lacks}; {options} sends it with the code; {_LARGE}"]


def _words(script: Path, args: Sequence[str]) -> set[str]:
    """Return what may be paths: the strings of a Python script, the words of another, and of arguments."""
    words = {word for text in args for word in _WORD.findall(text)}
    try:
        with script.open("rb") as file:
            text = file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return words
    tree, _ = parsed(text) if script.suffix == ".py" else (None, "")
    if tree is None:
        return words | set(_WORD.findall(text))
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return words | {value for value in constants if isinstance(value, str)}


def _mentioned(words: set[str], snapshot: Snapshot, beside: Path, ignored: Sequence[str]) -> list[str]:
    """Return the ignored paths that words mean, from the folder of the request or that of the script."""
    whole = {path.rstrip("/"): path for path in ignored}
    within: dict[str, list[str]] = {}
    for name, path in whole.items():
        for above in _above(name):
            within.setdefault(above, []).append(path)
    bases = {snapshot.inside, os.path.relpath(beside.resolve(), snapshot.root)}
    found: dict[str, None] = {}
    for word in sorted(words):
        if not word or len(word) > _LONGEST or "\n" in word or "\0" in word or word.startswith("/"):
            continue
        for base in bases:
            name = os.path.normpath(f"{base}/{word}" if base else word)
            if name in whole:
                found[whole[name]] = None
            elif any(above in whole for above in _above(name)) and (snapshot.root / name).exists():
                found[f"{name}/" if (snapshot.root / name).is_dir() else name] = None
            else:
                found.update(dict.fromkeys(within.get(name, ())))
    return list(found)


def _above(path: str) -> Iterator[str]:
    """Yield the folders that a relative path lies in, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def explain_missing_file(record: JobRecord, verdict: Verdict) -> Verdict:
    """Return the verdict with the reason why a file was missing, where it stayed on the submitting side."""
    lines = [verdict.summary, *(line.text for line in verdict.evidence)]
    quoted = (pair for line in lines if _MISSING.search(line) for pair in _QUOTED.findall(line))
    for single, double in quoted:
        found = _left_behind(record, single or double)
        if found is not None:
            here, path = found
            return replace(
                verdict,
                blame="user",
                summary=f"{verdict.summary}; {here} was left out of the job's copy of the code",
                advice=f"submit it again with --code-include {shlex.quote(path)}; {_LARGE}",
            )
    return verdict


def _left_behind(record: JobRecord, name: str) -> tuple[Path, str] | None:
    """Return where a file that the job did not find is here, and its path in the tree of the code.

    None where the job did not look for it in its copy of the code, or where it is not here either.
    """
    code = f"{record.run_dir}/code"
    missing = os.path.normpath(Path(record.work_dir) / name)
    if not f"{record.work_dir}/".startswith(f"{code}/") or not missing.startswith(f"{code}/"):
        return None
    try:
        folder = RunDir(Path(record.folder)).document().get("submitted_in")
    except StoreError:
        return None
    if not isinstance(folder, str):
        return None
    here = Path(os.path.normpath(Path(folder) / os.path.relpath(missing, record.work_dir)))
    return (here, os.path.relpath(missing, code)) if here.exists() else None
