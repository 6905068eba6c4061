"""The recipes of other package managers have the version and dependencies of the project; release notes."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import dtslurm
from tests.release.build import ROOT
from tests.release.notes import release_notes

tomllib: Any = pytest.importorskip("tomllib")

PACKAGING = ROOT / "packaging"
CONDA = PACKAGING / "conda" / "dtslurm" / "recipe.yaml"
SPACK = PACKAGING / "spack" / "spack_repo" / "dtslurm" / "packages" / "py_dtslurm" / "package.py"
APPTAINER = PACKAGING / "apptainer" / "dtslurm.def"
EASYBUILD = next((PACKAGING / "easybuild").glob("dtslurm-*.eb"))

DOCUMENT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHON = SpecifierSet(DOCUMENT["project"]["requires-python"])
VERSION = re.match(r"\d+\.\d+\.\d+", dtslurm.__version__)[0]  # type: ignore[index]  # without .dev0


def required_ranges(lines: list[str]) -> dict[str, SpecifierSet]:
    """Return the version ranges of requirements by their normal names."""
    return {canonicalize_name(item.name): item.specifier for item in map(Requirement, lines)}


DEPENDENCIES = required_ranges(DOCUMENT["project"]["dependencies"])
BACKEND = required_ranges(DOCUMENT["build-system"]["requires"])


def spack_range(specifier: SpecifierSet) -> str:
    """Return a version range in Spack's notation, whose upper bound is inclusive."""
    bounds = {item.operator: item.version for item in specifier}
    assert bounds.keys() <= {">=", "<"}, "this notation has no test yet"
    upper = str(int(bounds["<"]) - 1) if "<" in bounds else ""
    return f"@{bounds['>=']}:{upper}"


def called_with(source: str, function: str) -> list[str]:
    """Return the first arguments of the calls of a function in Python source."""
    return [
        node.args[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == function
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ]


def easyconfig() -> dict[str, Any]:
    """Return the values of the easyconfig, which is Python source."""
    values: dict[str, Any] = {}
    exec(EASYBUILD.read_text(), values)
    return values


def module_packages() -> dict[str, str]:
    """Return the versions of PyPI packages that the easyconfig's comments name beside modules."""
    comments = re.findall(r"# (\S+ \d.*)$", EASYBUILD.read_text(), re.MULTILINE)
    return dict(item.split() for comment in comments for item in comment.split(", "))


def test_the_conda_recipe_has_the_version_and_dependencies_of_the_project() -> None:
    recipe = yaml.safe_load(CONDA.read_text())
    context, requirements = recipe["context"], recipe["requirements"]
    assert context["version"] == VERSION
    run = [line.replace("${{ python_min }}", context["python_min"]) for line in requirements["run"]]
    assert required_ranges(run) == {"python": PYTHON, **DEPENDENCIES}
    assert BACKEND.items() <= required_ranges(requirements["host"][1:]).items()
    [script] = recipe["build"]["python"]["entry_points"]
    assert script == f"dtslurm = {DOCUMENT['project']['scripts']['dtslurm']}"


def test_the_spack_package_has_the_version_and_dependencies_of_the_project() -> None:
    source = SPACK.read_text()
    assert called_with(source, "version") == [VERSION]
    expected = {f"py-{name}{spack_range(items)}" for name, items in (BACKEND | DEPENDENCIES).items()}
    assert set(called_with(source, "depends_on")) == {f"python{spack_range(PYTHON)}", *expected}


def test_the_easyconfig_has_the_version_of_the_project_and_satisfies_its_dependencies() -> None:
    values = easyconfig()
    assert values["version"] == VERSION
    toolchain = "{name}-{version}".format(**values["toolchain"])
    assert EASYBUILD.name == f"dtslurm-{VERSION}-{toolchain}.eb"
    assert values["exts_list"][-1][:2] == ("dtslurm", VERSION)
    modules = dict(values["dependencies"] + values["builddependencies"])
    assert PYTHON.contains(modules["Python"])
    assert BACKEND["hatchling"].contains(modules["hatchling"])
    versions = module_packages() | {canonicalize_name(item[0]): item[1] for item in values["exts_list"]}
    unsatisfied = {
        name
        for name, items in DEPENDENCIES.items()
        if name not in versions or not items.contains(versions[name])
    }
    assert unsatisfied == set()


def test_the_apptainer_definition_installs_the_version_of_the_project() -> None:
    assert re.findall(r"package=(.*)", APPTAINER.read_text()) == [f"dtslurm=={VERSION}"]


def checksums_of_the_sdist() -> set[str]:
    """Return the checksums of dtslurm's sdist in the recipes."""
    spack = re.findall(r'sha256="(\w+)"', SPACK.read_text())
    return {*spack, *easyconfig()["exts_list"][-1][2]["checksums"]}


def test_the_conda_recipe_of_clustershell_installs_its_version_by_the_checksum_of_the_easyconfig() -> None:
    folder = PACKAGING / "conda" / "clustershell"
    version = yaml.safe_load((folder / "recipe.yaml").read_text())["context"]["version"]
    [options] = [item[2] for item in easyconfig()["exts_list"] if item[:2] == ("ClusterShell", version)]
    line = f"clustershell=={version} --hash=sha256:{options['checksums'][0]}\n"
    assert (folder / "requirements.txt").read_text() == line


def test_all_recipes_have_the_same_checksum_of_the_sdist() -> None:
    [checksum] = checksums_of_the_sdist()
    assert re.fullmatch(r"[0-9a-f]{64}", checksum)


def test_the_citation_has_the_version_and_the_date_of_the_changelog() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    heading = re.search(
        rf"^## {re.escape(VERSION)} \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert heading
    released = None if heading[1] == "Unreleased" else heading[1]
    assert str(citation.get("date-released")) == str(released)


def test_release_notes_are_the_dated_section_of_the_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtslurm, "__version__", "1.2.0")
    changelog = "# Changelog\n\n## 1.2.0 (2031-04-05)\n\n### Added\n\n- a\n\n## 1.1.0\n\n- b\n"
    assert release_notes("v1.2.0", changelog) == "### Added\n\n- a\n"
    with pytest.raises(ValueError, match="the tag is v1"):
        release_notes("v1.3.0", changelog)
    with pytest.raises(ValueError, match="with a date"):
        release_notes("v1.2.0", changelog.replace("2031-04-05", "Unreleased"))
