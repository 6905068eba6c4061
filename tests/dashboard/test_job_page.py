"""The page of a job: attempts, panes, copying and shells."""

from __future__ import annotations

from dataclasses import replace

import pytest
from textual.pilot import Pilot

from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.feed import Diagnosed, LogState, Notification
from dtslurm.dashboard.grid import RankGrid
from dtslurm.dashboard.job import PANES, JobScreen
from dtslurm.dashboard.jobs import JobsScreen
from dtslurm.services.observe.run_list import Board, JobRow
from dtslurm.views.run_page import Page
from tests.dashboard.samples import NOW, SampleSource, page_of
from tests.dashboard.screen import notification_text, screen_text, use_app, wait_until_stable

KEY = "000000000001"  # of the job that is first in the list


def job_screen(app: TopApp) -> JobScreen:
    assert isinstance(app.screen, JobScreen)
    return app.screen


def requests(source: SampleSource, verb: str) -> list[tuple[str, ...]]:
    return [words[1:] for words in source.asked if words[0] == verb]


def test_brackets_select_earlier_and_later_attempts() -> None:
    source = SampleSource(page=lambda job: replace(page_of(4, job.key), attempt=2, attempts=(0, 1, 2)))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await wait_until_stable(pilot)
        for key, attempt in zip("[[[]]]", (1, 0, 0, 1, 2, 2), strict=True):
            await pilot.press("left_square_bracket" if key == "[" else "right_square_bracket")
            source.post(replace(page_of(4), attempt=attempt, attempts=(0, 1, 2)))
            await wait_until_stable(pilot)
            assert f"attempt {attempt} · " in screen_text(app)

    use_app(what, source)
    assert [words[1] for words in requests(source, "watch")[:7]] == [
        "None",
        "1",
        "0",
        "0",
        "1",
        "None",
        "None",
    ]


def test_the_diagnosis_is_requested_again_only_for_another_attempt() -> None:
    source = SampleSource(page=lambda job: replace(page_of(4, job.key), attempt=1, attempts=(0, 1)))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "5", "1", "5")
        await wait_until_stable(pilot)
        assert len(requests(source, "verdict")) == 1
        await pilot.press("left_square_bracket")
        await wait_until_stable(pilot)
        assert len(requests(source, "verdict")) == 2

    use_app(what, source)


def test_a_job_without_data_has_no_other_attempt_and_no_rank_log() -> None:
    source = SampleSource(page=lambda job: Page(key=job.key))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "left_square_bracket", "2", "enter")
        await wait_until_stable(pilot)
        assert job_screen(app).pane == "ranks"  # nor is there a rank whose log could be shown
        assert "no ranks yet" in screen_text(app)
        assert notification_text(app) == ""

    use_app(what, source)
    assert [words[1] for words in requests(source, "watch")] == ["None"]


def test_the_diagnosis_is_requested_again_when_the_job_ends() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "5")
        await wait_until_stable(pilot)
        assert len(requests(source, "verdict")) == 1
        first, *rest = source.board.rows
        source.post(replace(source.board, rows=(replace(first, state="FAILED", over=True), *rest)))
        await wait_until_stable(pilot)
        assert "FAILED  llama-8b" in screen_text(app)
        source.post(Board(clusters=source.board.clusters))  # gone from the list
        await wait_until_stable(pilot)
        assert "FAILED  llama-8b" in screen_text(app)

    use_app(what, source)
    assert len(requests(source, "verdict")) == 2


def test_posts_about_other_jobs_change_nothing() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "5")
        await wait_until_stable(pilot)
        before = screen_text(app)
        for value in (page_of(1, "other"), LogState("other", "no"), Diagnosed("other", ("no",)), object()):
            source.post(value)
        await wait_until_stable(pilot)
        assert screen_text(app) == before

    use_app(what, source)


def test_tab_cycles_through_the_panes_in_both_directions() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        shown = []
        for key in (*["tab"] * len(PANES), "shift+tab", "shift+tab"):
            await pilot.press(key)
            shown.append(job_screen(app).pane)
        assert shown == [*PANES[1:], "overview", "history", "verdict"]

    use_app(what)


@pytest.mark.parametrize(
    ("keys", "copied"),
    [
        (("1",), ("4701", "/scratch/ada/runs/train-1")),
        (("2", "o"), ("rank 5: running · on gpu01 · pid 4005", "no output while other ranks write")),
        (("3",), ("4701", "/scratch/ada/runs/train-1")),
        (("4",), ("3: RuntimeError: CUDA out of memory", "3: step 59 loss")),
        (("5",), ("job 4705 (vit): FAILED", "cause         gpu-out-of-memory (95%)")),
    ],
)
def test_the_content_of_a_pane_is_copied(keys: tuple[str, ...], copied: tuple[str, ...]) -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", *keys)
        await wait_until_stable(pilot)
        await pilot.press("y")
        assert all(line in app.clipboard for line in copied)
        assert notification_text(app) == f"copied {len(app.clipboard.splitlines())} lines"

    use_app(what)


