"""Search for cluster profiles by name, resolution of ``extends``, and the origin of each value.

Profiles are searched for in ``./cluster_profiles``, in the folder ``cluster_profiles`` beside the project's
``dtslurm.yaml``, in the user's ``~/.config/dtslurm/cluster_profiles`` and among the packaged ones, in this
order. The search for ``extends: NAME`` starts at the file's own folder, so that a project's ``perlmutter``
can extend the packaged one. Mappings are merged, everything else is replaced. ``null`` removes a value of the
extended file: a partition, a node type or a variable.
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
from dtslurm.model.paths import working_directory
from dtslurm.model.values import dataclass
from dtslurm.suggestions import suggest_name

_SUFFIXES = (".yaml", ".yml")
# sources: docs.alcf.anl.gov, opus.nci.org.au, t4.gsic.titech.ac.jp, docs.csc.fi, 2026-08
_RUNS_PBS = "runs PBS, not Slurm: jobs cannot be submitted there"
_RUNS_AGE = "runs AGE, not Slurm: jobs cannot be submitted there"
_UNSUPPORTED_CLUSTERS = {
    "polaris": _RUNS_PBS,
    "aurora": _RUNS_PBS,
    "gadi": _RUNS_PBS,
    "tsubame": _RUNS_AGE,
    "tsubame4": _RUNS_AGE,
    "abci": _RUNS_AGE,
    "puhti": "was shut down in July 2026; its successor is roihu",
    "mahti": "was shut down in August 2026; its successor is roihu",
}


@dataclass(frozen=True, kw_only=True)
class LoadedProfile:
    """A profile, the file that it was read from, and the origin of each value.

    Attributes:
        origins: ``"slurm.partition": "perlmutter.yaml:12"``; a value without an entry is a default.
        watched: the files that were read and the paths that were searched, existing or not. The profile stays
            the same as long as none of them changes.
        foreign: the files of the profile that are neither packaged nor among the user's own settings.
    """

    profile: ClusterProfile
    path: Path
    origins: Mapping[str, str] = field(default_factory=dict)
    watched: tuple[Path, ...] = ()
    foreign: tuple[Path, ...] = ()

    @property
    def access(self) -> Access:
        """How dtslurm reaches and queries the cluster."""
        return self.profile.access


@dataclass(frozen=True, kw_only=True)
class ProfileEntry:
    """A profile in a listing; ``error`` is one line on why it is unusable, None if it is usable."""

    name: str
    path: Path
    title: str | None = None
    checked: str | None = None
    error: str | None = None


class _SearchPath(NamedTuple):
    """The folders to search, in order of precedence, and the folders that file names are shortened by."""

    cwd: Path
    home: Path | None
    env: Mapping[str, str]
    folders: tuple[Path, ...]
    project_files: tuple[Path, ...]  # searched to determine the folders, existing or not

    def label(self, path: Path) -> str:
        return files.label(path, cwd=self.cwd, home=self.home, packaged=assets.cluster_profiles())

    def find(self, name: str, folders: tuple[Path, ...]) -> Path | None:
        candidates = (folder / f"{name}{suffix}" for folder in folders for suffix in _SUFFIXES)
        return next((path for path in candidates if os.path.lexists(path)), None)

    def folders_for(self, path: Path) -> tuple[Path, ...]:
        """Return the folders to search for a file's ``extends``: its own folder, then the later ones."""
        if path.parent in self.folders:
            return self.folders[self.folders.index(path.parent) :]
        return (path.parent, *self.folders)


