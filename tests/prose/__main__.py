"""``python -m tests.prose [FILE...]``: print the words and sentences that break a rule of `rules.yaml`."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.prose import check_length, check_rules, check_spelling, load_dictionary, load_rules, read_passages

ROOT = Path(__file__).parents[2]
# The changelog is history; the comparison contains statements about other tools, with their sources.
ONLY_SPELLING = {"CHANGELOG.md", "docs/comparison.md"}
GENERATED = ("docs/benchmarks.md", "docs/reference/")
CHECKED = (
    *("dtslurm/", "docs/", "templates/", "examples/", "hydra_plugins/", ".github/"),
    *("Makefile", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md"),
    *("pyproject.toml", "mkdocs.yml", "tests/README.md"),
)
SUFFIXES = {".md", ".py", ".j2", ".yaml", ".yml", ".toml", ".sh", ""}


def main(arguments: list[str]) -> int:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *CHECKED]  # new files, too
    listed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    names = arguments or [name for name in listed if Path(name).suffix in SUFFIXES]
    rules = list(load_rules())
    american = [rule for rule in rules if rule.name == "american"]
    is_word = cache(load_dictionary())
    problems: list[str] = []
    for name in names:
        for passage in () if name.startswith(GENERATED) else read_passages(ROOT / name, name):
            if passage.kind == "docs":
                problems += check_spelling(passage, is_word)
            if passage.kind == "docs" and name not in ONLY_SPELLING:
                problems += check_length(passage)
            problems += check_rules(passage, american if name in ONLY_SPELLING else rules)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
