"""Key bindings for scrolling and moving a cursor, as in pagers and in vi."""

from __future__ import annotations

from textual.binding import Binding, BindingType

# Users of these bindings define the actions line, page, top and, for END, bottom.
MOVES: list[BindingType] = [
    Binding("down,j", "line(1)", show=False),
    Binding("up,k", "line(-1)", show=False),
    Binding("pagedown,ctrl+d,space", "page(1)", show=False),
    Binding("pageup,ctrl+u", "page(-1)", show=False),
    Binding("home,g", "top", show=False),
]
END = Binding("end,G", "bottom", show=False)
