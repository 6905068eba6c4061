"""A cursor that moves over numbered positions; shared by tables and the rank grid."""

from __future__ import annotations


class Cursor:
    """A mixin for widgets with a reactive ``cursor``."""

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
