"""The job list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from rich.markup import escape
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.message import Message
from textual.widgets import Footer, Input, Static

from dtslurm.dashboard import words
from dtslurm.dashboard.arrange import SORTS, Arrangement, arrange
from dtslurm.dashboard.charts.curves import Curves
from dtslurm.dashboard.charts.strips import draw_spark_line, rebin
from dtslurm.dashboard.dialogs import Confirm
from dtslurm.dashboard.feed import ComparisonText, GpuUtilization
from dtslurm.dashboard.reader import Reader
from dtslurm.dashboard.rows import Column, Rows
from dtslurm.dashboard.view import View
from dtslurm.logs.clean import safe
from dtslurm.services.observe.run_list import Board, JobRow
from dtslurm.services.observe.utilization_history import Percentages

USE_WIDTH = 8
COLUMNS = (
    Column("state", "STATE", 11),
    Column("name", "NAME", 12, share=2),
    Column("job", "JOB", 8, rank=2),
    Column("cluster", "CLUSTER", 8, rank=4),
    Column("size", "SIZE", 8, rank=7),
    Column("time", "TIME/LIMIT", 13, rank=1),
    Column("progress", "DONE", 5, rank=3, right=True),
    Column("use", "GPU USE", USE_WIDTH, rank=6),
    Column("about", "ABOUT", 10, share=3, rank=5),
)
BAR_WIDTH = 28  # of the progress column: ████████ 100% steps 12h03m
ROOM_FOR_BARS = 98  # columns of the list
MARK = "◆"
STALLED_WIDTH = 16  # of the state's column: ■ STALLED 12m03s


class JobRows(Rows):
    """Rows that can be marked."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "mark", show=False)]

    class Marked(Message):
        """A row was marked, or its mark was taken away."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def action_mark(self) -> None:
        """Mark the row under the cursor, and go on to the next."""
        if self.key is not None:
            self.post_message(self.Marked(self.key))
            self.move(1)


class JobsScreen(View):
    """All runs on all clusters."""

    DEFAULT_CSS = """
    JobsScreen Static { width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    JobsScreen #title { height: 1; background: $panel; }
    JobsScreen #clusters { height: auto; max-height: 3; }
    JobsScreen #body { height: 1fr; layout: vertical; }
    JobsScreen #list { height: 1fr; border: round $primary; }
    JobsScreen #about { height: auto; border: round $primary; }
    JobsScreen #detail { height: auto; min-height: 1; max-height: 3; text-wrap: wrap; }
    JobsScreen #panel { display: none; height: 40%; max-height: 18; border: round $primary; }
    JobsScreen #facts { height: auto; max-height: 60%; }
    JobsScreen #panel Curves { height: 1fr; max-height: 20; }
    JobsScreen.-wide #about, JobsScreen.-widest #about { display: none; }
    JobsScreen.-wide #panel { display: block; }
    JobsScreen.-widest #body { layout: horizontal; }
    JobsScreen.-widest #list { width: 1fr; }
    JobsScreen.-widest #panel { display: block; width: 36%; height: 1fr; max-height: 100%; }
    JobsScreen #filter { height: 1; border: none; padding: 0 1; display: none; }
    """
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [  # noqa: RUF012 (as in Textual)
        (0, "-narrow"),
        (120, "-wide"),
        (160, "-widest"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/", priority=True),
        Binding("escape", "unfilter", show=False),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", show=False),
        Binding("t", "ended", "hide ended"),
        Binding("C", "compare", show=False),
        Binding("D", "demo", show=False),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.choice = Arrangement()
        self.board = Board()
        self.shown: list[JobRow] = []
        self.uses: Mapping[str, Percentages] = {}
        self.marked: list[str] = []  # tokens of runs, in the order of their marks

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        with Container(id="body"):
            with Vertical(id="list"):
                yield JobRows(COLUMNS, self._cells, empty="asking …", id="jobs")
            with Vertical(id="panel"):
                yield Static(id="facts", markup=False)
                yield Curves()
        with Vertical(id="about"):
            yield Static(id="detail", markup=False)
        yield Input(placeholder="words to find, !words to leave out", id="filter")
        yield Static(id="clusters", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.set_focus(self.query_one(Rows))
        self.take(self.app.board)
        self.set_interval(1.0, self._tick)

    def take(self, value: object) -> None:
        """Show a board, or a comparison that was asked for here."""
        if isinstance(value, Board):
            self.board = value
            tokens = {row.token for row in value.rows}
            self.marked = [token for token in self.marked if token in tokens]
            self.refill()
        elif isinstance(value, GpuUtilization):
            self.uses = value.values
            self.refill()
        elif isinstance(value, ComparisonText) and self.app.screen is self:
            self.app.push_screen(Reader("comparison", value.lines))

    def on_resize(self) -> None:
        self.call_after_refresh(self.refill)

    def _tick(self) -> None:
        if self.is_current:
            self.query_one(Rows).refresh()
            self._frame()

    def refill(self) -> None:
        """Show the rows that are wanted now."""
        self.shown = arrange(self.board.rows, self.choice)
        rows = self.query_one(Rows)
        rows.empty = "no run matches" if self.board.rows else self._offer
        rows.sorted_by = self.choice.sort
        several = len({line.name for line in self.board.clusters}) > 1
        stalled = any(row.stalled for row in self.shown)
        with_use = any(row.key in self.uses for row in self.shown)
        widths = {"state": STALLED_WIDTH} if stalled else {}
        if self._has_bars:
            widths["progress"] = BAR_WIDTH
        rows.columns = tuple(
            replace(
                column, width=widths.get(column.key, column.width), right=column.right and not self._has_bars
            )
            for column in COLUMNS
            if (several or column.key != "cluster") and (with_use or column.key != "use")
        )
        rows.show([row.key for row in self.shown])
        self._frame()

    @property
    def _offer(self) -> str:
        """What can be done where there is no run."""
        demo = "" if self.app.read_only else "; D starts a demo on this machine"
        return f"no runs yet; dtslurm submit SCRIPT starts one{demo}"

    def _cells(self, at: int) -> dict[str, words.Piece]:
        row = self.shown[at]
        now = self.app.now()
        cells = words.job_cells(row, now, expanded=row.token in self.choice.expanded)
        if self.marked and row.token in self.marked and row.task is None:
            cells["name"] = (f"{MARK} {cells['name'][0]}", "accent")
        if row.key in self.uses:
            cells["use"] = (
                draw_spark_line(rebin(self.uses[row.key], USE_WIDTH)),
                "dim" if row.over else "accent",
            )
        return {**cells, "progress": words.progress_bar(row, now)} if self._has_bars else cells

    @property
    def _has_bars(self) -> bool:
        """Whether the list is wide enough for progress bars."""
        return self.query_one(Rows).room >= ROOM_FOR_BARS

    def _frame(self) -> None:
        now = self.app.now()
        wanted = []
        if self.choice.words:
            wanted.append(f"filter {self.choice.words!r}")
        if self.choice.hide_ended:
            wanted.append("ended hidden")
        if self.choice.sort != "newest":
            wanted.append(f"by {self.choice.sort}")
        if self.marked:
            wanted.append(f"{len(self.marked)} marked, C compares them")
        only = "  READ-ONLY" if self.app.read_only else ""
        self.put("#title", [(f"dtslurm top{only}  {words.counts(self.board)}", "bold")])
        row = self.row()
        frame = self.query_one("#list")
        frame.border_title = escape(f"runs {len(self.shown)}")
        frame.border_subtitle = escape(", ".join(wanted))
        self._describe(row, now)
        told = [words.cluster_words(line, now) for line in self.board.clusters]
        troubled = [piece for piece in told if piece[1] != "dim"]
        calm = "  ".join(text for text, kind in told if kind == "dim")
        self.put("#clusters", [*troubled[:2], *([(calm, "dim")] if calm else [])][:3])

    def _describe(self, row: JobRow | None, now: float) -> None:
        """Show the chosen run below the list, or in the panel where the terminal has room for it."""
        lines = words.detail(row, now) if row is not None else []
        self.query_one("#about").border_title = escape(safe(lines[0][0])) if lines else ""
        self.put("#detail", lines[1:])
        panel = self.query_one("#panel")
        if not panel.display:
            return
        panel.border_title = escape(f"{safe(row.name)} {safe(row.job_id)}") if row is not None else ""
        self.put("#facts", words.facts(row, now) if row is not None else [])
        curves = self.query_one(Curves)
        curves.display = row is not None and bool(row.losses)
        if row is not None and row.losses:
            curves.show([(f"loss {words.short(row.losses[-1][1], 4)}", list(row.losses))])

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

    def on_job_rows_marked(self, event: JobRows.Marked) -> None:
        """Mark the run of a row, or take its mark away."""
        token = next((row.token for row in self.shown if row.key == event.key), None)
        if token is None:
            return
        if token in self.marked:
            self.marked.remove(token)
        else:
            self.marked.append(token)
        self.query_one(Rows).refresh()
        self._frame()

    def action_compare(self) -> None:
        """Show the marked runs beside each other."""
        from dtslurm.services.observe.compare import MOST_RUNS

        if not 2 <= len(self.marked) <= MOST_RUNS:
            self.notify(
                f"2 to {MOST_RUNS} runs can be compared; {len(self.marked)} are marked (space marks one)",
                severity="warning",
            )
            return
        heads = {row.token: row for row in reversed(self.board.rows)}
        self.notify("comparing …", timeout=2)
        self.app.source.compare([heads[token] for token in self.marked])

    def action_demo(self) -> None:
        """Start the demo where there is no run yet, if the person says yes."""
        if self.board.rows or self.app.read_only:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.app.source.demo()

        self.app.push_screen(
            Confirm("Start a demo on this machine? Two processes fit a line to points for a minute."),
            answered,
        )

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
        """End the filter, or where there is none the marks."""
        line = self.query_one("#filter", Input)
        if not line.display and not self.choice.words:
            self.marked = []
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
