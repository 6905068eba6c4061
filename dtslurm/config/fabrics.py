"""What is known of a kind of network, kept in ``templates/fabrics/NAME.yaml`` and named by a profile.

``fabric: {environment_from: NAME}`` in a profile takes over the file's variables, setup lines and mounts;
what the profile itself says under ``fabric`` goes first, and ``null`` takes a variable away.
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
    """Return a profile with what the fabric that it names brings, and what is wrong with that.

    Args:
        folders: where fabrics are looked for, first match first.
        label: tells a file's name in messages.

    Raises:
        ProfileInvalid: the fabric's file cannot be read.
    """
    fabric = root.entries.get("fabric")
    named = (
        fabric.value.entries.get("environment_from") if fabric and isinstance(fabric.value, Table) else None
    )
    if fabric is None or named is None or not isinstance(named.value, Scalar) or not named.value.text:
        return root, []
    found = _find(folders)
    path = found.get(named.value.text)
    if path is None:
        name = named.value.text
        message = (
            f"there is no fabric {name!r}{suggest_name(name, found)} (known: {list_nearest(name, found)})"
        )
        return root, [Problem(named.source, named.line, "fabric.environment_from", message)]
    given, problems = _read(path, label)
    assert isinstance(fabric.value, Table)  # noqa: S101 - else nothing was named
    own = _over(given, fabric.value)
    entries = {**root.entries, "fabric": MappingEntry(fabric.source, fabric.line, own)}
    _mount(entries, own)
    return Table(root.source, root.line, entries), problems


def file(folder: Path, name: str) -> Path:
    """Return where a folder would hold the fabric of that name."""
    return folder / f"{name}{_SUFFIX}"


def _find(folders: Iterable[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in folders:
        try:
            paths = sorted(folder.glob(f"[!.]*{_SUFFIX}"))
        except OSError:
            continue  # not ours to read: nothing to name in it
        for path in paths:
            found.setdefault(path.stem, path)
    return found


def _read(path: Path, label: Callable[[Path], str]) -> tuple[Table, list[Problem]]:
    from dtslurm.config import strict_yaml  # brings PyYAML, which most commands never need

    packaged = path.parent == assets.templates() / "fabrics"
    source = f"fabrics/{path.name}" if packaged else label(path)
    root, problems = strict_yaml.parse(files.read(path, source, packaged=packaged), source)
    for key, entry in root.entries.items():
        if key not in _KEYS:
            meant = suggest_name(key, list(_KEYS)) or f" ({', '.join(_KEYS)})"
            problems.append(Problem(entry.source, entry.line, key, f"unknown key{meant}"))
    known = {key: entry for key, entry in root.entries.items() if key in _KEYS and key != "source"}
    return Table(root.source, root.line, known), problems


def _over(given: Table, own: Table) -> Table:
    """Return the profile's fabric completed by the named one; variables one by one, lists as a whole."""
    entries = {**given.entries, **own.entries}
    theirs, ours = given.entries.get("environment"), own.entries.get("environment")
    if theirs and ours and isinstance(theirs.value, Table):
        variables = dict(theirs.value.entries)
        if isinstance(ours.value, Table):
            for name, entry in ours.value.entries.items():
                variables[name] = _one_over(variables.get(name), entry)
        elif not isinstance(ours.value, Scalar) or ours.value.written:
            return Table(own.source, own.line, entries)  # null takes all away, anything else is told as wrong
        kept = {name: entry for name, entry in variables.items() if not _is_null(entry)}
        entries["environment"] = MappingEntry(ours.source, ours.line, Table(ours.source, ours.line, kept))
    return Table(own.source, own.line, entries)


def _one_over(below: MappingEntry | None, entry: MappingEntry) -> MappingEntry:
    if below is None or not isinstance(below.value, Table) or not isinstance(entry.value, Table):
        return entry
    merged = {**below.value.entries, **entry.value.entries}
    return MappingEntry(entry.source, entry.line, Table(entry.source, entry.line, merged))


def _is_null(entry: MappingEntry) -> bool:
    return isinstance(entry.value, Scalar) and entry.value.text is None


def _mount(entries: dict[str, MappingEntry], fabric: Table) -> None:
    """Add the fabric's mounts to those of the site's containers."""
    mounts = fabric.entries.get("mounts")
    if mounts is None or not isinstance(mounts.value, Items) or not mounts.value.items:
        return
    above = entries.get(
        "container", MappingEntry(mounts.source, mounts.line, Table(mounts.source, mounts.line))
    )
    if not isinstance(above.value, Table):
        return
    site = above.value.entries.get("mounts")
    first = site.value.items if site and isinstance(site.value, Items) else ()
    texts = {item.text for item in first if isinstance(item, Scalar)}
    more = (item for item in mounts.value.items if not (isinstance(item, Scalar) and item.text in texts))
    place = site or mounts
    every = MappingEntry(place.source, place.line, Items(place.source, place.line, (*first, *more)))
    table = Table(above.value.source, above.value.line, {**above.value.entries, "mounts": every})
    entries["container"] = MappingEntry(above.source, above.line, table)
