"""The job list screen."""

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
from dtslurm.dashboard.view import BaseScreen
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
BAR_WIDTH = 28  # width of the progress column: ████████ 100% steps 12h03m
ROOM_FOR_BARS = 98  # from this width of the list on, in terminal columns, it shows progress bars
MARK = "◆"  # before the name of a marked run
STALLED_WIDTH = 16  # width of the state column: ■ STALLED 12m03s


class JobRows(Rows):
    """A table whose rows can be marked."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "mark", show=False)]

    class Marked(Message):
        """The user toggled the mark of a row."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def action_mark(self) -> None:
        """Toggle the mark of the row under the cursor and move to the next row."""
        if self.key is not None:
            self.post_message(self.Marked(self.key))
            self.move(1)


class JobsScreen(BaseScreen):
    """The screen with all runs on all clusters."""

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
        self.marked: list[str] = []  # tokens of the marked runs, in marking order

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        with Container(id="body"):
            with Vertical(id="list"):
                yield JobRows(COLUMNS, self._format_cells, empty="querying …", id="jobs")
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
        """Update the screen from a board or GPU utilization, or show a requested comparison."""
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
            self._update_frame()

    def refill(self) -> None:
        """Filter and sort the rows, choose the columns, and show both."""
        self.shown = arrange(self.board.rows, self.choice)
        rows = self.query_one(Rows)
        rows.empty = "no run matches" if self.board.rows else self._empty_hint
        rows.sorted_by = self.choice.sort
        has_several_clusters = len({line.name for line in self.board.clusters}) > 1
        has_stalled = any(row.stalled for row in self.shown)
        has_utilization = any(row.key in self.uses for row in self.shown)
        widths = {"state": STALLED_WIDTH} if has_stalled else {}
        if self._has_room_for_bars:
            widths["progress"] = BAR_WIDTH
        rows.columns = tuple(
            replace(
                column,
                width=widths.get(column.key, column.width),
                right=column.right and not self._has_room_for_bars,
            )
            for column in COLUMNS
            if (has_several_clusters or column.key != "cluster") and (has_utilization or column.key != "use")
        )
        rows.show([row.key for row in self.shown])
        self._update_frame()

    @property
    def _empty_hint(self) -> str:
        """The text of an empty list: how to start a run."""
        demo = "" if self.app.read_only else "; D starts a demo on this machine"
        return f"no runs yet; dtslurm submit SCRIPT starts one{demo}"

    def _format_cells(self, index: int) -> dict[str, words.StyledText]:
        row = self.shown[index]
        now = self.app.now()
        cells = words.format_job_cells(row, now, expanded=row.token in self.choice.expanded)
        if self.marked and row.token in self.marked and row.task is None:
            cells["name"] = (f"{MARK} {cells['name'][0]}", "accent")
        if row.key in self.uses:
            cells["use"] = (
                draw_spark_line(rebin(self.uses[row.key], USE_WIDTH)),
                "dim" if row.over else "accent",
            )
        return {**cells, "progress": words.draw_progress(row, now)} if self._has_room_for_bars else cells

    @property
    def _has_room_for_bars(self) -> bool:
        """Whether the list is wide enough for progress bars."""
        return self.query_one(Rows).room >= ROOM_FOR_BARS

    def _update_frame(self) -> None:
        """Update all that surrounds the rows: title, borders, details, and the line about the clusters."""
        now = self.app.now()
        settings = []
        if self.choice.filter_text:
            settings.append(f"filter {self.choice.filter_text!r}")
        if self.choice.hide_ended:
            settings.append("ended hidden")
        if self.choice.sort != "newest":
            settings.append(f"by {self.choice.sort}")
        if self.marked:
            settings.append(f"{len(self.marked)} marked, C compares them")
        mode = "  READ-ONLY" if self.app.read_only else ""
        self.show_lines("#title", [(f"dtslurm top{mode}  {words.count_states(self.board)}", "bold")])
        row = self.row()
        frame = self.query_one("#list")
        frame.border_title = escape(f"runs {len(self.shown)}")
        frame.border_subtitle = escape(", ".join(settings))
        self._show_details(row, now)
        cluster_texts = words.describe_clusters(self.board.clusters, now)
        warnings = [cluster_text for cluster_text in cluster_texts if cluster_text[1] != "dim"]
        reachable = "  ".join(text for text, kind in cluster_texts if kind == "dim")
        self.show_lines("#clusters", [*warnings[:2], *([(reachable, "dim")] if reachable else [])][:3])

    def _show_details(self, row: JobRow | None, now: float) -> None:
        """Show the selected run below the list, or in the side panel if the terminal is large enough."""
        lines = words.describe_selected(row, now) if row is not None else []
        self.query_one("#about").border_title = escape(safe(lines[0][0])) if lines else ""
        self.show_lines("#detail", lines[1:])
        panel = self.query_one("#panel")
        if not panel.display:
            return
        panel.border_title = escape(f"{safe(row.name)} {safe(row.job_id)}") if row is not None else ""
        self.show_lines("#facts", words.describe_job(row, now) if row is not None else [])
        curves = self.query_one(Curves)
        curves.display = row is not None and bool(row.losses)
        if row is not None and row.losses:
            curves.show([(f"loss {words.format_short(row.losses[-1][1], 4)}", list(row.losses))])

    def row(self) -> JobRow | None:
        """Return the job under the cursor; None if the list is empty."""
        index = self.query_one(Rows).cursor
        return self.shown[index] if 0 <= index < len(self.shown) else None

    def look_at_ranks(self, row: JobRow) -> None:
        """Open the page of the job with the live diagnosis of its ranks."""
        self.app.open_job(row, live=True)

    def to_copy(self) -> str:
        """Return the job id and the run directory."""
        row = self.row()
        return f"{row.job_id}\n{row.run_dir}" if row is not None else ""

    def on_rows_moved(self) -> None:
        self._update_frame()

    def on_rows_chosen(self, event: Rows.Chosen) -> None:
        """Open the page of the chosen run; for a job array, show or hide its tasks."""
        row = next((row for row in self.shown if row.key == event.key), None)
        if row is None:
            return
        if row.is_array:
            self.choice = replace(self.choice, expanded=self.choice.expanded ^ {row.token})
            self.refill()
        else:
            self.app.open_job(row)

    def on_rows_titled(self, event: Rows.Titled) -> None:
        """Sort by the column whose title was clicked; a second click reverses the order."""
        if event.column in SORTS:
            is_same_column = self.choice.sort == event.column
            self.choice = replace(
                self.choice, sort=event.column, reverse=is_same_column and not self.choice.reverse
            )
            self.refill()

    def action_sort(self) -> None:
        """Sort by the next column."""
        next_sort = SORTS[(SORTS.index(self.choice.sort) + 1) % len(SORTS)]
        self.choice = replace(self.choice, sort=next_sort, reverse=False)
        self.refill()

    def action_reverse(self) -> None:
        """Reverse the sort order."""
        self.choice = replace(self.choice, reverse=not self.choice.reverse)
        self.refill()

    def on_job_rows_marked(self, event: JobRows.Marked) -> None:
        """Toggle the mark of the row's run."""
        token = next((row.token for row in self.shown if row.key == event.key), None)
        if token is None:
            return
        if token in self.marked:
            self.marked.remove(token)
        else:
            self.marked.append(token)
        self.query_one(Rows).refresh()
        self._update_frame()

    def action_compare(self) -> None:
        """Show the marked runs side by side."""
        from dtslurm.services.observe.compare import MOST_RUNS

        if not 2 <= len(self.marked) <= MOST_RUNS:
            self.notify(
                f"2 to {MOST_RUNS} runs can be compared; {len(self.marked)} are marked (space marks one)",
                severity="warning",
            )
            return
        rows_by_token = {row.token: row for row in reversed(self.board.rows)}
        self.notify("comparing …", timeout=2)
        self.app.source.compare([rows_by_token[token] for token in self.marked])

    def action_demo(self) -> None:
        """Start the demo after confirmation, if there are no runs yet."""
        if self.board.rows or self.app.read_only:
            return

        def start_if_confirmed(yes: bool | None) -> None:
            if yes:
                self.app.source.demo()

        self.app.push_screen(
            Confirm("Start a demo on this machine? Two processes fit a line to points for a minute."),
            start_if_confirmed,
        )

    def action_ended(self) -> None:
        """Hide or show ended runs."""
        self.choice = replace(self.choice, hide_ended=not self.choice.hide_ended)
        self.refill()

    def action_filter(self) -> None:
        """Open the input line for the filter."""
        text_input = self.query_one("#filter", Input)
        text_input.display = True
        self.set_focus(text_input)

    def action_unfilter(self) -> None:
        """Remove the filter; without a filter, remove all marks."""
        text_input = self.query_one("#filter", Input)
        if not text_input.display and not self.choice.filter_text:
            self.marked = []
        text_input.value = ""
        text_input.display = False
        self.choice = replace(self.choice, filter_text="")
        self.set_focus(self.query_one(Rows))
        self.refill()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.choice = replace(self.choice, filter_text=event.value)
        self.refill()

    def on_input_submitted(self) -> None:
        """Return to the rows; the input line stays visible if it contains a filter."""
        text_input = self.query_one("#filter", Input)
        text_input.display = bool(text_input.value)
        self.set_focus(self.query_one(Rows))
