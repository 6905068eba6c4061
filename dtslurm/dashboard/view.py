"""What both screens share: snapshots come in, actions go out after a question."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from ClusterShell.NodeSet import NodeSet, NodeSetException
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Input, Static

from dtslurm.dashboard import theme
from dtslurm.dashboard.charts.curves import Curves
from dtslurm.dashboard.dialogs import Confirm
from dtslurm.dashboard.words import Piece, next_command
from dtslurm.logs.clean import safe
from dtslurm.services.observe.run_list import JobRow

if TYPE_CHECKING:
    from dtslurm.dashboard.app import TopApp

_QUESTIONS = {
    "cancel": "Cancel {job}? It ends what is running.",
    "requeue": "Requeue {job}? It ends what is running and puts it back into the queue.",
    "hold": "Hold {job}? It will not start until it is released.",
    "release": "Release {job}?",
}
CHANGING = {"ask", "shell", "resubmit", "edit_log", "demo"}  # actions that --read-only leaves out
_HELD = {"REQUEUE_HOLD", "SPECIAL_EXIT"}


class View(Screen[None]):
    """A screen over snapshots."""

    app: TopApp

    BINDINGS: ClassVar[list[BindingType]] = [
        # Taken before any widget sees them: of keys that come together each acts where the last one led.
        Binding("c", "ask('cancel')", "cancel", priority=True),
        Binding("R", "ask('requeue')", show=False, priority=True),
        Binding("H", "ask('hold')", show=False, priority=True),
        Binding("U", "ask('release')", show=False, priority=True),
        Binding("x", "shell", "shell", priority=True),
        Binding("d", "live", show=False, priority=True),
        Binding("y", "copy", show=False, priority=True),
        Binding("Y", "command", show=False, priority=True),
        Binding("A", "resubmit", show=False, priority=True),
        Binding("w", "report", show=False, priority=True),
        Binding("b", "app.announce", show=False),
        Binding("f5", "poke", show=False),
        Binding("z", "zoom", show=False),
        Binding("a", "smooth", show=False),
        Binding("l", "logarithmic", show=False),
        Binding("question_mark", "app.help", "help", key_display="?"),
    ]

    def take(self, value: object) -> None:
        """Show a snapshot."""
        raise NotImplementedError

    def row(self) -> JobRow | None:
        """Return the job that actions are about."""
        raise NotImplementedError

    def node(self) -> str | None:
        """Return the node that a shell opens on."""
        row = self.row()
        return first_node(row.nodelist) if row is not None else None

    def to_copy(self) -> str:
        """Return what is copied."""
        raise NotImplementedError

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave out what changes something where nothing may be changed."""
        del parameters
        if isinstance(self.focused, Input) and action not in {"back", "unfilter"}:
            return False
        return not (self.app.read_only and action in CHANGING)

    def action_zoom(self) -> None:
        """Show the curves on the full screen, or end that."""
        curves = self.query_one(Curves)
        if self.maximized is not None:
            self.minimize()
        elif curves.is_on_screen:
            self.maximize(curves)
        else:
            self.notify("there is no curve here: open a run, then its overview", severity="warning")

    def action_smooth(self) -> None:
        """Smooth the curves, or show every value again."""
        curves = self.query_one(Curves)
        curves.is_smooth = not curves.is_smooth
        curves.refresh()

    def action_logarithmic(self) -> None:
        """Draw the curves on a logarithmic scale, or on a linear one again."""
        curves = self.query_one(Curves)
        curves.is_logarithmic = not curves.is_logarithmic
        curves.refresh()

    def action_poke(self) -> None:
        """Ask the clusters now."""
        self.app.source.refresh()

    def action_ask(self, verb: str) -> None:
        """Do it, if the person says yes."""
        row = self.row()
        if row is None or self.app.read_only:
            return
        if verb == "release" and not (row.is_array or row.pending or row.state in _HELD):
            self.notify("there is nothing to release: the job is not held", severity="warning")
            return
        what = f"{safe(row.name)} ({safe(row.job_id)} on {safe(row.cluster)})"

        def answered(yes: bool | None) -> None:
            if yes:
                self.app.source.act(verb, row)

        self.app.push_screen(Confirm(_QUESTIONS[verb].format(job=what)), answered)

    def action_resubmit(self) -> None:
        """Submit the run once more, if the person says yes."""
        row = self.row()
        if row is None or self.app.read_only:
            return
        what = f"{safe(row.name)} ({safe(row.job_id)} on {safe(row.cluster)})"

        def answered(yes: bool | None) -> None:
            if yes:
                self.app.source.resubmit(row)

        self.app.push_screen(
            Confirm(f"Submit {what} once more, with the code as it is now, from the beginning?"), answered
        )

    def attempt(self) -> int | None:
        """Return the attempt that was chosen, None for the newest."""
        return None

    def action_report(self) -> None:
        """Write the page about the run into the current folder."""
        row = self.row()
        if row is not None:
            self.notify("writing the report …", timeout=2)
            self.app.source.report(row, self.attempt())

    def action_command(self) -> None:
        """Copy the next command about the run."""
        row = self.row()
        if row is not None:
            self.app.copy_out(next_command(row))

    def action_shell(self) -> None:
        """Open a shell on a node, if the person says yes."""
        row, node = self.row(), self.node()
        if row is None or self.app.read_only:
            return
        if row.state != "RUNNING" or node is None:
            self.notify("a shell opens on a running job only", severity="warning")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.app.open_shell(row, node)

        self.app.push_screen(
            Confirm(f"Open a shell on {safe(node)}, beside job {safe(row.job_id)}?"), answered
        )

    def action_live(self) -> None:
        """Look at every rank of the job, and show the verdict on its page."""
        row = self.row()
        if row is None:
            return
        if row.state != "RUNNING" or row.is_array:
            what = "open the array and choose a task" if row.is_array else "the job does not run"
            self.notify(f"there are no ranks to look at: {what}", severity="warning")
            return
        self.look_at_ranks(row)

    def look_at_ranks(self, row: JobRow) -> None:
        """Begin to look at every rank of a running job."""
        raise NotImplementedError

    def action_copy(self) -> None:
        """Copy what is shown."""
        self.app.copy_out(self.to_copy())

    def put(self, selector: str, pieces: Sequence[Piece]) -> None:
        """Show lines of text in a `Static`, without what would command the terminal."""
        text = Text(no_wrap=True, overflow="ellipsis")
        for number, (words, kind) in enumerate(pieces):
            text.append(("\n" if number else "") + safe(words), style=theme.style(self.app, kind))
        self.query_one(selector, Static).update(text)


def first_node(nodelist: str) -> str | None:
    """Return the first node of Slurm's list."""
    try:
        return next(iter(NodeSet(nodelist)), None)
    except NodeSetException:
        return None


def pattern_error(check: Callable[[str], object], text: str) -> str:
    """Return what is wrong with a regular expression, empty if nothing is."""
    try:
        check(text)
    except re.error as error:
        return f"{text!r} is not a regular expression: {error}"
    return ""
