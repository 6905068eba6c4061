"""Shared settings of a kind of network, in ``templates/fabrics/NAME.yaml``. A profile names the fabric.

``fabric: {environment_from: NAME}`` in a profile adopts the file's variables, setup lines and mounts. The
profile's own values under ``fabric`` take precedence, and ``null`` removes a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from dtslurm import assets
from dtslurm.config import files
from dtslurm.config.tree import Items, MappingEntry, Problem, Scalar, Table
from dtslurm.suggestions import list_nearest, suggest_name

_KEYS = ("environment", "setup", "mounts", "source")
_SUFFIX = ".yaml"


def apply(root: Table, folders: Iterable[Path], label: Callable[[Path], str]) -> tuple[Table, list[Problem]]:
    """Return a profile's tree with the settings of the fabric that it names, and their problems.

    Args:
        folders: the folders with fabric files; the first match counts.
        label: returns a file's name for messages.

    Raises:
        ProfileInvalid: the fabric's file cannot be read.
    """
    fabric = root.entries.get("fabric")
    name_entry = (
        fabric.value.entries.get("environment_from") if fabric and isinstance(fabric.value, Table) else None
    )
    if (
        fabric is None
        or name_entry is None
        or not isinstance(name_entry.value, Scalar)
        or not name_entry.value.text
    ):
        return root, []
    paths = _find_fabrics(folders)
    path = paths.get(name_entry.value.text)
    if path is None:
        name = name_entry.value.text
        message = f"unknown fabric {name!r}{suggest_name(name, paths)} (known: {list_nearest(name, paths)})"
        return root, [Problem(name_entry.source, name_entry.line, "fabric.environment_from", message)]
    shared_table, problems = _read_fabric(path, label)
    assert isinstance(fabric.value, Table)  # noqa: S101 - it has a key
    merged_table = _merge_fabric(shared_table, fabric.value)
    entries = {**root.entries, "fabric": MappingEntry(fabric.source, fabric.line, merged_table)}
    _add_mounts(entries, merged_table)
    return Table(root.source, root.line, entries), problems


def file(folder: Path, name: str) -> Path:
    """Return the path that a fabric of that name has in a folder."""
    return folder / f"{name}{_SUFFIX}"


def _find_fabrics(folders: Iterable[Path]) -> dict[str, Path]:
    paths_by_name: dict[str, Path] = {}
    for folder in folders:
        try:
            paths = sorted(folder.glob(f"[!.]*{_SUFFIX}"))
        except OSError:
            continue  # an unreadable folder has no fabrics
        for path in paths:
            paths_by_name.setdefault(path.stem, path)
    return paths_by_name


def _read_fabric(path: Path, label: Callable[[Path], str]) -> tuple[Table, list[Problem]]:
    from dtslurm.config import strict_yaml  # imports PyYAML, which most commands never need

    packaged = path.parent == assets.templates() / "fabrics"
    source = f"fabrics/{path.name}" if packaged else label(path)
    root, problems = strict_yaml.parse(files.read(path, source, packaged=packaged), source)
    for key, entry in root.entries.items():
        if key not in _KEYS:
            suggestion = suggest_name(key, list(_KEYS)) or f" ({', '.join(_KEYS)})"
            problems.append(Problem(entry.source, entry.line, key, f"unknown key{suggestion}"))
    fields = {key: entry for key, entry in root.entries.items() if key in _KEYS and key != "source"}
    return Table(root.source, root.line, fields), problems


def _merge_fabric(shared_table: Table, own_table: Table) -> Table:
    """Return the profile's fabric over the shared one: variables merge by name, lists are replaced."""
    entries = {**shared_table.entries, **own_table.entries}
    shared_variables, own_variables = (
        shared_table.entries.get("environment"),
        own_table.entries.get("environment"),
    )
    if shared_variables and own_variables and isinstance(shared_variables.value, Table):
        variables = dict(shared_variables.value.entries)
        if isinstance(own_variables.value, Table):
            for name, entry in own_variables.value.entries.items():
                variables[name] = _merge_variable(variables.get(name), entry)
        elif not isinstance(own_variables.value, Scalar) or own_variables.value.written:
            return Table(
                own_table.source, own_table.line, entries
            )  # null removes all; other values are reported later
        remaining = {name: entry for name, entry in variables.items() if not _is_null(entry)}
        entries["environment"] = MappingEntry(
            own_variables.source,
            own_variables.line,
            Table(own_variables.source, own_variables.line, remaining),
        )
    return Table(own_table.source, own_table.line, entries)


def _merge_variable(shared_entry: MappingEntry | None, entry: MappingEntry) -> MappingEntry:
    if (
        shared_entry is None
        or not isinstance(shared_entry.value, Table)
        or not isinstance(entry.value, Table)
    ):
        return entry
    fields = {**shared_entry.value.entries, **entry.value.entries}
    return MappingEntry(entry.source, entry.line, Table(entry.source, entry.line, fields))


def _is_null(entry: MappingEntry) -> bool:
    return isinstance(entry.value, Scalar) and entry.value.text is None


def _add_mounts(entries: dict[str, MappingEntry], fabric: Table) -> None:
    """Add the fabric's mounts to those of the profile's container section."""
    mounts = fabric.entries.get("mounts")
    if mounts is None or not isinstance(mounts.value, Items) or not mounts.value.items:
        return
    container = entries.get(
        "container", MappingEntry(mounts.source, mounts.line, Table(mounts.source, mounts.line))
    )
    if not isinstance(container.value, Table):
        return
    container_mounts = container.value.entries.get("mounts")
    existing_items = (
        container_mounts.value.items if container_mounts and isinstance(container_mounts.value, Items) else ()
    )
    texts = {item.text for item in existing_items if isinstance(item, Scalar)}
    additional = (
        item for item in mounts.value.items if not (isinstance(item, Scalar) and item.text in texts)
    )
    location = container_mounts or mounts
    all_mounts = MappingEntry(
        location.source, location.line, Items(location.source, location.line, (*existing_items, *additional))
    )
    table = Table(
        container.value.source, container.value.line, {**container.value.entries, "mounts": all_mounts}
    )
    entries["container"] = MappingEntry(container.source, container.line, table)
