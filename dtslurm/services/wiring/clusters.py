"""Which clusters are known here."""

from __future__ import annotations

from pathlib import Path

from dtslurm import assets
from dtslurm.config import files, profiles
from dtslurm.services.wiring.context import Context


def known(context: Context) -> list[profiles.ProfileEntry]:
    """Return every profile found here, with the error of those that cannot be used."""
    return profiles.list_profiles(cwd=context.cwd, env=context.env)


def label(context: Context, path: Path) -> str:
    """Return where a profile's file is, in few words: one that came along needs no path."""
    packaged, home = assets.cluster_profiles(), context.env.get("HOME")
    if path.parent == packaged:
        return "packaged"
    return files.label(path, cwd=context.cwd, home=Path(home) if home else None, packaged=packaged)


def sources(context: Context, name: str) -> dict[str, str]:
    """Return which document each value of a profile is from, by its dotted key, where its file says so."""
    return profiles.sources(name, cwd=context.cwd, env=context.env)


def schema_text(kind: str) -> str:
    """Return the JSON Schema of profiles as text."""
    from dtslurm.config import schema

    return schema.text(kind)
