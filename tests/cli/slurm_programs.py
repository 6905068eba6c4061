"""Fake Slurm programs on the PATH that print the answers that a test sets."""

from __future__ import annotations

import shlex
from pathlib import Path

_PROGRAMS = ("sbatch", "scontrol", "sinfo", "squeue", "sacct", "sacctmgr", "srun", "scancel")


class Programs:
    """A folder of programs for the PATH; what they are not told to answer, they refuse."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked = folder / "asked"
        self._answers: dict[str, str] = {}
        folder.mkdir()
        self._asked.write_text("")
        self._write()

    @property
    def asked(self) -> list[str]:
        """What they were called with, in that order."""
        return self._asked.read_text().splitlines()

    def say(self, begin: str, text: str, code: int = 0) -> None:
        """Have the command lines that begin so print a text; the answer given last holds."""
        file = self.folder / f"answer-{len(list(self.folder.iterdir()))}"
        file.write_text(text)
        self._answers[begin] = f"cat {shlex.quote(str(file))}; exit {code}"
        self._write()

    def do(self, begin: str, shell: str) -> None:
        """Have the command lines that begin so run a line of shell."""
        self._answers[begin] = shell
        self._write()

    def refuse(self, begin: str, text: str) -> None:
        """Have the command lines that begin so fail with a text on stderr."""
        self.say(begin, text)
        self._answers[begin] = self._answers[begin].replace("; exit 0", " >&2; exit 1")
        self._write()

    def _write(self) -> None:
        cases = "".join(
            f"{shlex.quote(begin)}*) {act};;\n" for begin, act in reversed(list(self._answers.items()))
        )
        for name in _PROGRAMS:
            path = self.folder / name
            path.write_text(
                f'#!/bin/sh\nasked="{name} $*"\nprintf "%s\\n" "$asked" >>{shlex.quote(str(self._asked))}\n'
                f'case $asked in\n{cases}*) echo "{name}: error: refused" >&2; exit 1;;\nesac\n'
            )
            path.chmod(0o755)


def list_jobs(folder: Path) -> str:
    """Return the line of shell that prints a folder's jobs as squeue does: a file each, with its comment."""
    fields = (
        r"%s\037%s\037'$(id -u)'\037PENDING\037\037\037\037\037001\037main\037\037\037Priority"
        r"\037%s\037train\036"
    )
    return (
        f"for job in {folder}/*; do [ -f $job ] || continue; number=${{job##*/}}; "
        f"printf '{fields}' $number $number $(cat $job); done"
    )
