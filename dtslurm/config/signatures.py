"""Reads what is known of failures: the packaged signatures, then the user's, then the project's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from dtslurm import assets
from dtslurm.config import files, project, rules
from dtslurm.config.tree import Entry, Items, Problem, Scalar, Table
from dtslurm.errors import ProfileInvalid
from dtslurm.model.diagnosis import BLAMES, ROLES, Signature

FILE_NAME = "signatures.yaml"
_KEYS = (
    "cause", "role", "strength", "lasting", "blame", "words", "match", "summary", "advice", "examples",
    "source",
)  # fmt: skip
_SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def load(cwd: Path, env: Mapping[str, str] | None = None) -> tuple[Signature, ...]:
    """Return all signatures; of two with one name the user's replaces the packaged, the project's both.

    Raises:
        ProfileInvalid: a file is wrong; all problems are told at once.
    """
    found: dict[str, Signature] = {}
    problems: list[Problem] = []
    for path in _paths(cwd, env):
        packaged = path.parent == assets.templates() / "diagnose"
        source = f"diagnose/{path.name}" if packaged else str(path)
        for name, signature in _read(path, source, packaged, problems):
            found.pop(name, None)
            if signature is not None:
                found[name] = signature
    if problems:
        raise ProfileInvalid([str(problem) for problem in problems])
    return tuple(found.values())


def _paths(cwd: Path, env: Mapping[str, str] | None) -> Iterator[Path]:
    yield assets.templates() / "diagnose" / FILE_NAME
    folder = files.user_folder(os.environ if env is None else env)
    file = project.find(cwd, env=env)
    for path in (folder / FILE_NAME if folder else None, file.parent / FILE_NAME if file else None):
        if path is not None and os.path.lexists(path):
            yield path


def _read(
    path: Path, source: str, packaged: bool, problems: list[Problem]
) -> Iterator[tuple[str, Signature | None]]:
    from dtslurm.config import strict_yaml  # brings PyYAML, which most commands never need

    root, found = strict_yaml.parse(files.read(path, source, packaged=packaged), source)
    problems += found
    for key, entry in root.entries.items():
        if key != "signatures" or not isinstance(entry.value, Table):
            problems.append(Problem(source, entry.line, key, "only a mapping 'signatures' belongs here"))
            continue
        for name, one in entry.value.entries.items():
            if isinstance(one.value, Scalar) and one.value.text is None:
                yield name, None
            elif isinstance(one.value, Table):
                signature = _signature(name, one.value, problems)
                if signature is not None:
                    yield name, signature
            else:
                problems.append(Problem(source, one.line, name, "should be a mapping"))


def _signature(name: str, table: Table, problems: list[Problem]) -> Signature | None:
    before = len(problems)
    for key, entry in table.entries.items():
        if key not in _KEYS:
            meant = rules.suggestion(key, list(_KEYS)) or f" ({', '.join(_KEYS)})"
            problems.append(Problem(entry.source, entry.line, f"{name}.{key}", f"unknown key{meant}"))
    texts = {
        key: _text(table, name, key, problems) for key in ("cause", "role", "blame", "summary", "advice")
    }
    lists = {key: _list(table, name, key, problems) for key in ("words", "match", "examples")}
    for key, found in _faults(texts, lists, _text(table, name, "strength", problems)):
        entry = table.entries.get(key, Entry(table.source, table.line, table))
        problems.append(Problem(entry.source, entry.line, f"{name}.{key}", found))
    if len(problems) > before:
        return None
    return Signature(
        name=name,
        cause=texts["cause"] or "unknown",
        role=texts["role"] or "cause",
        strength=int(_text(table, name, "strength", problems) or "70"),
        lasting=_text(table, name, "lasting", problems) in {"yes", "true"},
        blame=texts["blame"] or "unknown",
        summary=texts["summary"] or "",
        advice=texts["advice"] or "",
        words=lists["words"],
        match=lists["match"],
        examples=lists["examples"],
    )


def _faults(
    texts: Mapping[str, str | None], lists: Mapping[str, tuple[str, ...]], strength: str | None
) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong) of a signature's values."""
    if not _SLUG.fullmatch(texts["cause"] or ""):
        yield "cause", "should be small letters, digits and '-', as in disk-full"
    if texts["role"] and texts["role"] not in ROLES:
        yield "role", f"should be one of {', '.join(ROLES)}"
    if texts["blame"] and texts["blame"] not in BLAMES:
        yield "blame", f"should be one of {', '.join(BLAMES)}"
    if strength and not (strength.isdecimal() and int(strength) <= 100):
        yield "strength", f"should be a whole number from 0 to 100, not {rules.quoted(strength)}"
    for key in ("words", "match"):
        if not lists[key] or not all(lists[key]):
            yield key, "should be a list of at least one text"
    if any("\n" in word for word in lists["words"]):
        yield "words", "should each be part of one line"
    for pattern in lists["match"]:
        try:
            re.compile(pattern)
        except re.error as error:
            yield "match", f"{rules.quoted(pattern)} is no regular expression: {error}"


def _text(table: Table, name: str, key: str, problems: list[Problem]) -> str | None:
    entry = table.entries.get(key)
    if entry is None:
        return None
    if not isinstance(entry.value, Scalar):
        problems.append(Problem(entry.source, entry.line, f"{name}.{key}", "should be one text"))
        return None
    return entry.value.text


def _list(table: Table, name: str, key: str, problems: list[Problem]) -> tuple[str, ...]:
    entry = table.entries.get(key)
    if entry is None:
        return ()
    items = entry.value.items if isinstance(entry.value, Items) else (entry.value,)
    if not all(isinstance(item, Scalar) for item in items):
        problems.append(Problem(entry.source, entry.line, f"{name}.{key}", "should be a list of texts"))
        return ()
    return tuple(item.text or "" for item in items if isinstance(item, Scalar))
