"""``dtslurm status``: table rows, a single run in full, and JSON."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dtslurm.cli.printing import output
from dtslurm.cli.printing.status_rows import format_run, make_rows
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.services.runs.history import History
from dtslurm.services.runs.run_evidence import apply_events
from dtslurm.services.runs.run_times import attempts_of
from dtslurm.services.runs.select_runs import parse_states, select_runs
from dtslurm.services.runs.status import RunView
from dtslurm.services.wiring.context import Context
from dtslurm.store.rundir import RunDir
from tests.cli.conftest import Run
from tests.cli.sample_runs import ENDED, Runs, ended_job
from tests.cli.slurm_programs import Programs, list_jobs
from tests.waiting import wait_until

NOW = 1_800_000_000.0
COLUMNS = ("JOB", "NAME", "CLUSTER", "STATE", "RANKS", "AGE", "TIME", "NODES", "ABOUT")


def job_status(job_id: str = "17", state: JobState = JobState.RUNNING, **values: Any) -> JobStatus:
    return JobStatus(**{"job_id": job_id, "state": state, "observed_at": NOW, "source": "squeue", **values})


def run_view(*statuses: JobStatus, **values: Any) -> RunView:
    record = JobRecord(
        **{
            "token": "t", "cluster": "perlmutter", "name": "llama", "run_dir": "/nowhere/run", "job_id": "17",
            "phase": "submitted", "created_at": 0, "world_size": 64, "launcher": "torchrun", **values,
        }
    )  # fmt: skip
    return RunView(record, statuses, observed_at=NOW - 2)


def about_column(view: RunView) -> list[str]:
    return [row[-1] for row in make_rows(view, NOW)]


def pending_status(reason: str, start: float | None = None) -> JobStatus:
    guess = None if start is None else int(start)
    return job_status(state=JobState.PENDING, reason=reason, estimated_start=guess)


def test_a_pending_job_shows_its_reason_and_an_estimated_start() -> None:
    (result,) = about_column(run_view(pending_status("Priority", NOW + 3600)))
    assert result.startswith("Priority: jobs with a higher priority wait, too; may start ")
    assert result.endswith("(Slurm's estimate)")
    assert "may start" not in about_column(run_view(pending_status("Priority", NOW - 3600)))[0]
    assert "will never start" in about_column(run_view(pending_status("PartitionTimeLimit")))[0]
    assert about_column(run_view(pending_status("None"))) == [""]


def stalled_activity(quiet: float = 220.0) -> Activity:
    return Activity(stalled=True, since=NOW - quiet, quiet_s=quiet, summary="no work of any rank")


def test_a_stalled_job_is_shown_as_stalled() -> None:
    seen = replace(run_view(job_status(time_left=300)), activities={"17": stalled_activity()})
    [row] = make_rows(seen, NOW)
    assert (row[3], row[-1]) == (
        "STALLED 3m40s", "no work of any rank: dtslurm diagnose --live 17; 5m00s left",
    )  # fmt: skip
    lines = list(format_run(seen, History((), ()), NOW, 80))
    assert lines[0].endswith(": STALLED 3m40s")
    assert "  stalled    no work of any rank" in lines
    assert lines[-1] == "  next       dtslurm diagnose --live 17   dtslurm logs 17   dtslurm cancel 17"


def test_the_row_of_a_job_mentions_a_rank_that_waits_for_a_child_process() -> None:
    waits = Activity(stalled=False, since=NOW, quiet_s=90, summary="rank 0 waits for its child cc1plus")
    seen = replace(run_view(job_status()), activities={"17": waits})
    [row] = make_rows(seen, NOW)
    assert (row[3], row[-1]) == ("RUNNING", "rank 0 waits for its child cc1plus")
    assert "  work       rank 0 waits for its child cc1plus" in format_run(seen, History((), ()), NOW, 80)


def test_stalled_array_tasks_are_grouped_in_one_row() -> None:
    activities = {"17_1": stalled_activity(90.0), "17_3": stalled_activity(400.0)}
    seen = run_view(*(job_status(f"17_{task}") for task in (1, 2, 3)), array="1-3")
    rows = make_rows(replace(seen, activities=activities), NOW)
    assert [row[:4:3] for row in rows] == [["17 (2 tasks)", "STALLED 6m40s"], ["17_2", "RUNNING"]]


def test_stalled_runs_can_be_selected_by_state() -> None:
    hung = replace(run_view(job_status()), activities={"17": stalled_activity()})
    states = parse_states("stalled")
    assert select_runs([hung, run_view(job_status())], states, None, "age", NOW) == [hung]
    assert select_runs([hung], parse_states("running"), None, "age", NOW) == [hung]


def test_array_tasks_in_the_same_state_are_grouped() -> None:
    seen = run_view(
        *(job_status(f"17_{task}", JobState.COMPLETED, exit_code=0) for task in range(3)),
        job_status("17_3"),
        job_status("17_[4-1003:2%8]", JobState.PENDING, reason="JobArrayTaskLimit"),
        array="0-1003%8",
    )
    assert [row[0] for row in make_rows(seen, NOW)] == ["17 (3 tasks)", "17_3", "17_[4-1003:2%8]"]
    text = "\n".join(format_run(seen, History((), ()), NOW, 80))
    assert "3 COMPLETED, 1 RUNNING, 500 PENDING" in text
    assert "ArrayTaskThrottle" in text


def test_a_held_array_task_is_shown_separately_from_pending_tasks() -> None:
    seen = run_view(
        *(job_status(f"17_{task}", JobState.PENDING, reason="JobArrayTaskLimit") for task in (1, 3)),
        job_status("17_2", JobState.PENDING, reason="JobHeldUser"),
        job_status("17_4", JobState.PENDING, reason="None"),
        array="0-4%1",
    )
    assert [(row[0], row[3], row[-1].partition(":")[0]) for row in make_rows(seen, NOW)] == [
        ("17 (2 tasks)", "PENDING", "JobArrayTaskLimit"),
        ("17_2", "PENDING", "JobHeldUser"),
        ("17_4", "PENDING", ""),
    ]
    text = " ".join("\n".join(format_run(seen, History((), ()), NOW, None)).split())
    assert "on perlmutter: 4 PENDING pending 17 (2 tasks)" in text
    assert (
        "pending 17_2: why JobHeldUser: held by you, and the job will never start as requested what "
        "to do release it"
    ) in text


@pytest.mark.parametrize("reason", ["Dependency", "Priority", "Resources", "BeginTime", "JobHeldUser"])
def test_a_cancelled_run_does_not_show_its_former_pending_reason(reason: str) -> None:
    assert about_column(run_view(job_status(state=JobState.CANCELLED, reason=reason))) == [""]


@pytest.mark.parametrize("reason", ["DependencyNeverSatisfied", "NodeDown", "OutOfMemory"])
def test_a_cancelled_run_shows_a_reason_that_may_explain_its_end(reason: str) -> None:
    assert about_column(run_view(job_status(state=JobState.CANCELLED, reason=reason))) != [""]


def test_a_failed_array_task_shows_its_first_failed_rank(tmp_path: Path) -> None:
    (tmp_path / "tasks/4/logs/0").mkdir(parents=True)
    (tmp_path / "tasks/4/ranks/0").mkdir(parents=True)
    (tmp_path / "tasks/4/ranks/0/first-failure").write_text("3 7\n")
    failed = job_status("17_4", JobState.FAILED, exit_code=7)
    seen = run_view(failed, array="0-7", run_dir=str(tmp_path))
    assert about_column(seen) == ["rank 3 failed first, exit code 7"]


def test_components_of_a_heterogeneous_job_in_one_state_share_a_row() -> None:
    seen = run_view(job_status("17+0"), job_status("17+1"))
    assert [row[0] for row in make_rows(seen, NOW)] == ["17 (2 parts)"]
    seen = run_view(job_status("17+0"), job_status("17+1", JobState.PENDING, reason="Resources"))
    assert [row[0] for row in make_rows(seen, NOW)] == ["17+0", "17+1"]


def test_an_unknown_job_shows_the_reason() -> None:
    seen = run_view(job_status(state=JobState.UNKNOWN, reason="the scheduler has no record of this job"))
    assert make_rows(seen, NOW)[0][3] == "UNKNOWN"
    assert "has no record of this job" in about_column(seen)[0]


def test_the_time_left_decreases_between_queries() -> None:
    seen = run_view(job_status(time_left=600, observed_at=NOW - 60, start_time=int(NOW) - 100))
    assert about_column(seen) == ["9m00s left"]
    assert make_rows(seen, NOW)[0][6] == "1m40s"


HOSTILE = [
    "\x1b]0;owned\x07",
    "\x1b[2J",
    "a\nJOB 99 COMPLETED",
    "[/red]",
    "[/usr/bin/x]",
    "\\[/",
    "\u202eevil",
    "\x9b31m",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("terminal", [True, False])
def test_c2_f64_names_and_reasons_cannot_control_the_terminal_or_add_rows(
    text: str, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    seen = run_view(
        job_status(state=JobState.PENDING, reason=text, nodelist=text, name=text), name=text, cluster=text
    )
    output.table(COLUMNS, make_rows(seen, NOW))
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 2
    for line in format_run(seen, History((), ({"time": NOW, "event": text, "why": text},)), NOW, 80):
        output.say(line)
    shown += capsys.readouterr().out
    assert not any(mark in shown for mark in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e"))
    assert "99 COMPLETED" not in [line[:12] for line in shown.splitlines()]
    if text.startswith("["):
        assert text in shown


@pytest.mark.parametrize("width", [80, 160])
def test_a_table_fits_the_terminal_and_keeps_all_words(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    seen = run_view(
        pending_status("AssocGrpGRESRunMinutes", NOW + 3600), name="a-name-that-is-longer-than-most-of-them"
    )
    columns = list(COLUMNS) if width > 120 else ["JOB", "NAME", "STATE", "TIME", "ABOUT"]
    cells = [[row[COLUMNS.index(name)] for name in columns] for row in make_rows(seen, NOW)]
    output.table(columns, cells)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    words = " ".join(" ".join(line.split()) for line in shown.splitlines())
    assert all(word in words for word in ("GPUs", "estimate)", "AssocGrpGRESRunMinutes:"))


def test_the_full_status_fits_80_columns() -> None:
    seen = run_view(
        pending_status("ReqNodeNotAvail, UnavailableNodes:n[1-40]", NOW + 90_000), time_limit=3600
    )
    lines = list(format_run(seen, History((), ()), NOW, 80))
    assert max(map(len, lines)) <= 80
    assert sum("what to do" in line for line in lines) == 1
    text = " ".join(" ".join(line.split()) for line in lines)
    assert "down or reserved: n[1-40]" in text
    assert "limit 1h00m" in text
    assert "queried 2s ago" in text
    assert "dtslurm cancel 17" in text


EVENTS: list[dict[str, Any]] = [
    {"time": NOW, "event": "submitted", "job_id": "17"},
    {"time": NOW + 1, "event": "started", "attempt": 0, "nodes": "n[1-2]"},
    {"time": NOW + 2, "event": "ended", "attempt": 0, "exit_code": 85},
    {"time": NOW + 3, "event": "started", "attempt": 1, "nodes": "n[3-4]"},
    {"time": NOW + 9, "event": "attempt", "attempt": 2, "nodes": "n3"},
    {"time": NOW + 11, "event": "attempt_ended", "attempt": 2, "exit_code": 1, "summary": "rank 3: NaN"},
    {"time": NOW + 11, "event": "ended", "attempt": 2, "exit_code": 93},  # the job's code, not the attempt's
    {"time": NOW + 12, "event": "started", "attempt": 3, "nodes": "n3"},
    {"time": "broken", "event": "ended", "attempt": 3, "exit_code": "?"},
]  # fmt: skip


def test_a_final_state_is_printed_once(tmp_path: Path) -> None:
    for folder in ("logs", "ranks"):
        (tmp_path / folder / "0").mkdir(parents=True)
    (tmp_path / "ranks" / "0" / "first-failure").write_text("0 143\n")
    ended = job_status(state=JobState.CANCELLED, start_time=int(NOW) - 60, end_time=int(NOW), nodelist="n1")
    lines = list(format_run(run_view(ended, run_dir=str(tmp_path)), History((), ()), NOW, 80))
    [line] = [line for line in lines if line.startswith("  cancelled")]
    assert line.endswith(", after 1m00s, on n1")


def test_attempts_are_derived_from_the_events() -> None:
    attempts = attempts_of(EVENTS)
    assert [(item.number, item.nodes, item.exit_code, item.how) for item in attempts] == [
        (0, "n[1-2]", 85, "exit code 85: checkpointed, to be continued"),
        (1, "n[3-4]", None, ""),
        (2, "n3", 1, "rank 3: NaN"),
        (3, "n3", None, ""),
    ]


def test_a_state_known_only_from_the_run_directory_is_shown_as_completing() -> None:
    ended = replace(
        job_status(), state=JobState.COMPLETED, flags=frozenset({StateFlag.COMPLETING}), source="record"
    )
    assert make_rows(run_view(ended), NOW)[0][3] == "COMPLETING"


def test_f49_nodes_that_stay_in_completing_are_reported_for_the_cluster_support() -> None:
    for state, source in ((JobState.UNKNOWN, "squeue"), (JobState.FAILED, "record")):
        ending = replace(job_status(), state=state, flags=frozenset({StateFlag.COMPLETING}), source=source)
        assert "not free" not in about_column(run_view(replace(ending, end_time=int(NOW) - 60)))[0]
        (result,) = about_column(run_view(replace(ending, end_time=int(NOW) - 720)))
        assert result.startswith("ended 12m00s ago, and the nodes of the job are not free yet")
        assert "support" in result


def test_f42_the_run_record_shows_the_end_of_a_job_on_a_dead_node(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    running = job_status(start_time=int(NOW) - 900)
    for code, state in ((0, "COMPLETING"), (1, "COMPLETING")):
        word = {"time": int(NOW) - 600, "event": "ended", "exit_code": code}
        (tmp_path / "events.jsonl").write_text(json.dumps(word) + "\n")
        seen = apply_events(running, run)
        assert (make_rows(run_view(seen), NOW)[0][3], seen.terminal, seen.exit_code) == (state, False, code)
        (result,) = about_column(run_view(seen))
        assert result.startswith("ended 10m00s ago: ")
        assert "cancel the job to free the nodes" in result
    soon = apply_events(
        replace(running, observed_at=NOW - 550), run
    )  # the controller was away, and asks its nodes
    assert (soon.state, soon.terminal) == (JobState.FAILED, False)
    assert soon.reason == "the batch script has ended; the scheduler has not confirmed the end yet"
    assert (
        apply_events(replace(running, start_time=int(NOW) - 60), run).state is JobState.RUNNING
    )  # started anew


def test_status_json_contains_the_time_of_the_query(run: Run, tmp_path: Path) -> None:
    job = run("submit", "--cluster", "local", "-t", "5", "--parsable", "train.py", code=0).stdout.strip()
    before = time.time()
    (seen,) = json.loads(run("status", "--json", job, code=0).stdout)["runs"]
    assert seen["observed_at"] >= before - 1
    assert seen["age_s"] >= 0
    assert seen["events"][0]["event"] == "submitted"
    assert "attempts" in seen
    shown = run("status", job, code=0).stdout
    assert f"job {job}  " in shown
    assert str(tmp_path / "runs") in shown
    run("cancel", job)


def test_a_pipe_gets_one_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    seen = run_view(pending_status("AssocGrpGRESRunMinutes", NOW + 3600))
    output.table(COLUMNS, make_rows(seen, NOW))
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--rank", "5"], 3, "the run has no rank 5, only 0"),
        (["--attempt", "3"], 3, "the run has no attempt 3, only 0"),
        (["--node", "nowhere"], 0, "no output on nowhere; the job is COMPLETED on local1"),
    ],
)
def test_logs_explain_a_missing_rank_attempt_or_node(
    run: Run, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    asked = ("--cluster", "local", "--run-root", str(tmp_path / "runs"), "--wait", "-t", "5")
    run("submit", *asked, "train.py", code=0, XDG_STATE_HOME=str(tmp_path))
    done = run("logs", *words, "train", code=code, XDG_STATE_HOME=str(tmp_path))
    assert (done.stdout, message in done.stderr) == ("", True)


def test_status_selects_runs_by_state_and_time_and_sorts_them(invoke: Run, runs: Runs) -> None:
    runs.add("old", "1", ended_job("1", JobState.FAILED, end_time=ENDED - 90 * 86400))
    runs.add("lost", "2", ended_job("2", JobState.NODE_FAIL))
    runs.add("bad", "3", ended_job("3", JobState.FAILED, start_time=ENDED - 7200))
    runs.add("good", "4", ended_job("4"))

    def names(*words: str) -> list[str]:
        shown = json.loads(invoke("status", "--json", *words, code=0).stdout)["runs"]
        return [item["record"]["name"] for item in shown]

    assert names() == ["good", "bad", "lost", "old"]
    assert names("--state", "failed") == ["bad", "old"]
    assert names("--state", "failed,node_fail", "-n", "2") == ["bad", "lost"]
    since = time.strftime("%Y-%m-%d", time.localtime(ENDED - 86400))
    assert names("--state", "FAILED", "--since", since) == ["bad"]
    assert names("--since", "1h") == []
    assert names("--sort", "name") == ["bad", "good", "lost", "old"]
    assert names("--sort", "time")[0] == "bad"
    assert names("--sort", "state")[0] == "good"
    assert "no matching run" in invoke("status", "--state", "running", code=0).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--state", "faild"), "--state FAILD: unknown state; did you mean 'FAILED'?"),
        (("--since", "soon"), "--since 'soon' is not a time: write 12h, 2d, 8w or 2026-01-31"),
        (("--watch", "--json"), "--watch needs a terminal, and shows only the list of runs"),
        (("--watch",), "--watch needs a terminal, and shows only the list of runs"),
    ],
)
def test_status_refuses_an_invalid_selection(invoke: Run, words: tuple[str, ...], said: str) -> None:
    assert said in invoke("status", *words, code=2).stderr


def test_status_watch_repeats_the_list_until_an_interrupt(
    invoke: Run, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.add("good", "4", ended_job("4"))
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setattr("dtslurm.cli.commands.status.Context", partial(Context, sleep=sleep))
    assert invoke("status", "--watch", code=0).stdout.count("good") == 2
    assert pauses == [5.0, 5.0]


# ---- Jobs whose record cannot be read ----

LOST = "its run directory {} does not exist: it was moved or deleted"
LATER = "{}/job.json has schema 2; this dtslurm reads schema 1 (this file is of a later version of dtslurm; "


@pytest.fixture
def active_job(invoke: Run, folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Return the record of a job of the local scheduler whose rank sleeps."""
    (folder / "train.py").write_text("import time; time.sleep(300)\n")
    words = ("submit", "--cluster", "local", "-t", "5", "--run-root", str(tmp_path / "root"), "--json")
    record: dict[str, Any] = json.loads(invoke(*words, "train.py", code=0).stdout)["run"]
    wait_until((Path(record["run_dir"]) / "ranks/0/0.json").exists, "the rank has begun")
    return record


