"""Modal dialogs: confirmations and the help."""

from __future__ import annotations

import math
import time
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

_READING_S = 0.2
_NAVIGATION_HELP = """\
Jobs
  Enter   open the job; unfold or fold an array
  /       filter by words; !word excludes; Esc clears the filter
  s S     sort by the next column, reverse the order
  t       hide ended runs
  Space C mark a run (Esc clears the marks), compare the marked runs
  F5      query the clusters now
Job
  1 to 6  overview, ranks, nodes, logs, verdict, history; Tab: next
  [ ]     show the previous, the next attempt
  d       live diagnosis: examine every rank of a running job
  p v     open the log of the rank in $PAGER, in $EDITOR
Curves
  z       show the curves on the full screen; z or Esc returns
  a l     smooth (moving average), logarithmic scale
Ranks
  m       show state, GPU %, GPU memory %, seconds without output
  o       go to the next outlier; Enter shows its log
Logs
  /       search (a regular expression); n N next, previous match
  f       show only the lines that match; Esc shows all lines
  e E     go to the next, the previous error
  r       select ranks: 0,3-7 or *; L loads earlier lines, End newest
"""
_ACTION_HELP = """\
Actions, each after a confirmation
  c cancel   R requeue   H hold   U release   x shell on a node
  A submit the run again         D start a demo if there are no runs
"""
_COMMON_HELP = """\
Everywhere
  y Y     copy the screen, copy the next command: to the clipboard
          (OSC 52) and to a file
  w       write the report of the run into the current folder
  b       bell and notification when a run ends or stalls: off, on
  Ctrl+P  all commands, themes     ? this help     q back, or quit\
"""


class Confirm(ModalScreen[bool]):
    """A confirmation dialog whose default answer is No."""

    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm > Vertical { width: 60; max-width: 95%; height: auto; max-height: 95%; padding: 1 2;
      background: $panel; border: round $warning; }
    Confirm Horizontal { height: auto; align-horizontal: center; }
    Confirm Button { margin: 1 2 0 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
        Binding("left,right", "other", show=False),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question
        self._shown_at = math.inf

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._question, markup=False)
            with Horizontal():
                yield Button("No", id="no", variant="primary", compact=True)
                yield Button("Yes", id="yes", variant="warning", compact=True)

    def on_mount(self) -> None:
        self._shown_at = time.monotonic()
        self.query_one("#no").focus()

    def action_answer(self, answer: bool) -> None:
        """Close the dialog with the answer.

        A Yes within `_READING_S` seconds is ignored: the user typed it before the question could be read.
        """
        if not answer or time.monotonic() - self._shown_at > _READING_S:
            self.dismiss(answer)

    def action_other(self) -> None:
        """Move the focus to the other button."""
        self.focus_next()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.action_answer(event.button.id == "yes")


class Help(ModalScreen[None]):
    """The help with all keys."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help > VerticalScroll { width: 76; max-width: 100%; height: auto; max-height: 100%; padding: 0 1;
      background: $panel; border: round $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "close", "close")]

    def __init__(self, *, read_only: bool) -> None:
        super().__init__()
        self._text = _NAVIGATION_HELP + ("" if read_only else _ACTION_HELP) + _COMMON_HELP

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._text, markup=False)

    def action_close(self) -> None:
        """Close the help."""
        self.dismiss(None)
