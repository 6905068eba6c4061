"""Which clusters are known here."""

from __future__ import annotations

from dtslurm.config import profiles
from dtslurm.services.context import Context


def known(context: Context) -> list[profiles.ProfileEntry]:
    """Return every profile found here, with the error of those that cannot be used."""
    return profiles.list_profiles(cwd=context.cwd, env=context.env)


def sources(context: Context, name: str) -> dict[str, str]:
    """Return which document each value of a profile is from, by its dotted key, where its file says so."""
    return profiles.sources(name, cwd=context.cwd, env=context.env)


def schema_text(kind: str) -> str:
    """Return the JSON Schema of profiles as text."""
    from dtslurm.config import schema

    return schema.text(kind)