def lose_directory(run: Path) -> str:
    run.rename(run.parent / "elsewhere")
    return LOST.format(run)


def lose_record(run: Path) -> str:
    (run / "job.json").unlink()
    return f"its record {run}/job.json does not exist"


def write_later_record(run: Path) -> str:
    document = json.loads((run / "job.json").read_text())
    (run / "job.json").write_text(json.dumps({**document, "schema": 2}))
    return LATER.format(run)


@pytest.mark.slow
@pytest.mark.parametrize("change", [lose_directory, lose_record, write_later_record])
def test_an_active_job_with_an_unreadable_record_is_shown_and_can_be_cancelled(
    invoke: Run, active_job: dict[str, Any], change: Any
) -> None:
    job, run = active_job["job_id"], Path(active_job["run_dir"])
    reason = change(run)
    shown = invoke("status", code=0)
    [row] = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert row[:5] == [job, "train", "local", "RUNNING", "?"]
    assert "no record of the run can be read" in shown.stdout
    assert f"job {job}: the record of the run cannot be read: {reason}" in shown.stderr
    assert f"dtslurm cancel {job} --cluster local ends the job" in shown.stderr
    for words in ((), (job,)):
        [result] = json.loads(invoke("status", "--json", *words, code=0).stdout)["runs"]
        assert (result["record"]["job_id"], result["record"]["token"]) == (job, active_job["token"])
        assert result["record_problem"].startswith(reason)
        assert [status["state"] for status in result["statuses"]] == ["RUNNING"]
    full_text = invoke("status", job, code=0).stdout
    assert full_text.startswith(f"job {job}  train  on local: RUNNING\n")
    assert f"warning    the record of the run cannot be read: {reason}" in full_text
    there = sorted(run.parent.rglob("*"))
    assert invoke("cancel", job, code=0).stderr == f"cancelled: {job}\n"
    assert not [path for path in set(run.parent.rglob("*")) - set(there) if path.name in {"stop", run.name}]
    wait_until(lambda: job not in invoke("status", code=0).stdout, limit=120)


