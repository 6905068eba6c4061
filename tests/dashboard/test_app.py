"""The dashboard in use: keys, mouse, filters, logs and confirmations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Static

from dtslurm.dashboard import dialogs
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.dialogs import Confirm
from dtslurm.dashboard.job import JobScreen
from dtslurm.dashboard.jobs import JobsScreen
from dtslurm.dashboard.logview import LogView
from dtslurm.dashboard.rows import Rows
from tests.dashboard.samples import NOW, SampleSource, row
from tests.dashboard.screen import notification_text, screen_text, use_app, wait_until_stable


def test_actions_require_a_yes() -> None:
    source = SampleSource()
    verbs = {"c": "cancel", "R": "requeue", "H": "hold", "U": "release"}

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for verb, answer in zip(verbs, ("enter", "escape", "n", "q"), strict=True):
            await pilot.press(*(["down"] if verb == "U" else []), verb)
            assert isinstance(app.screen, Confirm)
            await pilot.press(answer)
            assert isinstance(app.screen, JobsScreen)
        assert source.asked == []
        await pilot.press("up")
        for verb in verbs:
            await pilot.press(*(["down"] if verb == "U" else []), verb)
            await wait_until_stable(pilot)
            await pilot.press("y")
        await wait_until_stable(pilot)
        jobs = ["4701", "4701", "4701", "4702"]
        assert source.asked == list(zip(verbs.values(), jobs, strict=True))

    use_app(what, source)


def test_release_of_a_job_that_is_not_held_is_refused() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("U")
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert "nothing to release: the job is not held" in notification_text(app)

    use_app(what, source)


def test_keys_typed_into_the_filter_trigger_no_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow link brings many at once: what is typed into the filter must not cancel anything."""
    monkeypatch.setattr(dialogs, "_READING_S", 1e9)
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for key in "/cy":
            app.post_message(Key("slash" if key == "/" else key, key))
        await wait_until_stable(pilot)
        assert app.screen.choice.filter_text == "cy"  # type: ignore[attr-defined]
        await pilot.press("escape")
        for key in "cy":
            app.post_message(Key(key, key))
        await wait_until_stable(pilot)
        assert isinstance(app.screen, Confirm)
        assert source.asked == []

    use_app(what, source)


def test_a_read_only_dashboard_shows_no_actions_and_ignores_their_keys() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert "READ-ONLY" in screen_text(app)
        for key in ("c", "y", "R", "y", "x", "y", "H", "y", "U", "y"):
            await pilot.press(key)
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)
        assert "cancel" not in screen_text(app).lower().replace("cancelled", "")
        await pilot.press("question_mark")
        await wait_until_stable(pilot)
        first = screen_text(app)
        await pilot.press("end")  # the help is longer than 24 lines
        await wait_until_stable(pilot)
        assert "all commands, themes" in screen_text(app)
        assert "requeue" not in first + screen_text(app)

    use_app(what, source, read_only=True)
    assert {asked[0] for asked in source.asked} <= {"stop"}


def test_the_list_can_be_filtered_sorted_and_folded() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("slash", *"llama")
        await wait_until_stable(pilot)
        assert "4701" in screen_text(app)
        assert "4705" not in screen_text(app)
        await pilot.press("enter", "down")
        assert isinstance(app.screen, JobsScreen)
        assert app.screen.row() is not None
        await pilot.press("escape")
        await wait_until_stable(pilot)
        assert "4705" in screen_text(app)
        await pilot.press("t")
        assert "4705" not in screen_text(app)
        await pilot.press("t", *"ssssssss", "S")
        await wait_until_stable(pilot)
        assert "4705" in screen_text(app)

    use_app(what)


def test_the_cursor_stays_on_its_job_when_rows_are_added() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "down")
        assert app.screen.row().job_id == "4703"  # type: ignore[attr-defined]
        newer = row(0, job_id="4800", key="new", token="new", created=NOW)
        source.post(replace(source.board, rows=(newer, *source.board.rows)))
        await wait_until_stable(pilot)
        assert app.screen.row().job_id == "4703"  # type: ignore[attr-defined]
        assert "4800" in screen_text(app)

    use_app(what, source)


