"""Check, wrap and combine the text of scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtslurm.errors import RenderError
from dtslurm.model.shell import join, quote

_WIDTH = 100
_MAX_SCRIPT_SIZE = 4_000_000  # Slurm's default of SchedulerParameters=max_script_size, 4 MB


def check(script: str, template: str) -> None:
    """Reject a script that sbatch would reject, before anything is sent.

    Raises:
        RenderError: sbatch would reject the script, which can happen with a template of the user.
    """
    if not script.startswith("#!"):
        raise RenderError(
            f"template {template}: the script does not begin with an interpreter line such as #!/bin/bash"
        )
    if "\r\n" in script:
        raise RenderError(
            "the script would contain a DOS line break (CR LF), which sbatch refuses",
            hint="find it in an argument, a variable or a --setup line; use LF only",
        )
    if "\0" in script:
        raise RenderError(f"template {template}: the script contains a NUL character")
    if len(script) > _MAX_SCRIPT_SIZE:
        raise RenderError(
            f"the script is larger than {_MAX_SCRIPT_SIZE // 1_000_000} MB, which sbatch refuses"
        )


def insert_dependency(script: str, expression: str) -> str:
    """Add a ``--dependency`` expression to an sbatch script, joined with its existing dependency.

    ``--kill-on-invalid-dep`` lets Slurm cancel the job if the dependency can no longer be met.
    """
    lines = script.splitlines(keepends=True)
    first_command = next(
        number for number, line in enumerate(lines) if not line.startswith("#") and line.strip()
    )
    existing_lines = [line for line in lines[:first_command] if line.startswith("#SBATCH --dependency=")]
    if existing_lines:
        expression = f"{existing_lines[-1].partition('=')[2].strip()},{expression}"
    last_directive = max(
        number for number, line in enumerate(lines[:first_command]) if line.startswith("#SBATCH ")
    )
    remaining_lines = [line for line in lines[last_directive + 1 :] if line not in existing_lines]
    return "".join(
        [
            *(line for line in lines[: last_directive + 1] if line not in existing_lines),
            f"#SBATCH --dependency={expression}\n",
            "#SBATCH --kill-on-invalid-dep=yes\n",
            *remaining_lines,
        ]
    )


def insert_after_comments(script: str, lines: str) -> str:
    """Insert ``lines`` into a script after its leading comments."""
    script_lines = script.splitlines(keepends=True)
    insert_at = next(
        (number for number, line in enumerate(script_lines) if not line.startswith("#")), len(script_lines)
    )
    return "".join([*script_lines[:insert_at], lines, *script_lines[insert_at:]])


def heredoc_end(text: str, end: str = "END") -> str:
    """Return a heredoc delimiter that does not occur as a line of ``text``."""
    lines = set(text.splitlines())
    while end in lines:
        end += "_"
    return end


def comment_text(text: str) -> str:
    """Replace control characters, so that the text fits in one comment line."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)


def wrap(words: Sequence[object]) -> str:
    """Return a command line, wrapped with backslashes between words if it is too long."""
    if len(join(words)) <= _WIDTH:
        return join(words)
    lines, line = [], ""
    for word in map(quote, words):
        if line and len(line) + 1 + len(word) > _WIDTH - 4:  # " \" and the indentation follow
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return " \\\n  ".join([*lines, line])