@pytest.mark.parametrize(
    ("keys", "node"), [(("1",), "gpu01"), (("2", "end"), "gpu02"), (("3", "down"), "gpu02")]
)
def test_a_shell_opens_on_the_selected_or_the_first_node(keys: tuple[str, ...], node: str) -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", *keys, "x")
        await wait_until_stable(pilot)
        assert f"Open a shell on {node}, beside job 4701?" in screen_text(app)

    use_app(what)


def test_escape_closes_the_input_line_and_typed_letters_trigger_nothing() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4", "slash", *"q5cx[")
        assert job_screen(app).pane == "logs"
        await pilot.press("escape")
        await wait_until_stable(pilot)
        assert job_screen(app).pane == "logs"
        await pilot.press("n")  # what was typed was not searched for
        await wait_until_stable(pilot)
        assert notification_text(app) == ""
        await pilot.press("escape")
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)

    use_app(what, source)
    assert requests(source, "verdict") == []


def test_log_keys_do_nothing_in_other_panes() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2", "slash", "f", "r")
        await wait_until_stable(pilot)
        assert not job_screen(app).query_one("#typing").display

    use_app(what)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("not_distributed", "NOT DISTRIBUTED: the 4 ranks do not train together: no connection"),
        ("ranks_apart", "no connection; this is intended if each rank works on its own part"),
    ],
)
def test_ranks_that_do_not_train_together_are_reported_above_the_curves(event: str, words: str) -> None:
    page = page_of(4)
    apart = {"event": event, "attempt": page.attempt, "world_size": 4, "evidence": "no connection"}
    source = SampleSource(page=lambda job: replace(page, key=job.key, events=(*page.events, apart)))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await wait_until_stable(pilot)
        assert words in screen_text(app)

    use_app(what, source)


def test_a_nan_loss_is_reported_above_the_curves() -> None:
    page = page_of(4)
    lost = replace(page.points[-1], step=2010, loss=float("nan"))
    source = SampleSource(page=lambda job: replace(page, key=job.key, points=(*page.points, lost)))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await wait_until_stable(pilot)
        assert "the loss is no number since step 2010" in screen_text(app)

    use_app(what, source)


def test_the_rank_under_the_cursor_is_described() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2")
        grid = app.screen.query_one(RankGrid)
        places = []
        for key in ("right", "down", "left", "pagedown", "home", "pageup", "up", "G", "g"):
            await pilot.press(key)
            places.append(grid.cursor)
            assert f"rank {grid.cursor}: " in screen_text(app)
        across = grid.across
        down = across * max(1, grid.size.height - 1)
        assert places == [1, 1 + across, across, min(15, across + down), 0, 0, 0, 15, 0]

    use_app(what)


@pytest.mark.parametrize("ranks", [16, 256])
def test_a_click_selects_a_rank_and_a_double_click_opens_its_log(ranks: int) -> None:
    source = SampleSource(page=lambda job: page_of(ranks, job.key))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2")
        await wait_until_stable(pilot)
        grid = app.screen.query_one(RankGrid)
        assert grid.cards == (ranks == 16)
        place = (1, 1) if grid.cards else (7, 1)  # beside dots stands the number of the first
        first = grid.across  # of the second line
        await pilot.click(RankGrid, offset=place)
        assert grid.cursor == first
        await pilot.click(RankGrid, offset=(1, grid.size.height - 1) if grid.cards else (1, 0))
        assert grid.cursor == first  # no rank is there
        await pilot.click(RankGrid, offset=place, times=2)
        await wait_until_stable(pilot)
        assert job_screen(app).pane == "logs"
        assert requests(source, "follow")[-1] == ("4701", str(first))

    use_app(what, source)


def test_without_outliers_the_o_key_keeps_the_cursor() -> None:
    source = SampleSource(page=lambda job: page_of(8, job.key, odd=False))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2", "right", "o")
        await wait_until_stable(pilot)
        assert app.screen.query_one(RankGrid).cursor == 1
        assert "no outliers" in screen_text(app)

    use_app(what, source)


OUTSIDE = "before\x1b]52;c;ZXZpbA==\x07\x1b[2J after"


@pytest.mark.parametrize(
    ("pane", "value"),
    [
        ("1", replace(page_of(4), trouble=OUTSIDE, taken_at=NOW)),
        ("4", LogState(KEY, OUTSIDE)),
        ("5", Diagnosed(KEY, (OUTSIDE,))),
    ],
    ids=["trouble", "following", "verdict"],
)
def test_remote_text_contains_no_escape_sequences(pane: str, value: object) -> None:
    class Quiet(SampleSource):
        def verdict(self, row: JobRow, attempt: int | None = None) -> None:
            del row, attempt

    source = Quiet()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", pane)
        await wait_until_stable(pilot)
        source.post(value)
        await wait_until_stable(pilot)
        assert "before after" in screen_text(app)
        assert not {"\x1b", "\x07"} & set(screen_text(app))

    use_app(what, source, size=(120, 24))


def test_notifications_contain_no_escape_sequences() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        app.source.post(Notification(OUTSIDE + "\nand more"))  # type: ignore[attr-defined]
        await wait_until_stable(pilot)
        assert notification_text(app) == "before after\nand more"

    use_app(what)
