"""Moving: the keys for scrolling and for a cursor, as in pagers and in vi, and the cursor itself."""

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


class Cursor:
    """A cursor over numbered positions: a mixin for widgets with a reactive ``cursor``."""

    cursor: int

    @property
    def position_count(self) -> int:
        """The number of positions."""
        raise NotImplementedError

    def move(self, step: int) -> None:
        """Move the cursor by ``step`` positions, within the first and the last position."""
        self.cursor = max(0, min(self.position_count - 1, self.cursor + step))

    def action_top(self) -> None:
        """Move the cursor to the first position."""
        self.cursor = 0

    def action_bottom(self) -> None:
        """Move the cursor to the last position."""
        self.cursor = max(0, self.position_count - 1)
