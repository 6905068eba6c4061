"""The log pane of a job: searching, filtering, scrolling and dropped lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from textual.events import MouseScrollUp
from textual.geometry import Region
from textual.pilot import Pilot

from dtslurm.dashboard import theme as look
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.logview import EXCEPTION, LogView, classify_line
from dtslurm.dashboard.store import CHUNK, LineStore
from tests.dashboard.screen import notification_text, screen_text, use_app

Reading = Callable[[Pilot[None], TopApp, LogView], Awaitable[None]]


def use_log_view(what: Reading, *lines: str) -> None:
    """Open the log pane with the sample log or with the given lines."""

    async def at_the_log(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4")
        await wait_until_scanned(pilot)
        view = app.screen.query_one("#log", LogView)
        if lines:
            store = LineStore()
            store.add("0", "".join(f"{line}\n" for line in lines).encode())
            view.show_store(store)
            await wait_until_scanned(pilot)
        await what(pilot, app, view)

    use_app(at_the_log)


async def wait_until_scanned(pilot: Pilot[None]) -> None:
    """Wait until what was asked for is found, and all lines are looked at and drawn."""
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()
    view = pilot.app.screen.query_one("#log", LogView)
    view._tick()
    while view._filter is not None and view._filtered < view.store.total:
        view._tick()
    await pilot.pause()


def highlighted_texts(view: LogView) -> list[str]:
    """Return the highlighted texts of the visible lines."""
    drawn = view.render_lines(Region(0, 0, *view.size))
    return [part.text for strip in drawn for part in strip if part.style is not None and part.style.reverse]


def first_line(view: LogView) -> str:
    return view.visible_text().splitlines()[0]


NUMBERED = tuple(f"line {number}" for number in range(200))


def test_a_search_goes_in_both_directions_and_reports_its_end() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        place = view.scroll_offset.y
        await pilot.press("n")
        await wait_until_scanned(pilot)
        assert (view.scroll_offset.y, notification_text(app)) == (place, "")  # nothing is searched for yet
        await pilot.press("slash", *"ine 1?50$", "enter")
        await wait_until_scanned(pilot)
        assert highlighted_texts(view) == ["ine 150"]  # the newest, as the newest were followed
        await pilot.press("N")
        await wait_until_scanned(pilot)
        assert highlighted_texts(view) == ["ine 50"]
        await pilot.press("N")
        await wait_until_scanned(pilot)
        assert notification_text(app) == "no match above; n goes down"
        assert highlighted_texts(view) == ["ine 50"]
        await pilot.press("n")
        await wait_until_scanned(pilot)
        assert highlighted_texts(view) == ["ine 150"]

    use_log_view(what, *NUMBERED)


def test_an_empty_search_ends_the_search() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        await pilot.press("slash", *"line 7$", "enter")
        await wait_until_scanned(pilot)
        assert highlighted_texts(view) == ["line 7"]
        await pilot.press("slash", "ctrl+u", "enter")
        await wait_until_scanned(pilot)
        assert highlighted_texts(view) == []
        place = view.scroll_offset.y
        await pilot.press("n")
        await wait_until_scanned(pilot)
        assert view.scroll_offset.y == place
        assert notification_text(app) == ""

    use_log_view(what, *NUMBERED)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [("gr.", ["Grö"]), (".e", ["ße", "Me", "te"]), ("ß|[\\x80-\\xff]", ["ö", "ß", "数", "据"]), ("x*", [])],
)
def test_a_match_highlights_whole_characters(pattern: str, texts: list[str]) -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        view.search(pattern)
        await wait_until_scanned(pilot)
        assert highlighted_texts(view) == texts
        assert "Größe 12 数据 Meter" in screen_text(app)

    use_log_view(what, "Größe 12 数据 Meter")


def test_an_error_outside_the_filter_ends_the_filter() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        await pilot.press("f", *"line 1.", "enter")
        await wait_until_scanned(pilot)
        assert "110 of 201 lines match 'line 1.'" in screen_text(app)
        await pilot.press("e")
        await wait_until_scanned(pilot)
        assert "Traceback" in screen_text(app)
        assert "201 lines" in screen_text(app)
        assert "match" not in view.status()

    use_log_view(what, *NUMBERED, "Traceback (most recent call last):")


def test_a_match_inside_the_filter_keeps_the_filter() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        await pilot.press("f", *"line 1..", "enter")
        await wait_until_scanned(pilot)
        await pilot.press("slash", *"105", "enter")
        await wait_until_scanned(pilot)
        assert highlighted_texts(view) == ["105"]
        assert "100 of 200 lines match" in screen_text(app)

    use_log_view(what, *NUMBERED)


def test_an_error_search_starts_at_the_first_line_if_the_filter_matches_nothing() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        await pilot.press("f", *"nothing like it", "enter")
        await wait_until_scanned(pilot)
        assert view.count == 0
        await pilot.press("e")
        await wait_until_scanned(pilot)
        assert "Traceback" in screen_text(app)

    use_log_view(what, "Traceback (most recent call last):", *NUMBERED)


def test_the_e_keys_go_through_errors_in_both_directions() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        await pilot.press("E")
        await wait_until_scanned(pilot)
        assert "ValueError: two" in view.visible_text()
        await pilot.press("E")
        await wait_until_scanned(pilot)
        assert "ValueError: one" in view.visible_text()
        await pilot.press("e")
        await wait_until_scanned(pilot)
        assert "ValueError: two" in view.visible_text()

    use_log_view(what, *NUMBERED, "ValueError: one", *NUMBERED, "ValueError: two", *NUMBERED)


def test_scrolling_pauses_following_until_the_end_key() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        page = view.size.height
        assert "following" in screen_text(app)
        await pilot.press("up")
        await wait_until_scanned(pilot)
        assert "paused, End follows" in screen_text(app)
        assert first_line(view) == f"0: line {200 - page - 1}"
        await pilot.press("pageup")
        assert first_line(view) == f"0: line {200 - page - 1 - (page - 1)}"
        await pilot.press("g", "space", "j")
        assert first_line(view) == f"0: line {page}"
        view.store.add("0", b"the newest\n")
        await wait_until_scanned(pilot)
        assert first_line(view) == f"0: line {page}"
        await pilot.press("G")
        await wait_until_scanned(pilot)
        assert "the newest" in screen_text(app)
        assert "paused" not in screen_text(app)

    use_log_view(what, *NUMBERED)


def test_the_mouse_wheel_pauses_following() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        view.post_message(MouseScrollUp(view, 5, 5, 0, -1, 0, False, False, False))
        await wait_until_scanned(pilot)
        assert "paused, End follows" in screen_text(app)

    use_log_view(what, *NUMBERED)


def test_long_lines_scroll_horizontally() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        assert "0 begin" in screen_text(app)
        assert "xend" not in screen_text(app)
        await pilot.press("right")
        assert "0 " + "x" * 70 in screen_text(app)
        await pilot.press(*["right"] * 5)
        assert "xend" in screen_text(app)
        await pilot.press(*["left"] * 9)
        assert "0 begin" in screen_text(app)

    use_log_view(what, "begin   " + "x" * 100 + "end")


def test_dropped_lines_do_not_move_the_visible_lines() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        store = LineStore(most_lines=CHUNK)
        view.show_store(store)
        store.add("0", b"".join(b"line %d\n" % number for number in range(3 * CHUNK)))
        await wait_until_scanned(pilot)
        await pilot.press("up")
        before = view.visible_text()
        assert first_line(view).startswith("0: line 12")
        store.add("0", b"more\n" * CHUNK)
        await wait_until_scanned(pilot)
        assert store.first == 2 * CHUNK
        assert view.visible_text() == before
        assert "8,192 older ones dropped" in view.status()
        store.add("0", b"more\n" * 3 * CHUNK)
        await wait_until_scanned(pilot)
        assert first_line(view) == "0: more"  # what was read is gone itself

    use_log_view(what)


def test_dropped_lines_are_removed_from_the_filter() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        store = LineStore(most_lines=CHUNK)
        view.show_store(store)
        store.add("0", b"old\n" * CHUNK)
        view.filter("old|last")
        await wait_until_scanned(pilot)
        assert view.count == CHUNK
        store.add("0", b"new\n" * 3 * CHUNK + b"last\n")
        await wait_until_scanned(pilot)
        assert (store.first > CHUNK, view.count, first_line(view)) == (True, 1, "0: last")

    use_log_view(what)


def test_an_empty_log_shows_that_nothing_is_written() -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        view.show_store(LineStore())
        await wait_until_scanned(pilot)
        assert "nothing written yet" in screen_text(app)
        assert "0 lines" in screen_text(app)

    use_log_view(what)


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
def test_the_level_of_a_line_determines_its_kind(text: str, kind: str) -> None:
    assert classify_line(text) == kind


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "colour-blind", "ansi-dark"])
def test_levels_have_colours_and_exceptions_have_a_background(theme: str) -> None:
    async def what(pilot: Pilot[None], app: TopApp, view: LogView) -> None:
        app.theme = theme
        await wait_until_scanned(pilot)
        styles = [list(view.render_line(number))[1].style for number in range(5)]
        error, warning, debug, plain, exception = styles
        assert error is not None and warning is not None and debug is not None  # noqa: PT018
        assert exception is not None and plain is not None  # noqa: PT018
        assert error.color == look.style(app, "bad").color
        assert warning.color == look.style(app, "warn").color
        assert debug.dim or debug.color == look.style(app, "dim").color != plain.color
        assert exception.bold
        assert exception.bgcolor == look.ground(app, "error").bgcolor != plain.bgcolor

    use_log_view(what, "ERROR a", "WARNING b", "DEBUG c", "d", "ValueError: e")
