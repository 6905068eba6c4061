"""The characters of the dashboard, and what stands for them where a terminal knows ASCII alone."""

from __future__ import annotations

import locale
import unicodedata
from collections.abc import Mapping

STATES = {
    "RUNNING": "●", "PENDING": "○", "COMPLETED": "✓", "FAILED": "✗", "TIMEOUT": "◷", "CANCELLED": "⊘",
    "OUT_OF_MEMORY": "✗", "NODE_FAIL": "✗", "BOOT_FAIL": "✗", "DEADLINE": "◷", "PREEMPTED": "↺",
    "SUSPENDED": "‖", "COMPLETING": "◐", "CONFIGURING": "◐", "REQUEUE_HOLD": "○", "SPECIAL_EXIT": "○",
    "UNKNOWN": "?",
}  # fmt: skip
STALLED = "■"
RANKS = {"waiting": "·", "running": "●", "done": "✓", "failed": "✗", "terminated": "⊘", "lost": "?"}

_ASCII = {
    "●": "*", "○": "o", "✓": "+", "✗": "x", "◷": "t", "⊘": "-", "↺": "r", "‖": "=", "◐": "~", "·": ".",
    "…": "~", "—": "-", "–": "-", "→": ">", "←": "<", "↑": "^", "↓": "v", "▸": ">", "▾": "v", "│": "|",
    "▲": "^", "▼": "v", "°": " ", "×": "x", "▌": "|", "▐": "|", "▎": "|", "▁": "_", "▂": ".", "▃": ":",
    "▄": "-", "▅": "=", "▆": "+", "▇": "*", "┊": ":",
    "▔": "-", "█": "#",
    "╸": "-", "╺": "-", "━": "-", "─": "-", "┃": "|", "▊": "|", "▏": "|", "▕": "|", "⭘": "O", "⏎": "<",
    "■": "!", "◆": "*",
}  # fmt: skip
_SHADES = " .:-=+*#"


def ascii_only(stream_encoding: str | None = None) -> bool:
    """Return whether the terminal's encoding has no room for more than ASCII."""
    encoding = stream_encoding or locale.getpreferredencoding(False)
    return encoding.lower().replace("-", "").replace("_", "") not in {"utf8", "utf16", "utf32", "cp65001"}


def _plain(character: str) -> str:
    if character in _ASCII:
        return _ASCII[character]
    code = ord(character)
    if 0x2800 <= code <= 0x28FF:  # braille: the more dots, the darker
        return _SHADES[min(len(_SHADES) - 1, _dots(code - 0x2800))]
    if 0x2500 <= code <= 0x257F:  # lines of boxes
        return "|" if "VERTICAL" in unicodedata.name(character, "") else "-"
    if 0x2580 <= code <= 0x259F:  # blocks
        return "#"
    bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    width = 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1
    if not bare and unicodedata.combining(character):
        return ""
    return (bare or "?").ljust(width, "?")[:width]


def _dots(bits: int) -> int:
    return sum(bits >> at & 1 for at in range(8))


class _Table(dict[int, str]):
    def __missing__(self, code: int) -> str:
        self[code] = made = chr(code) if code < 128 else _plain(chr(code))
        return made


_TABLE: Mapping[int, str] = _Table()


def to_ascii(text: str) -> str:
    """Return the text in ASCII, as wide as it was."""
    return text if text.isascii() else text.translate(_TABLE)
