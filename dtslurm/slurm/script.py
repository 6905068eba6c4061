"""Parser of a script's ``#SBATCH`` lines, with sbatch's rules."""

from __future__ import annotations

import re
import shlex

_SHORT_OPTIONS = {"-p": "partition", "-A": "account", "-q": "qos", "-N": "nodes", "-t": "time", "-a": "array"}
_SRUN_MPI = re.compile(r"^srun (?:[^\n]|(?<=\\)\n)*?--mpi=([\w.-]+)", re.MULTILINE)


def mpi_types(script: str) -> set[str]:
    """Return the values of ``--mpi`` in the script's srun commands."""
    return set(_SRUN_MPI.findall(script))


def options(script: str) -> dict[str, str]:
    """Return the options in a script's ``#SBATCH`` lines; a later option overrides an earlier one."""
    values: dict[str, str] = {}
    _collect_options(option_words(script), values)
    return values


def option_words(script: str) -> list[str]:
    """Return the words of a script's ``#SBATCH`` lines.

    Lines after the first command are ignored. Of a heterogeneous job, only the first component counts.
    """
    found: list[str] = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:  # an unclosed quote: sbatch reports it
                continue
            if words == ["hetjob"]:
                break
            found += words
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


def _collect_options(words: list[str], values: dict[str, str]) -> None:
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            if not separator and words and not words[0].startswith("-"):
                value = words.pop(0)
            values[name] = value
        elif word[:2] in _SHORT_OPTIONS:
            value = word[2:] or (words.pop(0) if words else "")
            values[_SHORT_OPTIONS[word[:2]]] = value
