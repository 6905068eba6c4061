"""The base class of the screens: shows snapshots and runs actions, with a confirmation where needed."""

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
from dtslurm.dashboard.words import StyledText, suggest_command
from dtslurm.logs.clean import safe
from dtslurm.services.observe.run_list import JobRow

if TYPE_CHECKING:
    from dtslurm.dashboard.app import TopApp

_CONFIRMATIONS = {
    "cancel": "Cancel {job}? It ends what is running.",
    "requeue": "Requeue {job}? It ends what is running and puts it back into the queue.",
    "hold": "Hold {job}? It will not start until it is released.",
    "release": "Release {job}?",
}
CHANGING = {"ask", "shell", "resubmit", "edit_log", "demo"}  # actions that --read-only disables
_HELD_STATES = {"REQUEUE_HOLD", "SPECIAL_EXIT"}


class BaseScreen(Screen[None]):
    """The base class of the screens that show snapshots."""

    app: TopApp

    BINDINGS: ClassVar[list[BindingType]] = [
        # Priority bindings: in a rapid sequence, each key acts on the screen that the previous key opened.
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
        Binding("f5", "refresh_now", show=False),
        Binding("z", "zoom", show=False),
        Binding("a", "smooth", show=False),
        Binding("l", "logarithmic", show=False),
        Binding("question_mark", "app.help", "help", key_display="?"),
    ]

    def take(self, value: object) -> None:
        """Update the screen from a snapshot."""
        raise NotImplementedError

    def row(self) -> JobRow | None:
        """Return the job that actions apply to; None if there is none."""
        raise NotImplementedError

    def node(self) -> str | None:
        """Return the node for a shell; None if there is none."""
        row = self.row()
        return first_node(row.nodelist) if row is not None else None

    def to_copy(self) -> str:
        """Return the text for the clipboard."""
        raise NotImplementedError

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable changing actions in read-only mode, and most actions while the user types."""
        del parameters
        if isinstance(self.focused, Input) and action not in {"back", "unfilter"}:
            return False
        return not (self.app.read_only and action in CHANGING)

    def action_zoom(self) -> None:
        """Toggle the full-screen view of the curves."""
        curves = self.query_one(Curves)
        if self.maximized is not None:
            self.minimize()
        elif curves.is_on_screen:
            self.maximize(curves)
        else:
            self.notify("there is no curve here: open a run, then its overview", severity="warning")

    def action_smooth(self) -> None:
        """Toggle the smoothing of the curves."""
        curves = self.query_one(Curves)
        curves.is_smooth = not curves.is_smooth
        curves.refresh()

    def action_logarithmic(self) -> None:
        """Toggle the logarithmic scale of the curves."""
        curves = self.query_one(Curves)
        curves.is_logarithmic = not curves.is_logarithmic
        curves.refresh()

    def action_refresh_now(self) -> None:
        """Query the clusters now."""
        self.app.source.refresh()

    def action_ask(self, verb: str) -> None:
        """Cancel, requeue, hold or release the job after confirmation."""
        row = self.row()
        if row is None or self.app.read_only:
            return
        if verb == "release" and not (row.is_array or row.pending or row.state in _HELD_STATES):
            self.notify("there is nothing to release: the job is not held", severity="warning")
            return
        job_name = f"{safe(row.name)} ({safe(row.job_id)} on {safe(row.cluster)})"

        def act_if_confirmed(yes: bool | None) -> None:
            if yes:
                self.app.source.change_job(verb, row)

        self.app.push_screen(Confirm(_CONFIRMATIONS[verb].format(job=job_name)), act_if_confirmed)

    def action_resubmit(self) -> None:
        """Resubmit the run after confirmation."""
        row = self.row()
        if row is None or self.app.read_only:
            return
        job_name = f"{safe(row.name)} ({safe(row.job_id)} on {safe(row.cluster)})"

        def resubmit_if_confirmed(yes: bool | None) -> None:
            if yes:
                self.app.source.resubmit(row)

        self.app.push_screen(
            Confirm(f"Submit {job_name} once more, with the code as it is now, from the beginning?"),
            resubmit_if_confirmed,
        )

    def attempt(self) -> int | None:
        """Return the selected attempt; None for the newest."""
        return None

    def action_report(self) -> None:
        """Write the report of the run into the current folder."""
        row = self.row()
        if row is not None:
            self.notify("writing the report …", timeout=2)
            self.app.source.report(row, self.attempt())

    def action_command(self) -> None:
        """Copy the suggested next command for the run."""
        row = self.row()
        if row is not None:
            self.app.copy_out(suggest_command(row))

    def action_shell(self) -> None:
        """Open a shell on a node after confirmation."""
        row, node = self.row(), self.node()
        if row is None or self.app.read_only:
            return
        if row.state != "RUNNING" or node is None:
            self.notify("a shell needs a running job", severity="warning")
            return

        def open_if_confirmed(yes: bool | None) -> None:
            if yes:
                self.app.open_shell(row, node)

        self.app.push_screen(
            Confirm(f"Open a shell on {safe(node)}, beside job {safe(row.job_id)}?"), open_if_confirmed
        )

    def action_live(self) -> None:
        """Inspect every rank of the job, and show the diagnosis on the job's page."""
        row = self.row()
        if row is None:
            return
        if row.state != "RUNNING" or row.is_array:
            reason = "open the array and choose a task" if row.is_array else "the job does not run"
            self.notify(f"there are no ranks to examine: {reason}", severity="warning")
            return
        self.look_at_ranks(row)

    def look_at_ranks(self, row: JobRow) -> None:
        """Start the live diagnosis of every rank of a running job."""
        raise NotImplementedError

    def action_copy(self) -> None:
        """Copy the visible text."""
        self.app.copy_out(self.to_copy())

    def show_lines(self, selector: str, styled_lines: Sequence[StyledText]) -> None:
        """Show lines of text in a `Static`, without terminal control sequences."""
        text = Text(no_wrap=True, overflow="ellipsis")
        for number, (line, kind) in enumerate(styled_lines):
            text.append(("\n" if number else "") + safe(line), style=theme.style(self.app, kind))
        self.query_one(selector, Static).update(text)


def first_node(nodelist: str) -> str | None:
    """Return the first node of a Slurm node list; None if it is empty or invalid."""
    try:
        return next(iter(NodeSet(nodelist)), None)
    except NodeSetException:
        return None


def pattern_error(check: Callable[[str], object], text: str) -> str:
    """Return the error in a regular expression as text; empty if it is valid."""
    try:
        check(text)
    except re.error as error:
        return f"{text!r} is not a regular expression: {error}"
    return ""
