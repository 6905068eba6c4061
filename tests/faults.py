"""The table of faults: which tests have a fault's number in their names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
_NUMBER = re.compile(r"(?<=_)([fFcC]\d+b?)(?=_|$)")


class Fault(NamedTuple):
    """A fault: its number, in words, and either the tests that make it or why there is none."""

    number: str
    words: str
    tests: tuple[str, ...]
    why: str


def faults() -> dict[str, list[Fault]]:
    """Return the faults of `docs/faults.yaml` by chapter, with the tests named after each."""
    named = numbered()
    chapters: Mapping[str, Mapping[str, Mapping[str, str]]] = yaml.safe_load(
        (ROOT / "docs" / "faults.yaml").read_text()
    )
    return {
        chapter: [
            Fault(number, row["fault"], tuple(named.get(number, ())), row.get("why", ""))
            for number, row in rows.items()
        ]
        for chapter, rows in chapters.items()
    }


def numbered() -> dict[str, list[str]]:
    """Return fault number -> ``file::test`` of every test function named after it."""
    result: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in _NUMBER.findall(node.name):
                    result[number[0].upper() + number[1:]].append(f"{path.relative_to(ROOT)}::{node.name}")
    return result
