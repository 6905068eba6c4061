"""Finds cluster profiles by name, follows ``extends`` and tells where each value came from.

Profiles are looked for in ``./cluster_profiles``, in that beside the project's ``dtslurm.yaml``, in the
user's ``~/.config/dtslurm/cluster_profiles`` and among the packaged ones, in this order. ``extends: NAME`` in
a file is looked for from that file's own folder on, so that a project's ``perlmutter`` may extend the
packaged one; mappings are merged, everything else replaced. ``null`` takes a value away: a partition, a node
type or a variable of the file that is extended is then not there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

from dtslurm import assets
from dtslurm.config import chain, decode, fabrics, files, origins, project, provenance, rules
from dtslurm.config.tree import MappingEntry, Problem, Scalar, Table
from dtslurm.errors import ProfileInvalid, ProfileNotFound
from dtslurm.model.access import Access
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.paths import here
from dtslurm.model.values import dataclass
from dtslurm.suggestions import suggest_name

_SUFFIXES = (".yaml", ".yml")
# sources: docs.alcf.anl.gov, opus.nci.org.au, t4.gsic.titech.ac.jp, docs.csc.fi, 2026-08
_PBS = "runs PBS, not Slurm: jobs cannot be submitted there"
_AGE = "runs AGE, not Slurm: jobs cannot be submitted there"
_NONE_FOR = {
    "polaris": _PBS,
    "aurora": _PBS,
    "gadi": _PBS,
    "tsubame": _AGE,
    "tsubame4": _AGE,
    "abci": _AGE,
    "puhti": "was shut down in July 2026; its successor is roihu",
    "mahti": "was shut down in August 2026; its successor is roihu",
}


@dataclass(frozen=True, kw_only=True)
class LoadedProfile:
    """A profile, the file it was read from, and where each value came from.

    Attributes:
        origins: ``"slurm.partition": "perlmutter.yaml:12"``; what is not in it is a default.
        watched: the files that were read and the folders that were looked in, there or not: as long as
            none of them changes, the profile is the same.
        foreign: the files of it that are neither packaged nor among the user's own settings.
    """

    profile: ClusterProfile
    path: Path
    origins: Mapping[str, str] = field(default_factory=dict)
    watched: tuple[Path, ...] = ()
    foreign: tuple[Path, ...] = ()

    @property
    def access(self) -> Access:
        """How the cluster is reached and asked."""
        return self.profile.access


@dataclass(frozen=True, kw_only=True)
class ProfileEntry:
    """A profile in a listing; ``error`` says in one line why it cannot be used, None if it can."""

    name: str
    path: Path
    title: str | None = None
    checked: str | None = None
    error: str | None = None


class _Places(NamedTuple):
    """The folders to look in, best first, and what names are shortened by."""

    cwd: Path
    home: Path | None
    env: Mapping[str, str]
    folders: tuple[Path, ...]
    project_files: tuple[Path, ...]  # looked for to know the folders, there or not

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
        if name.lower() in _NONE_FOR:
            raise ProfileNotFound([f"{name} {_NONE_FOR[name.lower()]}"], hint=_KNOWN_HINT)
        meant = suggest_name(name, sorted(_names(places)))
        raise ProfileNotFound([f"no cluster profile {name!r}{meant}"], hint=_KNOWN_HINT)
    return path_or_none


def load(name: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> LoadedProfile:
    """Return the profile of that name (or path), as ``find`` finds it, with what it extends.

    Raises:
        ProfileNotFound: there is no such profile.
        ProfileInvalid: it, or one it extends, is wrong; every problem reads ``file:line: key: message``.
    """
    return _load(find(name, cwd=cwd, env=env), _places(cwd, env))


def sources(name: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return which document each value of a profile is from, by its dotted key, where its file says so.

    Raises:
        ProfileNotFound, ProfileInvalid: as of ``load``.
    """
    loaded = load(name, cwd=cwd, env=env)
    return provenance.select_origins(loaded.origins, loaded.watched)


def packaged() -> Path:
    """Return the folder of the profiles that come along."""
    return assets.cluster_profiles()


