"""Finds and reads a project's ``dtslurm.yaml``."""

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
# Defaults that run something, or that send something of the user's to a place that the file names.
_TRUSTED_ONLY = ("env", "secrets", "setup", "teardown", "template", "tracking")


@dataclass(frozen=True, kw_only=True)
class _ProjectFile:
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
    data = files.read(path, source, env=env)
    root, problems = strict_yaml.parse(data, source)
    content = decode.decode(_ProjectFile, root, problems=problems)
    places = origins.of(root)
    asks = tuple(
        f"{place}: {key}"
        for key, place in places.items()
        if key.startswith("defaults.") and key.split(".")[1] in _TRUSTED_ONLY
    )
    known = trust.trust_of(os.environ if env is None else env)
    return Project(
        cluster=content.cluster,
        options=content.defaults,
        path=path,
        origins=places,
        untrusted=() if known.has(path, what_needs_trust(content.defaults)) else asks,
    )


def what_needs_trust(defaults: Defaults) -> bytes:
    """Return what the user trusts of a project's file: an edit of anything else asks nobody anything."""
    values = {name: getattr(defaults, name) for name in _TRUSTED_ONLY}
    return json.dumps({name: value for name, value in values.items() if value}, sort_keys=True).encode()


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
