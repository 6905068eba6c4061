"""Remove terminal control sequences from untrusted text."""

from __future__ import annotations

import re

# Removed are characters that change a terminal's state or hide text: C0 except tab, DEL, C1, characters that
# change the text direction or have no width, and line separators. With characters of no width, one name can
# look like another; joiners are kept, because words contain them. Escape sequences are removed, too.
_SGR = re.compile(r"\x1b\[[0-9;:]*m")  # sets a color
_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~]?)", re.DOTALL
)
_INVISIBLE = r"\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
_CONTROL = re.compile(rf"[\x00-\x08\x0a-\x1f{_INVISIBLE}]")
_INVISIBLE_CHARACTER = re.compile(rf"[{_INVISIBLE}]")
_PLAIN_BYTES = bytes([9, 10, *range(32, 127), *range(128, 256)])


def safe(text: str, *, colours: bool = False) -> str:
    """Return text without terminal control sequences; keep colors if ``colors`` is true."""
    if text.isprintable():
        return text
    colour_codes = _SGR.findall(text) if colours else []
    segments = _SGR.split(text) if colours else [text]
    clean_segments = [_CONTROL.sub("", _ESCAPE_SEQUENCE.sub("", segment)) for segment in segments]
    if not colour_codes:
        return clean_segments[0]
    safe_text = "".join(
        segment + colour for segment, colour in zip(clean_segments, [*colour_codes, ""], strict=False)
    )
    return f"{safe_text}\x1b[0m"


def is_plain(data: bytes, text: str) -> bool:
    """Return whether a block of lines needs no cleaning; ``text`` is the decoded ``data``."""
    if data.translate(None, _PLAIN_BYTES):
        return False
    return text.isascii() or _INVISIBLE_CHARACTER.search(text) is None