def test_a_job_known_only_to_the_queue_is_shown_and_can_be_cancelled(
    invoke: Run, slurm: Programs, runs: Runs, tmp_path: Path
) -> None:
    queue = tmp_path / "queue"
    queue.mkdir()
    slurm.do("squeue", list_jobs(queue))
    slurm.do("scancel", f'for job; do rm "{queue}/$job"; done')
    (queue / "4711").write_text("dtslurm:0123456789ab:fedc")
    (queue / "4712").write_text("made by hand")
    known = runs.add("known", "4713", cluster="slurm", final=())
    (queue / "4713").write_text(known.comment)
    shown = invoke("status", "--cluster", "slurm", code=0)
    assert sorted(line.split()[0] for line in shown.stdout.splitlines()[1:]) == ["4711", "4713"]
    assert "job 4711: the record of the run cannot be read: this machine has no record" in shown.stderr
    [run] = json.loads(invoke("status", "--json", "4711", "--cluster", "slurm", code=0).stdout)["runs"]
    assert (run["record"]["name"], run["statuses"][0]["state"]) == ("train", "PENDING")
    one_run = invoke("status", "--cluster", "slurm", "-n", "1").stdout.splitlines()[1:]
    assert sorted(line.split()[0] for line in one_run) == ["4711", "4713"]
    (queue / "4714").write_text(runs.add("newer", "4714", cluster="slurm", final=()).comment)
    limited = invoke("status", "--cluster", "slurm", "-n", "1", code=0)
    assert sorted(line.split()[0] for line in limited.stdout.splitlines()[1:]) == ["4711", "4714"]
    assert "older runs in the queue that are not shown: 1; dtslurm status -n 2 shows" in limited.stderr
    invoke("cancel", "4711", "--cluster", "slurm", code=0)
    assert "scancel 4711" in slurm.asked
    assert not (queue / "4711").exists()
    (queue / "12").write_text("dtslurm:abcdefabcdef:fedc")
    old = runs.add("old", "12", cluster="slurm", final=())  # the controller gave its number to another job
    Path(old.run_dir).rename(tmp_path / "away")
    invoke("cancel", "12", "--cluster", "slurm", code=0)
    assert "scancel 12" in slurm.asked
    assert (
        "no run '4712' is known on this machine"
        in invoke("cancel", "4712", "--cluster", "slurm", code=3).stderr
    )


def test_a_deleted_run_absent_from_the_queue_is_marked_as_ended(
    invoke: Run, slurm: Programs, runs: Runs
) -> None:
    slurm.say("squeue", "")
    record = runs.add("old", "7", cluster="slurm", final=())
    Path(record.run_dir).rename(f"{record.run_dir}-away")
    assert invoke("status", code=0).stdout == ""
    assert [row.ended for row in Context().index.rows()] == [True]


def test_a_job_with_a_lost_record_is_shown_while_slurm_does_not_answer(
    invoke: Run, slurm: Programs, runs: Runs
) -> None:
    slurm.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller\n")
    record = runs.add("old", "7", cluster="slurm", final=())
    Path(record.run_dir).rename(f"{record.run_dir}-away")
    shown = invoke("status", code=3)
    assert [line.split()[:4] for line in shown.stdout.splitlines()[1:]] == [["7", "old", "slurm", "UNKNOWN"]]
    assert LOST.format(record.run_dir) in shown.stderr
    for verb in ("cancel", "status"):
        refused = invoke(verb, "7", code=3).stderr
        assert (
            "the record of 7 cannot be read, and the scheduler of slurm could not be queried for its job"
            in refused
        )
        assert LOST.format(record.run_dir) in refused
