"""Log lines printed to a pipe, to a terminal, and above a progress line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from dtslurm.cli import follow
from dtslurm.cli.printing import output, screen
from dtslurm.cli.printing.screen import LiveScreen, PlainScreen, TerminalScreen, summarize_state
from dtslurm.logs.lines import LogBlock, LogFile
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.logs.log_stream import Mark, Notice, Record, Rewritten
from dtslurm.services.runs.status import RunView

RECORD = JobRecord(
    token="t", cluster="hpc", name="llama", run_dir="/r", phase="submitted", created_at=0.0, job_id="17"
)


def log_block(rank: int, *lines: str, task: str | None = None) -> LogBlock:
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    return LogBlock(LogFile("rank", rank, task=task), data)


def run_view(*states: JobState, trouble: str = "", reason: str = "") -> RunView:
    return RunView(
        RECORD, tuple(JobStatus(job_id="17", state=state, reason=reason) for state in states), trouble
    )


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (run_view(JobState.RUNNING), "llama: RUNNING"),
        (run_view(JobState.PENDING, reason="Priority"), "llama: PENDING (Priority)"),
        (run_view(JobState.PENDING, reason="None"), "llama: PENDING"),
        (run_view(JobState.RUNNING, JobState.PENDING, JobState.RUNNING), "llama: 2 RUNNING, 1 PENDING"),
        (run_view(JobState.RUNNING, trouble="no route"), "llama: RUNNING, last known state (no route)"),
        (run_view(JobState.UNKNOWN, trouble="no route"), "llama: state unknown: no route"),
        (run_view(JobState.UNKNOWN), "llama: UNKNOWN"),
    ],
)
def test_the_state_of_a_run_is_described_in_one_line(view: RunView, words: str) -> None:
    assert summarize_state(view) == words


def test_a_pipe_gets_prefixed_lines_and_stderr_the_state_once(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    plain, silent = PlainScreen(stream), PlainScreen(stream)
    silent.show([])
    plain.show_state(run_view(JobState.RUNNING))
    plain.show_state(run_view(JobState.RUNNING))
    plain.show(
        [
            log_block(3, "a", "b"),
            Notice("attempt 1 begins"),
            log_block(4, "\x1b[2Jc", task="7"),
            Mark.CAUGHT_UP,
        ]
    )
    plain.end()
    assert (plain.has_output, silent.has_output) == (True, False)
    assert stream.getvalue() == "[3] a\n[3] b\n[7/4] c\n"
    assert capsys.readouterr().err == "llama: RUNNING\nattempt 1 begins\n"


def test_a_character_that_the_encoding_lacks_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    PlainScreen(stream).show([log_block(0, "loss ↓ 2")])
    assert raw.getvalue() == b"[0] loss ? 2\n"
    assert capsys.readouterr().err == ""


def terminal_screen(*, fold: bool = True, colours: bool = False) -> tuple[TerminalScreen, io.StringIO]:
    stream = io.StringIO()
    return TerminalScreen(stream, fold=fold, colours=colours), stream


def test_equal_lines_of_several_ranks_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    shown, stream = terminal_screen()
    shown.show_state(run_view(JobState.RUNNING))  # it is told elsewhere
    shown.show([log_block(0, "ready"), log_block(1, "ready"), log_block(2, "ready", "mine")])
    assert stream.getvalue() == ""  # what was there at the start is folded over its whole length
    shown.show([Mark.CAUGHT_UP])
    assert stream.getvalue() == "[0-2] ready\n[2] mine\n"
    shown.show([log_block(5, "late"), Notice("attempt 1 begins")])
    assert stream.getvalue().endswith("[5] late\n")  # before the notice
    shown.show([log_block(6, "last")])
    shown.end()
    assert stream.getvalue().endswith("[6] last\n")
    assert capsys.readouterr().err == "attempt 1 begins\n"


def test_lines_are_not_folded_without_fold() -> None:
    shown, stream = terminal_screen(fold=False)
    shown.show([log_block(0, "x"), LogBlock(LogFile("batch"), b"x\n"), log_block(1, "x", task="4")])
    assert stream.getvalue() == "[0] x\n[batch] x\n[4/1] x\n"


def test_each_rank_prefix_has_a_colour() -> None:
    shown, stream = terminal_screen(colours=True)
    shown.show(
        [
            log_block(0, "a"),
            log_block(10, "b"),
            log_block(1, "c"),
            log_block(2, "c"),
            LogBlock(LogFile("node"), b"d\n"),
        ]
    )
    shown.end()
    alone, other, many, launcher = stream.getvalue().splitlines()
    assert alone == "\x1b[32m[0]\x1b[0m a"
    assert other == "\x1b[32m[10]\x1b[0m b"
    assert many == "\x1b[1m[1-2]\x1b[0m c"
    assert launcher == "\x1b[2m[node0]\x1b[0m d"


def live_screen() -> tuple[LiveScreen, Progress, io.StringIO]:
    """Return a screen with a progress line, and the text drawn around the line."""
    drawn = io.StringIO()
    console = Console(file=drawn, width=80, highlight=False)
    progress = Progress(
        TextColumn("{task.description}"), console=console, auto_refresh=False, redirect_stdout=False
    )
    return LiveScreen(RECORD, progress, fold=True, colours=False), progress, drawn


def test_the_progress_line_shows_state_steps_and_loss() -> None:
    shown, progress, _ = live_screen()
    metrics = LogFile("metrics")
    [task] = progress.tasks
    shown.show_state(run_view(JobState.RUNNING))
    assert task.description == "llama: RUNNING"
    shown.show([Record(metrics, {"step": 5, "total_steps": 100, "loss": 1.23456})])
    assert (task.completed, task.total, task.fields["values"]) == (5, 100, "loss 1.235")
    shown.show([Record(metrics, {"step": 6, "total_steps": 100})])
    assert (task.completed, task.fields["values"]) == (6, "")
    shown.show([Record(metrics, {"step": 7.5}), Record(LogFile("events"), {"step": 9, "total_steps": 9})])
    assert (task.completed, task.total) == (6, 100)
    shown.show([Rewritten(LogFile("rank", 3), "37%|\x1b[2J###")])
    assert task.fields["values"] == "[3] 37%|###"


def test_log_lines_are_printed_above_the_progress() -> None:
    shown, _, drawn = live_screen()
    shown.show([log_block(0, "[red]hello[/]"), Notice("attempt [1] begins"), Mark.CAUGHT_UP])
    assert drawn.getvalue() == "[0] [red]hello[/]\nattempt [1] begins\n"


def test_many_lines_are_printed_directly_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    shown, progress, drawn = live_screen()
    shown.show([log_block(0, *(f"line {number}" for number in range(200))), Mark.CAUGHT_UP])
    progress.stop()
    assert capsys.readouterr().out.splitlines()[-1] == "[0] line 199"
    assert "line" not in drawn.getvalue()


@pytest.mark.parametrize(
    ("on_stderr", "tty", "fold", "kind", "folds"),
    [
        (False, False, None, PlainScreen, False),
        (False, False, False, PlainScreen, False),
        (False, False, True, TerminalScreen, True),
        (False, True, None, TerminalScreen, True),
        (False, True, False, TerminalScreen, False),
        (True, True, None, PlainScreen, False),
    ],
)
def test_the_screen_type_depends_on_terminal_and_fold(
    on_stderr: bool, tty: bool, fold: bool | None, kind: type, folds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: tty)
    result = follow.make_screen(fold=fold, on_stderr=on_stderr)
    assert type(result) is kind
    assert result.folds is folds


@pytest.mark.parametrize(
    ("tty", "env", "has"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colours_require_a_terminal_and_no_no_color(
    tty: bool, env: dict[str, str], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: tty)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert output.has_colours() is has


def test_the_live_screen_prints_folded_lines_at_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with screen.open_live_screen(RECORD, fold=True) as shown:
        shown.show([log_block(0, "a"), log_block(1, "a")])
    assert "[0-1] a" in capsys.readouterr().out