def find(name: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Path:
    """Return the file of a profile.

    Args:
        name: a profile's name, or a path (with ``/`` or ending in ``.yaml``) relative to ``cwd``.
        cwd: the user's working directory; by default that of this process.
        env: the user's environment; by default that of this process.

    Raises:
        ProfileNotFound: there is no such profile.
    """
    search_path = _build_search_path(cwd, env)
    if _is_path(name):
        path = _resolve_path(name, search_path.cwd, search_path.home)
        if not os.path.lexists(path):
            raise ProfileNotFound([f"file {name} does not exist"], hint=_LIST_HINT)
        return path
    found_path = search_path.find(name, search_path.folders)
    if found_path is None:
        if name.lower() in _UNSUPPORTED_CLUSTERS:
            raise ProfileNotFound([f"{name} {_UNSUPPORTED_CLUSTERS[name.lower()]}"], hint=_LIST_HINT)
        suggestion = suggest_name(name, sorted(_list_names(search_path)))
        raise ProfileNotFound([f"no cluster profile {name!r}{suggestion}"], hint=_LIST_HINT)
    return found_path


def load(name: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> LoadedProfile:
    """Return the profile of a name or path, as in ``find``, merged with the profiles that it extends.

    Raises:
        ProfileNotFound: there is no such profile.
        ProfileInvalid: the profile, or one that it extends, is invalid; every problem reads ``file:line: key:
            message``.
    """
    return _load(find(name, cwd=cwd, env=env), _build_search_path(cwd, env))


def sources(name: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the document that each value of a profile comes from, by dotted key, if its file names one.

    Raises:
        ProfileNotFound, ProfileInvalid: as in ``load``.
    """
    loaded_profile = load(name, cwd=cwd, env=env)
    return provenance.select_origins(loaded_profile.origins, loaded_profile.watched)


def packaged() -> Path:
    """Return the folder of the packaged profiles."""
    return assets.cluster_profiles()


def list_profiles(*, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> list[ProfileEntry]:
    """Return all available profiles, sorted by name; invalid ones have their error."""
    search_path = _build_search_path(cwd, env)
    entries = []
    for name, path in sorted(_list_names(search_path).items()):
        try:
            loaded_profile = _load(path, search_path)
        except ProfileInvalid as error:
            suffix = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
            entries.append(ProfileEntry(name=name, path=path, error=error.problems[0] + suffix))
        else:
            entries.append(
                ProfileEntry(
                    name=name,
                    path=path,
                    title=loaded_profile.profile.title,
                    checked=_find_own_check(loaded_profile, path),
                )
            )
    return entries


def _find_own_check(loaded_profile: LoadedProfile, path: Path) -> str | None:
    """Return how a profile was checked according to its own file; ``checked`` is not inherited."""
    file_name = loaded_profile.origins.get("checked", "").rpartition(":")[0]
    return loaded_profile.profile.checked if Path(file_name).name == path.name else None


_LIST_HINT = "dtslurm cluster list shows all profiles"


def _build_search_path(cwd: Path | None, env: Mapping[str, str] | None) -> _SearchPath:
    folder = working_directory() if cwd is None else cwd
    variables = os.environ if env is None else env
    home = Path(variables["HOME"]) if variables.get("HOME") else None
    folders = [folder / "cluster_profiles"]
    project_files = project.list_search_paths(folder, env=variables)
    folders += [file.parent / "cluster_profiles" for file in project_files if os.path.lexists(file)][:1]
    if settings := files.user_folder(variables):
        folders.append(settings / "cluster_profiles")
    folders.append(assets.cluster_profiles())
    # In a checkout of dtslurm, ./cluster_profiles is the folder of packaged profiles. Only the last of equal
    # folders stays; otherwise packaged profiles would precede the user's own ones that extend them.
    folders = list(dict.fromkeys(reversed(folders)))[::-1]
    return _SearchPath(folder, home, variables, tuple(folders), tuple(project_files))


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith(_SUFFIXES)


def _resolve_path(name: str, folder: Path, home: Path | None) -> Path:
    if home is not None and name.startswith("~/"):
        return home / name[2:]
    return Path(os.path.normpath(folder / name))


def _list_names(search_path: _SearchPath) -> dict[str, Path]:
    path_by_name: dict[str, Path] = {}
    for folder in search_path.folders:
        try:
            paths = sorted(folder.iterdir())
        except OSError:
            continue  # a missing or unreadable folder has no profiles
        for path in paths:
            if path.suffix in _SUFFIXES and not path.name.startswith("."):
                path_by_name.setdefault(path.stem, path)
    return path_by_name


def _load(path: Path, search_path: _SearchPath) -> LoadedProfile:
    root, problems, files_read = _load_chain(path, search_path)
    name, fabric_folders = path.stem, _list_fabric_folders(path, search_path)
    root, fabric_problems = fabrics.apply(root, fabric_folders, search_path.label)
    problems += fabric_problems
    root = decode.remove_null_sections(ClusterProfile, root)
    value_origins = origins.collect_origins(root)
    if "name" not in root.entries:
        source = search_path.label(path)
        entries = {"name": MappingEntry(source, 1, Scalar(source, 1, name)), **root.entries}
        root = Table(root.source, root.line, entries)
        value_origins["name"] = source
    profile = decode.decode(
        ClusterProfile, root, problems=problems, check=rules.profile_problems, extra_keys=("extends",)
    )
    fabric = profile.fabric.environment_from if profile.fabric else None
    files_read += [fabrics.file(folder, fabric) for folder in fabric_folders] if fabric else []
    folders = (*search_path.folders, *fabric_folders, *(file.parent for file in files_read))
    watched_paths = tuple(dict.fromkeys([*files_read, *folders, *search_path.project_files]))
    untrusted_files = tuple(
        file for file in files_read if not _is_own_or_packaged(file, search_path) and file.exists()
    )
    return LoadedProfile(
        profile=profile, path=path, origins=value_origins, watched=watched_paths, foreign=untrusted_files
    )


def _is_own_or_packaged(path: Path, search_path: _SearchPath) -> bool:
    """Return whether a file is part of dtslurm, or belongs to the user's own settings."""
    user_folder = files.user_folder(search_path.env)
    return any(
        path.is_relative_to(folder)
        for folder in (assets.cluster_profiles(), assets.templates(), user_folder)
        if folder
    )


def find_replaced_profile(name: str, path: Path, *, cwd: Path, env: Mapping[str, str]) -> Path | None:
    """Return the user's own or packaged profile that a project's profile of the same name replaces."""
    search_path = _build_search_path(cwd, env)
    other_folders = tuple(folder for folder in search_path.folders if folder != path.parent)
    replaced_path = search_path.find(name, other_folders) if path.parent in search_path.folders else None
    return (
        replaced_path
        if replaced_path is not None
        and _is_own_or_packaged(replaced_path, search_path)
        and not _is_own_or_packaged(path, search_path)
        else None
    )


def _list_fabric_folders(path: Path, search_path: _SearchPath) -> tuple[Path, ...]:
    """Return ``templates/fabrics`` beside each profile folder, starting with the profile's own folder."""
    return tuple(folder.parent / "templates" / "fabrics" for folder in search_path.folders_for(path))


def _load_chain(path: Path, search_path: _SearchPath) -> tuple[Table, list[Problem], list[Path]]:
    """Return the merged tree of a file and all files that it extends, the problems, and the files read."""

    def read(file: Path) -> bytes:
        packaged = file.parent == assets.cluster_profiles()
        return files.read(file, search_path.label(file), packaged=packaged, env=search_path.env)

    trees, problems, visited = chain.load_chain(
        path,
        read_file=read,
        label=search_path.label,
        find=lambda name, current: _resolve_extends(name, current, search_path),
        value_description="the name of one profile",
    )
    own_table, *base_tables = trees
    _check_file_name(own_table.entries.get("name"), path.stem, problems)
    base_tables = [_remove_name(tree) for tree in base_tables]  # a name is not inherited
    return chain.merge_all([own_table, *base_tables]), problems, visited


def _remove_name(tree: Table) -> Table:
    return tree._replace(entries={key: entry for key, entry in tree.entries.items() if key != "name"})


def _check_file_name(entry: MappingEntry | None, stem: str, problems: list[Problem]) -> None:
    if entry is None or not isinstance(entry.value, Scalar) or entry.value.text in {None, stem}:
        return
    message = f"should be {stem!r}, the name of the file, which --cluster uses"
    problems.append(Problem(entry.source, entry.line, "name", message))


def _resolve_extends(name: str, current: Path, search_path: _SearchPath) -> Path | str:
    """Return the file that ``extends: NAME`` in another file means, or why there is none."""
    if _is_path(name):
        path = _resolve_path(name, current.parent, search_path.home)
        return path if os.path.lexists(path) else f"file {name} does not exist"
    folders = search_path.folders_for(current)
    match = search_path.find(name, folders[1:] if name == current.stem else folders)
    if match is not None:
        return match
    if name == current.stem:
        return "a profile cannot extend itself, and there is no later profile of this name in the search path"
    known_names = sorted(_list_names(search_path._replace(folders=folders)))
    return f"no cluster profile {name!r}{suggest_name(name, known_names)}"
