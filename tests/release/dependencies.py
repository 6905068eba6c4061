"""What a release brings along: listed as an SBOM, its licences checked, its known weaknesses asked for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.release.build import ROOT, build, environment, quietly

SBOM = ROOT / "docs" / "sbom.cdx.json"
# Licences that go together with MIT for a program that only imports what they cover.
WELCOME = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "LGPL-2.1-only", "LGPL-2.1-or-later",
    "LGPL-3.0-only", "LGPL-3.0-or-later", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0", "Python-2.0",
}  # fmt: skip
# What packages write that is no name of SPDX's; each read in the package's own licence file.
_CLASSIFIER = "License :: OSI Approved :: "
READ = {
    ("clustershell", "GNU Lesser General Public License v2 or later (LGPLv2+)"): "LGPL-2.1-or-later",
    ("jinja2", "BSD License"): "BSD-3-Clause",
    ("paramiko", "LGPL-2.1"): "LGPL-2.1-or-later",
    ("pathspec", "Mozilla Public License 2.0 (MPL 2.0)"): "MPL-2.0",
}


def write_sbom(folder: Path) -> Path:
    """Write the SBOM (CycloneDX) of what installing the wheel brings; return that environment's programs."""
    _, wheel = build(folder / "dist")
    programs = environment(folder / "env", sys.executable, wheel)
    tool = Path(sys.executable).parent / "cyclonedx-py"
    argv: list[Path | str] = [tool, "environment", "--output-reproducible", "--of", "JSON"]
    argv += ["--pyproject", ROOT / "pyproject.toml", "-o", SBOM, programs / "python"]
    quietly(argv)
    SBOM.write_text(json.dumps(without_places(json.loads(SBOM.read_text())), indent=1) + "\n")
    return programs


def without_places(part: Any) -> Any:
    """Return an SBOM without where things came from: that differs from machine to machine."""
    if isinstance(part, dict):
        return {key: without_places(value) for key, value in part.items() if key != "externalReferences"}
    return [without_places(item) for item in part] if isinstance(part, list) else part


def components(path: Path = SBOM) -> dict[str, dict[str, Any]]:
    """Return the packages an SBOM lists, dtslurm itself left out, by their normal names."""
    listed = json.loads(path.read_text())["components"]
    return {normal(item["name"]): item for item in listed if normal(item["name"]) != "dtslurm"}


def normal(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence(component: dict[str, Any]) -> str:
    """Return a package's licence by SPDX's name, or in the package's own words if they are none."""
    said = [item.get("license", item) for item in component.get("licenses", ())]
    # An expression or a name of SPDX's says more than a line of free text.
    for key in ("expression", "id", "name"):
        for item in said:
            if key in item:
                name = str(item[key]).removeprefix(_CLASSIFIER)
                return READ.get((normal(component["name"]), name), name)
    return "none named"


def unwelcome() -> Iterator[str]:
    """Yield what is to be looked at: packages under licences that are not known to go together with ours."""
    for name, component in components().items():
        said = licence(component)
        names = set(re.split(r"\s+(?:AND|OR|WITH)\s+", said.strip("()")))
        if not names <= WELCOME:
            yield f"{name} {component['version']}: {said}"


def audit(programs: Path) -> tuple[int, str]:
    """Ask for known weaknesses of what is installed; return the auditor's exit code and words.

    What the service does not know counts as a failure: not found is not the same as clean.
    """
    frozen = programs.parent / "installed.txt"
    frozen.write_text("".join(f"{n}=={c['version']}\n" for n, c in components().items()))
    tool = Path(sys.executable).parent / "pip-audit"
    argv: list[str | Path] = [
        tool,
        "--disable-pip",
        "--no-deps",
        "--strict",
        "--progress-spinner",
        "off",
        "-r",
        frozen,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
