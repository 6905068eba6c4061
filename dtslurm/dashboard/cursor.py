"""A cursor that keys move over a number of places: what tables and the rank grid have in common."""

from __future__ import annotations


class Cursor:
    """Mixed into a widget that has a reactive ``cursor``."""

    cursor: int

    @property
    def places(self) -> int:
        """How many places there are."""
        raise NotImplementedError

    def move(self, step: int) -> None:
        """Move the cursor, but no further than to the first or the last place."""
        self.cursor = max(0, min(self.places - 1, self.cursor + step))

    def action_top(self) -> None:
        """Move the cursor to the first place."""
        self.cursor = 0

    def action_bottom(self) -> None:
        """Move the cursor to the last place."""
        self.cursor = max(0, self.places - 1)
