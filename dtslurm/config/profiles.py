"""Finds cluster profiles by name, follows ``extends`` and tells where each value came from.

Profiles are looked for in ``./cluster_profiles``, the user's ``~/.config/dtslurm/cluster_profiles`` and the
packaged ones, in this order. ``extends: NAME`` in a file is looked for from that file's own folder on, so
that a project's ``perlmutter`` may extend the packaged one; mappings are merged, everything else replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dtslurm import assets
from dtslurm.config import decode, fabrics, files, origins, rules
from dtslurm.config.tree import Entry, Problem, Scalar, Table
from dtslurm.errors import ProfileInvalid, ProfileNotFound
from dtslurm.model.cluster import ClusterProfile

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class LoadedProfile:
    """A profile, the file it was read from, and where each value came from.

    Attributes:
        origins: ``"slurm.partition": "perlmutter.yaml:12"``; what is not in it is a default.
    """

    profile: ClusterProfile
    path: Path
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProfileEntry:
    """A profile in a listing; ``error`` says in one line why it cannot be used, None if it can."""

    name: str
    path: Path
    title: str | None = None
    error: str | None = None


class _Places(NamedTuple):
    """The folders to look in, best first, and what names are shortened by."""

    cwd: Path
    home: Path | None
    folders: tuple[Path, ...]

    def label(self, path: Path) -> str:
        return files.label(path, cwd=self.cwd, home=self.home, packaged=assets.cluster_profiles())

    def find(self, name: str, folders: tuple[Path, ...]) -> Path | None:
        candidates = (folder / f"{name}{suffix}" for folder in folders for suffix in _SUFFIXES)
        return next((path for path in candidates if os.path.lexists(path)), None)

    def from_here(self, path: Path) -> tuple[Path, ...]:
        """Return where a file's ``extends`` is looked for: its own folder, then those that come after it."""
        if path.parent in self.folders:
            return self.folders[self.folders.index(path.parent) :]
        return (path.parent, *self.folders)


