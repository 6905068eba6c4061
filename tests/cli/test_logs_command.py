"""``dtslurm logs``: selected lines, messages without output, and invalid selections."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest

from dtslurm.cli import follow as following
from dtslurm.cli.commands import logs as logs_command
from dtslurm.cli.printing import output
from dtslurm.model.runs.state import JobState
from tests.cli.conftest import Run
from tests.cli.sample_runs import ENDED, Runs, ended_job, rank_record


@pytest.fixture(autouse=True)
def finished_run(runs: Runs) -> None:
    files = {
        "logs/0/rank-0.log": "first try\n",
        "logs/1/rank-0.log": "one\ntwo\nthree\n",
        "logs/1/rank-1.log": "one\nzwei\n",
        "logs/batch.log": "srun: hello\n",
        "ranks/1/0.json": rank_record(0, "n1"),
        "ranks/1/1.json": rank_record(1, "n2"),
    }
    runs.add("train", "7", world_size=2, files=files)


def log_lines(invoke: Run, *words: str) -> list[str]:
    return sorted(invoke("logs", *words, code=0).stdout.splitlines())


def test_logs_show_all_ranks_of_the_newest_attempt_by_default(invoke: Run) -> None:
    done = invoke("logs", code=0)
    assert done.stderr == "the newest run: job 7 (train)\n"
    assert sorted(done.stdout.splitlines()) == [
        "[0] one", "[0] three", "[0] two", "[1] one", "[1] zwei", "[batch] srun: hello",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("--rank", "1"), ["[1] one", "[1] zwei"]),
        (("--rank", "0 , 1-3", "-n", "1"), ["[0] three", "[1] zwei"]),
        (("--node", "n[2-9]"), ["[1] one", "[1] zwei"]),
        (("--attempt", "0", "--rank", "0"), ["[0] first try"]),
        (("--grep", "^o|w.i"), ["[0] one", "[1] one", "[1] zwei"]),
        (("--grep", "e$", "--tail", "1", "--rank", "0"), ["[0] three"]),
        (("--fold", "--rank", "0-1", "-n", "5"), ["[0-1] one", "[0] three", "[0] two", "[1] zwei"]),
    ],
)
def test_logs_select_lines_by_rank_node_attempt_and_pattern(
    invoke: Run, words: tuple[str, ...], lines: list[str]
) -> None:
    assert log_lines(invoke, *words, "train") == lines


def test_logs_select_lines_by_time(invoke: Run, runs: Runs) -> None:
    minutes = range(ENDED - ENDED % 60, ENDED - ENDED % 60 + 240, 60)
    stamps = [datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M") for moment in minutes]
    text = "".join(f"{stamp}:00 step {number}\n" for number, stamp in enumerate(stamps))
    runs.add("timed", "8", files={"logs/0/rank-0.log": text})
    since, until = (
        log_lines(invoke, "--since", stamps[1], "timed"),
        log_lines(invoke, "--until", stamps[1], "timed"),
    )
    assert [line[-6:] for line in since] == ["step 1", "step 2", "step 3"]
    assert [line[-6:] for line in until] == ["step 0", "step 1"]
    assert log_lines(invoke, "--since", "10m", "timed") == []


def test_logs_json_has_rank_and_attempt_of_each_line(invoke: Run) -> None:
    document = json.loads(invoke("logs", "--json", "--rank", "1", "train", code=0).stdout)
    assert document["job_id"] == "7"
    assert document["lines"][0] == {"source": "1", "text": "one", "rank": 1, "attempt": 1, "task": None}
    followed = json.loads(invoke("logs", "--json", "-f", "--rank", "1", "train", code=0).stdout)
    assert [line["text"] for line in followed["lines"]] == ["one", "zwei"]


def test_logs_follow_ends_immediately_for_a_finished_run(invoke: Run) -> None:
    done = invoke("logs", "-f", "--rank", "1", "train", code=0)
    assert done.stdout == "[1] one\n[1] zwei\n"
    assert done.stderr == "train: COMPLETED\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--node", "n9"), "no output on n9; the job is COMPLETED on n1"),
        (("--rank", "1", "--attempt", "0"), "no output; the job is COMPLETED"),
    ],
)
def test_logs_explain_an_empty_selection(invoke: Run, words: tuple[str, ...], message: str) -> None:
    done = invoke("logs", *words, "train", code=0)
    assert (done.stdout, done.stderr) == ("", f"{message}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rank", "5,7-9"), "the run has no rank 5,7-9, only 0-1"),
        (("--rank", "5", "--json"), "the run has no rank 5, only 0-1"),
        (("--attempt", "3", "--rank", "0"), "the run has no attempt 3, only 0, 1"),
        (("--attempt", "3"), "the run has no attempt 3, only 0, 1"),
        (("--attempt", "3", "--json"), "the run has no attempt 3, only 0, 1"),
    ],
)
@pytest.mark.parametrize("following", [(), ("-f",)])
def test_logs_exit_with_3_for_a_rank_or_attempt_that_does_not_exist(
    invoke: Run, words: tuple[str, ...], message: str, following: tuple[str, ...]
) -> None:
    done = invoke("logs", *following, *words, "train", code=3)
    assert (done.stdout, done.stderr) == ("", f"error: {message}\n")


@pytest.mark.parametrize("following", [(), ("-f",)])
def test_logs_check_attempts_per_array_task(invoke: Run, runs: Runs, following: tuple[str, ...]) -> None:
    files = {"tasks/3/logs/0/rank-0.log": "of 3\n", "tasks/4/logs/1/rank-0.log": "of 4\n"}
    runs.add("many", "10", ended_job("10_3"), ended_job("10_4"), array="3-4", files=files)
    assert invoke("logs", *following, "--attempt", "1", "10_4", code=0).stdout == "[4/0] of 4\n"
    done = invoke("logs", *following, "--attempt", "1", "10_3", code=3)
    assert (done.stdout, done.stderr) == ("", "error: the run has no attempt 1, only 0\n")


def test_logs_follow_accepts_a_future_attempt_of_an_active_run(
    invoke: Run, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(logs_command, "follow_to_end", lambda *given, **_: asked.append(given[2].attempt))
    runs.add("alive", "9", ended_job("9", JobState.UNKNOWN), files={"logs/0/rank-0.log": "x\n"})
    invoke("logs", "-f", "--attempt", "1", "alive", code=0)
    assert asked == [1]


def test_logs_show_existing_ranks_and_ignore_others_in_the_selection(invoke: Run) -> None:
    assert log_lines(invoke, "--rank", "1,9", "train") == ["[1] one", "[1] zwei"]


def test_logs_of_an_active_run_without_output_print_a_message(invoke: Run, runs: Runs) -> None:
    runs.add("fresh", "9", ended_job("9", JobState.UNKNOWN, nodelist="", end_time=ENDED))
    assert "no output yet; the job is UNKNOWN" in invoke("logs", "fresh").stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rank", "3-1"), "--rank '3-1': write ranks and ranges like 0,3-7"),
        (("--rank", "a"), "--rank 'a': write ranks and ranges like 0,3-7"),
        (("--rank", ""), "--rank '': write ranks and ranges like 0,3-7"),
        (("--node", "n[1-"), "--node 'n[1-' is not a node set"),
        (("--grep", "("), "--grep '(' is not a regular expression"),
        (("--since", "soon"), "--since 'soon' is not a time: write 10m (ago), 14:05 or 2026-11-21 14:05"),
        (("--until", "25:99"), "--until '25:99' is not a time"),
    ],
)
def test_logs_refuse_an_invalid_selection(invoke: Run, words: tuple[str, ...], message: str) -> None:
    done = invoke("logs", *words, "train", code=2)
    assert message in done.stderr
    assert done.stdout == ""


def test_logs_select_an_array_task_by_its_id(invoke: Run, runs: Runs) -> None:
    files = {f"tasks/{task}/logs/0/rank-0.log": f"of {task}\n" for task in (3, 4)}
    runs.add("many", "10", ended_job("10_3"), ended_job("10_4"), array="3-4", files=files)
    assert log_lines(invoke, "many") == ["[3/0] of 3", "[4/0] of 4"]
    assert log_lines(invoke, "10_4") == ["[4/0] of 4"]


def test_an_interrupt_of_logs_follow_prints_that_the_job_continues(
    invoke: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(following, "follow", interrupted)
    done = invoke("logs", "-f", "train", code=130)
    assert done.stderr == "the job continues; dtslurm logs -f 7 follows it again\n\n"


def test_the_message_after_an_interrupt_comes_after_the_progress_line(
    invoke: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    result: list[str] = []

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    @contextmanager
    def screen(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            result.append("the screen is free")

    monkeypatch.setattr(following, "follow", interrupted)
    monkeypatch.setattr(following, "_open_screen", screen)
    monkeypatch.setattr(output, "note", result.append)
    invoke("logs", "-f", "train", code=130)
    assert result == ["the screen is free", "the job continues; dtslurm logs -f 7 follows it again"]


def test_logs_follow_prints_the_folded_last_lines_on_a_terminal(
    invoke: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    shown = invoke("logs", "-f", "--rank", "0-1", "train", code=0).stdout
    assert [line in shown for line in ("[0-1] one", "[0] three", "[1] zwei")] == [True, True, True]


def test_logs_of_a_run_without_a_job_explain_the_missing_output(invoke: Run, runs: Runs) -> None:
    record = runs.add("lost", "9")
    runs.change(record, job_id=None, phase="withdrawn", final=())
    for words in ([], ["-f"]):
        done = invoke("logs", *words, "lost", code=3)
        assert "has no output: the answer of sbatch was lost, and Slurm created no job" in done.stderr
    runs.change(record, job_id=None, phase="unknown", final=(), created_at=time.time())
    assert "it is not known whether Slurm created a job" in invoke("logs", "lost", code=3).stderr
