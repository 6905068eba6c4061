"""The lock file of the development dependencies: versions, hashes and installation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.release.build import LOCK as RELEASE_LOCK
from tests.release.build import ROOT, quietly, uv

tomllib: Any = pytest.importorskip("tomllib")

LOCK = ROOT / "requirements-dev.lock"
TEXT = LOCK.read_text()
LOCKED = [Requirement(line.rstrip("\\ ")) for line in TEXT.splitlines() if re.match(r"\w", line)]


def required_packages() -> Iterator[Requirement]:
    """Yield the dependencies of the project, its tests and its checks."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    yield from map(Requirement, document["project"]["dependencies"])
    groups, waiting = document["dependency-groups"], ["test", "check"]
    while waiting:
        for item in groups[waiting.pop()]:
            if isinstance(item, dict):
                waiting.append(item["include-group"])
            else:
                yield Requirement(item)


@pytest.mark.parametrize("requirement", [*required_packages()], ids=lambda item: item.name)
def test_every_required_package_is_locked_to_one_version(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    here = [item for item in LOCKED if canonicalize_name(item.name) == name]
    used = [item for item in here if item.marker is None or item.marker.evaluate()]
    assert len(used) == 1, f"make lock writes {LOCK.name} anew"
    [version] = used[0].specifier
    assert version.operator == "=="
    assert requirement.specifier.contains(version.version, prereleases=True)


@pytest.mark.parametrize("lock", [LOCK, RELEASE_LOCK], ids=lambda path: path.name)
def test_every_locked_package_has_a_hash_and_no_url(lock: Path) -> None:
    text = lock.read_text()
    parts = re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]
    assert len(parts) > 50
    assert [
        part.splitlines()[0] for part in parts if not re.match(r"\S+==.*--hash=sha256:", part, re.DOTALL)
    ] == []
    assert "://" not in text


def test_the_release_tools_and_the_build_backend_are_locked() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = document["dependency-groups"]["release"] + document["build-system"]["requires"]
    locked = re.findall(r"^(\S+)==", RELEASE_LOCK.read_text(), re.MULTILINE)
    assert {canonicalize_name(Requirement(line).name) for line in required} <= set(locked)


@pytest.mark.slow
def test_the_lock_file_can_be_installed(tmp_path: Path) -> None:
    quietly([uv(), "venv", "--quiet", tmp_path / "venv"])
    python = tmp_path / "venv" / "bin" / "python"
    quietly([uv(), "pip", "install", "--quiet", "--require-hashes", "--python", python, "-r", LOCK])
    result = quietly(
        [python, "-c", "import click, jinja2, paramiko, pytest, rich, submitit, textual; print('fine')"]
    )
    assert result == "fine\n"


def test_a_package_with_a_wrong_hash_is_refused(tmp_path: Path) -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("click==")]
    (tmp_path / "lock").write_text(f"{lines[0]}\n    --hash=sha256:{'0' * 64}\n")
    quietly([uv(), "venv", "--quiet", tmp_path / "venv"])
    python = tmp_path / "venv" / "bin" / "python"
    words: list[Path | str] = ["pip", "install", "--no-cache", "--require-hashes", "--no-deps"]
    with pytest.raises(RuntimeError, match=r"(?i)hash"):
        quietly([uv(), *words, "--python", python, "-r", tmp_path / "lock"])
