"""What the dashboard does for its user at this terminal: questions, shells, copies, themes, commands."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from dtslurm.dashboard import start
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.dialogs import Confirm
from dtslurm.dashboard.feed import Diagnosed
from dtslurm.dashboard.job import JobScreen
from dtslurm.dashboard.jobs import JobsScreen
from dtslurm.dashboard.rows import Rows
from dtslurm.errors import HostUnavailable, RequestInvalid
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.state import JobState
from dtslurm.services.observe.run_list import Board, JobRow
from tests.dashboard.desk import Desk, over
from tests.dashboard.made import NOW, Made, row
from tests.dashboard.screen import seen, settled, told, use


def chosen(app: TopApp) -> str:
    """Return the id of the job under the cursor, empty if there is none."""
    assert isinstance(app.screen, JobsScreen)
    row = app.screen.row()
    return row.job_id if row is not None else ""


def test_the_answer_is_chosen_by_arrows_too() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("c")
        await settled(pilot)
        await pilot.press("right", "left", "enter")  # No
        assert source.asked == []
        await pilot.press("c")
        await settled(pilot)
        await pilot.press("right", "enter")
        await settled(pilot)
        assert source.asked == [("cancel", "4701")]

    use(what, source)


def test_the_palettes_commands_ask_first_as_keys_do() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        commands = {command.title: command.callback for command in app.get_system_commands(app.screen)}
        await pilot.press("down")  # to one that waits
        for title in ("Cancel", "Requeue", "Hold", "Release"):
            commands[title]()
            await pilot.pause()
            assert isinstance(app.screen, Confirm)
            await pilot.press("n")
        commands["Refresh"]()
        assert source.asked == [("poke",)]
        commands["Help"]()
        await settled(pilot)
        assert "the job before" not in seen(app)
        assert "ask the clusters now" in seen(app)

    use(what, source)


def test_in_front_of_a_question_there_is_nothing_to_act_on() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("question_mark")
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Copy", "Cancel", "Shell"}.isdisjoint(titles)
        assert {"Help", "Refresh", "Quit"} <= titles

    use(what)


def test_f5_asks_the_clusters() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("f5")
        assert source.asked == [("poke",)]

    use(what, source)


def verdict(app: TopApp) -> str:
    assert isinstance(app.screen, JobScreen)
    return str(app.screen.query_one("#saying", Static).visual)


@pytest.mark.parametrize("keys", [("d",), ("enter", "d"), ("enter", "5", "d")])
def test_one_key_looks_at_every_rank_of_a_running_job(keys: tuple[str, ...]) -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press(*keys)
        await settled(pilot)
        assert ("live", "4701") in source.asked
        assert isinstance(app.screen, JobScreen)
        assert app.screen.pane == "verdict"
        assert "the job hangs (90%)" in verdict(app)
        source.post(Diagnosed(app.screen.row().key, ("nothing has failed so far",)))  # which came late
        await settled(pilot)
        assert "the job hangs (90%)" in verdict(app)

    use(what, source)


def test_a_job_that_does_not_run_has_no_ranks_to_look_at() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "d")
        assert "there are no ranks to look at: the job does not run" in told(app)
        assert isinstance(app.screen, JobsScreen)
        assert not [asked for asked in source.asked if asked[0] == "live"]

    use(what, source)


def test_a_stalled_job_has_room_for_its_state() -> None:
    activity = Activity(stalled=True, since=NOW - 745, quiet_s=745, summary="no work of any rank")
    source = Made(board=Board(rows=(row(1, activity=activity),), taken_at=NOW))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert "■ STALLED 12m25s " in seen(app)
        assert "d looks at every rank" in seen(app)

    use(what, source)


class Shells(Made):
    """A source whose shells end, or fail to open, as they are told to."""

    end: int | Exception = 0

    def shell(self, row: JobRow, node: str) -> int:
        super().shell(row, node)
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (0, ""),
        (3, "the shell ended with exit code 3"),
        (HostUnavailable("login is gone", hint="is the VPN up?"), "login is gone\nhint: is the VPN up?"),
        (OSError("no terminal"), "no terminal"),
    ],
)  # fmt: skip
def test_how_a_shell_ended_is_told(monkeypatch: pytest.MonkeyPatch, end: int | Exception, words: str) -> None:
    source = Shells()
    source.end = end
    monkeypatch.setattr(TopApp, "suspend", lambda _: nullcontext())

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("x")
        await settled(pilot)
        await pilot.press("y")
        await settled(pilot)
        assert told(app) == words
        assert isinstance(app.screen, JobsScreen)

    use(what, source)
    assert source.asked[0] == ("shell", "4701", "gpu01")


def test_where_the_terminal_cannot_be_given_away_that_is_told() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        app.open_shell(source.board.rows[0], "gpu01")
        await settled(pilot)
        assert "not supported in this environment" in told(app)
        assert source.asked == []

    use(what, source)


def test_a_list_of_nodes_that_cannot_be_read_is_no_place_for_a_shell() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("x")
        await settled(pilot)
        assert told(app) == "a shell opens on a running job only"
        assert isinstance(app.screen, JobsScreen)

    use(what, Made(board=Board(rows=(row(1, nodelist="gpu[01-"),))))


def test_a_file_that_cannot_be_written_does_not_keep_from_copying(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    target = tmp_path / "state" / "copied.txt"

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("y")
        assert app.clipboard == "4701\n/scratch/ada/runs/train-1"
        assert told(app) in {
            f"copied 2 lines; {target}: Not a directory",
            f"copied 2 lines; {target}: File exists",
        }

    use(what, clipboard=target)


def test_where_there_is_no_job_there_is_nothing_to_do() -> None:
    source = Made(board=Board())

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("y", "enter", "x", "c", "pagedown", "pageup")
        await settled(pilot)
        assert (told(app), app.clipboard, chosen(app)) == ("", "", "")
        assert isinstance(app.screen, JobsScreen)

    use(what, source)
    assert source.asked == [("stop",)]


def test_the_cursor_goes_by_screens_and_no_further_than_there_are_jobs() -> None:
    rows = tuple(row(number) for number in range(1, 41))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        screenful = app.screen.query_one(Rows).size.height - 2
        await pilot.press("pagedown")
        assert chosen(app) == str(4701 + screenful)
        await pilot.press("pagedown", "pagedown", "pagedown")
        assert chosen(app) == "4740"
        await settled(pilot)
        assert "train-40" in seen(app)
        await pilot.press("pageup")
        assert chosen(app) == str(4740 - screenful)
        await pilot.press("g")
        await settled(pilot)
        assert chosen(app) == "4701"
        assert "train-40" not in seen(app)

    use(what, Made(board=Board(rows=rows, taken_at=NOW)))


def test_a_title_sorts_and_then_turns_round_and_one_of_no_order_does_nothing() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        title = str(app.screen.query_one(Rows).render_line(0).text)
        name, about = title.index("NAME"), title.index("ABOUT")
        await pilot.click(Rows, offset=(about, 0))
        await settled(pilot)
        assert "▼" not in seen(app)
        await pilot.click(Rows, offset=(name, 0))
        await settled(pilot)
        assert "NAME▼" in seen(app).splitlines()[2]
        await pilot.press("home")
        first = chosen(app)
        await pilot.click(Rows, offset=(name, 0))
        await settled(pilot)
        await pilot.press("end")
        assert chosen(app) == first

    use(what, size=(110, 24))


def test_a_job_that_went_as_it_was_opened_opens_nothing() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        rows = app.screen.query_one(Rows)
        rows.post_message(Rows.Chosen(rows, "gone"))
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)

    use(what)


def test_a_click_below_the_jobs_chooses_none() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.click(Rows, offset=(5, app.screen.query_one(Rows).size.height - 1))
        await settled(pilot)
        assert chosen(app) == "4701"

    use(what, Made(board=Board(rows=(row(1), row(2)))))


def test_the_list_is_left_by_nothing_but_its_end() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        app.leave_job()
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert "4701" in seen(app)

    use(what)


@pytest.fixture
def as_before() -> Iterator[None]:
    """Leave the interpreter as it was found: the dashboard tunes it for its own process."""
    turn, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(turn)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def shown(
    monkeypatch: pytest.MonkeyPatch,
    *,
    theme: str | None = None,
    key: str | None = None,
    ascii_only: bool = False,
) -> tuple[str, str]:
    """Start the dashboard on what there is, and return its theme and what stands on its screen."""
    found: list[tuple[str, str]] = []

    def run(app: TopApp) -> None:
        async def look() -> None:
            async with app.run_test(size=(100, 24)) as pilot:
                for _ in range(200):
                    await settled(pilot)
                    if "asking" not in seen(app):
                        break
                found.append((app.theme, seen(app)))

        asyncio.run(look())

    monkeypatch.setattr(TopApp, "run", run)
    start.run(
        cluster=None, key=key, read_only=False, ascii_only=ascii_only, theme=theme, say=lambda _: ("well",)
    )
    over()
    return found[0]


@pytest.mark.parametrize("theme", ["colour-blind", "nord", None])
@pytest.mark.usefixtures("as_before")
def test_it_starts_in_the_theme_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, theme: str | None
) -> None:
    used, screen = shown(monkeypatch, theme=theme)
    assert used == (theme or "textual-dark")
    assert "no runs yet; dtslurm submit SCRIPT starts one" in screen


@pytest.mark.usefixtures("as_before")
def test_it_starts_with_the_job_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, monkeypatch)
    record, _ = desk.run(1)
    desk.run(2, job="8")
    desk.say("7", JobState.RUNNING, start_time=int(NOW))
    _, screen = shown(monkeypatch, key=record.token, ascii_only=True)
    assert "train  7 on local" in screen
    assert "1 overview" in screen


def test_a_theme_that_there_is_not_is_refused_and_the_others_are_named() -> None:
    with pytest.raises(RequestInvalid, match=r"no theme 'pink' \(there are: .*, and 17 more\)"):
        start.run(cluster=None, key=None, read_only=False, ascii_only=False, theme="pink", say=lambda _: ())
