"""Finds and reads a project's ``dtslurm.yaml``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path

from dtslurm import assets
from dtslurm.config import files, origins
from dtslurm.model.project import Defaults, Project
from dtslurm.model.values import dataclass

FILE_NAME = "dtslurm.yaml"


@dataclass(frozen=True, kw_only=True)
class _File:
    """The file's top level."""

    cluster: str | None = None
    defaults: Defaults = field(default_factory=Defaults)


def find(cwd: Path, *, env: Mapping[str, str] | None = None) -> Path | None:
    """Return the nearest ``dtslurm.yaml`` from ``cwd`` up to the git checkout's top or the home folder.

    Outside both only ``cwd`` itself is looked in: what others leave in shared folders above is not ours.
    """
    return next((path for path in looked_for(cwd, env=env) if os.path.lexists(path)), None)


def looked_for(cwd: Path, *, env: Mapping[str, str] | None = None) -> list[Path]:
    """Return where ``find`` looks, the nearest first, there or not."""
    return [folder / FILE_NAME for folder in _folders(cwd, env)]


def load(cwd: Path, *, env: Mapping[str, str] | None = None) -> Project:
    """Return the project that ``cwd`` belongs to, an empty one where there is no file.

    Raises:
        ProfileInvalid: the file is wrong, or writable by every user; all problems are told at once.
    """
    path = find(cwd, env=env)
    if path is None:
        return Project()
    from dtslurm.config import decode, strict_yaml

    source = files.label(path, cwd=cwd, home=_home(env), packaged=assets.cluster_profiles())
    root, problems = strict_yaml.parse(files.read(path, source), source)
    content = decode.decode(_File, root, problems=problems)
    return Project(
        cluster=content.cluster,
        options=content.defaults,
        path=path,
        origins=origins.of(root),
    )


def _folders(cwd: Path, env: Mapping[str, str] | None) -> Iterator[Path]:
    home = _home(env)
    folders = [cwd, *cwd.parents]
    for number, folder in enumerate(folders):
        if folder == home or os.path.lexists(folder / ".git"):
            return iter(folders[: number + 1])
    return iter(folders[:1])


def _home(env: Mapping[str, str] | None) -> Path | None:
    home = (os.environ if env is None else env).get("HOME")
    return Path(home) if home else None
