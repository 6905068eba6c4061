"""A job's page in use: its attempts, its panes, what is copied of them, and where a shell opens."""

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
from tests.dashboard.made import NOW, Made, page_of
from tests.dashboard.screen import seen, settled, told, use

KEY = "000000000001"  # of the job that is first in the list


def page_screen(app: TopApp) -> JobScreen:
    assert isinstance(app.screen, JobScreen)
    return app.screen


def asked(source: Made, verb: str) -> list[tuple[str, ...]]:
    return [words[1:] for words in source.asked if words[0] == verb]


def test_brackets_go_through_the_attempts_and_stay_with_the_newest() -> None:
    source = Made(page=lambda job: replace(page_of(4, job.key), attempt=2, attempts=(0, 1, 2)))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await settled(pilot)
        for key, attempt in zip("[[[]]]", (1, 0, 0, 1, 2, 2), strict=True):
            await pilot.press("left_square_bracket" if key == "[" else "right_square_bracket")
            source.post(replace(page_of(4), attempt=attempt, attempts=(0, 1, 2)))
            await settled(pilot)
            assert f"attempt {attempt} · " in seen(app)

    use(what, source)
    assert [words[1] for words in asked(source, "watch")[:7]] == ["None", "1", "0", "0", "1", "None", "None"]


def test_the_verdict_is_asked_anew_for_another_attempt_and_not_for_the_same() -> None:
    source = Made(page=lambda job: replace(page_of(4, job.key), attempt=1, attempts=(0, 1)))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "5", "1", "5")
        await settled(pilot)
        assert len(asked(source, "verdict")) == 1
        await pilot.press("left_square_bracket")
        await settled(pilot)
        assert len(asked(source, "verdict")) == 2

    use(what, source)


def test_a_job_that_has_told_nothing_has_no_other_attempt() -> None:
    source = Made(page=lambda job: Page(key=job.key))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "left_square_bracket", "2", "enter")
        await settled(pilot)
        assert page_screen(app).pane == "ranks"  # nor is there a rank whose log could be shown
        assert "no ranks yet" in seen(app)
        assert told(app) == ""

    use(what, source)
    assert [words[1] for words in asked(source, "watch")] == ["None"]


def test_the_verdict_is_asked_for_when_the_job_ends_under_ones_eyes() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "5")
        await settled(pilot)
        assert len(asked(source, "verdict")) == 1
        first, *rest = source.board.rows
        source.post(replace(source.board, rows=(replace(first, state="FAILED", over=True), *rest)))
        await settled(pilot)
        assert "FAILED  llama-8b" in seen(app)
        source.post(Board(clusters=source.board.clusters))  # gone from the list
        await settled(pilot)
        assert "FAILED  llama-8b" in seen(app)

    use(what, source)
    assert len(asked(source, "verdict")) == 2


def test_what_is_told_of_other_jobs_changes_nothing() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "5")
        await settled(pilot)
        before = seen(app)
        for value in (page_of(1, "other"), LogState("other", "no"), Diagnosed("other", ("no",)), object()):
            source.post(value)
        await settled(pilot)
        assert seen(app) == before

    use(what, source)


def test_panes_come_in_turn_both_ways() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        shown = []
        for key in (*["tab"] * len(PANES), "shift+tab", "shift+tab"):
            await pilot.press(key)
            shown.append(page_screen(app).pane)
        assert shown == [*PANES[1:], "overview", "history", "verdict"]

    use(what)


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
def test_what_a_pane_shows_is_copied(keys: tuple[str, ...], copied: tuple[str, ...]) -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", *keys)
        await settled(pilot)
        await pilot.press("y")
        assert all(line in app.clipboard for line in copied)
        assert told(app) == f"copied {len(app.clipboard.splitlines())} lines"

    use(what)


@pytest.mark.parametrize(
    ("keys", "node"), [(("1",), "gpu01"), (("2", "end"), "gpu02"), (("3", "down"), "gpu02")]
)
def test_a_shell_opens_on_the_chosen_node_or_rank_or_on_the_first_node(
    keys: tuple[str, ...], node: str
) -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", *keys, "x")
        await settled(pilot)
        assert f"Open a shell on {node}, beside job 4701?" in seen(app)

    use(what)


