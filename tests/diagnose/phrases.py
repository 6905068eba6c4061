"""What programs print when they fail, as they print it: ``data/HALF.txt``.

Each way to fail starts with ``=== KIND``; ``{rank}``, ``{node}``, ``{job}`` and the like are filled in.
``tuning`` is what the signatures were written and corrected by. ``held-out`` is in the words of other
frameworks, other versions and other people's reports, and is only measured: nothing may be changed for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Half = Literal["tuning", "held-out"]
Lines = tuple[str, ...]


def read_phrases(half: Half) -> dict[str, tuple[Lines, ...]]:
    text = (Path(__file__).parent / "data" / f"{half}.txt").read_text()
    result: dict[str, list[Lines]] = {}
    for block in ("\n" + text).split("\n=== ")[1:]:
        kind, *lines = block.rstrip("\n").split("\n")
        result.setdefault(kind, []).append(tuple(lines))
    return {kind: tuple(ways) for kind, ways in result.items()}


PHRASES: dict[Half, dict[str, tuple[Lines, ...]]] = {
    "tuning": read_phrases("tuning"),
    "held-out": read_phrases("held-out"),
}
