"""Search for a project's ``dtslurm.yaml``, and its validation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path

from dtslurm import assets
from dtslurm.config import files, origins, trust
from dtslurm.model.jobs.project import Defaults, Project
from dtslurm.model.values import dataclass

FILE_NAME = "dtslurm.yaml"
# Defaults that run commands, or that send the user's data to a destination that the file names.
_TRUSTED_ONLY = ("env", "notify", "secrets", "setup", "teardown", "template", "tracking")


@dataclass(frozen=True, kw_only=True)
class _ProjectFile:
    """The top level of a project file."""

    cluster: str | None = None
    defaults: Defaults = field(default_factory=Defaults)


def find(cwd: Path, *, env: Mapping[str, str] | None = None) -> Path | None:
    """Return the nearest ``dtslurm.yaml`` from ``cwd`` up to the top of the git checkout or the home folder.

    Outside both, only ``cwd`` itself is searched: files of other users in shared parent folders do not apply.
    """
    return next((path for path in list_search_paths(cwd, env=env) if os.path.lexists(path)), None)


def list_search_paths(cwd: Path, *, env: Mapping[str, str] | None = None) -> list[Path]:
    """Return the paths that ``find`` checks, the nearest first, existing or not."""
    return [folder / FILE_NAME for folder in _search_folders(cwd, env)]


def load(cwd: Path, *, env: Mapping[str, str] | None = None) -> Project:
    """Return the project that ``cwd`` belongs to, an empty one if there is no file.

    Raises:
        ProfileInvalid: the file is invalid, or other users can write it; all problems are reported at once.
    """
    path = find(cwd, env=env)
    if path is None:
        return Project()
    from dtslurm.config import decode, strict_yaml

    source = files.label(path, cwd=cwd, home=_find_home(env), packaged=assets.cluster_profiles())
    data = files.read(path, source, env=env)
    root, problems = strict_yaml.parse(data, source)
    project_file = decode.decode(_ProjectFile, root, problems=problems)
    value_origins = origins.collect_origins(root)
    untrusted_names = tuple(
        f"{location}: {key}"
        for key, location in value_origins.items()
        if key.startswith("defaults.") and key.split(".")[1] in _TRUSTED_ONLY
    )
    trust_store = trust.trust_of(os.environ if env is None else env)
    return Project(
        cluster=project_file.cluster,
        options=project_file.defaults,
        path=path,
        origins=value_origins,
        untrusted=()
        if trust_store.has(path, encode_trusted_defaults(project_file.defaults))
        else untrusted_names,
    )


def encode_trusted_defaults(defaults: Defaults) -> bytes:
    """Return the part of a project's defaults that needs the user's trust; other edits need no new trust."""
    values = {name: getattr(defaults, name) for name in _TRUSTED_ONLY}
    return json.dumps({name: value for name, value in values.items() if value}, sort_keys=True).encode()


def _search_folders(cwd: Path, env: Mapping[str, str] | None) -> Iterator[Path]:
    home = _find_home(env)
    folders = [cwd, *cwd.parents]
    for number, folder in enumerate(folders):
        if folder == home or os.path.lexists(folder / ".git"):
            return iter(folders[: number + 1])
    return iter(folders[:1])


def _find_home(env: Mapping[str, str] | None) -> Path | None:
    home = (os.environ if env is None else env).get("HOME")
    return Path(home) if home else None