def test_escape_closes_what_is_typed_and_letters_typed_there_do_nothing_else() -> None:
    source = Made()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "4", "slash", *"q5cx[")
        assert page_screen(app).pane == "logs"
        await pilot.press("escape")
        await settled(pilot)
        assert page_screen(app).pane == "logs"
        await pilot.press("n")  # what was typed was not searched for
        await settled(pilot)
        assert told(app) == ""
        await pilot.press("escape")
        await settled(pilot)
        assert isinstance(app.screen, JobsScreen)

    use(what, source)
    assert asked(source, "verdict") == []


def test_keys_of_the_logs_do_nothing_in_other_panes() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2", "slash", "f", "r")
        await settled(pilot)
        assert not page_screen(app).query_one("#typing").display

    use(what)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("not_distributed", "NOT DISTRIBUTED: the 4 ranks do not train together: no connection"),
        ("ranks_apart", "no connection; this is intended if each rank works on its own part"),
    ],
)
def test_ranks_that_train_apart_are_said_above_the_curves(event: str, words: str) -> None:
    page = page_of(4)
    apart = {"event": event, "attempt": page.attempt, "world_size": 4, "evidence": "no connection"}
    source = Made(page=lambda job: replace(page, key=job.key, events=(*page.events, apart)))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await settled(pilot)
        assert words in seen(app)

    use(what, source)


def test_a_loss_that_is_no_number_is_said_above_the_curves() -> None:
    page = page_of(4)
    lost = replace(page.points[-1], step=2010, loss=float("nan"))
    source = Made(page=lambda job: replace(page, key=job.key, points=(*page.points, lost)))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter")
        await settled(pilot)
        assert "the loss is no number since step 2010" in seen(app)

    use(what, source)


def test_the_rank_under_the_cursor_is_told_of_wherever_it_goes() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2")
        grid = app.screen.query_one(RankGrid)
        places = []
        for key in ("right", "down", "left", "pagedown", "home", "pageup", "up", "G", "g"):
            await pilot.press(key)
            places.append(grid.cursor)
            assert f"rank {grid.cursor}: " in seen(app)
        across = grid.across
        down = across * max(1, grid.size.height - 1)
        assert places == [1, 1 + across, across, min(15, across + down), 0, 0, 0, 15, 0]

    use(what)


@pytest.mark.parametrize("ranks", [16, 256])
def test_a_click_chooses_a_rank_and_a_second_one_shows_its_log(ranks: int) -> None:
    source = Made(page=lambda job: page_of(ranks, job.key))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2")
        await settled(pilot)
        grid = app.screen.query_one(RankGrid)
        assert grid.cards == (ranks == 16)
        place = (1, 1) if grid.cards else (7, 1)  # beside dots stands the number of the first
        first = grid.across  # of the second line
        await pilot.click(RankGrid, offset=place)
        assert grid.cursor == first
        await pilot.click(RankGrid, offset=(1, grid.size.height - 1) if grid.cards else (1, 0))
        assert grid.cursor == first  # no rank is there
        await pilot.click(RankGrid, offset=place, times=2)
        await settled(pilot)
        assert page_screen(app).pane == "logs"
        assert asked(source, "follow")[-1] == ("4701", str(first))

    use(what, source)


def test_where_no_rank_stands_out_the_cursor_stays() -> None:
    source = Made(page=lambda job: page_of(8, job.key, odd=False))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", "2", "right", "o")
        await settled(pilot)
        assert app.screen.query_one(RankGrid).cursor == 1
        assert "no rank stands out" in seen(app)

    use(what, source)


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
def test_words_from_outside_command_no_terminal(pane: str, value: object) -> None:
    class Quiet(Made):
        def verdict(self, row: JobRow, attempt: int | None = None) -> None:
            del row, attempt

    source = Quiet()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("enter", pane)
        await settled(pilot)
        source.post(value)
        await settled(pilot)
        assert "before after" in seen(app)
        assert not {"\x1b", "\x07"} & set(seen(app))

    use(what, source, size=(120, 24))


def test_nor_do_words_for_the_person() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        app.source.post(Notification(OUTSIDE + "\nand more"))  # type: ignore[attr-defined]
        await settled(pilot)
        assert told(app) == "before after\nand more"

    use(what)
