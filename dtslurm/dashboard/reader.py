"""A full-screen reader for text such as the comparison of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.markup import escape
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from dtslurm.logs.clean import safe

if TYPE_CHECKING:
    from dtslurm.dashboard.app import TopApp


class Reader(ModalScreen[None]):
    """A screen with text to read and copy that scrolls in both directions."""

    app: TopApp

    DEFAULT_CSS = """
    Reader { background: $background; }
    Reader > ScrollableContainer { height: 1fr; border: round $primary; padding: 0 1; }
    Reader Static { width: auto; min-width: 100%; text-wrap: nowrap; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "close", "back", key_display="q"),
        Binding("y", "copy", "copy"),
    ]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._heading = title
        self._body_text = "\n".join(map(safe, lines))

    def compose(self) -> ComposeResult:
        with ScrollableContainer() as frame:
            yield Static(self._body_text, markup=False)
        frame.border_title = escape(self._heading)
        yield Footer(show_command_palette=False)

    def action_close(self) -> None:
        """Close the reader."""
        self.dismiss(None)

    def action_copy(self) -> None:
        """Copy the whole text."""
        self.app.copy_out(self._body_text)
