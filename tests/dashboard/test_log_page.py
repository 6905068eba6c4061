"""The page of a job's output in use: searching, filtering, scrolling, and lines that go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from textual.events import MouseScrollUp
from textual.geometry import Region
from textual.pilot import Pilot

from dtslurm.dashboard import theme as look
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.logview import EXCEPTION, LogView, line_kind
from dtslurm.dashboard.store import CHUNK, LineStore
from tests.dashboard.screen import seen, told, use

Reading = Callable[[Pilot[None], TopApp, LogView], Awaitable[None]]


def reading(what: Reading, *lines: str) -> None:
    """Look at a job's output: at what is made up of every job, or at these lines."""

    async def at_the_log(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4")
        await rested(pilot)
        view = app.screen.query_one("#log", LogView)
        if lines:
            store = LineStore()
            store.add("0", "".join(f"{line}\n" for line in lines).encode())
            view.use(store)
            await rested(pilot)
        await what(pilot, app, view)

    use(at_the_log)


async def rested(pilot: Pilot[None]) -> None:
    """Wait until what was asked for is found, and all lines are looked at and drawn."""
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()
    view = pilot.app.screen.query_one("#log", LogView)
    view._tick()
    while view._filter is not None and view._filtered < view.store.total:
        view._tick()
    await pilot.pause()


def marked(view: LogView) -> list[str]:
    """Return what of the lines on the screen is marked as found."""
    drawn = view.render_lines(Region(0, 0, *view.size))
    return [part.text for strip in drawn for part in strip if part.style is not None and part.style.reverse]


def top(view: LogView) -> str:
    return view.visible_text().splitlines()[0]


NUMBERED = tuple(f"line {number}" for number in range(200))


def test_a_search_goes_back_and_forth_and_says_where_it_ends() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        place = view.scroll_offset.y
        await pilot.press("n")
        await rested(pilot)
        assert (view.scroll_offset.y, told(app)) == (place, "")  # nothing is searched for yet
        await pilot.press("slash", *"ine 1?50$", "enter")
        await rested(pilot)
        assert marked(view) == ["ine 150"]  # the newest, as the newest were followed
        await pilot.press("N")
        await rested(pilot)
        assert marked(view) == ["ine 50"]
        await pilot.press("N")
        await rested(pilot)
        assert told(app) == "no match above; n goes down"
        assert marked(view) == ["ine 50"]
        await pilot.press("n")
        await rested(pilot)
        assert marked(view) == ["ine 150"]

    reading(what, *NUMBERED)


def test_an_empty_search_ends_the_search() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        await pilot.press("slash", *"line 7$", "enter")
        await rested(pilot)
        assert marked(view) == ["line 7"]
        await pilot.press("slash", "ctrl+u", "enter")
        await rested(pilot)
        assert marked(view) == []
        place = view.scroll_offset.y
        await pilot.press("n")
        await rested(pilot)
        assert view.scroll_offset.y == place
        assert told(app) == ""

    reading(what, *NUMBERED)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("gr.", ["Grö"]), (".e", ["ße", "Me", "te"]), ("ß|[\\x80-\\xff]", ["ö", "ß", "数", "据"]), ("x*", [])],
)
def test_what_is_found_are_whole_characters(pattern: str, found: list[str]) -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        view.search(pattern)
        await rested(pilot)
        assert marked(view) == found
        assert "Größe 12 数据 Meter" in seen(app)

    reading(what, "Größe 12 数据 Meter")


def test_what_is_found_beside_the_filter_ends_the_filter() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        await pilot.press("f", *"line 1.", "enter")
        await rested(pilot)
        assert "110 of 201 lines match 'line 1.'" in seen(app)
        await pilot.press("e")
        await rested(pilot)
        assert "Traceback" in seen(app)
        assert "201 lines" in seen(app)
        assert "match" not in view.status()

    reading(what, *NUMBERED, "Traceback (most recent call last):")


def test_what_is_found_within_the_filter_leaves_it() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        await pilot.press("f", *"line 1..", "enter")
        await rested(pilot)
        await pilot.press("slash", *"105", "enter")
        await rested(pilot)
        assert marked(view) == ["105"]
        assert "100 of 200 lines match" in seen(app)

    reading(what, *NUMBERED)


def test_the_first_line_is_found_from_where_no_line_is_shown() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        await pilot.press("f", *"nothing like it", "enter")
        await rested(pilot)
        assert view.count == 0
        await pilot.press("e")
        await rested(pilot)
        assert "Traceback" in seen(app)

    reading(what, "Traceback (most recent call last):", *NUMBERED)


def test_errors_are_gone_through_both_ways() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        await pilot.press("E")
        await rested(pilot)
        assert "ValueError: two" in view.visible_text()
        await pilot.press("E")
        await rested(pilot)
        assert "ValueError: one" in view.visible_text()
        await pilot.press("e")
        await rested(pilot)
        assert "ValueError: two" in view.visible_text()

    reading(what, *NUMBERED, "ValueError: one", *NUMBERED, "ValueError: two", *NUMBERED)


