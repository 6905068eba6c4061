"""Text from outside, made harmless for a terminal."""

from __future__ import annotations

import re

# Everything a terminal acts on: C0 but tab, DEL, C1, what turns the direction of text around or takes no room
# (it would make a name read as another one; joiners are parts of words), separators of lines, and escape
# sequences other than colours (SGR).
_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~]?)", re.DOTALL)
_INVISIBLE = r"\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
_CONTROL = re.compile(rf"[\x00-\x08\x0a-\x1f{_INVISIBLE}]")
_C1 = re.compile(rf"[{_INVISIBLE}]")
_PLAIN = bytes([9, 10, *range(32, 127), *range(128, 256)])


def safe(text: str, *, colours: bool = False) -> str:
    """Return text that cannot command a terminal; colours survive where asked for."""
    if text.isprintable():
        return text
    parts = _SGR.findall(text) if colours else []
    pieces = _SGR.split(text) if colours else [text]
    clean = [_CONTROL.sub("", _SEQUENCE.sub("", piece)) for piece in pieces]
    if not parts:
        return clean[0]
    joined = "".join(piece + colour for piece, colour in zip(clean, [*parts, ""], strict=False))
    return f"{joined}\x1b[0m"


def is_plain(data: bytes, text: str) -> bool:
    """Return whether many lines at once (``text`` is ``data`` decoded) are harmless as they are."""
    if data.translate(None, _PLAIN):
        return False
    return text.isascii() or _C1.search(text) is None
