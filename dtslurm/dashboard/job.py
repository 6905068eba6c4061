"""The page of one job with its panes: overview, ranks, nodes, logs, verdict and history."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import ContentSwitcher, Footer, Input, Static

from dtslurm.dashboard import theme, words
from dtslurm.dashboard.actions.handoffs import EDITOR, PAGER, Opener
from dtslurm.dashboard.charts.curves import Curves
from dtslurm.dashboard.charts.plot import draw_bar
from dtslurm.dashboard.charts.strip_view import StripView
from dtslurm.dashboard.charts.strips import Strips, describe_strips, step_strips, utilization_strips
from dtslurm.dashboard.feed import (
    LAST_LINES,
    Diagnosed,
    EarlierAttempts,
    LogState,
    RunUtilization,
    parse_rank_ranges,
)
from dtslurm.dashboard.grid import RankGrid
from dtslurm.dashboard.logview import LogView
from dtslurm.dashboard.rows import Column, Rows
from dtslurm.dashboard.store import LineStore
from dtslurm.dashboard.view import BaseScreen, pattern_error
from dtslurm.logs.clean import safe
from dtslurm.presentation.quantities import duration
from dtslurm.services.observe.run_list import Board, JobRow, add_page
from dtslurm.views.run_page import Page

PANES = ("overview", "ranks", "nodes", "logs", "verdict", "history")
TITLES = {
    "#progress": "progress", "Curves": "curves", "#events": "events", "#tail": "log", "RankGrid": "ranks",
    "#nodelist": "nodes", "#log": "log", "#verdict": "verdict", "#strips": "history",
}  # fmt: skip
_UTILIZATION_S = 30.0  # between reads of the samples of a running job
NODE_COLUMNS = (
    Column("node", "NODE", 10, share=1),
    Column("gpu", "GPU", 5, right=True),
    Column("memory", "GMEM", 5, right=True),
    Column("heat", "TEMP", 5, rank=3, right=True),
    Column("cpu", "CPU", 5, rank=1, right=True),
    Column("ram", "RAM", 5, rank=2, right=True),
    Column("rx", "RX/s", 6, rank=4, right=True),
    Column("tx", "TX/s", 6, rank=5, right=True),
    Column("disk", "DISK", 5, rank=6, right=True),
    Column("gpus", "EACH GPU", 24, rank=8),
    Column("about", "ABOUT", 10, share=2, rank=7),
)


class JobScreen(BaseScreen):
    """The screen of one job."""

    DEFAULT_CSS = """
    JobScreen Static { width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    JobScreen #head { height: 2; background: $panel; }
    JobScreen #tabs { height: 1; background: $surface; link-style: none; }
    JobScreen ContentSwitcher { height: 1fr; }
    JobScreen #overview, JobScreen #ranks, JobScreen #nodes, JobScreen #logs { height: 1fr; }
    JobScreen #progress { height: auto; }
    JobScreen Curves { height: 40%; min-height: 4; max-height: 16; }
    JobScreen #events { height: auto; max-height: 30%; }
    JobScreen #tail { height: 1fr; }
    JobScreen #legend { height: 2; background: $surface; }
    JobScreen .titled { border-top: solid $primary; border-title-align: left; }
    JobScreen.-tall .titled { border: round $primary; }
    JobScreen.-short #progress, JobScreen.-short #nodelist, JobScreen.-short #log, JobScreen.-short #verdict,
    JobScreen.-short RankGrid, JobScreen.-short StripView { border-top: none; }
    JobScreen #events Static, JobScreen #verdict Static { height: auto; }
    JobScreen #rankline, JobScreen #rank { height: 1; }
    JobScreen #rank { height: 2; background: $surface; }
    JobScreen #logline { height: 1; background: $surface; }
    JobScreen Input { height: 1; border: none; padding: 0 1; display: none; }
    """
    VERTICAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-short"), (36, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(index + 1), f"pane('{name}')", show=False, priority=True)
            for index, name in enumerate(PANES)
        ),
        Binding("tab", "next(1)", "pane", priority=True),
        Binding("shift+tab", "next(-1)", show=False, priority=True),
        Binding("left_square_bracket", "attempt(-1)", show=False),
        Binding("right_square_bracket", "attempt(1)", show=False),
        Binding("slash", "type('search')", "search", key_display="/", priority=True),
        Binding("f", "type('filter')", "filter", priority=True),
        Binding("r", "type('ranks')", "ranks", priority=True),
        Binding("L", "earlier", show=False, priority=True),
        Binding("p", "page_log", show=False, priority=True),
        Binding("v", "edit_log", show=False, priority=True),
        Binding("escape", "back", show=False),
        Binding("q", "leave", "back"),
    ]

    def __init__(self, row: JobRow, *, live: bool = False) -> None:
        super().__init__()
        self._row = row
        self._is_live = live  # the verdict pane shows the live diagnosis
        self.page: Page | None = None
        self._earlier_attempts: words.Attempts = {}
        self._utilization: RunUtilization | None = None
        self._utilization_queried_at: float | None = None
        self._rank_line_parts = ("", "", "")
        self._lines_per_file = LAST_LINES
        self._has_aimed = False
        self._attempt: int | None = None
        self._input_purpose = ""
        self._input_texts: dict[str, str] = {"search": "", "filter": "", "ranks": ""}
        self._log_status = ""
        self._diagnosis_request: tuple[str, int | None] | None = None
        self.store = LineStore(loading=True)

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        tabs = Static(id="tabs")
        tabs.auto_links = False  # link colors are unreadable on the active tab's background
        yield tabs
        with ContentSwitcher(initial="overview"):
            with Vertical(id="overview"):
                yield Static(id="progress", markup=False)
                yield Curves()
                with VerticalScroll(id="events"):
                    yield Static(id="timeline", markup=False)
                yield LogView(self.store, id="tail")
            with Vertical(id="ranks"):
                yield Static(id="rankline", markup=False)
                yield RankGrid()
                yield Static(id="rank", markup=False)
            with Vertical(id="nodes"):
                yield Rows(NODE_COLUMNS, self._node_cells, empty="loading …", id="nodelist")
            with Vertical(id="logs"):
                yield LogView(self.store, id="log")
                yield Static(id="logline", markup=False)
            with VerticalScroll(id="verdict"):
                yield Static("querying …", id="saying", markup=False)
            with Vertical(id="history"):
                yield StripView(id="strips")
                yield Static(id="legend", markup=False)
        yield Input(id="typing")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        for selector, title in TITLES.items():
            panel = self.query_one(selector)
            panel.add_class("titled")
            panel.border_title = title
        self.app.source.watch(self._row, self._attempt)
        self._restart_following()
        has_failed = self._row.over and not self._row.ok
        if self._is_live:
            self.look_at_ranks(self._row)
        else:
            self.action_pane("verdict" if has_failed else "overview")
        self._update_frame()
        self.set_interval(1.0, self._tick)

    def _tick(self) -> None:
        if self.is_current:
            self._update_frame()

    # ---- Snapshots

    def take(self, value: object) -> None:
        """Update the screen from a snapshot; ignore snapshots of other jobs."""
        if isinstance(value, Board):
            previous_row = self._row
            self._row = next((row for row in value.rows if row.key == previous_row.key), previous_row)
            if previous_row.over != self._row.over:
                self._diagnosis_request, self._is_live = None, False
                self._request_diagnosis()
                self._mark_ended()
        elif isinstance(value, Page) and value.key == self._row.key:
            self.page = value
            self._fill_panes(value)
            self._mark_ended()
            self._show_history()
        elif isinstance(value, RunUtilization) and value.key == self._row.key:
            self._utilization = value
            self._show_history()
        elif isinstance(value, EarlierAttempts) and value.key == self._row.key:
            self._earlier_attempts = value.attempts
            if self.page is not None:
                self._fill_panes(self.page)
        elif isinstance(value, LogState) and value.key == self._row.key:
            self._log_status = value.text
        elif isinstance(value, Diagnosed) and value.key == self._row.key and value.live == self._is_live:
            self.query_one("#saying", Static).update("\n".join(map(safe, value.lines)))
        else:
            return
        self._update_frame()

    def _fill_panes(self, page: Page) -> None:
        now = page.now
        self._aim_at_failure(page)
        self._rank_line_parts = words.format_rank_line(page)
        node_ranks = [cell.node_rank for cell in page.ranks[:64] if cell.node_rank is not None]
        ranks_per_node = node_ranks.count(node_ranks[0]) if node_ranks else 8
        grid = self.query_one(RankGrid)
        grid.empty = words.describe_empty_pane("ranks", page, has_ended=self._has_ended)
        grid.show(page.ranks, ranks_per_node)
        curves = self.query_one(Curves)
        curves.empty = words.describe_empty_pane("training metrics", page, has_ended=self._has_ended)
        earlier = self._earlier_attempts if self._attempt is None else {}
        curves.show(words.select_curves(page, 4, earlier), words.find_restarts(page, earlier))
        lines = words.describe_activity(add_page(self._row, page), "d")
        if page.forecast is not None:
            forecast_lines = words.describe_forecast(page.forecast, now)
            room = min(40, self.size.width - len(forecast_lines[0]) - 1)
            share = page.forecast.share
            progress = f"{draw_bar(share, room)} " if share is not None and room >= 8 else ""
            lines.append((progress + forecast_lines[0], "" if page.forecast.stalled else "good"))
            lines += [(line, "warn") for line in forecast_lines[1:]]
        lines += words.describe_faults(page)
        lines += words.describe_roles(page, has_ended=self._has_ended)
        lines += words.describe_outliers(page)
        self.show_lines("#progress", lines)
        events = self.query_one("#events", VerticalScroll)
        is_at_end = events.scroll_offset.y >= events.max_scroll_y
        self.show_lines("#timeline", words.format_timeline(page, now))
        if is_at_end:
            events.scroll_end(animate=False)
        nodes = self.query_one("#nodelist", Rows)
        nodes.empty = words.describe_empty_pane("samples of nodes", page, has_ended=self._has_ended)
        nodes.show([cell.name for cell in page.nodes])

    def _show_history(self) -> None:
        """Draw the ranks' step times over time, or the utilization if fewer than two ranks report steps."""
        if self.page is None or self.pane != "history":
            return
        view = self.query_one(StripView)
        utilization = (
            self._utilization
            if self._utilization is not None and self._utilization.attempt == self.page.attempt
            else None
        )
        strips = step_strips(self.page.points, view.room)
        if strips is None:
            self._request_utilization(self.page.attempt)
            strips = (
                utilization_strips(utilization.history, view.room) if utilization is not None else Strips()
            )
        view.empty = (
            "loading …"
            if utilization is None
            else words.describe_empty_pane("samples", self.page, has_ended=self._has_ended)
        )
        view.show(strips)
        self.show_lines("#legend", describe_strips(strips, self.app.now()))

    def _request_utilization(self, attempt: int) -> None:
        """Request the GPU and CPU utilization: once, and every `_UTILIZATION_S` seconds until the end."""
        now = self.app.now()
        if self._utilization_queried_at is None or (
            not self._has_ended and now - self._utilization_queried_at > _UTILIZATION_S
        ):
            self._utilization_queried_at = now
            self.app.source.history(self._row, attempt)

    def _update_frame(self) -> None:
        now = self.app.now()
        head = words.format_header(add_page(self._row, self.page), self.page, now)
        if self.page is not None:
            age = now - self.page.taken_at
            freshness = f" · updated {duration(age)} ago" if age >= 1 else " · live"
            freshness = "" if self._has_ended else freshness
            if self.page.trouble:
                last_seen = f"last update {duration(age)} ago" if self.page.taken_at else "no update yet"
                freshness = f" · {self.page.trouble}; {last_seen}"
            head[1] = (head[1][0] + freshness, "warn" if self.page.trouble else "dim")
        self.show_lines("#head", head)
        self._draw_tabs()
        self._draw_rank_lines()
        view = self.query_one("#log", LogView)
        parts = [view.status(), self._log_status]
        if self.store.skipped:
            parts.append(f"the last {self._lines_per_file:,} lines of each file, L loads earlier ones")
        self.show_lines("#logline", [(" · ".join(filter(None, parts)), "dim")])

    def _draw_tabs(self) -> None:
        text = Text(no_wrap=True, overflow="ellipsis")
        current = self.query_one(ContentSwitcher).current
        for index, name in enumerate(PANES):
            is_current = name == current
            style = theme.style(self.app, "dim")
            if is_current:
                background = theme.ground(self.app, "primary")
                style = Style(color=theme.choose_text_colour(background)) + background
            text.append(f" {index + 1} {name} ", style=style)
            text.apply_meta({"@click": f"screen.pane('{name}')"}, len(text) - len(name) - 4, len(text))
            text.append(" ")
        self.query_one("#tabs", Static).update(text)

    def _draw_rank_lines(self) -> None:
        grid = self.query_one(RankGrid)
        if self.page is not None:
            mode_titles = {
                "state": "state",
                "gpu": "GPU %",
                "memory": "GPU memory %",
                "silence": "seconds without output",
            }
            columns = "rank, GPU, memory, seconds without output" if grid.cards else mode_titles[grid.mode]
            prefix, suffix, kind = self._rank_line_parts
            self.show_lines("#rankline", [(" · ".join(filter(None, (prefix, columns, suffix))), kind)])
        cell = grid.chosen
        if cell is not None:
            lines = words.wrap_text(words.describe_rank(cell), self.size.width, 2)
            self.show_lines("#rank", [(line, "") for line in lines])

    def _node_cells(self, index: int) -> dict[str, words.StyledText]:
        return words.format_node_cells(self.page.nodes[index]) if self.page is not None else {}

    # ---- Panes

    @property
    def pane(self) -> str:
        """The name of the visible pane."""
        return self.query_one(ContentSwitcher).current or "overview"

    def action_pane(self, name: str) -> None:
        """Show a pane."""
        self.query_one(ContentSwitcher).current = name
        focus = {
            "overview": "#tail", "ranks": "RankGrid", "nodes": "#nodelist", "logs": "#log",
            "history": "#strips",
        }  # fmt: skip
        self.set_focus(self.query_one(focus.get(name, "#verdict")))
        if name == "verdict":
            self._request_diagnosis()
        self.call_after_refresh(self._show_history)  # a pane has no width before its layout
        self._update_frame()
        self.refresh_bindings()

    def action_next(self, step: int) -> None:
        """Show the next or previous pane."""
        self.action_pane(PANES[(PANES.index(self.pane) + step) % len(PANES)])

    def action_attempt(self, step: int) -> None:
        """Show the attempt ``step`` positions after the present one."""
        if self.page is None or not self.page.attempts:
            return
        attempts = self.page.attempts
        index = attempts.index(self.page.attempt) if self.page.attempt in attempts else len(attempts) - 1
        selected = attempts[max(0, min(len(attempts) - 1, index + step))]
        self._attempt = None if selected == attempts[-1] else selected
        self.notify(f"attempt {selected}", timeout=1.5)
        self.app.source.watch(self._row, self._attempt)
        self._restart_following()
        self._has_aimed = False
        self._utilization, self._utilization_queried_at = None, None
        self._diagnosis_request, self._is_live = None, False
        self._request_diagnosis()

    @property
    def _has_ended(self) -> bool:
        """Whether the shown attempt has ended."""
        if self._row.over or self._attempt is not None:
            return True
        return self._row.pending and self.page is not None and bool(self.page.attempts)

    def _mark_ended(self) -> None:
        for view in self.query(LogView):
            view.ended = self._has_ended

    def _aim_at_failure(self, page: Page) -> None:
        """Scroll the log of a failed, ended attempt to its first failure, once."""
        failure = page.first_failure
        if failure is None or not self._has_ended or self._has_aimed:
            return
        self._has_aimed = True
        self.query_one("#log", LogView).aim(str(failure.rank), failure.error)

    def _request_diagnosis(self) -> None:
        request = (self._row.key, self._attempt)
        if self.pane == "verdict" and self._diagnosis_request != request:
            self._diagnosis_request = request
            self.app.source.verdict(self._row, self._attempt)

    def look_at_ranks(self, row: JobRow) -> None:
        """Show the live diagnosis of every rank instead of the diagnosis of the run."""
        self._is_live, self._diagnosis_request = True, (row.key, self._attempt)
        self.query_one("#saying", Static).update("looking at every rank …")
        self.action_pane("verdict")
        self.app.source.live(row)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the log actions outside the log pane."""
        if action in {"type", "earlier"} and self.is_mounted and self.pane != "logs":
            return False
        return super().check_action(action, parameters)

    # ---- Input line

    def action_type(self, purpose: str) -> None:
        """Open the input line for a search, a filter, or a list of ranks."""
        text_input = self.query_one("#typing", Input)
        self._input_purpose = purpose
        text_input.placeholder = {
            "search": "search: a regular expression",
            "filter": "only lines that match this regular expression",
            "ranks": "ranks such as 0,3-7, or * for all",
        }[purpose]
        text_input.value = self._input_texts[purpose]
        text_input.display = True
        self.set_focus(text_input)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        purpose, text = self._input_purpose, event.value.strip()
        log = self.query_one("#log", LogView)
        problem = ""
        if purpose == "ranks":
            try:
                parse_rank_ranges(text)
            except ValueError as error:
                problem = str(error)
            else:
                self._restart_following(text)
                self._input_texts["ranks"] = text
        else:
            problem = pattern_error(log.search if purpose == "search" else log.filter, text)
        if problem:
            self.notify(problem, severity="error", markup=False)
            return
        self._input_texts[purpose] = text
        event.input.display = False
        self.set_focus(log)

    def _restart_following(self, ranks: str | None = None) -> None:
        """Follow the output of these ranks, or of the previously selected ranks, in a new store."""
        ranks = self._input_texts["ranks"] if ranks is None else ranks
        self.store = LineStore(loading=True)
        for view in self.query(LogView):
            view.show_store(self.store)
        self._mark_ended()
        self.app.source.follow(
            self._row, self.store, ranks, attempt=self._attempt, lines=self._lines_per_file
        )

    def action_earlier(self) -> None:
        """Load ten times as many lines of each file, if there are earlier lines."""
        if self.store.loading:
            return
        if not self.store.skipped:
            self.notify("there are no earlier lines", timeout=2)
            return
        self._lines_per_file *= 10
        self._restart_following()

    def action_back(self) -> None:
        """Close the input line, else remove the log filter, else leave the page."""
        text_input = self.query_one("#typing", Input)
        log = self.query_one("#log", LogView)
        if text_input.display:
            text_input.display = False
            self.set_focus(log)
        elif self.pane == "logs" and log.filter_text:
            self._input_texts["filter"] = ""
            log.filter("")
        else:
            self.action_leave()

    def action_leave(self) -> None:
        """Return to the job list."""
        self.app.source.watch(None)
        self.app.source.follow(None, self.store)
        self.store.clear()
        self.app.leave_job()

    def on_rank_grid_moved(self) -> None:
        self._draw_rank_lines()

    def on_rank_grid_chosen(self, event: RankGrid.Chosen) -> None:
        self._input_texts["ranks"] = str(event.rank)
        self._restart_following()
        failure = self.page.first_failure if self.page is not None else None
        if failure is not None and failure.rank == event.rank:
            self.query_one("#log", LogView).aim(str(failure.rank), failure.error)
        self.action_pane("logs")

    def on_log_view_status(self) -> None:
        self._update_frame()

    # ---- Actions

    def attempt(self) -> int | None:
        """Return the selected attempt; None for the newest."""
        return self._attempt

    def shown_rank(self) -> int | None:
        """Return the rank under the cursor, else the rank whose log is shown, else the first failed rank.

        Without any of these, return the first rank; None if no rank is known.
        """
        if self.page is None or not self.page.ranks:
            return None
        selected = self.query_one(RankGrid).chosen
        if self.pane == "ranks" and selected is not None:
            return selected.rank
        source = self.query_one("#log", LogView).source if self.pane == "logs" else ""
        if source.isdecimal():
            return int(source)
        failure = self.page.first_failure
        return failure.rank if failure is not None else self.page.ranks[0].rank

    def action_page_log(self) -> None:
        """Open the log of the shown rank in the pager."""
        self._open_log(PAGER)

    def action_edit_log(self) -> None:
        """Open the log of the shown rank in the editor."""
        self._open_log(EDITOR)

    def _open_log(self, opener: Opener) -> None:
        rank = self.shown_rank()
        if self.page is None or rank is None:
            self.notify("no rank of this run has started: there is no log to open", severity="warning")
            return
        self.app.open_log(self._row, rank, self.page.attempt, opener)

    def row(self) -> JobRow:
        """Return the job of this page."""
        return self._row

    def node(self) -> str | None:
        """Return the node under the cursor, else the node of the selected rank, else the first node."""
        if self.pane == "nodes" and self.query_one("#nodelist", Rows).key is not None:
            return self.query_one("#nodelist", Rows).key
        selected = self.query_one(RankGrid).chosen
        if self.pane == "ranks" and selected is not None and selected.host:
            return selected.host
        return super().node()

    def to_copy(self) -> str:
        """Return the text of the pane; of other panes, the job id and the run directory."""
        if self.pane == "logs":
            return self.query_one("#log", LogView).visible_text()
        if self.pane == "verdict":
            return str(self.query_one("#saying", Static).visual)
        if self.pane == "ranks" and (cell := self.query_one(RankGrid).chosen) is not None:
            return words.describe_rank(cell)
        return f"{self._row.job_id}\n{self._row.run_dir}"
