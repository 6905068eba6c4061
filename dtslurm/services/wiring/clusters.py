"""Lists the cluster profiles that can be used here, and the origin of their values."""

from __future__ import annotations

from pathlib import Path

from dtslurm import assets
from dtslurm.config import files, profiles
from dtslurm.services.wiring.context import Context


def known(context: Context) -> list[profiles.ProfileEntry]:
    """Return every profile on the search path; profiles that cannot be used carry their error."""
    return profiles.list_profiles(cwd=context.cwd, env=context.env)


def label(context: Context, path: Path) -> str:
    """Return a short label of where a profile's file is; ``packaged`` for profiles that dtslurm ships."""
    packaged, home = assets.cluster_profiles(), context.env.get("HOME")
    if path.parent == packaged:
        return "packaged"
    return files.label(path, cwd=context.cwd, home=Path(home) if home else None, packaged=packaged)


def sources(context: Context, name: str) -> dict[str, str]:
    """Return the document that is the source of each value of a profile, by dotted key, where stated."""
    return profiles.sources(name, cwd=context.cwd, env=context.env)


def schema_text(kind: str) -> str:
    """Return the JSON Schema of ``kind`` as text."""
    from dtslurm.config import schema

    return schema.text(kind)
