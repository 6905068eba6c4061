"""The built wheel: its contents, its installation and its dependencies."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.release import dependencies
from tests.release.build import ROOT, build, quietly
from tests.release.environments import with_uv_tool
from tests.release.trial import try_out


@pytest.fixture(scope="module")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a built sdist, as a release is."""
    return build(tmp_path_factory.mktemp("dist"))[1]


def test_the_wheel_contains_templates_and_profiles(built_wheel: Path) -> None:
    names = set(zipfile.ZipFile(built_wheel).namelist())
    for wanted in (ROOT / "templates").rglob("*.j2"):
        assert f"dtslurm/_data/templates/{wanted.relative_to(ROOT / 'templates')}" in names
    for wanted in (ROOT / "cluster_profiles").glob("*"):
        assert f"dtslurm/_data/cluster_profiles/{wanted.name}" in names
    assert "dtslurm/py.typed" in names


def build_commit(folder: Path, umask: int) -> list[Path]:
    """Build the packages of the checkout's commit from files that are unpacked with a umask."""
    source = folder / "source"
    source.mkdir(parents=True)
    quietly(["git", "-C", ROOT, "archive", "--output", folder / "commit.tar", "HEAD"])
    previous = os.umask(umask)
    try:
        quietly(["tar", "-x", "--touch", "--no-same-permissions", "-f", folder / "commit.tar", "-C", source])
        return [*build(folder / "dist", source)]
    finally:
        os.umask(previous)


def test_the_same_commit_gives_the_same_bytes_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_commit(tmp_path / "first", 0o022)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    second = build_commit(tmp_path / "second" / "folder", 0o077)
    assert [path.name for path in first] == [path.name for path in second]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_an_installed_wheel_works_outside_the_checkout(built_wheel: Path, tmp_path: Path) -> None:
    try_out(with_uv_tool(built_wheel, tmp_path / "tool"), tmp_path / "user")


def dependency_names(name: str, visited_names: set[str]) -> Iterator[str]:
    """Yield the names of all dependencies of an installed package, without extras."""
    for line in metadata.requires(name) or ():
        requirement, _, condition = line.partition(";")
        match = re.match(r"[\w.-]+", requirement)
        assert match
        below = dependencies.normal(match[0])
        if below in visited_names or "extra" in condition:
            continue
        try:
            metadata.version(below)
        except metadata.PackageNotFoundError:
            continue  # for other systems or versions of Python
        visited_names.add(below)
        yield below
        yield from dependency_names(below, visited_names)


def test_the_sbom_is_complete_and_all_licences_are_compatible() -> None:
    listed = dependencies.components()
    assert {"click", "textual", "paramiko"} <= set(listed)
    # markdown-it-py comes with an extra of its own by way of textual
    missing = set(dependency_names("dtslurm", set())) - set(listed)
    assert missing == set(), "make sbom lists them"
    assert list(dependencies.unwelcome()) == []
    assert not [line for line in dependencies.SBOM.read_text().splitlines() if "file://" in line]
