"""The messages about a run, from its events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dtslurm.views.unsent_messages import describe_unsent
from dtslurm.worker.notify import job_sender, outbox, sender
from dtslurm.worker.notify.messages import PAUSE_S, Message, RunState, is_due, list_messages
from dtslurm.worker.supervisor.attempts import Ledger
from tests.sinks import MailSink, WebhookSink, find_closed_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from dtslurm.worker.notify.sender import main; sys.exit(main(sys.argv[1:]))"
RUN = RunState(name="train", cluster="ours")


def event(name: str, time: float = 100.0, **values: Any) -> dict[str, Any]:
    return {"time": time, "event": name, **values}


def start(number: int) -> dict[str, Any]:
    return event("attempt", attempt=number, nodes=["n1", "n2"], world_size=2)


def end(number: int, cause: str, **values: Any) -> dict[str, Any]:
    return event("attempt_ended", attempt=number, cause=cause, summary=f"the {cause}", **values)


SCRIPT_STARTS = event("started", job_id="17", attempt=None)


def final(code: int) -> dict[str, Any]:
    return event("ended", attempt=0, exit_code=code, final=True)


def keys(events: list[dict[str, Any]], run: RunState = RUN) -> list[str]:
    return [message.key for message in list_messages(events, run)]


def test_each_event_of_a_run_has_one_message() -> None:
    events = [
        SCRIPT_STARTS,
        start(0),
        event("hang", attempt=0, summary="rank 1 waits"),
        event("hang", attempt=0, summary="rank 1 waits"),
        end(0, "hang"),
        start(1),
        event("limit_expected", attempt=1, summary="the job reaches its time limit in 5 min"),
        end(1, "time-limit"),
        event("ended", attempt=None, exit_code=85),  # by the script, which is requeued
        SCRIPT_STARTS,
        start(2),
        end(2, "done"),
        final(0),
        event("ended", attempt=None, exit_code=0),
    ]
    messages = list_messages(events, RUN)
    assert [(message.key, message.about) for message in messages] == [
        ("started", "started"),
        ("stalled-0", "stalled"),
        ("restarted-1", "restarted"),
        ("limit-1", "will reach its time limit"),
        ("restarted-2", "restarted"),
        ("end-2", "done"),
    ]
    assert messages[0].title == "job 17 (train) on ours started"
    assert messages[2].lines == ["attempt 0 ended: the hang", "2 ranks on n1, n2"]
    assert keys(events) == keys(events, RUN._replace(state="COMPLETED"))  # Slurm's report adds none


def test_a_second_end_after_a_requeue_is_another_event() -> None:
    events = [SCRIPT_STARTS, start(0), end(0, "exit-code"), final(1)]
    again = [*events, SCRIPT_STARTS, start(1), end(1, "exit-code"), final(1)]
    assert keys(events) == ["started", "end-1"]
    assert keys(again) == ["started", "end-1", "restarted-1", "end-2"]


def test_failure_names_cause_rank_node_last_lines_and_the_next_command() -> None:
    output = "".join(f"line {number}\n" for number in range(20)) + "\x1b[31mred\x07\x1b[0m\u202e" + "x" * 500
    events = [SCRIPT_STARTS, start(0), end(0, "oom", rank=1, node="n2", exit_code=137), final(137)]
    message = list_messages(events, RUN, lambda attempt, rank: output if (attempt, rank) == (0, 1) else "")[
        -1
    ]
    assert message.title == "job 17 (train) on ours failed"
    assert message.lines[:3] == [
        "cause: oom: the oom", "rank 1, node n2, attempt 0, exit code 137", "last lines of rank 1:",
    ]  # fmt: skip
    assert message.lines[3] == "  line 13"
    assert message.lines[-2].startswith("  redxxx")
    assert len(message.lines[-2]) < 210
    assert message.lines[-1] == "to look further: dtslurm diagnose 17"
    assert message.body.isprintable() or set(filter(lambda c: not c.isprintable(), message.body)) == {"\n"}


@pytest.mark.parametrize(
    ("events", "run"),
    [
        ([SCRIPT_STARTS, start(0), end(0, "cancelled"), final(143)], RUN),
        ([SCRIPT_STARTS, start(0), end(0, "lost"), final(1)], RUN._replace(cancelled=True)),
        ([SCRIPT_STARTS, start(0)], RUN._replace(state="CANCELLED")),
        ([SCRIPT_STARTS, start(0), event("ended", attempt=None, exit_code=1)], RUN),  # it may be requeued
    ],
)
def test_cancelled_and_unknown_ends_have_no_message(events: list[dict[str, Any]], run: RunState) -> None:
    assert keys(events, run) == ["started"]


def test_an_end_that_only_slurm_reports_has_a_message_with_its_state() -> None:
    [_, message] = list_messages([SCRIPT_STARTS, start(0)], RUN._replace(state="NODE_FAIL"))
    assert (message.key, message.kind) == ("end-1", "failure")
    assert message.lines[0] == "Slurm reports NODE_FAIL"
    [message] = list_messages([event("ended", exit_code=3, attempt=None)], RUN._replace(state="FAILED"))
    assert message.lines[0] == "the job ended before training started, with exit code 3"


def test_a_message_is_left_to_the_job_first_and_given_up_after_some_tries() -> None:
    events = [SCRIPT_STARTS, {**start(0), "time": 1000.0}]
    messages = list_messages(events, RUN)

    def due(now: float, *results: dict[str, Any], addresses: int = 1) -> bool:
        return is_due([*events, *results], messages, addresses, now, 30.0)

    sent = event("message_sent", 1001.0, message="started", address=0)
    failed = event("message_failed", 1001.0, message="started", address=0, final=False)
    assert not due(1020.0)
    assert due(1031.0)
    assert not due(1031.0, addresses=0)
    assert not due(9999.0, sent)
    assert due(1031.0, sent, addresses=2)  # the other address
    assert not due(1031.0, failed)
    assert due(1062.0, failed)
    assert due(1062.0, failed, failed, failed)
    assert not due(9999.0, failed, failed, failed, failed)
    assert not due(9999.0, {**failed, "final": True})


@pytest.mark.parametrize(
    ("steps", "total", "left_s", "expected"),
    [
        (100, 1000, 1800, "the job reaches its time limit in 30 min, and training needs about 150 min more"),
        (100, 1000, 3500, ""),  # in the first half of the time limit
        (900, 1000, 1800, ""),
        (900, None, 1800, ""),
        (900, None, 300, "the job reaches its time limit in 5 min, and training continues"),
        (0, None, 20, "the job reaches its time limit in 20 s, and training continues"),
        (900, 1000, 130, ""),  # it needs 111 s
    ],
)
def test_time_limit_is_expected_from_the_pace_or_shortly_before(
    steps: int, total: int | None, left_s: float, expected: str
) -> None:
    points = [(1000.0 * step / (steps or 1), step, total) for step in range(0, steps + 1, 10)]
    points += [("x", None, []), (float("nan"), 3, 4)]  # type: ignore[list-item]
    assert job_sender.expect_limit(points, left_s, 3600.0) == expected


# ---- Sending ----


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    events = [SCRIPT_STARTS, start(0), end(0, "oom", rank=0, node="n1"), final(1)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(item) + "\n" for item in events))
    log = tmp_path / "logs" / "0" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("the last words\n")
    return tmp_path


def address(run_dir: Path, *urls: str) -> None:
    addresses = [{"label": f"***{number}", "name": "", "url": url} for number, url in enumerate(urls)]
    settings = {"name": "train", "cluster": "ours", "from_job": True, "addresses": addresses}
    (run_dir / "notify.json").write_text(json.dumps(settings))


def results(run_dir: Path) -> list[tuple[str, str, str]]:
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [
        (line["event"], line["message"], line.get("problem", ""))
        for line in lines
        if line["event"].startswith("message_")
    ]


def send(run_dir: Path, *words: str, python: tuple[str, ...] = (sys.executable,)) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*python, "-c", PROGRAM, str(run_dir), *words], cwd=ROOT)


def test_several_senders_at_once_send_each_message_once(run_dir: Path) -> None:
    with WebhookSink().run() as sink:
        address(run_dir, sink.url)
        senders = [send(run_dir, *words) for words in ((), ("--job",), ("--detach",))]
        assert [sender.wait() for sender in senders] == [0, 0, 0]
        wait_until(lambda: len(results(run_dir)) == 2)  # the detached one goes on after its end
        assert send(run_dir).wait() == 0
    assert sorted(sink.titles()) == ["job 17 (train) on ours failed", "job 17 (train) on ours started"]
    assert "  the last words" in "".join(message["message"] for message in sink.messages)
    assert sorted(results(run_dir)) == [("message_sent", "end-1", ""), ("message_sent", "started", "")]


@pytest.mark.slow
def test_a_mail_has_the_diagnosis_and_its_server_has_its_time_for_each_message(run_dir: Path) -> None:
    with MailSink().run() as sink:
        address(run_dir, sink.url)
        sending = send(run_dir)
        wait_until(lambda: sink.mails)
        sink.delay_s = 1.0
        assert sending.wait() == 0
    assert len(sink.mails) == 2
    assert "To: " in sink.mails[1]
    assert "dtslurm diagnose 17" in sink.mails[1]


@pytest.mark.slow
def test_a_receiver_that_does_not_answer_delays_no_other(run_dir: Path) -> None:
    hanging = WebhookSink()
    hanging.delay_s = 600.0
    with hanging.run(), WebhookSink().run() as sink:
        address(run_dir, hanging.url, sink.url, f"json://127.0.0.1:{find_closed_port()}/c4n4ry-token")
        began = time.monotonic()
        assert send(run_dir, "--job").wait() == sender.UNSENT
        assert time.monotonic() - began < 300  # two messages, of at most 6 s each
        assert len(sink.messages) == 2
    problems = {problem for name, _, problem in results(run_dir) if name == "message_failed"}
    assert problems  # a time-out of Apprise or of the sender, and a refused connection
    assert "c4n4ry" not in "".join(problems)
    assert "c4n4ry" not in (run_dir / "events.jsonl").read_text()


@pytest.mark.slow
def test_a_failed_message_is_sent_later_by_another_sender(run_dir: Path) -> None:
    with WebhookSink().run() as sink:
        address(run_dir, sink.url)
        sink.status = 500
        assert send(run_dir, "--job").wait() == sender.UNSENT
        sink.status = 200
        for path in (run_dir / "notify").iterdir():
            os.utime(path, (time.time() + 3600,) * 2)
        assert send(run_dir).wait() == 0  # too soon
        assert sink.titles() == []
        for path in (run_dir / "notify").iterdir():
            os.utime(path, (time.time() - PAUSE_S,) * 2)
        assert [send(run_dir).wait() for _ in range(2)] == [0, 0]
    assert len(sink.titles()) == 2
    assert [name for name, _, _ in results(run_dir)] == ["message_failed"] * 2 + ["message_sent"] * 2
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    assert describe_unsent(lines) == ""


def test_a_message_of_a_killed_sender_is_not_repeated(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PAUSE_S", 0.0)
    message = Message("end-1", "failed", "failure", 1.0, "", [])
    box = outbox.Outbox(str(run_dir), 4)
    assert box.claim("end-1", 0)
    assert box.claim("end-1", 0) is None
    path = box.find_cut_off("end-1", 0)
    assert path is not None
    box.settle(path, message, 0, "A", outbox.CUT_OFF, final=True)
    assert box.claim("end-1", 0) is None
    assert box.find_cut_off("end-1", 0) is None
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    assert describe_unsent(lines) == f"not sent to A (the job failed): {outbox.CUT_OFF}"


def test_an_interpreter_without_the_library_sends_nothing(run_dir: Path) -> None:
    address(run_dir, "json://127.0.0.1:1/")
    assert send(run_dir, python=(sys.executable, "-S")).wait() == sender.NO_LIBRARY
    assert results(run_dir) == []


def test_nothing_is_loaded_if_nothing_is_left(run_dir: Path) -> None:
    with WebhookSink().run() as sink:
        address(run_dir, sink.url)
        assert send(run_dir).wait() == 0
    without_library = (sys.executable, "-S")
    assert send(run_dir, python=without_library).wait() == 0
    (run_dir / "events.jsonl").write_text("")
    assert send(run_dir, python=without_library).wait() == 0


def test_problems_are_shown_without_the_parts_of_the_address() -> None:
    url = "mailtos://me:pa55word@smtp.example.org/?to=you@mail.test&key=abcdef"
    problem = "cannot log in at smtp.example.org as me with pa55word (abcdef)"
    assert sender.hide_parts(problem, url) == "cannot log in at smtp.example.org as me with *** (***)"
    address = "json://h:1/a.b.c?x=dd%2Fee&token"
    assert sender.hide_parts("no a.b.c, dd/ee at token", address) == "no ***, *** at ***"


def test_the_job_waits_for_its_messages_for_a_limited_time(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address(run_dir, "json://127.0.0.1:1/")
    program = run_dir / "slow"
    program.write_text("import time; time.sleep(600)")
    events: list[str] = []
    ledger: Any = type("Ledger", (), {"event": lambda _self, name, **_values: events.append(name)})()
    notifications = job_sender.JobMessages(str(run_dir), str(program), ledger)
    notifications.request()
    began = time.monotonic()
    notifications.finish(0.5)
    assert 0.5 <= time.monotonic() - began < 60
    notifications._process.kill()
    notifications._process.wait()
    notifications._process = None
    program.write_text(f"raise SystemExit({sender.NO_LIBRARY})")
    notifications.request()
    notifications.finish(60.0)
    notifications.look()
    assert (events, notifications.enabled) == (["messages_left"], False)


def test_time_limit_is_reported_once_in_a_start(tmp_path: Path) -> None:
    (tmp_path / "notify.json").write_text(json.dumps({"from_job": False}))
    metrics = tmp_path / "metrics" / "2" / "train.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text("".join(f'{{"time": {n}, "step": {n}, "total_steps": 9000}}\n' for n in range(9)))
    messages = job_sender.JobMessages(str(tmp_path), "", Ledger(str(tmp_path)))
    assert messages.is_limit_check_due()
    assert not messages.is_limit_check_due()  # it was checked just now
    assert messages.expect_limit(2, 100.0, None, 0.0) == ""
    assert messages.expect_limit(2, 100.0, 3700.0, 0.0) == ""  # the first half of the partition's limit
    summary = messages.expect_limit(2, 2500.0, 3700.0, 0.0)
    assert summary == "the job reaches its time limit in 20 min, and training needs about 150 min more"
    messages.report_limit(2, summary)
    messages._limit_checked_at = -1e9
    assert not messages.is_limit_check_due()
    [recorded] = Ledger(str(tmp_path)).events("limit_expected")
    assert (recorded["attempt"], recorded["summary"]) == (2, summary)


def test_documented_message_is_the_one_that_is_sent() -> None:
    page = (ROOT / "docs" / "notify.md").read_text()
    output = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 5, in <module>\n'
        '    raise ValueError("no data")\nValueError: no data\n'
    )
    ended = end(0, "python-exception", rank=0, node="local1", exit_code=1)
    ended["summary"] = "ValueError: no data at /home/me/train.py:5 in <module>"
    events = [SCRIPT_STARTS, start(0), ended, final(1)]
    message = list_messages(events, RunState(name="train", cluster="local"), lambda *_: output)[-1]
    assert f"```text\n{message.title}\n\n{message.body}\n```" in page
