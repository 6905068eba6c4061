"""One job: overview, ranks, nodes, logs, verdict."""

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
from dtslurm.dashboard.charts.plot import bar
from dtslurm.dashboard.charts.strip_view import StripView
from dtslurm.dashboard.charts.strips import Strips, describe_strips, step_strips, utilization_strips
from dtslurm.dashboard.feed import LAST_LINES, Diagnosed, EarlierAttempts, LogState, RunUtilization, ranges
from dtslurm.dashboard.grid import RankGrid
from dtslurm.dashboard.logview import LogView
from dtslurm.dashboard.rows import Column, Rows
from dtslurm.dashboard.store import LineStore
from dtslurm.dashboard.view import View, pattern_error
from dtslurm.logs.clean import safe
from dtslurm.model.units import duration
from dtslurm.services.observe.run_list import Board, JobRow, with_page
from dtslurm.views.run_page import Page

PANES = ("overview", "ranks", "nodes", "logs", "verdict", "history")
TITLES = {
    "#progress": "progress", "Curves": "curves", "#events": "events", "#tail": "log", "RankGrid": "ranks",
    "#nodelist": "nodes", "#log": "log", "#verdict": "verdict", "#strips": "history",
}  # fmt: skip
_USE_S = 30.0  # between looks at the samples of a run that runs
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


