"""Reads back the ``#SBATCH`` lines of a script, as sbatch would."""

from __future__ import annotations

import re
import shlex

_LETTERS = {"-p": "partition", "-A": "account", "-q": "qos", "-N": "nodes", "-t": "time", "-a": "array"}
_SRUN = re.compile(r"^srun (?:[^\n]|(?<=\\)\n)*?--mpi=([\w.-]+)", re.MULTILINE)


def mpi_types(script: str) -> set[str]:
    """Return the values of ``--mpi`` that the script's own srun lines ask for."""
    return set(_SRUN.findall(script))


def options(script: str) -> dict[str, str]:
    """Return the options a script asks with; a later line overrides, and the first command ends them."""
    found: dict[str, str] = {}
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:  # an open quote: sbatch will say so itself
                continue
            _take(words, found)
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


def _take(words: list[str], found: dict[str, str]) -> None:
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            if not sign and words and not words[0].startswith("-"):
                value = words.pop(0)
            found[name] = value
        elif word[:2] in _LETTERS:
            value = word[2:] or (words.pop(0) if words else "")
            found[_LETTERS[word[:2]]] = value