def list_profiles(*, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> list[ProfileEntry]:
    """Return every profile that can be named here, sorted by name; broken ones with their error."""
    places = _places(cwd, env)
    entries = []
    for name, path in sorted(_names(places).items()):
        try:
            loaded = _load(path, places)
        except ProfileInvalid as error:
            more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
            entries.append(ProfileEntry(name=name, path=path, error=error.problems[0] + more))
        else:
            entries.append(
                ProfileEntry(name=name, path=path, title=loaded.profile.title, checked=_checked(loaded, path))
            )
    return entries


def _checked(loaded: LoadedProfile, path: Path) -> str | None:
    """Return how a profile was checked, as its own file says; what it extends was checked for another."""
    place = loaded.origins.get("checked", "").rpartition(":")[0]
    return loaded.profile.checked if Path(place).name == path.name else None


_KNOWN_HINT = "dtslurm cluster list shows the profiles there are"


def _places(cwd: Path | None, env: Mapping[str, str] | None) -> _Places:
    folder = here() if cwd is None else cwd
    variables = os.environ if env is None else env
    home = Path(variables["HOME"]) if variables.get("HOME") else None
    folders = [folder / "cluster_profiles"]
    project_files = project.looked_for(folder, env=variables)
    folders += [file.parent / "cluster_profiles" for file in project_files if os.path.lexists(file)][:1]
    if own := files.user_folder(variables):
        folders.append(own / "cluster_profiles")
    folders.append(assets.cluster_profiles())
    # In a checkout of dtslurm ./cluster_profiles are the packaged ones: of equal folders the last one counts,
    # else what the user's own profiles extend would lie before them.
    folders = list(dict.fromkeys(reversed(folders)))[::-1]
    return _Places(folder, home, variables, tuple(folders), tuple(project_files))


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
    root, problems, read = _chain(path, places)
    name, fabric_folders = path.stem, _fabric_folders(path, places)
    root, more = fabrics.apply(root, fabric_folders, places.label)
    problems += more
    root = decode.without_taken(ClusterProfile, root)
    written = origins.of(root)
    if "name" not in root.entries:
        source = places.label(path)
        entries = {"name": MappingEntry(source, 1, Scalar(source, 1, name)), **root.entries}
        root = Table(root.source, root.line, entries)
        written["name"] = source
    profile = decode.decode(
        ClusterProfile, root, problems=problems, check=rules.profile_problems, also=("extends",)
    )
    fabric = profile.fabric.environment_from if profile.fabric else None
    read += [fabrics.file(folder, fabric) for folder in fabric_folders] if fabric else []
    folders = (*places.folders, *fabric_folders, *(one.parent for one in read))
    watched = tuple(dict.fromkeys([*read, *folders, *places.project_files]))
    foreign = tuple(file for file in read if not _is_known(file, places) and file.exists())
    return LoadedProfile(profile=profile, path=path, origins=written, watched=watched, foreign=foreign)


def _is_known(path: Path, places: _Places) -> bool:
    """Tell whether a file came with dtslurm, or lies among the user's own settings."""
    own = files.user_folder(places.env)
    return any(
        path.is_relative_to(folder)
        for folder in (assets.cluster_profiles(), assets.templates(), own)
        if folder
    )


def stood_in_for(name: str, path: Path, *, cwd: Path, env: Mapping[str, str]) -> Path | None:
    """Return the file that a project's profile of the same name comes before: one's own or a packaged one."""
    places = _places(cwd, env)
    known = tuple(folder for folder in places.folders if folder != path.parent)
    found = places.find(name, known) if path.parent in places.folders else None
    return found if found is not None and _is_known(found, places) and not _is_known(path, places) else None


def _fabric_folders(path: Path, places: _Places) -> tuple[Path, ...]:
    """Return ``templates/fabrics`` beside each folder of profiles, that of the profile's own first."""
    return tuple(folder.parent / "templates" / "fabrics" for folder in places.from_here(path))


def _chain(path: Path, places: _Places) -> tuple[Table, list[Problem], list[Path]]:
    """Return the merged tree of a file and all it extends, the problems met, and the files read."""

    def read(file: Path) -> bytes:
        packaged = file.parent == assets.cluster_profiles()
        return files.read(file, places.label(file), packaged=packaged, env=places.env)

    trees, problems, visited = chain.follow(
        path,
        read=read,
        label=places.label,
        find=lambda name, current: _parent(name, current, places),
        what="the name of one profile",
    )
    own, *others = trees
    _check_name(own.entries.get("name"), path.stem, problems)
    others = [_nameless(tree) for tree in others]  # a name is a file's own
    return chain.merged([own, *others]), problems, visited


def _nameless(tree: Table) -> Table:
    return tree._replace(entries={key: entry for key, entry in tree.entries.items() if key != "name"})


def _check_name(entry: MappingEntry | None, stem: str, problems: list[Problem]) -> None:
    if entry is None or not isinstance(entry.value, Scalar) or entry.value.text in {None, stem}:
        return
    message = f"should be {stem!r} as the file is called; --cluster goes by that"
    problems.append(Problem(entry.source, entry.line, "name", message))


def _parent(name: str, current: Path, places: _Places) -> Path | str:
    """Return the file that ``extends: NAME`` in another means, or why there is none."""
    if _is_path(name):
        path = _resolve(name, current.parent, places.home)
        return path if os.path.lexists(path) else f"there is no file {name}"
    folders = places.from_here(current)
    found = places.find(name, folders[1:] if name == current.stem else folders)
    if found is not None:
        return found
    if name == current.stem:
        return "a profile cannot extend itself; there is no other of that name further on"
    known = sorted(_names(places._replace(folders=folders)))
    return f"no cluster profile {name!r}{suggest_name(name, known)}"
