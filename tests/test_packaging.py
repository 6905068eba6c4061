"""What is installed works without the checkout: wheel, and wheel made from the sdist."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a built sdist, as a release is."""
    folder = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = "from hatchling.build import build_sdist; import sys; print(build_sdist(sys.argv[1]))"
    tools = folder / "tools"
    subprocess.run([*pip, "install", "--target", tools, "hatchling"], check=True)
    name = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tools)!r}); {build}", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[-1]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / name], check=True)
    [path] = folder.glob("*.whl")
    return path


def test_the_wheel_carries_templates_and_profiles(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for wanted in (ROOT / "templates").rglob("*.j2"):
        assert f"dtslurm/_data/templates/{wanted.relative_to(ROOT / 'templates')}" in names
    for wanted in (ROOT / "cluster_profiles").glob("*"):
        assert f"dtslurm/_data/cluster_profiles/{wanted.name}" in names
    assert "dtslurm/py.typed" in names


def test_an_installed_wheel_renders(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
    (tmp_path / "train.py").write_text("")
    words = ["render", "--cluster", "perlmutter", "-N2", "-A", "proj", "-t", "60", "train.py"]
    program = folder / "bin" / "dtslurm"
    done = subprocess.run([program, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("#!/bin/bash")
    shown = subprocess.run(
        [program, "cluster", "list"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "perlmutter" in shown.stdout
