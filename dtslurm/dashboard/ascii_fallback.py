"""The special characters of the dashboard, and their replacements on ASCII-only terminals."""

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
    """Return whether the terminal's encoding cannot represent Unicode."""
    encoding = stream_encoding or locale.getpreferredencoding(False)
    return encoding.lower().replace("-", "").replace("_", "") not in {"utf8", "utf16", "utf32", "cp65001"}


def _replace_character(character: str) -> str:
    if character in _ASCII:
        return _ASCII[character]
    code = ord(character)
    if 0x2800 <= code <= 0x28FF:  # braille: more dots give a darker character
        return _SHADES[min(len(_SHADES) - 1, _count_dots(code - 0x2800))]
    if 0x2500 <= code <= 0x257F:  # box drawing
        return "|" if "VERTICAL" in unicodedata.name(character, "") else "-"
    if 0x2580 <= code <= 0x259F:  # blocks
        return "#"
    decomposed = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    width = 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1
    if not decomposed and unicodedata.combining(character):
        return ""
    return (decomposed or "?").ljust(width, "?")[:width]


def _count_dots(bits: int) -> int:
    return sum(bits >> bit & 1 for bit in range(8))


class _TranslationTable(dict[int, str]):
    def __missing__(self, code: int) -> str:
        self[code] = replacement = chr(code) if code < 128 else _replace_character(chr(code))
        return replacement


_TRANSLATION_TABLE: Mapping[int, str] = _TranslationTable()


def to_ascii(text: str) -> str:
    """Return the text in ASCII with unchanged width."""
    return text if text.isascii() else text.translate(_TRANSLATION_TABLE)