def find(name: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Path:
    """Return the file of a profile.

    Args:
        name: a profile's name, or a path (with ``/`` or ending in ``.yaml``) from ``cwd``.
        cwd: where the user stands; this process's working directory by default.
        env: the user's environment; this process's by default.

    Raises:
        ProfileNotFound: there is none; the error names those there are.
    """
    places = _places(cwd, env)
    if _is_path(name):
        path = _resolve(name, places.cwd, places.home)
        if not os.path.lexists(path):
            raise ProfileNotFound([f"there is no file {name}"], hint=_KNOWN_HINT)
        return path
    path_or_none = places.find(name, places.folders)
    if path_or_none is None:
        known = sorted(_names(places))
        meant = rules.suggestion(name, known)
        raise ProfileNotFound(
            [f"no cluster profile {name!r}{meant} (known: {', '.join(known) or 'none'})"], hint=_KNOWN_HINT
        )
    return path_or_none


def load(name: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> LoadedProfile:
    """Return the profile of that name (or path), as ``find`` finds it, with what it extends.

    Raises:
        ProfileNotFound: there is no such profile.
        ProfileInvalid: it, or one it extends, is wrong; every problem reads ``file:line: key: message``.
    """
    return _load(find(name, cwd=cwd, env=env), _places(cwd, env))


def list_profiles(*, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> list[ProfileEntry]:
    """Return every profile that can be named here, sorted by name; broken ones with their error."""
    places = _places(cwd, env)
    entries = []
    for name, path in sorted(_names(places).items()):
        try:
            title = _load(path, places).profile.title
        except ProfileInvalid as error:
            more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
            entries.append(ProfileEntry(name=name, path=path, error=error.problems[0] + more))
        else:
            entries.append(ProfileEntry(name=name, path=path, title=title))
    return entries


_KNOWN_HINT = "dtslurm cluster list shows the profiles there are"


def _places(cwd: Path | None, env: Mapping[str, str] | None) -> _Places:
    here = Path.cwd() if cwd is None else cwd
    variables = os.environ if env is None else env
    home = Path(variables["HOME"]) if variables.get("HOME") else None
    folders = [here / "cluster_profiles"]
    if own := files.user_folder(variables):
        folders.append(own / "cluster_profiles")
    folders.append(assets.cluster_profiles())
    return _Places(here, home, tuple(dict.fromkeys(folders)))


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith(_SUFFIXES)


def _resolve(name: str, folder: Path, home: Path | None) -> Path:
    if home is not None and name.startswith("~/"):
        return home / name[2:]
    return Path(os.path.normpath(folder / name))


def _names(places: _Places) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in places.folders:
        try:
            paths = sorted(folder.iterdir())
        except OSError:
            continue  # no such folder, or not ours to read: nothing to name in it
        for path in paths:
            if path.suffix in _SUFFIXES and not path.name.startswith("."):
                found.setdefault(path.stem, path)
    return found


def _load(path: Path, places: _Places) -> LoadedProfile:
    root, problems, name = _chain(path, places)
    root, more = fabrics.apply(root, _fabric_folders(path, places), places.label)
    problems += more
    written = origins.of(root)
    if "name" not in root.entries:
        source = places.label(path)
        entries = {"name": Entry(source, 1, Scalar(source, 1, name)), **root.entries}
        root = Table(root.source, root.line, entries)
        written["name"] = source
    profile = decode.decode(
        ClusterProfile, root, problems=problems, check=rules.profile_problems, also=("extends",)
    )
    return LoadedProfile(profile=profile, path=path, origins=written)


def _fabric_folders(path: Path, places: _Places) -> tuple[Path, ...]:
    """Return ``templates/fabrics`` beside each folder of profiles, that of the profile's own first."""
    return tuple(folder.parent / "templates" / "fabrics" for folder in places.from_here(path))


def _chain(path: Path, places: _Places) -> tuple[Table, list[Problem], str]:
    """Return the merged tree of a file and all it extends, the problems met, and the default name."""
    from dtslurm.config import strict_yaml  # brings PyYAML, which most commands never need

    problems: list[Problem] = []
    visited: list[Path] = []
    merged: Table | None = None
    current: Path | None = path
    while current is not None:
        visited.append(current)
        source = places.label(current)
        data = files.read(current, source, packaged=current.parent == assets.cluster_profiles())
        root, found = strict_yaml.parse(data, source)
        problems += found
        parent = root.entries.get("extends")
        own = {key: entry for key, entry in root.entries.items() if key != "extends"}
        if merged is None:
            _check_name(own.get("name"), path.stem, problems)
        else:
            own.pop("name", None)  # a name is a file's own
        root = root._replace(entries=own)
        merged = root if merged is None else merge(root, merged)
        current = _parent(parent, visited, places, problems) if parent else None
    assert merged is not None  # noqa: S101 - the loop ran at least once
    return merged, problems, path.stem


def _check_name(entry: Entry | None, stem: str, problems: list[Problem]) -> None:
    if entry is None or not isinstance(entry.value, Scalar) or entry.value.text in {None, stem}:
        return
    message = f"should be {stem!r} as the file is called; --cluster goes by that"
    problems.append(Problem(entry.source, entry.line, "name", message))


def _parent(entry: Entry, visited: list[Path], places: _Places, problems: list[Problem]) -> Path | None:
    """Return the file that ``extends`` names, or None with the problem noted."""
    name = entry.value.text if isinstance(entry.value, Scalar) else None
    current = visited[-1]

    def wrong(message: str) -> None:
        problems.append(Problem(entry.source, entry.line, "extends", message))

    if not name:
        if not isinstance(entry.value, Scalar):
            wrong("should be the name of one profile")
        return None
    if _is_path(name):
        path: Path | None = _resolve(name, current.parent, places.home)
        if path is None or not os.path.lexists(path):
            wrong(f"there is no file {name}")
            return None
    else:
        folders = places.from_here(current)
        path = places.find(name, folders[1:] if name == current.stem else folders)
        if path is None and name == current.stem:
            wrong("a profile cannot extend itself; there is no other of that name further on")
            return None
        if path is None:
            known = sorted(_names(places._replace(folders=folders)))
            wrong(f"no cluster profile {name!r}{rules.suggestion(name, known)}")
            return None
    if path in visited:
        circle = " → ".join(places.label(step) for step in [*visited[visited.index(path) :], path])
        wrong(f"goes in a circle: {circle}")
        return None
    return path


def merge(base: Table, over: Table) -> Table:
    """Return ``base`` with the values of ``over`` in their place; mappings are merged, lists replaced.

    A key of ``over`` with nothing after it leaves a mapping of ``base`` as it is; ``null`` takes it away.
    """
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        below = entries.get(key)
        if below is not None and isinstance(below.value, Table):
            if isinstance(entry.value, Table):
                entries[key] = Entry(entry.source, entry.line, merge(below.value, entry.value))
                continue
            if isinstance(entry.value, Scalar) and not entry.value.written:
                continue
        entries[key] = entry
    return Table(over.source, over.line, entries)