class JobScreen(View):
    """Everything about one job."""

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
            Binding(str(at + 1), f"pane('{name}')", show=False, priority=True)
            for at, name in enumerate(PANES)
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
        self._live = live  # the verdict is on what the ranks do now
        self.page: Page | None = None
        self._earlier: words.Attempts = {}
        self._use: RunUtilization | None = None
        self._use_asked: float | None = None
        self._rank_line = ("", "", "")
        self._lines = LAST_LINES
        self._aimed = False
        self._attempt: int | None = None
        self._typing = ""
        self._typed: dict[str, str] = {"search": "", "filter": "", "ranks": ""}
        self._log_words = ""
        self._verdict_of: tuple[str, int | None] | None = None
        self.store = LineStore(loading=True)

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        tabs = Static(id="tabs")
        tabs.auto_links = False  # link colours are unreadable on the background of the active tab
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
                yield Static("asking …", id="saying", markup=False)
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
        self._refollow()
        failed = self._row.over and not self._row.ok
        if self._live:
            self.look_at_ranks(self._row)
        else:
            self.action_pane("verdict" if failed else "overview")
        self._frame()
        self.set_interval(1.0, self._tick)

    def _tick(self) -> None:
        if self.is_current:
            self._frame()

    # ---- Snapshots

    def take(self, value: object) -> None:
        """Show a board's news of this job, or a page."""
        if isinstance(value, Board):
            before = self._row
            self._row = next((row for row in value.rows if row.key == before.key), before)
            if before.over != self._row.over:
                self._verdict_of, self._live = None, False
                self._ask_verdict()
                self._mark_ended()
        elif isinstance(value, Page) and value.key == self._row.key:
            self.page = value
            self._fill(value)
            self._mark_ended()
            self._show_history()
        elif isinstance(value, RunUtilization) and value.key == self._row.key:
            self._use = value
            self._show_history()
        elif isinstance(value, EarlierAttempts) and value.key == self._row.key:
            self._earlier = value.attempts
            if self.page is not None:
                self._fill(self.page)
        elif isinstance(value, LogState) and value.key == self._row.key:
            self._log_words = value.words
        elif isinstance(value, Diagnosed) and value.key == self._row.key and value.live == self._live:
            self.query_one("#saying", Static).update("\n".join(map(safe, value.lines)))
        else:
            return
        self._frame()

    def _fill(self, page: Page) -> None:
        now = page.now
        self._aim_at_failure(page)
        self._rank_line = words.rank_line(page)
        on_node = [cell.node_rank for cell in page.ranks[:64] if cell.node_rank is not None]
        together = on_node.count(on_node[0]) if on_node else 8
        grid = self.query_one(RankGrid)
        grid.empty = words.nothing_of("ranks", page, over=self._ended)
        grid.show(page.ranks, together)
        curves = self.query_one(Curves)
        curves.empty = words.nothing_of("training metrics", page, over=self._ended)
        earlier = self._earlier if self._attempt is None else {}
        curves.show(words.curves(page, 4, earlier), words.restarts(page, earlier))
        lines = words.activity_words(with_page(self._row, page), "d")
        if page.forecast is not None:
            told = words.forecast_words(page.forecast, now)
            room = min(40, self.size.width - len(told[0]) - 1)
            share = page.forecast.share
            filled = f"{bar(share, room)} " if share is not None and room >= 8 else ""
            lines.append((filled + told[0], "" if page.forecast.stalled else "good"))
            lines += [(line, "warn") for line in told[1:]]
        if page.lost_at is not None:
            lines.append((f"the loss is no number since step {page.lost_at}", "bad"))
        if page.ranks_apart is not None:
            lines.append((safe(page.ranks_apart.text), "bad" if page.ranks_apart.is_fault else "dim"))
        lines += words.standing_out(page)
        self.put("#progress", lines)
        events = self.query_one("#events", VerticalScroll)
        at_end = events.scroll_offset.y >= events.max_scroll_y
        self.put("#timeline", words.timeline(page, now))
        if at_end:
            events.scroll_end(animate=False)
        nodes = self.query_one("#nodelist", Rows)
        nodes.empty = words.nothing_of("samples of nodes", page, over=self._ended)
        nodes.show([cell.name for cell in page.nodes])

    def _show_history(self) -> None:
        """Draw the ranks' step times over time, or the use of GPUs or CPUs where no two ranks tell steps."""
        if self.page is None or self.pane != "history":
            return
        view = self.query_one(StripView)
        use = self._use if self._use is not None and self._use.attempt == self.page.attempt else None
        strips = step_strips(self.page.points, view.room)
        if strips is None:
            self._ask_use(self.page.attempt)
            strips = utilization_strips(use.history, view.room) if use is not None else Strips()
        view.empty = "loading …" if use is None else words.nothing_of("samples", self.page, over=self._ended)
        view.show(strips)
        self.put("#legend", describe_strips(strips, self.app.now()))

    def _ask_use(self, attempt: int) -> None:
        """Ask for the use of GPUs and CPUs: once, and every now and then while the attempt runs."""
        now = self.app.now()
        if self._use_asked is None or (not self._ended and now - self._use_asked > _USE_S):
            self._use_asked = now
            self.app.source.history(self._row, attempt)

    def _frame(self) -> None:
        now = self.app.now()
        head = words.header(with_page(self._row, self.page), self.page, now)
        if self.page is not None:
            age = now - self.page.taken_at
            fresh = f" · seen {duration(age)} ago" if age >= 1 else " · live"
            fresh = "" if self._ended else fresh
            if self.page.trouble:
                seen = f"last seen {duration(age)} ago" if self.page.taken_at else "never seen"
                fresh = f" · {self.page.trouble}; {seen}"
            head[1] = (head[1][0] + fresh, "warn" if self.page.trouble else "dim")
        self.put("#head", head)
        self._tabs()
        self._rank_lines()
        view = self.query_one("#log", LogView)
        told = [view.status(), self._log_words]
        if self.store.skipped:
            told.append(f"the last {self._lines:,} lines of each file, L loads earlier ones")
        self.put("#logline", [(" · ".join(filter(None, told)), "dim")])

    def _tabs(self) -> None:
        text = Text(no_wrap=True, overflow="ellipsis")
        current = self.query_one(ContentSwitcher).current
        for at, name in enumerate(PANES):
            chosen = name == current
            style = theme.style(self.app, "dim")
            if chosen:
                ground = theme.ground(self.app, "primary")
                style = Style(color=theme.on(ground)) + ground
            text.append(f" {at + 1} {name} ", style=style)
            text.apply_meta({"@click": f"screen.pane('{name}')"}, len(text) - len(name) - 4, len(text))
            text.append(" ")
        self.query_one("#tabs", Static).update(text)

    def _rank_lines(self) -> None:
        grid = self.query_one(RankGrid)
        if self.page is not None:
            legend = {"state": "state", "gpu": "GPU %", "memory": "GPU memory %", "silence": "seconds silent"}
            columns = "rank, GPU, memory, silent" if grid.cards else legend[grid.mode]
            before, after, kind = self._rank_line
            self.put("#rankline", [(" · ".join(filter(None, (before, columns, after))), kind)])
        cell = grid.chosen
        if cell is not None:
            self.put(
                "#rank", [(line, "") for line in words.wrap_text(words.rank_words(cell), self.size.width, 2)]
            )

    def _node_cells(self, at: int) -> dict[str, words.Piece]:
        return words.node_cells(self.page.nodes[at]) if self.page is not None else {}

    # ---- Panes

    @property
    def pane(self) -> str:
        """The pane that is shown."""
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
            self._ask_verdict()
        self.call_after_refresh(self._show_history)  # a pane has a width once it has been laid out
        self._frame()
        self.refresh_bindings()

    def action_next(self, step: int) -> None:
        """Show the next or previous pane."""
        self.action_pane(PANES[(PANES.index(self.pane) + step) % len(PANES)])

    def action_attempt(self, step: int) -> None:
        """Show another attempt."""
        if self.page is None or not self.page.attempts:
            return
        there = self.page.attempts
        at = there.index(self.page.attempt) if self.page.attempt in there else len(there) - 1
        chosen = there[max(0, min(len(there) - 1, at + step))]
        self._attempt = None if chosen == there[-1] else chosen
        self.notify(f"attempt {chosen}", timeout=1.5)
        self.app.source.watch(self._row, self._attempt)
        self._refollow()
        self._aimed = False
        self._use, self._use_asked = None, None
        self._verdict_of, self._live = None, False
        self._ask_verdict()

    @property
    def _ended(self) -> bool:
        """Whether the attempt that is shown has ended."""
        if self._row.over or self._attempt is not None:
            return True
        return self._row.pending and self.page is not None and bool(self.page.attempts)

    def _mark_ended(self) -> None:
        for view in self.query(LogView):
            view.ended = self._ended

    def _aim_at_failure(self, page: Page) -> None:
        """Open the log of an attempt that ended with a failure at that failure, once."""
        failure = page.first_failure
        if failure is None or not self._ended or self._aimed:
            return
        self._aimed = True
        self.query_one("#log", LogView).aim(str(failure.rank), failure.error)

    def _ask_verdict(self) -> None:
        wanted = (self._row.key, self._attempt)
        if self.pane == "verdict" and self._verdict_of != wanted:
            self._verdict_of = wanted
            self.app.source.verdict(self._row, self._attempt)

    def look_at_ranks(self, row: JobRow) -> None:
        """Show what every rank does now in place of the verdict."""
        self._live, self._verdict_of = True, (row.key, self._attempt)
        self.query_one("#saying", Static).update("looking at every rank …")
        self.action_pane("verdict")
        self.app.source.live(row)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer what a pane has a use for."""
        if action in {"type", "earlier"} and self.is_mounted and self.pane != "logs":
            return False
        return super().check_action(action, parameters)

    # ---- Typing

    def action_type(self, what: str) -> None:
        """Type a search, a filter, or which ranks."""
        line = self.query_one("#typing", Input)
        self._typing = what
        line.placeholder = {
            "search": "search: a regular expression",
            "filter": "only lines that match this regular expression",
            "ranks": "ranks such as 0,3-7, or * for all",
        }[what]
        line.value = self._typed[what]
        line.display = True
        self.set_focus(line)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        what, text = self._typing, event.value.strip()
        log = self.query_one("#log", LogView)
        wrong = ""
        if what == "ranks":
            try:
                ranges(text)
            except ValueError as error:
                wrong = str(error)
            else:
                self._refollow(text)
                self._typed["ranks"] = text
        else:
            wrong = pattern_error(log.search if what == "search" else log.filter, text)
        if wrong:
            self.notify(wrong, severity="error", markup=False)
            return
        self._typed[what] = text
        event.input.display = False
        self.set_focus(log)

    def _refollow(self, ranks: str | None = None) -> None:
        """Show the output of these ranks, or of those chosen before, from its newest line on."""
        ranks = self._typed["ranks"] if ranks is None else ranks
        self.store = LineStore(loading=True)
        for view in self.query(LogView):
            view.use(self.store)
        self._mark_ended()
        self.app.source.follow(self._row, self.store, ranks, attempt=self._attempt, lines=self._lines)

    def action_earlier(self) -> None:
        """Load ten times as many lines of each file, if there are earlier ones."""
        if self.store.loading:
            return
        if not self.store.skipped:
            self.notify("there are no earlier lines", timeout=2)
            return
        self._lines *= 10
        self._refollow()

    def action_back(self) -> None:
        """Close what is typed, then end the filter, then leave."""
        line = self.query_one("#typing", Input)
        log = self.query_one("#log", LogView)
        if line.display:
            line.display = False
            self.set_focus(log)
        elif self.pane == "logs" and log.words:
            self._typed["filter"] = ""
            log.filter("")
        else:
            self.action_leave()

    def action_leave(self) -> None:
        """Go back to the list."""
        self.app.source.watch(None)
        self.app.source.follow(None, self.store)
        self.store.clear()
        self.app.leave_job()

    def on_rank_grid_moved(self) -> None:
        self._rank_lines()

    def on_rank_grid_chosen(self, event: RankGrid.Chosen) -> None:
        self._typed["ranks"] = str(event.rank)
        self._refollow()
        failure = self.page.first_failure if self.page is not None else None
        if failure is not None and failure.rank == event.rank:
            self.query_one("#log", LogView).aim(str(failure.rank), failure.error)
        self.action_pane("logs")

    def on_log_view_status(self) -> None:
        self._frame()

    # ---- Actions

    def attempt(self) -> int | None:
        """Return the attempt that was chosen, None for the newest."""
        return self._attempt

    def shown_rank(self) -> int | None:
        """Return the rank under the cursor, or whose log is shown, or that failed first.

        None where no rank is known.
        """
        if self.page is None or not self.page.ranks:
            return None
        chosen = self.query_one(RankGrid).chosen
        if self.pane == "ranks" and chosen is not None:
            return chosen.rank
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
        """Return the job."""
        return self._row

    def node(self) -> str | None:
        """Return the node under the cursor, or the chosen rank's, or the first."""
        if self.pane == "nodes" and self.query_one("#nodelist", Rows).key is not None:
            return self.query_one("#nodelist", Rows).key
        chosen = self.query_one(RankGrid).chosen
        if self.pane == "ranks" and chosen is not None and chosen.host:
            return chosen.host
        return super().node()

    def to_copy(self) -> str:
        """Return what the pane shows, as text."""
        if self.pane == "logs":
            return self.query_one("#log", LogView).visible_text()
        if self.pane == "verdict":
            return str(self.query_one("#saying", Static).visual)
        if self.pane == "ranks" and (cell := self.query_one(RankGrid).chosen) is not None:
            return words.rank_words(cell)
        return f"{self._row.job_id}\n{self._row.run_dir}"
