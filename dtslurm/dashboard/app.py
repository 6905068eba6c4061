"""The Textual application of ``dtslurm top``: a job list and a page per job, updated by snapshot messages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.segment import Segment
from textual.app import App, SuspendNotSupported, SystemCommand
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.filter import LineFilter
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer

from dtslurm.dashboard import ascii_fallback, theme
from dtslurm.dashboard.actions.handoffs import Opener
from dtslurm.dashboard.actions.notifications import Announcer, join_events, make_terminal_notification
from dtslurm.dashboard.dialogs import Help
from dtslurm.dashboard.feed import Notification, SnapshotSource
from dtslurm.dashboard.job import JobScreen
from dtslurm.dashboard.jobs import JobsScreen
from dtslurm.dashboard.view import BaseScreen
from dtslurm.errors import DtslurmError
from dtslurm.logs.clean import safe
from dtslurm.model.own_files import make_own_folder
from dtslurm.services.observe.run_list import Board, JobRow

_GC_INTERVAL_S = 300.0
_GC_AFTER_LEAVING_S = 1.0


class Arrived(Message):
    """A message that carries a new snapshot."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


class _AsciiFilter(LineFilter):
    """A line filter that replaces all characters that a terminal without UTF-8 cannot show."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        del background
        return [Segment(ascii_fallback.to_ascii(text), style, control) for text, style, control in segments]


class TopApp(App[None]):
    """The application ``dtslurm top``.

    Args:
        source: source of the snapshots.
        clock: returns the time in seconds since the epoch.
        read_only: whether all actions that change something are disabled.
        ascii_only: whether to draw with ASCII characters only.
        job: predicate for the job whose page opens at the start; called with each row until it returns True.
        clipboard: file to which copied text is also written.
    """

    TITLE = "dtslurm top"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", show=False, priority=True)]
    CSS = """
    Footer { height: 1; }
    Input:focus { background-tint: $foreground 0%; }
    * { border-title-color: $foreground; border-subtitle-color: $foreground; }
    """

    def __init__(
        self,
        source: SnapshotSource,
        clock: Callable[[], float],
        *,
        read_only: bool = False,
        ascii_only: bool = False,
        job: Callable[[JobRow], bool] | None = None,
        clipboard: Path | None = None,
    ) -> None:
        super().__init__()
        self.source, self.now = source, clock
        self.read_only = read_only
        self.board = Board()
        self.announces = True
        self._announcer = Announcer()
        self._is_initial_job = job
        self._clipboard_file = clipboard
        self._ascii_filters = [_AsciiFilter()] if ascii_only else []
        self.requested_theme: str | None = None

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return Textual's line filters, followed by the ASCII filter."""
        return [*super().get_line_filters(), *self._ascii_filters]

    def get_css_variables(self) -> dict[str, str]:
        """Return the theme's variables with text colors that are readable on its backgrounds."""
        self.theme_variables = theme.readable_labels(super().get_css_variables())
        return self.theme_variables

    def get_default_screen(self) -> Screen[Any]:
        """Return the job list."""
        return JobsScreen()

    def on_mount(self) -> None:
        self.register_theme(theme.COLOUR_BLIND)
        if self.requested_theme is not None:
            self.theme = self.requested_theme
        self.set_interval(_GC_INTERVAL_S, self._collect_garbage)
        self.source.start(self._arrive)

    def _collect_garbage(self) -> None:
        """Collect cyclic garbage, including the removed key widgets of footers.

        Textual's footer keeps every key widget as a watcher of its ``compact`` attribute, and drops removed
        widgets only when the attribute changes (Textual 8.2.8).
        """
        for screen in self.screen_stack:
            for footer in screen.query(Footer):
                footer.mutate_reactive(Footer.compact)
        gc.collect()

    def _arrive(self, value: object) -> None:
        self.post_message(Arrived(value))

    def on_unmount(self) -> None:
        self.source.stop()

    def on_arrived(self, event: Arrived) -> None:
        if not self.is_running:  # its screens are being closed
            return
        if isinstance(event.value, Notification):
            self.show_notice(event.value.text, is_error=event.value.bad)
            return
        if isinstance(event.value, Board):
            self.board = event.value
            self._announce_events(self._announcer.list_new_events(event.value))
            self._open_initial_job(event.value)
        for screen in self.screen_stack:
            if isinstance(screen, BaseScreen) and screen.is_mounted:
                screen.take(event.value)

    def _announce_events(self, events: Sequence[str]) -> None:
        """Ring the bell for runs that ended or stalled, and name them here and in a terminal notification."""
        if not events or not self.announces:
            return
        text = join_events(events)
        self.notify(text, markup=False)
        self.bell()
        self.write_sequence(make_terminal_notification(text))

    def write_sequence(self, sequence: str) -> None:
        """Write an escape sequence to the terminal; do nothing in headless mode."""
        if self._driver is not None and not self.is_headless:
            self._driver.write(sequence)

    def action_announce(self) -> None:
        """Toggle the bell for runs that end or stall."""
        self.announces = not self.announces
        behaviour = "rings the bell" if self.announces else "is silent"
        self.notify(f"dtslurm top {behaviour} when a run ends or stalls", timeout=3)

    def _open_initial_job(self, board: Board) -> None:
        initial_row = next(
            (row for row in board.rows if self._is_initial_job is not None and self._is_initial_job(row)),
            None,
        )
        if initial_row is not None:
            self._is_initial_job = None
            self.open_job(initial_row)

    def open_job(self, row: JobRow, *, live: bool = False) -> None:
        """Open a job's page; with the live diagnosis of its ranks if ``live``."""
        self.push_screen(JobScreen(row, live=live))

    def leave_job(self) -> None:
        """Return to the job list."""
        if len(self.screen_stack) > 1:
            self.pop_screen()
            # A closed page has reference cycles and may hold a large log.
            self.set_timer(_GC_AFTER_LEAVING_S, self._collect_garbage)

    def action_help(self) -> None:
        """Show all keys."""
        self.push_screen(Help(read_only=self.read_only))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the commands of the command palette: themes and the actions of the screen."""
        for command in super().get_system_commands(screen):
            if command.title in {"Theme", "Quit", "Screenshot"}:
                yield command
        yield SystemCommand("Help", "Show all keys", self.action_help)
        yield SystemCommand("Refresh", "Ask all clusters now", self.source.refresh)
        if isinstance(screen, BaseScreen):
            yield SystemCommand("Live diagnosis", "Examine every rank of the job", screen.action_live)
            yield SystemCommand("Copy", "Copy the screen", screen.action_copy)
            if not self.read_only:
                for verb in ("cancel", "requeue", "hold", "release"):
                    yield SystemCommand(
                        verb.capitalize(),
                        f"{verb.capitalize()} the job",
                        lambda verb=verb: screen.action_ask(verb),
                    )
                yield SystemCommand("Shell", "Open a shell on a node of the job", screen.action_shell)
                yield SystemCommand("Resubmit", "Submit the run once more", screen.action_resubmit)
            yield SystemCommand("Report", "Write one page about the run", screen.action_report)
            yield SystemCommand("Command", "Copy the next command about the run", screen.action_command)

    def show_notice(self, text: str, *, is_error: bool) -> None:
        """Show a notification; the text may come from outside dtslurm and is sanitized."""
        lines = map(safe, text.splitlines())
        self.notify("\n".join(lines), severity="error" if is_error else "information", markup=False)

    def copy_out(self, text: str) -> None:
        """Copy text to the terminal's clipboard, and to a file for terminals without clipboard access."""
        if not text:
            return
        self.copy_to_clipboard(text)
        file_note = ""
        if self._clipboard_file is not None:
            try:
                make_own_folder(self._clipboard_file.parent)
                self._clipboard_file.write_text(text + "\n", encoding="utf-8", errors="replace")
                file_note = f", also in {self._clipboard_file}"
            except OSError as error:
                file_note = f"; {self._clipboard_file}: {error.strerror}"
        self.notify(f"copied {len(text.splitlines())} lines{file_note}", markup=False)

    def open_shell(self, row: JobRow, node: str) -> None:
        """Suspend the application and run a shell on a node."""
        self._lend_terminal("shell", lambda: self.source.shell(row, node))

    def open_log(self, row: JobRow, rank: int, attempt: int, opener: Opener) -> None:
        """Suspend the application and open a rank's log in a pager or an editor."""
        self._lend_terminal(opener.name, lambda: self.source.open_log(row, rank, attempt, opener))

    def _lend_terminal(self, program_name: str, run_program: Callable[[], int]) -> None:
        """Suspend the application while a program uses the terminal; report errors and failed exit codes."""
        try:
            with self.suspend():
                code = run_program()
        except SuspendNotSupported:
            self.show_notice(f"the {program_name} needs a terminal: run dtslurm top in one", is_error=True)
            return
        except (DtslurmError, OSError) as error:
            self.show_notice(str(error), is_error=True)
            return
        if code:
            self.notify(f"the {program_name} ended with exit code {code}", severity="warning")
