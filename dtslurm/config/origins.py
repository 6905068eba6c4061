"""The location at which each value of a tree is written."""

from __future__ import annotations

from dtslurm.config.tree import Table


def collect_origins(root: Table) -> dict[str, str]:
    """Return ``file:line`` of every value by its dotted key; a list counts as one value."""
    origins: dict[str, str] = {}
    _collect_locations(root, "", origins)
    return origins


def _collect_locations(table: Table, prefix: str, locations: dict[str, str]) -> None:
    for key, entry in table.entries.items():
        if isinstance(entry.value, Table) and entry.value.entries:
            _collect_locations(entry.value, f"{prefix}{key}.", locations)
        else:
            locations[f"{prefix}{key}"] = f"{entry.source}:{entry.line}"
