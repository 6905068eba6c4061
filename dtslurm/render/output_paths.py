"""Paths with sbatch's filename patterns, as the shell of the batch script fills them in."""

from __future__ import annotations

import re

from dtslurm.model.shell import Sh, quote

_NO_ARRAY_TASK = "4294967294"  # what sbatch puts in for %a where there is no array
# sbatch(1), FILENAME PATTERN, as it holds for a batch script.
_VALUES = {
    "A": "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}",
    "J": "$SLURM_JOB_ID",
    "N": "${SLURMD_NODENAME:-$HOSTNAME}",
    "a": f"${{SLURM_ARRAY_TASK_ID:-{_NO_ARRAY_TASK}}}",
    "b": f"$((${{SLURM_ARRAY_TASK_ID:-{_NO_ARRAY_TASK}}} % 10))",
    "j": "$SLURM_JOB_ID",
    "n": "0",
    "s": "batch",
    "t": "0",
    "u": "$USER",
    "x": "$SLURM_JOB_NAME",
}
_NUMBERS = set("AJabjnt")
_PATTERN = re.compile(r"%(?:%|(\d*)([A-Za-z]))")


def fill_in_pattern(pattern: str, work_dir: str) -> Sh:
    """Return the path that a pattern of ``--output`` stands for, relative ones below ``work_dir``.

    A backslash anywhere switches the patterns off, as in sbatch.
    """
    if not pattern.startswith("/"):
        pattern = f"{work_dir.replace('%', '%%')}/{pattern}"
    if "\\" in pattern:
        return Sh(quote(pattern.replace("\\", "")))
    words, end = [], 0
    for found in _PATTERN.finditer(pattern):
        words += [_literal(pattern[end : found.start()]), _value(found[0], found[1] or "", found[2])]
        end = found.end()
    return Sh("".join([*words, _literal(pattern[end:])]))


def _literal(text: str) -> str:
    return quote(text) if text else ""


def _value(written: str, width: str, letter: str | None) -> str:
    if letter is None:
        return "%"
    value = _VALUES.get(letter)
    if value is None:
        return _literal(written)
    if width and letter in _NUMBERS:
        return f'"$(printf %0{min(int(width), 10)}d "{value}")"'
    return f'"{value}"' if "$" in value else value
