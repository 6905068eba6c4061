"""Programs and files that the dashboard uses: pagers, editors, reports, resubmission and the bell."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from dtslurm.dashboard.actions import demo
from dtslurm.dashboard.actions.handoffs import EDITOR, PAGER, find_program, write_new
from dtslurm.dashboard.actions.notifications import Announcer, join_events, make_terminal_notification
from dtslurm.dashboard.app import TopApp
from dtslurm.dashboard.dialogs import Confirm, Help
from dtslurm.dashboard.feed import Feed, Notification
from dtslurm.dashboard.jobs import JobsScreen
from dtslurm.errors import CommandNotFound, StoreError
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.state import JobState
from dtslurm.services.observe.run_list import Board, ClusterReader, JobRow, Runs
from dtslurm.services.wiring.context import Context
from tests.dashboard.desk import Desk, join_feed_threads, row_of
from tests.dashboard.samples import NOW, SampleSource, board, row
from tests.dashboard.screen import notification_text, screen_text, use_app, wait_until_stable
from tests.waiting import wait_until


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


# ---- Logs


@pytest.mark.parametrize(
    ("keys", "expected_request"),
    [
        (("enter", "2", "down", "p"), ("pager", "4701", "3", "0")),
        (("enter", "2", "v"), ("editor", "4701", "0", "0")),
        (("enter", "4", "p"), ("pager", "4701", "3", "0")),  # whose line is the newest on the screen
        (("enter", "p"), ("pager", "4701", "0", "0")),
    ],
)
def test_the_log_of_the_selected_rank_opens_in_the_pager_or_editor(
    monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], expected_request: tuple[str, ...]
) -> None:
    source = SampleSource()
    monkeypatch.setattr(TopApp, "suspend", lambda _: nullcontext())

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for key in keys:
            await pilot.press(key)
            await wait_until_stable(pilot)
        assert expected_request in source.asked

    use_app(what, source)


def test_a_missing_log_file_is_reported(desk: Desk) -> None:
    record, files = desk.run(1)
    files.start(1)
    feed = desk.feed()
    with pytest.raises(StoreError, match=r"the rank has no log: there is no .*/logs/0/rank-7.log"):
        feed.open_log(row_of(record), 7, 0, PAGER)


@pytest.mark.parametrize("opener", [PAGER, EDITOR])
def test_a_log_opens_with_the_program_of_the_environment(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opener: object
) -> None:
    record, files = desk.run(1)
    files.start(1)
    files.rank(0)
    log = Path(record.run_dir) / "logs" / "0" / "rank-0.log"
    log.write_text("hello\n")
    program = tmp_path / "my pager"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/words"\nexit 3\n')
    program.chmod(0o755)
    assert opener in {PAGER, EDITOR}
    named = PAGER if opener is PAGER else EDITOR
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv(named.variables[-1], f"'{program}' -x")
    assert desk.feed().open_log(row_of(record), 0, 0, named) == 3
    assert (tmp_path / "words").read_text() == f"-x\n{log}\n"


def fake_which(*names: str) -> Callable[[str], str | None]:
    return lambda name: f"/bin/{name}" if name in names else None


def test_find_program_prefers_the_named_program_that_is_installed() -> None:
    assert find_program(PAGER, {"PAGER": "less -S"}, fake_which("less")) == ["less", "-S"]
    assert find_program(PAGER, {"PAGER": "most"}, fake_which("more")) == ["more"]
    assert find_program(PAGER, {"PAGER": "'"}, fake_which("less")) == ["less"]
    assert find_program(PAGER, {}, fake_which("less", "more")) == ["less"]
    assert find_program(EDITOR, {"VISUAL": "code -w", "EDITOR": "vi"}, fake_which("code")) == ["code", "-w"]
    assert find_program(EDITOR, {"VISUAL": " ", "EDITOR": "ed"}, fake_which("ed", "vi")) == ["ed"]


def test_a_missing_program_is_reported_with_the_names_that_were_tried() -> None:
    with pytest.raises(CommandNotFound) as caught:
        find_program(EDITOR, {"EDITOR": "emacs"}, fake_which())
    text = str(caught.value)
    assert "there is no editor on this machine: neither vi nor nano is installed" in text
    assert "$EDITOR is 'emacs', which is no program here" in text
    assert "hint: set $EDITOR" in text


# ---- Reports


def test_the_w_key_writes_a_report() -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("w")
        assert source.asked == [("report", "4701", "None")]

    use_app(what, source)


def test_a_report_is_written_under_a_new_name_and_its_path_is_reported(desk: Desk) -> None:
    record, files = desk.run(1)
    files.start(1)
    files.rank(0, ended=2000, exit_code=0)
    desk.say("7", JobState.COMPLETED, exit_code=0)
    feed = desk.feed()
    for name in ("train-7.html", "train-7-2.html"):
        feed.report(row_of(record))
        word = desk.next(Notification)
        assert word == Notification(f"wrote the report to {desk.folder / name}")
        assert "<html" in (desk.folder / name).read_text()
        join_feed_threads()


def test_a_report_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot write .*gone/run-1.html: No such file"):
        write_new(tmp_path / "gone", "run-1", "text")


# ---- Resubmission, commands, the demo


@pytest.mark.parametrize("keys", [("A",), ("enter", "A")])
def test_the_a_key_resubmits_a_run_after_a_confirmation(keys: tuple[str, ...]) -> None:
    source = SampleSource()

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press(*keys)
        await wait_until_stable(pilot)
        assert isinstance(app.screen, Confirm)
        assert "Submit llama-8b (4701 on hpc) once more" in screen_text(app)
        await pilot.press("n")
        await wait_until_stable(pilot)
        assert ("resubmit", "4701") not in source.asked
        await pilot.press("A")
        await wait_until_stable(pilot)
        await pilot.press("y")
        await wait_until_stable(pilot)
        assert source.asked[-1] == ("resubmit", "4701")

    use_app(what, source)


@pytest.mark.parametrize("key", ["A", "D", "v"])
def test_a_read_only_dashboard_does_not_submit_or_edit(key: str) -> None:
    source = SampleSource(board=Board() if key == "D" else board())

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert "starts a demo" not in screen_text(app)
        if key == "v":
            await pilot.press("enter")
        await pilot.press(key)
        await wait_until_stable(pilot)
        assert not isinstance(app.screen, Confirm)
        assert {asked[0] for asked in source.asked} <= {"watch", "follow"}

    use_app(what, source, read_only=True)


def test_the_next_command_of_a_run_is_copied() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("Y")
        assert app.clipboard == "dtslurm logs -f 4701"
        await pilot.press("enter", "Y")
        assert app.clipboard == "dtslurm logs -f 4701"

    use_app(what)


def test_without_runs_the_d_key_starts_the_demo_after_a_confirmation() -> None:
    source = SampleSource(board=Board())

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        assert "D starts a demo on this machine" in screen_text(app)
        await pilot.press("D")
        await wait_until_stable(pilot)
        await pilot.press("y")
        await wait_until_stable(pilot)
        assert source.asked == [("demo",)]

    use_app(what, source)


def test_with_runs_the_d_key_does_not_start_the_demo() -> None:
    async def what(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("D")
        await wait_until_stable(pilot)
        assert isinstance(app.screen, JobsScreen)

    use_app(what)


def test_the_demo_trains_and_records_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DTSLURM_METRICS", str(tmp_path / "train.jsonl"))
    loss = demo.train(1, 60, 0.0)
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [*range(1, 61)]
    assert {record["rank"] for record in records} == {1}
    assert records[-1]["loss"] == loss < records[0]["loss"] / 4
    assert capsys.readouterr().out.splitlines()[-1] == f"step 60/60 loss {loss:.4f}"


@pytest.mark.e2e
def test_the_demo_can_be_run_and_resubmitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posts: list[object] = []
    monkeypatch.chdir(tmp_path)
    feed = Feed(Context, lambda _: ())
    feed._post = posts.append

    def words() -> list[str]:
        return [post.text for post in posts if isinstance(post, Notification)]

    def rows() -> tuple[JobRow, ...]:
        context = Context()
        answer = [record for records in Runs(context).by_cluster().values() for record in records]
        return ClusterReader(context, "local").read(answer)[0]

    feed.demo()
    wait_until(lambda: len(words()) == 1, "the demo is submitted")
    assert words()[0].startswith("submitted job "), words()
    [first] = rows()
    feed.resubmit(first)
    wait_until(lambda: len(words()) == 2, "the demo is submitted once more")
    assert words()[1].endswith(f"; it repeats {first.job_id}")
    folder = Path(first.run_dir)
    wait_until(lambda: len(list(folder.glob("metrics/0/train.jsonl"))) == 1, "the demo trains")
    assert {row.name for row in rows()} == {"demo"}
    for item in rows():
        feed.change_job("cancel", item)
    wait_until(lambda: all(item.over for item in rows()), "both runs have ended")
    join_feed_threads()


# ---- Events


def running_row(**values: object) -> JobRow:
    return row(1, name="llama", **values)


def failed_row(**values: object) -> JobRow:
    return running_row(state="FAILED", over=True, about="rank 3 failed first", **values)


STALLED = Activity(stalled=True, since=NOW - 600, quiet_s=600, summary="no work of any rank")
WORKS = Activity(stalled=False, since=NOW, quiet_s=0, summary="")


def test_an_end_is_announced_once_for_runs_that_were_seen_active() -> None:
    announcer = Announcer()
    assert announcer.list_new_events(Board(rows=(failed_row(), row(2)))) == []
    assert announcer.list_new_events(
        Board(rows=(failed_row(), row(2, state="COMPLETED", over=True, ok=True)))
    ) == ["train-2 (4702) completed"]
    assert (
        announcer.list_new_events(Board(rows=(failed_row(), row(2, state="COMPLETED", over=True, ok=True))))
        == []
    )


def test_an_unknown_state_is_neither_active_nor_ended() -> None:
    announcer = Announcer()
    unknown = running_row(state="UNKNOWN", unknown=True)
    assert announcer.list_new_events(Board(rows=(unknown,))) == []
    assert announcer.list_new_events(Board(rows=(failed_row(),))) == []
    announcer.list_new_events(Board(rows=(running_row(),)))
    announcer.list_new_events(Board(rows=(unknown,)))
    assert announcer.list_new_events(Board(rows=(failed_row(),))) == [
        "llama (4701) failed: rank 3 failed first"
    ]


def test_a_stall_is_announced_once_until_the_run_works_again() -> None:
    announcer = Announcer()
    stalled = Board(rows=(running_row(activity=STALLED),))
    assert announcer.list_new_events(stalled) == []  # it had stalled before
    announcer.list_new_events(Board(rows=(running_row(activity=WORKS),)))
    text = "llama (4701) stalled: its ranks have done nothing for 10m00s"
    assert announcer.list_new_events(stalled) == [text]
    assert announcer.list_new_events(Board(rows=(running_row(),))) == []  # nobody has looked
    assert announcer.list_new_events(stalled) == []
    announcer.list_new_events(Board(rows=(running_row(activity=WORKS),)))
    assert announcer.list_new_events(stalled) == [text]


def test_the_end_of_an_array_is_announced_once_for_all_tasks() -> None:
    announcer = Announcer()
    whole = running_row(tasks=(("RUNNING", 2),), job_id="9")
    tasks = tuple(running_row(key=f"t{task}", task=str(task)) for task in range(2))
    announcer.list_new_events(Board(rows=(whole, *tasks)))
    done = tuple(replace(item, over=True, ok=True, state="COMPLETED") for item in (whole, *tasks))
    assert announcer.list_new_events(Board(rows=done)) == ["llama (9) completed"]


def test_several_announcements_form_one_line_without_escape_sequences() -> None:
    text = join_events([f"run\x1b]52;c;ZXZpbA==\x07 {number}\n" for number in range(5)])
    assert text == "run 0; run 1; run 2; and 2 more"
    assert make_terminal_notification("a\x07b\x1b[2J") == "\x1b]9;dtslurm: ab\x07"


def test_the_bell_rings_once_per_ended_run_unless_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SampleSource(board=Board(rows=(running_row(), row(2))))
    rung: list[str] = []
    monkeypatch.setattr(TopApp, "bell", lambda _: rung.append("bell"))
    monkeypatch.setattr(TopApp, "write_sequence", lambda _, sequence: rung.append(sequence))

    async def what(pilot: Pilot[None], app: TopApp) -> None:
        for _ in range(2):
            source.post(Board(rows=(failed_row(), row(2))))
            await wait_until_stable(pilot)
        words = "llama (4701) failed: rank 3 failed first"
        assert rung == ["bell", f"\x1b]9;dtslurm: {words}\x07"]
        assert words in notification_text(app)
        await pilot.press("b")
        assert "is silent when a run ends" in notification_text(app)
        source.post(Board(rows=(failed_row(), row(2, state="COMPLETED", over=True, ok=True))))
        await wait_until_stable(pilot)
        assert len(rung) == 2

    use_app(what, source)


def test_the_help_lists_the_keys_of_external_programs() -> None:
    assert {key: key in Help(read_only=False)._text for key in ("p v ", "w  ", "A submit", "b  ", "y Y")} == (
        dict.fromkeys(("p v ", "w  ", "A submit", "b  ", "y Y"), True)
    )
