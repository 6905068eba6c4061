"""The job list."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Input, Static

from dtslurm.dashboard import words
from dtslurm.dashboard.arrange import SORTS, Choice, arrange
from dtslurm.dashboard.rows import Column, Rows
from dtslurm.dashboard.view import View
from dtslurm.services.board import Board, JobRow

COLUMNS = (
    Column("state", "STATE", 11),
    Column("name", "NAME", 12, share=2),
    Column("job", "JOB", 8, rank=2),
    Column("cluster", "CLUSTER", 8, rank=4),
    Column("size", "SIZE", 8, rank=6),
    Column("time", "TIME/LIMIT", 13, rank=1),
    Column("progress", "DONE", 5, rank=3, right=True),
    Column("about", "ABOUT", 10, share=3, rank=5),
)
STALLED_WIDTH = 16  # of the state's column: ■ STALLED 12m03s


class JobsScreen(View):
    """All runs on all clusters."""

    DEFAULT_CSS = """
    JobsScreen Static { width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    JobsScreen #title { height: 1; background: $panel; }
    JobsScreen #clusters { height: auto; max-height: 3; }
    JobsScreen #detail { height: 2; background: $surface; }
    JobsScreen #filter { height: 1; border: none; padding: 0 1; display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/", priority=True),
        Binding("escape", "unfilter", show=False),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", show=False),
        Binding("t", "ended", "hide ended"),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.choice = Choice()
        self.board = Board()
        self.shown: list[JobRow] = []

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        yield Rows(COLUMNS, self._cells, empty="asking …", id="jobs")
        yield Static(id="detail", markup=False)
        yield Input(placeholder="words to find, !words to leave out", id="filter")
        yield Static(id="clusters", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.set_focus(self.query_one(Rows))
        self.take(self.app.board)
        self.set_interval(1.0, self._tick)

    def take(self, value: object) -> None:
        """Show a board."""
        if isinstance(value, Board):
            self.board = value
            self.refill()

    def _tick(self) -> None:
        if self.is_current:
            self.query_one(Rows).refresh()
            self._frame()

    def refill(self) -> None:
        """Show the rows that are wanted now."""
        self.shown = arrange(self.board.rows, self.choice)
        rows = self.query_one(Rows)
        rows.empty = "no run matches" if self.board.rows else "no runs yet; dtslurm submit SCRIPT starts one"
        rows.sorted_by = self.choice.sort
        several = len({line.name for line in self.board.clusters}) > 1
        stalled = any(row.stalled for row in self.shown)
        rows.columns = tuple(
            replace(column, width=STALLED_WIDTH) if stalled and column.key == "state" else column
            for column in COLUMNS
            if several or column.key != "cluster"
        )
        rows.show([row.key for row in self.shown])
        self._frame()

    def _cells(self, at: int) -> dict[str, words.Piece]:
        row = self.shown[at]
        return words.job_cells(row, self.app.now(), expanded=row.token in self.choice.expanded)

    def _frame(self) -> None:
        now = self.app.now()
        wanted = []
        if self.choice.words:
            wanted.append(f"filter {self.choice.words!r}")
        if self.choice.hide_ended:
            wanted.append("ended hidden")
        if self.choice.sort != "newest":
            wanted.append(f"by {self.choice.sort}")
        notes = f"  [{', '.join(wanted)}]" if wanted else ""
        only = "  READ-ONLY" if self.app.read_only else ""
        self.put("#title", [(f"dtslurm top{only}  {words.counts(self.board)}{notes}", "bold")])
        row = self.row()
        self.put("#detail", words.detail(row, now) if row is not None else [])
        told = [words.cluster_words(line, now) for line in self.board.clusters]
        troubled = [piece for piece in told if piece[1] != "dim"]
        calm = "  ".join(text for text, kind in told if kind == "dim")
        self.put("#clusters", [*troubled[:2], *([(calm, "dim")] if calm else [])][:3])

    def row(self) -> JobRow | None:
        """Return the job under the cursor."""
        at = self.query_one(Rows).cursor
        return self.shown[at] if 0 <= at < len(self.shown) else None

    def look_at_ranks(self, row: JobRow) -> None:
        """Open the job's page, which looks at its ranks."""
        self.app.open_job(row, live=True)

    def to_copy(self) -> str:
        """Return the job's id and folder."""
        row = self.row()
        return f"{row.job_id}\n{row.run_dir}" if row is not None else ""

    def on_rows_moved(self) -> None:
        self._frame()

    def on_rows_chosen(self, event: Rows.Chosen) -> None:
        row = next((row for row in self.shown if row.key == event.key), None)
        if row is None:
            return
        if row.is_array:
            self.choice = replace(self.choice, expanded=self.choice.expanded ^ {row.token})
            self.refill()
        else:
            self.app.open_job(row)

    def on_rows_titled(self, event: Rows.Titled) -> None:
        if event.column in SORTS:
            again = self.choice.sort == event.column
            self.choice = replace(self.choice, sort=event.column, reverse=again and not self.choice.reverse)
            self.refill()

    def action_sort(self) -> None:
        """Sort by the next column."""
        following = SORTS[(SORTS.index(self.choice.sort) + 1) % len(SORTS)]
        self.choice = replace(self.choice, sort=following, reverse=False)
        self.refill()

    def action_reverse(self) -> None:
        """Sort the other way round."""
        self.choice = replace(self.choice, reverse=not self.choice.reverse)
        self.refill()

    def action_ended(self) -> None:
        """Hide or show what has ended."""
        self.choice = replace(self.choice, hide_ended=not self.choice.hide_ended)
        self.refill()

    def action_filter(self) -> None:
        """Type a filter."""
        line = self.query_one("#filter", Input)
        line.display = True
        self.set_focus(line)

    def action_unfilter(self) -> None:
        """Show everything again."""
        line = self.query_one("#filter", Input)
        line.value = ""
        line.display = False
        self.choice = replace(self.choice, words="")
        self.set_focus(self.query_one(Rows))
        self.refill()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.choice = replace(self.choice, words=event.value)
        self.refill()

    def on_input_submitted(self) -> None:
        line = self.query_one("#filter", Input)
        line.display = bool(line.value)
        self.set_focus(self.query_one(Rows))