def test_who_scrolls_stays_there_until_told_to_follow_again() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        page = view.size.height
        assert "following" in seen(app)
        await pilot.press("up")
        await rested(pilot)
        assert "paused, End follows" in seen(app)
        assert top(view) == f"0: line {200 - page - 1}"
        await pilot.press("pageup")
        assert top(view) == f"0: line {200 - page - 1 - (page - 1)}"
        await pilot.press("g", "space", "j")
        assert top(view) == f"0: line {page}"
        view.store.add("0", b"the newest\n")
        await rested(pilot)
        assert top(view) == f"0: line {page}"
        await pilot.press("G")
        await rested(pilot)
        assert "the newest" in seen(app)
        assert "paused" not in seen(app)

    reading(what, *NUMBERED)


def test_the_wheel_pauses_too() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        view.post_message(MouseScrollUp(view, 5, 5, 0, -1, 0, False, False, False))
        await rested(pilot)
        assert "paused, End follows" in seen(app)

    reading(what, *NUMBERED)


def test_long_lines_are_read_sideways() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        assert "0 begin" in seen(app)
        assert "xend" not in seen(app)
        await pilot.press("right")
        assert "0 " + "x" * 70 in seen(app)
        await pilot.press(*["right"] * 5)
        assert "xend" in seen(app)
        await pilot.press(*["left"] * 9)
        assert "0 begin" in seen(app)

    reading(what, "begin   " + "x" * 100 + "end")


def test_lines_that_go_do_not_move_what_is_read() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        store = LineStore(most_lines=CHUNK)
        view.use(store)
        store.add("0", b"".join(b"line %d\n" % number for number in range(3 * CHUNK)))
        await rested(pilot)
        await pilot.press("up")
        before = view.visible_text()
        assert top(view).startswith("0: line 12")
        store.add("0", b"more\n" * CHUNK)
        await rested(pilot)
        assert store.first == 2 * CHUNK
        assert view.visible_text() == before
        assert "8,192 older ones dropped" in view.status()
        store.add("0", b"more\n" * 3 * CHUNK)
        await rested(pilot)
        assert top(view) == "0: more"  # what was read is gone itself

    reading(what)


def test_lines_that_go_leave_the_filter_too() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        store = LineStore(most_lines=CHUNK)
        view.use(store)
        store.add("0", b"old\n" * CHUNK)
        view.filter("old|last")
        await rested(pilot)
        assert view.count == CHUNK
        store.add("0", b"new\n" * 3 * CHUNK + b"last\n")
        await rested(pilot)
        assert (store.first > CHUNK, view.count, top(view)) == (True, 1, "0: last")

    reading(what)


def test_before_anything_is_written_that_is_said() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        view.use(LineStore())
        await rested(pilot)
        assert "nothing written yet" in seen(app)
        assert "0 lines" in seen(app)

    reading(what)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("2026-11-24 12:00:00 ERROR trainer: no data", "bad"),
        ("CRITICAL:root:gone", "bad"),
        ("E1124 12:00:00.1 worker.py:3] lost", "bad"),
        ("WARNING:root:slow", "warn"),
        ("[W1124 12:00:00 socket.cpp] x", ""),
        ("W1124 12:00:00 torch/run.py:1] OMP_NUM_THREADS", "warn"),
        ("[warning] slow", "warn"),
        ("DEBUG 3 workers", "dim"),
        ("INFO no ERROR so far", ""),
        ("n1:1:1 [0] NCCL WARN Cuda failure", "bad"),
        ("Traceback (most recent call last):", "bad"),
        ("ValueError: no", EXCEPTION),
        ("torch.OutOfMemoryError: CUDA out of memory", EXCEPTION),
        ("[rank3]: RuntimeError: no", EXCEPTION),
        ("KeyboardInterrupt", EXCEPTION),
        ("the ValueError: is named", "bad"),
        ("step 3 loss 0.5", ""),
        ("INFORMATION about DEBUGGING", ""),
        ("", ""),
    ],
)
def test_the_level_of_a_line_is_its_kind(text: str, kind: str) -> None:
    assert line_kind(text) == kind


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "colour-blind", "ansi-dark"])
def test_levels_have_colours_and_the_exceptions_line_is_the_most_visible(theme: str) -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        app.theme = theme
        await rested(pilot)
        styles = [list(view.render_line(number))[1].style for number in range(5)]
        error, warning, debug, plain, exception = styles
        assert error is not None and warning is not None and debug is not None  # noqa: PT018
        assert exception is not None and plain is not None  # noqa: PT018
        assert error.color == look.style(app, "bad").color
        assert warning.color == look.style(app, "warn").color
        assert debug.dim or debug.color == look.style(app, "dim").color != plain.color
        assert exception.bold
        assert exception.bgcolor == look.ground(app, "error").bgcolor != plain.bgcolor

    reading(what, "ERROR a", "WARNING b", "DEBUG c", "d", "ValueError: e")
