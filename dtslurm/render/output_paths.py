"""Translate sbatch's filename patterns into shell expressions for the batch script."""

from __future__ import annotations

import re

from dtslurm.model.shell import RawShell, quote

_NO_ARRAY_TASK = "4294967294"  # sbatch's value of %a for a job that is not an array
# The values of sbatch(1), FILENAME PATTERN, in a batch script.
_EXPANSIONS = {
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
_NUMERIC_LETTERS = set("AJabjnt")
_PLACEHOLDER = re.compile(r"%(?:%|(\d*)([A-Za-z]))")


def fill_in_pattern(pattern: str, work_dir: str) -> RawShell:
    """Return the shell expression of an ``--output`` pattern; a relative path is relative to ``work_dir``.

    A backslash anywhere disables the patterns, as in sbatch.
    """
    if not pattern.startswith("/"):
        pattern = f"{work_dir.replace('%', '%%')}/{pattern}"
    if "\\" in pattern:
        return RawShell(quote(pattern.replace("\\", "")))
    parts, end = [], 0
    for match in _PLACEHOLDER.finditer(pattern):
        parts += [
            _quote_literal(pattern[end : match.start()]),
            _expand_letter(match[0], match[1] or "", match[2]),
        ]
        end = match.end()
    return RawShell("".join([*parts, _quote_literal(pattern[end:])]))


def _quote_literal(text: str) -> str:
    return quote(text) if text else ""


def _expand_letter(placeholder: str, width: str, letter: str | None) -> str:
    if letter is None:
        return "%"
    value = _EXPANSIONS.get(letter)
    if value is None:
        return _quote_literal(placeholder)
    if width and letter in _NUMERIC_LETTERS:
        return f'"$(printf %0{min(int(width), 10)}d "{value}")"'
    return f'"{value}"' if "$" in value else value
