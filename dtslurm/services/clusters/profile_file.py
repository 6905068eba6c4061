"""Reads, updates and writes the profile files of ``dtslurm cluster discover``."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from dtslurm.config import profiles, strict_yaml
from dtslurm.config.trust import trust_of
from dtslurm.discover.amend import Amended, amend, iterate_leaves
from dtslurm.discover.facts import DiscoveredCluster
from dtslurm.errors import StoreError
from dtslurm.services.wiring.context import Context


def existing(path: Path) -> str | None:
    """Return a profile's text, None if there is no such file.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        return path.read_text("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error


def extended_by(text: str, source: str) -> str | None:
    """Return the name of the profile that a profile's text extends; None if it extends none.

    Raises:
        ProfileInvalid: the text cannot be parsed.
    """
    return dict(iterate_leaves(strict_yaml.parse(text.encode("utf-8", "surrogateescape"), source)[0])).get(
        ("extends",)
    )


def amend_profile(old_text: str, cluster: DiscoveredCluster, source: str) -> Amended:
    """Return an existing profile updated with the discovered values; see `dtslurm.discover.amend.amend`."""
    without_head = replace(
        cluster, facts=tuple(fact for fact in cluster.facts if fact.key[0] not in {"title", "sources"})
    )
    return amend(old_text, without_head, source)


def save(context: Context, path: Path, text: str) -> None:
    """Write a profile atomically, and validate it.

    A new file is trusted, because the user requested it. An amended file is trusted only if it was trusted
    before.

    Raises:
        StoreError: the file cannot be written.
        ProfileInvalid: the written text is no valid profile; the file stays for inspection.
    """
    old_text, trust_record = existing(path), trust_of(context.env)
    data = text.encode("utf-8", "surrogateescape")
    context.transport.put(data, str(path), mode=0o644)
    if old_text is None or trust_record.has(path, old_text.encode("utf-8", "surrogateescape")):
        with contextlib.suppress(OSError):  # the user can trust the profile later
            trust_record.add(path, data)
    profiles.load(str(path), cwd=context.cwd, env=context.env)
