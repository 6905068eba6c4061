"""Packaged data that users and projects extend with files of the same name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dtslurm import assets
from dtslurm.config import files, project
from dtslurm.config.tree import Items, Problem, Scalar, Table
from dtslurm.errors import ProfileInvalid
from dtslurm.suggestions import list_nearest, suggest_name

_Entry = TypeVar("_Entry")


Read = Callable[[str, Table, list[Problem]], _Entry | None]
"""Reads the entry of a name, noting what is wrong with it; None for one that is wrong."""


def load(
    folder: str,
    file_name: str,
    section: str,
    read_entry: Read[_Entry],
    cwd: Path,
    env: Mapping[str, str] | None,
) -> list[dict[str, _Entry | None]]:
    """Return the entries of each file's only section, the packaged file's first; a removed entry is None.

    Raises:
        ProfileInvalid: a file is invalid; all problems are reported at once.
    """
    problems: list[Problem] = []
    layers = []
    for path in paths(folder, file_name, cwd, env):
        packaged = path.parent == assets.templates() / folder
        source = f"{folder}/{path.name}" if packaged else str(path)
        data = files.read(path, source, packaged=packaged)
        layers.append(dict(_read_entries(data, source, section, read_entry, problems)))
    if problems:
        raise ProfileInvalid([str(problem) for problem in problems])
    return layers


def _read_entries(
    data: bytes, source: str, section: str, read_entry: Read[_Entry], problems: list[Problem]
) -> Iterator[tuple[str, _Entry | None]]:
    from dtslurm.config import strict_yaml  # imports PyYAML, which most commands never need

    root, syntax_problems = strict_yaml.parse(data, source)
    problems += syntax_problems
    for key, entry in root.entries.items():
        if key != section or not isinstance(entry.value, Table):
            problems.append(Problem(source, entry.line, key, f"only a mapping {section!r} is allowed here"))
            continue
        for name, named_entry in entry.value.entries.items():
            if isinstance(named_entry.value, Scalar) and named_entry.value.text is None:
                yield name, None
            elif isinstance(named_entry.value, Table):
                yield name, read_entry(name, named_entry.value, problems)
            else:
                problems.append(Problem(source, named_entry.line, name, "should be a mapping"))


def check_keys(table: Table, name: str, known_keys: Sequence[str], problems: list[Problem]) -> None:
    """Record a problem for each unknown key of an entry."""
    for key, entry in table.entries.items():
        if key not in known_keys:
            suggestion = suggest_name(key, list(known_keys)) or f" ({list_nearest(key, known_keys)})"
            problems.append(Problem(entry.source, entry.line, f"{name}.{key}", f"unknown key{suggestion}"))


def paths(folder: str, name: str, cwd: Path, env: Mapping[str, str] | None) -> Iterator[Path]:
    """Yield the packaged file of ``templates/<folder>``, then the user's and the project's if they exist."""
    yield assets.templates() / folder / name
    user_folder = files.user_folder(os.environ if env is None else env)
    project_file = project.find(cwd, env=env)
    for path in (
        user_folder / name if user_folder else None,
        project_file.parent / name if project_file else None,
    ):
        if path is not None and os.path.lexists(path):
            yield path


def text_of(table: Table, name: str, key: str, problems: list[Problem]) -> str | None:
    """Return the text of a key, None if the key is absent; a value of another kind is a problem."""
    entry = table.entries.get(key)
    if entry is None:
        return None
    if not isinstance(entry.value, Scalar):
        problems.append(Problem(entry.source, entry.line, f"{name}.{key}", "should be a single string"))
        return None
    return entry.value.text


def texts_of(table: Table, name: str, key: str, problems: list[Problem]) -> tuple[str, ...]:
    """Return the list of texts of a key, empty if the key is absent; a value of another kind is a problem."""
    entry = table.entries.get(key)
    if entry is None:
        return ()
    items = entry.value.items if isinstance(entry.value, Items) else (entry.value,)
    if not all(isinstance(item, Scalar) for item in items):
        problems.append(Problem(entry.source, entry.line, f"{name}.{key}", "should be a list of strings"))
        return ()
    return tuple(item.text or "" for item in items if isinstance(item, Scalar))
