"""A regular expression for the names of Python exceptions."""

from __future__ import annotations

EXCEPTION_NAME = (
    r"(?:[A-Za-z_]\w*\.)*"
    r"(?:[A-Z]\w*(?:Error|Exception|Interrupt)|Exception|StopIteration|StopAsyncIteration|SystemExit)"
)
"""A regular expression for the names that are recognized outside a traceback."""
