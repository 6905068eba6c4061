"""``dtslurm sweep``: status, results, resume and stop."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.jobs.sweep import MEMBERS, SETTINGS, TRIALS
from dtslurm.model.runs.state import JobState
from dtslurm.store.lock import try_lock
from tests.cli.conftest import Run
from tests.cli.sample_runs import ENDED, Runs, ended_job

STARTED = {"time": ENDED - 60, "event": "started"}


def trial_events(code: int) -> list[dict[str, Any]]:
    return [STARTED, {"time": ENDED, "event": "ended", "exit_code": code}]


def loss_lines(*values: float) -> list[dict[str, float]]:
    return [{"step": step, "loss": value} for step, value in enumerate(values, start=1)]


def add_sweep(runs: Runs, states: list[JobState], files: dict[str, object], **settings: Any) -> JobRecord:
    """Add a sweep with one array task for each of the states."""
    folder = runs.root / "tune-40"
    known = {"schema": 1, "sweep": str(folder), "per_task": 1, "metric": "loss", "mode": "min", **settings}
    trials = [
        {"number": number, "name": f"lr={number}", "values": {"lr": str(number)}, "checkpoints": ""}
        for number in range(len(states))
    ]
    return runs.add(
        "tune", "40", *(ended_job(f"40_{task}", state) for task, state in enumerate(states)),
        sweep=str(folder), array=f"0-{len(states) - 1}",
        files={
            SETTINGS: json.dumps(known), TRIALS: list(trials),
            MEMBERS: json.dumps({"schema": 1, "runs": [str(folder)]}), **files,
        },
    )  # fmt: skip


DONE, FAILED, CANCELLED = JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED


@pytest.fixture
def finished_sweep(runs: Runs) -> JobRecord:
    """Trial 1 is the best, 2 was stopped, 3 failed and 4 never ran."""
    return add_sweep(
        runs, [DONE, DONE, DONE, FAILED, CANCELLED],
        {
            "tasks/0/events.jsonl": trial_events(0), "tasks/0/metrics/0/train.jsonl": loss_lines(3.0, 2.5),
            "tasks/1/events.jsonl": trial_events(0), "tasks/1/metrics/0/train.jsonl": loss_lines(1.25, 1.5),
            "tasks/2/events.jsonl": trial_events(0), "tasks/2/metrics/0/train.jsonl": loss_lines(9.0),
            "tasks/2/stopped.json": '{"step": 1}',
            "tasks/3/events.jsonl": trial_events(7), "tasks/3/trial.json": '{"values": {"lr": "drawn"}}',
        },
    )  # fmt: skip


def table_cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_a_sweep_metric_that_no_trial_writes_is_reported(runs: Runs, invoke: Run) -> None:
    add_sweep(
        runs, [DONE, DONE],
        {"tasks/0/metrics/0/train.jsonl": loss_lines(3.0), "tasks/1/events.jsonl": trial_events(0)},
        metric="acc", mode="max",
    )  # fmt: skip
    for verb in ("status", "results"):
        done = invoke("sweep", verb, "tune", code=0)
        assert (
            "no trial has written 'acc', the metric of the comparison; metrics found: step, loss"
            in done.stderr
        )


@pytest.mark.usefixtures("finished_sweep")
def test_sweep_status_lists_failed_trials_and_the_best_trial(invoke: Run) -> None:
    done = invoke("sweep", "status", "tune", code=0)
    first, heads, failed, never, best = done.stdout.splitlines()
    assert first == "sweep tune (job 40) on local: 2 done, 1 stopped, 1 failed, 1 never ran"
    assert table_cells(heads) == ["TRIAL", "lr", "STATE", "BEST loss", "LAST", "STEP", "JOB"]
    assert table_cells(failed) == ["3", "drawn", "failed", "-", "-", "-", "40_3"]
    assert table_cells(never) == ["4", "4", "never ran", "-", "-", "-", "40_4"]
    assert best == "best so far: lr=1, loss 1.25"
    assert "dtslurm sweep resume tune runs the failed and the missing trials again" in done.stderr


@pytest.mark.usefixtures("finished_sweep")
def test_sweep_status_prints_json(invoke: Run) -> None:
    document = json.loads(invoke("sweep", "status", "--json", "40", code=0).stdout)
    assert document["counts"] == {"done": 2, "stopped": 1, "failed": 1, "never ran": 1}
    assert (document["jobs"], document["metric"], document["mode"]) == (["40"], "loss", "min")
    assert [trial["exit_code"] for trial in document["trials"]] == [0, 0, 0, 7, None]


@pytest.mark.usefixtures("finished_sweep")
def test_sweep_results_are_sorted_by_the_metric(invoke: Run) -> None:
    _, *rows = invoke("sweep", "results", "tune", code=0).stdout.splitlines()
    assert [table_cells(row)[0] for row in rows] == ["1", "0", "2", "3", "4"]
    assert table_cells(rows[0]) == ["1", "1", "done", "1.25", "1.5", "2", "40_1"]
    document = json.loads(invoke("sweep", "results", "--json", "-n", "2", "tune", code=0).stdout)
    assert [trial["name"] for trial in document["trials"]] == ["lr=1", "lr=0"]


def test_mode_max_selects_the_largest_metric(invoke: Run, runs: Runs) -> None:
    add_sweep(
        runs, [DONE, DONE],
        {
            "tasks/0/events.jsonl": trial_events(0),
            "tasks/0/metrics/0/train.jsonl": loss_lines(1.0, 5.0, 2.0),
            "tasks/1/events.jsonl": trial_events(0), "tasks/1/metrics/0/train.jsonl": loss_lines(4.0),
        },
        mode="max",
    )  # fmt: skip
    assert "best so far: lr=0, loss 5\n" in invoke("sweep", "status", "tune", code=0).stdout


@pytest.mark.usefixtures("finished_sweep")
def test_sweep_results_prints_csv(invoke: Run) -> None:
    rows = list(csv.DictReader(io.StringIO(invoke("sweep", "results", "--csv", "tune", code=0).stdout)))
    assert (rows[0]["trial"], rows[0]["lr"], rows[0]["best"], rows[0]["state"]) == ("1", "1", "1.25", "done")
    assert (rows[-1]["best"], rows[-1]["exit_code"], rows[-1]["folder"]) == ("", "", "")
    both = invoke("sweep", "results", "--csv", "--json", "tune", code=2)
    assert "give only one of --csv and --json" in both.stderr


def test_a_long_list_of_failed_trials_is_shortened(invoke: Run, runs: Runs) -> None:
    add_sweep(runs, [CANCELLED] * 23, {})
    done = invoke("sweep", "status", "tune", code=0)
    assert len(done.stdout.splitlines()) == 22
    assert "and 3 more; dtslurm sweep results tune has all of them" in done.stderr


def test_a_finished_sweep_has_no_trials_to_resume_or_stop(invoke: Run, runs: Runs) -> None:
    add_sweep(runs, [DONE], {"tasks/0/events.jsonl": trial_events(0)})
    assert "every trial is done: no trial to run again" in invoke("sweep", "resume", "tune", code=0).stderr
    assert json.loads(invoke("sweep", "resume", "--json", "tune", code=0).stdout)["runs"] == []
    assert invoke("sweep", "stop", "tune", code=0).stderr == "the sweep has no pending or running jobs\n"
    assert json.loads(invoke("sweep", "stop", "--json", "tune", code=0).stdout)["cancelled"] == []


def test_trials_that_share_a_task_have_separate_states(invoke: Run, runs: Runs) -> None:
    rank = {"started": ENDED - 50, "ended": ENDED - 5}
    record = add_sweep(
        runs, [DONE, DONE],
        {
            "tasks/0/events.jsonl": trial_events(1),
            "tasks/0/trials/0/metrics/0/train.jsonl": loss_lines(2.0),
            "tasks/0/trials/1/metrics/0/train.jsonl": loss_lines(3.0),
            "tasks/0/ranks/0/0.json": json.dumps({**rank, "exit_code": 0}),
            "tasks/0/ranks/0/1.json": json.dumps({**rank, "exit_code": 1}),
        },
        per_task=2,
    )  # fmt: skip
    runs.change(record, final=(ended_job("40_0", FAILED),))
    trials = json.loads(invoke("sweep", "results", "--json", "tune", code=0).stdout)["trials"]
    assert [(item["name"], item["state"], item["job"]) for item in trials] == [
        ("lr=0", "done", "40_0"), ("lr=1", "failed", "40_0"),
    ]  # fmt: skip


def test_a_sweep_with_a_damaged_member_list_consists_of_its_first_run(
    invoke: Run, finished_sweep: JobRecord
) -> None:
    (Path(finished_sweep.run_dir) / MEMBERS).write_text("{")
    assert json.loads(invoke("sweep", "status", "--json", "tune", code=0).stdout)["jobs"] == ["40"]


def test_a_deleted_run_of_a_sweep_is_reported(invoke: Run, finished_sweep: JobRecord) -> None:
    gone = str(Path(finished_sweep.run_dir).with_name("tune-41"))
    (Path(finished_sweep.run_dir) / MEMBERS).write_text(json.dumps({"runs": [finished_sweep.run_dir, gone]}))
    assert (
        f"{gone}, a run directory of this sweep, no longer exists"
        in invoke("sweep", "status", "tune", code=3).stderr
    )


def test_the_results_of_a_resumed_trial_count(invoke: Run, runs: Runs, finished_sweep: JobRecord) -> None:
    again = runs.add(
        "tune", "41", ended_job("41_0"), sweep=finished_sweep.run_dir, array="0",
        files={
            TRIALS: [{"number": 3, "name": "lr=3", "values": {"lr": "3"}, "checkpoints": ""}],
            "tasks/0/events.jsonl": trial_events(0), "tasks/0/metrics/0/train.jsonl": loss_lines(0.5),
        },
    )  # fmt: skip
    (Path(finished_sweep.run_dir) / MEMBERS).write_text(
        json.dumps({"runs": [finished_sweep.run_dir, again.run_dir]})
    )
    done = invoke("sweep", "status", "41", code=0)  # any of a sweep's jobs names it
    assert "sweep tune (job 40, 41) on local: 3 done, 1 stopped, 1 never ran" in done.stdout
    assert "best so far: lr=3, loss 0.5" in done.stdout


def test_sweep_resume_refuses_while_trials_are_active(
    invoke: Run, runs: Runs, finished_sweep: JobRecord
) -> None:
    alive = (*(ended_job(f"40_{task}") for task in range(4)), ended_job("40_4", JobState.UNKNOWN))
    runs.change(finished_sweep, final=alive)
    done = invoke("sweep", "resume", "tune", code=2)
    assert "tune: 1 trial pending or running" in done.stderr
    assert "dtslurm sweep stop tune ends them" in done.stderr


@pytest.mark.parametrize(
    ("state", "times", "state_name"),
    [
        (JobState.PENDING, {}, "waiting"),
        (JobState.PENDING, {"observed_at": ENDED - 1.0}, "failed"),  # Slurm's word is older than the end
        (JobState.RUNNING, {"start_time": ENDED + 2}, "running"),
        (JobState.RUNNING, {"start_time": ENDED - 90}, "failed"),  # its end is not noticed yet
        (JobState.RUNNING, {"start_time": None}, "failed"),
    ],
)
@pytest.mark.parametrize("folded", [False, True])
def test_the_state_of_a_requeued_trial_follows_slurm(
    invoke: Run,
    runs: Runs,
    finished_sweep: JobRecord,
    state: JobState,
    times: dict[str, Any],
    state_name: str,
    folded: bool,
) -> None:
    task = "40_[3]" if folded else "40_3"
    rest = (ended_job("40_0"), ended_job("40_1"), ended_job("40_2"), ended_job("40_4", CANCELLED))
    runs.change(finished_sweep, final=(*rest, ended_job(task, state, **times)))
    trials = json.loads(invoke("sweep", "results", "--json", "tune", code=0).stdout)["trials"]
    assert [item["state"] for item in trials if item["number"] == 3] == [state_name]


def test_a_stopped_trial_that_was_requeued_is_waiting(
    invoke: Run, runs: Runs, finished_sweep: JobRecord
) -> None:
    rest = (ended_job("40_0"), ended_job("40_1"), ended_job("40_3", FAILED), ended_job("40_4", CANCELLED))
    runs.change(finished_sweep, final=(*rest, ended_job("40_2", JobState.PENDING)))
    done = invoke("sweep", "status", "tune", code=0)
    assert "2 done, 1 waiting, 1 failed, 1 never ran" in done.stdout
    assert "sweep resume" not in done.stderr  # it wants the sweep over


def test_only_one_process_resumes_a_sweep(invoke: Run, finished_sweep: JobRecord) -> None:
    with try_lock(Path(finished_sweep.run_dir) / "resuming.lock"):
        done = invoke("sweep", "resume", "tune", code=2)
    assert "tune: another dtslurm process is resuming this sweep; no job was queued" in done.stderr
    assert "another dtslurm" not in invoke("sweep", "resume", "tune", code=2).stderr


def test_sweep_resume_refuses_a_run_without_a_recorded_request(
    invoke: Run, finished_sweep: JobRecord
) -> None:
    del finished_sweep
    assert "40: the record does not contain the request" in invoke("sweep", "resume", "tune", code=2).stderr


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("ntasks_per_node: 2", "trials that share a node run one process each: remove ntasks_per_node"),
        ("launcher: torchrun", "trials that share a node are started by srun, not by torchrun"),
        ("nodes: 2", "trials that share a node run on one node: set nodes to 1"),
    ],
)
def test_trials_that_share_a_node_restrict_launcher_and_sizes(
    invoke: Run, folder: Path, job: str, message: str
) -> None:
    sweep = "sweep: {grid: {x: [1, 2]}, trials_per_node: 2}"
    (folder / "job.yaml").write_text(
        f"cluster: local\ntime: 5\nscript: train.py\nargs: ['${{x}}']\n{job}\n{sweep}\n"
    )
    (folder / "job.yaml").chmod(0o644)
    assert message in invoke("submit", "job.yaml", code=2).stderr


def test_a_failed_trial_is_never_the_best(runs: Runs, invoke: Run) -> None:
    add_sweep(
        runs, [DONE, FAILED, DONE],
        {
            "tasks/0/events.jsonl": trial_events(0), "tasks/0/metrics/0/train.jsonl": loss_lines(3.0),
            "tasks/1/events.jsonl": trial_events(1), "tasks/1/metrics/0/train.jsonl": loss_lines(0.5),
            "tasks/2/events.jsonl": trial_events(0), "tasks/2/logs/0/rank-0.log": "step 1/3 loss 2.0\n",
        },
    )  # fmt: skip
    trials = json.loads(invoke("sweep", "results", "--json", "tune", code=0).stdout)["trials"]
    assert [(trial["number"], trial["best"]) for trial in trials] == [(2, 2.0), (0, 3.0), (1, 0.5)]