def test_the_mouse_selects_opens_sorts_and_changes_panes() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.click(Rows, offset=(20, 2))
        assert app.screen.row().job_id == "4702"  # type: ignore[attr-defined]
        await pilot.click(Rows, offset=(14, 0))
        assert app.screen.choice.sort == "name"  # type: ignore[attr-defined]
        await pilot.click(Rows, offset=(20, 1), times=2)
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobScreen)
        await pilot.click("#tabs", offset=(17, 0))
        await wait_until_stable(pilot)
        assert app.screen.pane == "ranks"

    use_app(what)


def test_logs_can_be_searched_and_filtered_and_contain_no_escape_sequences() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4")
        await wait_until_stable(pilot)
        view = app.screen.query_one("#log", LogView)
        place = view.scroll_offset.y
        assert view.count - place <= view.size.height  # it follows
        assert "\x1b" not in screen_text(app)
        assert "wiped? �" in screen_text(app)
        await pilot.press("home", "slash", *"step 7 ", "enter")
        await wait_until_stable(pilot)
        assert "step 7 loss" in screen_text(app)
        assert view.scroll_offset.y < place
        place = view.scroll_offset.y
        await pilot.press("n")
        await wait_until_stable(pilot)
        assert view.scroll_offset.y > place
        await pilot.press("e")
        await wait_until_stable(pilot)
        assert "CUDA out of memory" in screen_text(app)
        await pilot.press("f", *"out of memory", "enter")
        await wait_until_stable(pilot)
        assert view.count == 1
        await pilot.press("escape", "end")
        await wait_until_stable(pilot)
        assert view.count > 200
        await pilot.press("slash", "(", "enter")
        await wait_until_stable(pilot)
        assert "not a regular expression" in notification_text(app)
        await pilot.press("escape", "escape")
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)

    use_app(what)


def test_logs_can_be_limited_to_ranks() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4", "r", *"0,2-3", "enter")
        await wait_until_stable(pilot)
        await pilot.press("r", *"x", "enter")
        await wait_until_stable(pilot)
        assert "names no ranks" in notification_text(app)

    use_app(what, source)
    assert ("follow", "4701", "0,2-3") in source.asked


def test_copying_also_writes_a_file(tmp_path: Path) -> None:
    target = tmp_path / "state" / "copied.txt"

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("y")
        assert app.clipboard == "4701\n/scratch/ada/runs/train-1"
        await pilot.press("enter", "4")
        await wait_until_stable(pilot)
        await pilot.press("y")

    use_app(what, clipboard=target)
    assert "RuntimeError: CUDA out of memory" in target.read_text()
    assert "\x1b" not in target.read_text()


def test_a_shell_opens_on_a_node_of_a_running_job_after_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SampleSource()
    opened: list[tuple[str, str]] = []
    monkeypatch.setattr(TopApp, "open_shell", lambda self, job, node: opened.append((job.job_id, node)))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("x", "enter", "x")
        await wait_until_stable(pilot)
        await pilot.press("y", "enter", "3", "down", "x")
        await wait_until_stable(pilot)
        await pilot.press("y")
        await wait_until_stable(pilot)
        await pilot.press("q", "down", "x")
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)  # a pending job has no node

    use_app(what, source)
    assert opened == [("4701", "gpu01"), ("4701", "gpu02")]


def test_a_job_named_at_the_start_is_opened() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert isinstance(app.screen, JobScreen)
        assert app.screen.row().job_id == "4705"
        assert app.screen.pane == "verdict"
        assert "gpu-out-of-memory" in str(app.screen.query_one("#saying", Static).visual)

    use_app(what, job=lambda job: job.job_id == "4705")


def test_the_command_palette_lists_the_actions() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Theme", "Help", "Copy", "Cancel", "Requeue", "Hold", "Release", "Shell"} <= titles
        await pilot.press("ctrl+p")
        await wait_until_stable(pilot)
        await pilot.press("escape")
        app.read_only = True
        assert "Cancel" not in {command.title for command in app.get_system_commands(app.screen)}

    use_app(what)
