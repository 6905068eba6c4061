"""Files on the submitting machine that git ignores, so that the job's copy of the code lacks them."""

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
from dtslurm.launch.detection.evidence import parse_source
from dtslurm.model.jobs.job import JobRecord
from dtslurm.services.request.request import JobRequest
from dtslurm.store.rundir import RunDir
from dtslurm.store.snapshot import Snapshot

if TYPE_CHECKING:  # not imported at run time: submission needs no diagnosis
    from dtslurm.model.runs.diagnosis import Verdict

_MOST_LISTED = 3
_LONGEST = 1000  # characters of a path
_WORD = re.compile(r"[^\s=:,;'\"()\[\]{}]+")
_MISSING_FILE = re.compile(r"FileNotFoundError|No such file or directory")
_LARGE_DATA_HINT = (
    "copy large data to the cluster once, and give its path on the cluster to the script or to --stage"
)
_QUOTED = re.compile(r"'([^']+)'|\"([^\"]+)\"")


def mention_notices(
    folder: Path, request: JobRequest, snapshot: Snapshot, ignored_paths: Sequence[str]
) -> list[str]:
    """Return a warning about ignored files that the script or its arguments mention, if there are any.

    Args:
        folder: the working directory of the request.
        request: the request, with the script and its arguments.
        snapshot: the code that will be copied.
        ignored_paths: the paths that git ignores, relative to the snapshot's root; folders end with ``/``.
    """
    script = folder / request.script
    missing = _find_mentioned(_find_words(script, request.args), snapshot, script.parent, ignored_paths)
    included_paths = {file.path for file in snapshot.files}
    missing = [
        path
        for path in missing
        if not any(f"{name}/".startswith(f"{path.rstrip('/')}/") for name in included_paths)
    ]
    if not missing:
        return []
    remainder_text = f" and {len(missing) - _MOST_LISTED} more" if len(missing) > _MOST_LISTED else ""
    options = _format_options(missing)
    subject = (
        f"{', '.join(missing[:_MOST_LISTED])}{remainder_text}, which {script.name} or its arguments name"
    )
    effect = "the job's copy of the code on the cluster does not contain these files"
    return [f"git ignores {subject}: {effect}; {options} copies them with the code; {_LARGE_DATA_HINT}"]


def _format_options(missing: Sequence[str]) -> str:
    """Return options that copy all missing paths; if there are many, an option names a folder of several."""
    included = list(missing)
    for depth in range(max(path.count("/") for path in missing), 0, -1):
        if len(included) <= _MOST_LISTED:
            break
        included = list(dict.fromkeys(_cut_to_folder(path, depth) for path in included))
    return " ".join(f"--code-include {shlex.quote(path)}" for path in included)


def _cut_to_folder(path: str, depth: int) -> str:
    """Return the folder of a path at a depth, such as ``a/b/`` of ``a/b/c`` at 2, or the path itself."""
    return "/".join(path.split("/")[:depth]) + "/" if path.count("/") >= depth else path


def _find_words(script: Path, args: Sequence[str]) -> set[str]:
    """Return words that may be paths: from the arguments, and a script's words or Python strings."""
    words = {word for text in args for word in _WORD.findall(text)}
    try:
        with script.open("rb") as file:
            text = file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return words
    tree, _ = parse_source(text) if script.suffix == ".py" else (None, "")
    if tree is None:
        return words | set(_WORD.findall(text))
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return words | {value for value in constants if isinstance(value, str)}


def _find_mentioned(
    words: set[str], snapshot: Snapshot, beside: Path, ignored_paths: Sequence[str]
) -> list[str]:
    """Return the ignored paths that words refer to, relative to the request's or the script's folder."""
    ignored_by_name = {path.rstrip("/"): path for path in ignored_paths}
    ignored_below: dict[str, list[str]] = {}
    for name, path in ignored_by_name.items():
        for parent in _parents(name):
            ignored_below.setdefault(parent, []).append(path)
    bases = {snapshot.inside, os.path.relpath(beside.resolve(), snapshot.root)}
    mentioned_paths: dict[str, None] = {}
    for word in sorted(words):
        if not word or len(word) > _LONGEST or "\n" in word or "\0" in word or word.startswith("/"):
            continue
        for base in bases:
            name = os.path.normpath(f"{base}/{word}" if base else word)
            if name in ignored_by_name:
                mentioned_paths[ignored_by_name[name]] = None
            elif (
                any(parent in ignored_by_name for parent in _parents(name))
                and (snapshot.root / name).exists()
            ):
                mentioned_paths[f"{name}/" if (snapshot.root / name).is_dir() else name] = None
            else:
                mentioned_paths.update(dict.fromkeys(ignored_below.get(name, ())))
    return list(mentioned_paths)


def _parents(path: str) -> Iterator[str]:
    """Yield the parent folders of a relative path, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def explain_missing_file(record: JobRecord, verdict: Verdict) -> Verdict:
    """Add to the verdict that a missing file was ignored by git and stayed on the submitting machine."""
    lines = [verdict.summary, *(line.text for line in verdict.evidence)]
    quoted_names = (pair for line in lines if _MISSING_FILE.search(line) for pair in _QUOTED.findall(line))
    for single, double in quoted_names:
        local_file = _find_local_file(record, single or double)
        if local_file is not None:
            local_path, path = local_file
            return replace(
                verdict,
                blame="user",
                summary=f"{verdict.summary}; {local_path} was not copied with the code",
                advice=f"submit the run again with --code-include {shlex.quote(path)}; {_LARGE_DATA_HINT}",
            )
    return verdict


def _find_local_file(record: JobRecord, name: str) -> tuple[Path, str] | None:
    """Return the local path of a file that the job lacked, and its path in the tree of the code.

    None if the job did not look for it in its copy of the code, or if it does not exist on this machine.
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
    local_path = Path(os.path.normpath(Path(folder) / os.path.relpath(missing, record.work_dir)))
    return (local_path, os.path.relpath(missing, code)) if local_path.exists() else None
