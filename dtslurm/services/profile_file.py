"""A profile's file, as discover finds it and leaves it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dtslurm.config import profiles, strict_yaml
from dtslurm.discover.amend import Amended, amend, leaves
from dtslurm.discover.facts import Found
from dtslurm.errors import StoreError
from dtslurm.services.context import Context


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


def amended(old: str, found: Found, source: str) -> Amended:
    """Return an existing profile brought up to date; see `dtslurm.discover.amend.amend`."""
    steady = replace(
        found, facts=tuple(fact for fact in found.facts if fact.key[0] not in {"title", "sources"})
    )
    return amend(old, steady, source)


def save(context: Context, path: Path, text: str) -> None:
    """Write a profile, whole or not at all, and see that it can be used.

    Raises:
        StoreError: the disk refused.
        ProfileInvalid: what was written is no profile; the file is there for a look.
    """
    context.transport.put(text.encode("utf-8", "surrogateescape"), str(path), mode=0o644)
    profiles.load(str(path), cwd=context.cwd, env=context.env)
