"""What is done to the text of scripts: checked, wrapped, put together."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtslurm.errors import RenderError
from dtslurm.model.shell import join, quote

_WIDTH = 100
_MOST_BYTES = 4_000_000  # SchedulerParameters=max_script_size, 4 MB unless a site says otherwise


def check(script: str, template: str) -> None:
    """Refuse what sbatch refuses too, before anything is sent.

    Raises:
        RenderError: a template of the user's own makes a script that sbatch would not take.
    """
    if not script.startswith("#!"):
        raise RenderError(f"template {template}: the script does not begin with #!, as in #!/bin/bash")
    if "\r\n" in script:
        raise RenderError(
            "the script would hold a DOS line break (CR LF), which sbatch refuses",
            hint="it comes of an argument, a variable or a --setup line; write it with LF alone",
        )
    if "\0" in script:
        raise RenderError(f"template {template}: there is a NUL in the script")
    if len(script) > _MOST_BYTES:
        raise RenderError(f"the script is larger than {_MOST_BYTES // 1_000_000} MB, which sbatch refuses")


def depending(script: str, expression: str) -> str:
    """Return an sbatch script with ``--dependency``, beside what it waits for already.

    The scheduler ends the job where what it waits for cannot come any more.
    """
    lines = script.splitlines(keepends=True)
    head = next(number for number, line in enumerate(lines) if not line.startswith("#") and line.strip())
    own = [line for line in lines[:head] if line.startswith("#SBATCH --dependency=")]
    if own:
        expression = f"{own[-1].partition('=')[2].strip()},{expression}"
    last = max(number for number, line in enumerate(lines[:head]) if line.startswith("#SBATCH "))
    rest = [line for line in lines[last + 1 :] if line not in own]
    return "".join(
        [
            *(line for line in lines[: last + 1] if line not in own),
            f"#SBATCH --dependency={expression}\n",
            "#SBATCH --kill-on-invalid-dep=yes\n",
            *rest,
        ]
    )


def behind_head(script: str, lines: str) -> str:
    """Return a script with ``lines`` after its leading comments."""
    text = script.splitlines(keepends=True)
    first = next((number for number, line in enumerate(text) if not line.startswith("#")), len(text))
    return "".join([*text[:first], lines, *text[first:]])


def heredoc_end(text: str, end: str = "END") -> str:
    """Return a heredoc delimiter that is no line of ``text``."""
    lines = set(text.splitlines())
    while end in lines:
        end += "_"
    return end


def comment_text(text: str) -> str:
    """Return text that stays inside one comment line."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)


def wrap(words: Sequence[object]) -> str:
    """Return a command line, broken by backslashes where it grows past the width; words stay whole."""
    if len(join(words)) <= _WIDTH:
        return join(words)
    lines, line = [], ""
    for word in map(quote, words):
        if line and len(line) + 1 + len(word) > _WIDTH - 4:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return " \\\n  ".join([*lines, line])
