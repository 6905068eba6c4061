"""``python -m tests.release.notes TAG``: print the release notes of a tag, from the changelog.

The tag must name the version of the package, and the changelog must have its date.
"""

from __future__ import annotations

import re
import sys

import dtslurm
from tests.release.build import ROOT


def release_notes(tag: str, changelog: str) -> str:
    """Return the changelog's section of a tag's version.

    Raises:
        ValueError: the tag does not name this version, or the changelog has no section or date for it.
    """
    if tag != f"v{dtslurm.__version__}":
        raise ValueError(f"the tag is {tag}, but the version is {dtslurm.__version__}")
    heading = rf"^## {re.escape(dtslurm.__version__)} \(\d{{4}}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)"
    section = re.search(heading, changelog, re.DOTALL | re.MULTILINE)
    if section is None:
        raise ValueError(f"CHANGELOG.md has no section {dtslurm.__version__} with a date")
    return section[1].strip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(release_notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text()))
