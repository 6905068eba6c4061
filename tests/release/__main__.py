"""``python -m tests.release [PART]...``: try a release out before it is one.

Parts are install, sbom and audit; all unless named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.release import dependencies
from tests.release.environments import test_release

PARTS = ("install", "sbom", "audit")


def main() -> int:
    """Do what is named; return 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.release")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"no part {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="dtslurm-release-") as name:
        folder = Path(name)
        if "install" in parts:
            failed += test_release(folder / "install")
        if "sbom" in parts or "audit" in parts:
            programs = dependencies.write_sbom(folder / "sbom")
            strange = list(dependencies.unwelcome())
            print(f"{len(dependencies.components())} packages listed in {dependencies.SBOM.name}")
            print("licences: " + ("; ".join(strange) or "all go together with ours"))
            failed += len(strange)
        if "audit" in parts:
            code, words = dependencies.audit(programs)
            print(f"pip-audit: exit code {code}\n{words.strip()}")
            failed += bool(code)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
