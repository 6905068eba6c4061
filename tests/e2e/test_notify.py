"""Messages about runs: sent once, by the job or by what looks at it, without their secrets anywhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import WITHOUT_SSH, Cli, events_of
from tests.e2e.test_secrets import argvs, files_with_the_secret
from tests.sinks import MailSink, WebhookSink

pytestmark = pytest.mark.timeout(600)
FAILS = """
    import sys, time
    print("step 1", flush=True)
    raise ValueError("no data in shard 7")
"""
FAILS_ONCE = """
    import os, pathlib, signal
    mark = pathlib.Path("mark")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
KILLS_ITS_JOB = """
    import os, pathlib, re, signal
    run = os.environ["DTSLURM_RUN_DIR"]
    text = ""
    while '"batch"' not in text:
        text = pathlib.Path(run, "events.jsonl").read_text()
    os.kill(int(re.search('"batch": ([0-9]+)', text)[1]), signal.SIGKILL)
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        if f"{run}/supervisor\\0--nodes".encode() in path.read_bytes():
            os.kill(int(path.parent.name), signal.SIGKILL)
    raise SystemExit(1)
"""


@pytest.fixture
def sink() -> Iterator[WebhookSink]:
    with WebhookSink().run() as running:
        yield running


def submit(cli: Cli, *words: str, script: str) -> str:
    return cli.submit("-l", "single", "--python", sys.executable, *words, cli.script(script))


def submit_offline(cli: Cli, sink: WebhookSink, *words: str, script: str) -> str:
    """Submit a job to a cluster whose compute nodes have no internet, and whose profile names the address."""
    cli.env["HOOK"] = sink.url
    folder = cli.folder / "cluster_profiles"
    folder.mkdir()
    (folder / "offline.yaml").write_text(
        f"extends: {cli.cluster}\nnotify: [HOOK]\nenvironment:\n  offline: true\n"
    )
    options = ("--parsable", "-t", "10", "-l", "single", "--python", sys.executable, *words)
    done = cli("submit", "--cluster", "offline", *options, cli.script(script))
    assert "have no internet" in done.stderr
    cli.started.append(done.stdout.strip())
    return cli.started[-1]


def test_failed_run_sends_its_diagnosis_and_no_secret_is_left(
    cli: Cli, sink: WebhookSink, tmp_path: Path
) -> None:
    cli.env["HOOK"] = sink.url
    job = submit(cli, "--notify", "HOOK", script=FAILS)
    assert not [words for words in argvs() if b"c4n4ry" in words]
    cli.wait_for_end(job)
    cli.wait_until(lambda: len(sink.messages) == 2)
    started, failed = sink.messages
    assert started["title"] == f"job {job} (train) on {cli.cluster} started"
    assert failed["title"] == f"job {job} (train) on {cli.cluster} failed"
    for part in (
        "ValueError: no data in shard 7", "rank 0, node ", "exit code 1",
        f"to look further: dtslurm diagnose {job}",
    ):  # fmt: skip
        assert part in failed["message"]
    shown = cli("status", job).stdout + cli("status", "--json", job).stdout + cli("logs", job).stdout
    run = cli.run_dir(job)
    assert "message sent to HOOK: the job failed" in shown
    assert "c4n4ry" not in shown
    assert files_with_the_secret(tmp_path) == ["notify.json"]
    assert (run.path / "notify.json").stat().st_mode & 0o777 == 0o600
    assert len(sink.messages) == 2


@WITHOUT_SSH
def test_restarted_run_sends_each_event_once(cli: Cli, sink: WebhookSink) -> None:
    job = submit(cli, "--notify", sink.url, "--max-restarts", "1", "--no-health-check", script=FAILS_ONCE)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    cli.wait_until(lambda: len(sink.messages) == 3)
    ends = [title.rpartition(" ")[2] for title in sink.titles()]
    assert ends == ["started", "restarted", "done"]
    assert "attempt 0 ended: " in sink.messages[1]["message"]
    assert "c4n4ry" not in (cli.run_dir(job).path / "job.json").read_text()


@WITHOUT_SSH
def test_hanging_webhook_delays_neither_the_training_nor_other_messages(cli: Cli, sink: WebhookSink) -> None:
    sink.delay_s = 1000.0
    with MailSink().run() as mail:
        job = submit(cli, "--notify", sink.url, "--notify", mail.url, script='open("trained", "w")')
        assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
        cli.wait_until(lambda: len(mail.mails) == 2)
        run = cli.run_dir(job)
        [end] = [event for event in events_of(run, "ended") if event.get("final")]
        [attempt] = events_of(run, "attempt_ended")
        assert end["time"] - attempt["time"] < 60  # the end of training did not wait for a message
        cli.wait_until(lambda: events_of(run, "message_failed"))
        assert "not sent to json://***" in cli("status", job).stdout


def test_messages_that_a_job_cannot_send_are_sent_once_by_those_who_look(cli: Cli, sink: WebhookSink) -> None:
    job = submit_offline(cli, sink, script=FAILS)
    watchers = [threading.Thread(target=cli, args=("logs", "-f", job), kwargs={"code": None}) for _ in "ab"]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join()
    cli.wait_until(lambda: cli("status", job) and len(sink.messages) == 2)
    assert sorted(title.rpartition(" ")[2] for title in sink.titles()) == ["failed", "started"]
    cli.wait_until(lambda: len(events_of(cli.run_dir(job), "message_sent")) == 2)


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_end_of_a_job_that_could_not_report_it_is_sent_by_those_who_look(cli: Cli, sink: WebhookSink) -> None:
    job = submit_offline(cli, sink, "--no-requeue", script=KILLS_ITS_JOB)
    assert cli.wait_for_end(job)["statuses"][0]["state"] != "COMPLETED"
    cli.wait_until(lambda: cli("status", job) and sink.count("failed"))
    assert sorted(title.rpartition(" ")[2] for title in sink.titles()) == ["failed", "started"]
