"""A profile's file, as discover finds it and leaves it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from dtslurm.config import profiles, strict_yaml
from dtslurm.config.trust import trust_of
from dtslurm.discover.amend import Amended, amend, leaves
from dtslurm.discover.facts import DiscoveredCluster
from dtslurm.errors import StoreError
from dtslurm.services.wiring.context import Context


def existing(path: Path) -> str | None:
    """Return a profile's text, None where there is no such file.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        return path.read_text("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error


def extended_by(text: str, source: str) -> str | None:
    """Return which profile a profile's text extends.

    Raises:
        ProfileInvalid: it cannot be read.
    """
    return dict(leaves(strict_yaml.parse(text.encode("utf-8", "surrogateescape"), source)[0])).get(
        ("extends",)
    )


def amended(old: str, found: DiscoveredCluster, source: str) -> Amended:
    """Return an existing profile brought up to date; see `dtslurm.discover.amend.amend`."""
    steady = replace(
        found, facts=tuple(fact for fact in found.facts if fact.key[0] not in {"title", "sources"})
    )
    return amend(old, steady, source)


def save(context: Context, path: Path, text: str) -> None:
    """Write a profile, whole or not at all, and see that it can be used.

    What the user has just asked for needs no trust of its own, unless it amends a file that had none.

    Raises:
        StoreError: the disk refused.
        ProfileInvalid: what was written is no profile; the file is there for a look.
    """
    old, trust = existing(path), trust_of(context.env)
    data = text.encode("utf-8", "surrogateescape")
    context.transport.put(data, str(path), mode=0o644)
    if old is None or trust.has(path, old.encode("utf-8", "surrogateescape")):
        with contextlib.suppress(OSError):  # then the user is asked when the profile is used
            trust.add(path, data)
    profiles.load(str(path), cwd=context.cwd, env=context.env)
