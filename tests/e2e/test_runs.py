"""The everyday commands of a user, with real jobs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.disks import fill, small_disk
from tests.e2e.conftest import WITHOUT_SSH, Cli
from tests.store.trees import git

UNTIL = """
    import os, sys, time
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.1)
"""

TELL = """
    import json, os, sys
    keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_NAME",
            "SLURMD_NODENAME", "DTSLURM_ATTEMPT", "CUDA_VISIBLE_DEVICES", "GREETING", "PWD"]
    values = {key: os.environ.get(key) for key in keys}
    print(json.dumps({"argv": [os.fsencode(word).hex() for word in sys.argv[1:]], **values}))
"""


def printed_variables(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return value


@pytest.mark.proves("single", "logs")
def test_single_f82_values_arrive_unchanged(cli: Cli) -> None:
    script = cli.script(TELL)
    odd = [
        "a b",
        "it's",
        'say "hi"',
        "; rm -rf x",
        "$(date)",
        "l1\nEND\nl2",
        "é",
        "",
        "*",
        "\\n",
        "--nodes=9",
    ]
    name = "run; $(x) 'q' \"d\" é \\ #1"
    job = cli.submit("-J", name, "--env", "GREETING=it's; $(date)\nbye, a=b", script, *odd)
    status = cli.wait_for_end(job)
    assert [item["state"] for item in status["statuses"]] == ["COMPLETED"]
    run = cli.run_dir(job)
    values = printed_variables(run.logs(0) / "rank-0.log")
    assert [bytes.fromhex(item).decode() for item in values["argv"]] == odd
    assert values["SLURM_JOB_NAME"] == name
    assert values["GREETING"] == "it's; $(date)\nbye, a=b"
    assert values["RANK"] is None
    assert values["PWD"] == str(run.path / "code" if cli.cluster == "far" else cli.folder)
    [record] = run.ranks(0)
    assert (record.rank, record.exit_code, record.signal) == (0, 0, None)
    assert [event["event"] for event in run.events() if event["event"] != "submitted"] == ["started", "ended"]


@WITHOUT_SSH
def test_relative_outputs_are_written_to_the_submission_directory(cli: Cli) -> None:
    git(cli.folder, "init", "-q")
    script = cli.script("""
        from pathlib import Path
        Path("out").mkdir()
        Path("out/ckpt.pt").write_text("weights")
    """)
    job = cli.submit(script)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert (cli.folder / "out" / "ckpt.pt").read_text() == "weights"
    assert cli.status(job)["record"]["work_dir"] == str(cli.folder)


def test_relative_outputs_of_a_snapshot_are_shown_and_fetched(cli: Cli, tmp_path: Path) -> None:
    script = cli.script("""
        from pathlib import Path
        Path("out").mkdir()
        Path("out/ckpt.pt").write_text("weights")
    """)
    submitted = cli("submit", "--cluster", cli.cluster, "-t", "5", "--snapshot", script)
    [job] = re.findall(r"submitted job (\d+)", submitted.stderr)
    cli.started.append(job)
    cli.wait_for_end(job)
    code = cli.run_dir(job).path / "code"
    assert f"  works in       {code}, the base of relative paths\n" in submitted.stderr
    assert re.search(rf"^  works in .*{code}, the base of relative", cli("status", job).stdout, re.MULTILINE)
    assert cli.status(job)["record"]["work_dir"] == str(code)
    cli("report", job, "-o", str(tmp_path / "report.html"))
    assert str(code) in (tmp_path / "report.html").read_text()
    fetched = cli("fetch", job, "-o", str(tmp_path / "fetched")).stderr
    assert "skipped: 1 file of the snapshot in code/" in fetched
    assert (tmp_path / "fetched" / "code" / "out" / "ckpt.pt").read_text() == "weights"
    assert not (tmp_path / "fetched" / "code" / script).exists()


def test_c21_run_files_and_directories_are_private(cli: Cli) -> None:
    job = cli.submit(cli.script("print('hello')"))
    cli.wait_for_end(job)
    for path in [cli.run_dir(job).path, *cli.run_dir(job).path.rglob("*")]:
        assert path.is_symlink() or path.stat().st_mode & 0o077 == 0, path


@pytest.mark.quick
def test_srun_starts_ranks_on_two_nodes(cli: Cli) -> None:
    job = cli.submit("-N2", "--ntasks-per-node", "2", "-l", "srun", cli.script(TELL))
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    run = cli.run_dir(job)
    values = [printed_variables(run.logs(0) / f"rank-{rank}.log") for rank in range(4)]
    assert [value["RANK"] for value in values] == ["0", "1", "2", "3"]
    assert [value["LOCAL_RANK"] for value in values] == ["0", "1", "0", "1"]
    assert {value["WORLD_SIZE"] for value in values} == {"4"}
    assert len({value["SLURMD_NODENAME"] for value in values}) == 2
    assert len({(value["MASTER_ADDR"], value["MASTER_PORT"]) for value in values}) == 1
    assert [record.node_rank for record in run.ranks(0)] == [0, 0, 1, 1]
    assert run.manifest(0)["world_size"] == 4


def test_every_rank_sees_the_gpus_of_the_job_on_its_node(cli: Cli) -> None:
    job = cli.submit("--gpus-per-node", "2", "-l", "srun", cli.script(TELL))
    cli.wait_for_end(job)
    run = cli.run_dir(job)
    devices = [
        printed_variables(run.logs(0) / f"rank-{rank}.log")["CUDA_VISIBLE_DEVICES"] for rank in range(2)
    ]
    assert [len((value or "").split(",")) for value in devices] == [2, 2]


@WITHOUT_SSH
@pytest.mark.slow
@pytest.mark.proves("launcher", "runs", "logs")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("launcher", ["single", "srun", "torchrun"])
def test_digits_example_trains(cli: Cli, launcher: str) -> None:
    example = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
    place = [] if launcher == "single" else ["-N2", "--gpus-per-node", "2"]
    world = 1 if launcher == "single" else 4
    words = [*place, "-l", launcher, "--python", sys.executable]
    script = Path(shutil.copy(example, cli.folder)).name if cli.cluster == "far" else str(example)
    job = cli.submit(*words, script, "--epochs", "3")
    status = cli.wait_for_end(job, limit=240)
    run = cli.run_dir(job)
    output = (run.path / "logs" / "batch.log").read_text()
    assert status["statuses"][0]["state"] == "COMPLETED", output
    records = run.ranks(0)
    assert [record.rank for record in records] == list(range(world))
    assert [record.exit_code for record in records] == [0] * world
    assert launcher == "single" or records[0].host != records[2].host
    for rank in range(world):
        assert (run.logs(0) / f"rank-{rank}.log").stat().st_size > 0
    metrics = run.metrics(0)
    losses = [item["loss"] for item in metrics if "loss" in item]
    assert losses[-1] < losses[0]
    assert metrics[-1]["test_accuracy"] > 0.7
    assert list((run.path / "checkpoints").iterdir())


@WITHOUT_SSH
@pytest.mark.proves("launcher", "exit")
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_f44_exit_code_of_the_failed_rank_is_the_exit_code_of_the_job(cli: Cli, launcher: str) -> None:
    script = cli.script(
        """
        import os, sys, time
        rank = int(os.environ["RANK"])
        if rank == 3:
            time.sleep(1)
            print("giving up", flush=True)
            sys.exit(42)
        time.sleep(100)
        """
    )
    words = ["-N2", "--ntasks-per-node", "2", "-l", launcher, "--python", sys.executable, script]
    job = cli.submit(*words)
    status = cli.wait_for_end(job, limit=90)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("FAILED", 42)
    run = cli.run_dir(job)
    assert run.first_failure(0) == (3, 42)
    records = {record.rank: record for record in run.ranks(0)}
    assert records[3].exit_code == 42
    assert "giving up" in cli("logs", job, "--rank", "3").stdout
    shown = cli("status", job)
    assert "rank 3 failed first, exit code 42" in shown.stdout


def test_status_list_names_the_exception(cli: Cli) -> None:
    script = cli.script(
        """
        import os, time
        if os.environ["RANK"] == "1":
            {"labels": 1}["label"]
        time.sleep(100)
        """
    )
    job = cli.submit("--ntasks-per-node", "2", "-l", "srun", "--python", sys.executable, script)
    cli.wait_for_end(job, limit=90)
    assert "KeyError: 'label' (rank 1)" in cli("status").stdout
    assert "KeyError: 'label' " in cli("top", "--once").stdout


CAUGHT_EARLY = """
import traceback
try:
    {}["x"]
except KeyError:
    traceback.print_exc()
print(*range(30), sep="\\n")
raise SystemExit(1)
"""


@pytest.mark.parametrize("cli", ["local"], indirect=True)
@pytest.mark.parametrize(
    ("failure", "exception_text"),
    [
        ("raise Exception('boom')", "Exception: boom"),
        ("class OutOfLuck(Exception): pass\nraise OutOfLuck('no luck')", "OutOfLuck: no luck"),
        ("next(iter([]))", "StopIteration"),
        (
            CAUGHT_EARLY,
            "",  # it was caught long before the end
        ),
    ],
)
def test_exception_of_any_class_is_named(cli: Cli, failure: str, exception_text: str) -> None:
    job = cli.submit("-l", "single", cli.script(failure))
    cli.wait_for_end(job)
    expected = f"{exception_text} (rank 0)" if exception_text else "rank 0 failed first, exit code 1"
    assert expected in cli("status").stdout
    assert exception_text in cli("top", "--once").stdout
    assert cli.run_dir(job).first_error(0) == exception_text


@pytest.mark.proves("single", "exit")
def test_killed_rank_is_recorded_with_its_signal(cli: Cli) -> None:
    job = cli.submit(cli.script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    status = cli.wait_for_end(job)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("FAILED", 137)
    assert cli.run_dir(job).ranks(0)[0].signal == 9


@pytest.mark.parametrize("options", [(), ("--max-restarts", "0")], ids=["plain", "supervised"])
@pytest.mark.parametrize("code", [0, 3])
@WITHOUT_SSH
def test_teardown_runs_last_and_does_not_change_the_exit_code(
    cli: Cli, code: int, options: tuple[str, ...]
) -> None:
    script = cli.script(f"import sys; print('trained', flush=True); sys.exit({code})")
    lines = (
        "cat $DTSLURM_RUN_DIR/logs/0/rank-0.log >down.txt",
        "(exit 9)",
        "echo $DAEMON >>down.txt; exit 7",
    )
    teardown = [word for line in lines for word in ("--teardown", line)]
    job = cli.submit(*options, "-l", "srun", "--setup", "DAEMON=12", *teardown, script)
    status = cli.wait_for_end(job)["statuses"][0]
    assert status["exit_code"] == code
    run = cli.run_dir(job)
    assert (cli.folder / "down.txt").read_text() == "trained\n12\n"
    text = (run.path / "logs" / "batch.log").read_text()
    assert "teardown: exit code 9 of " in text
    assert "teardown: exit code 7 of " in text
    assert [event["exit_code"] for event in run.events() if event["event"] == "ended"] == [code]


@WITHOUT_SSH
def test_teardown_runs_after_a_cancel_and_a_failed_setup(cli: Cli) -> None:
    words = ("-l", "srun", "--teardown", "touch down.txt")
    job = cli.submit(*words, "--setup", "false || exit 4", cli.script("print('hello')"))
    assert cli.wait_for_end(job)["statuses"][0]["exit_code"] == 4
    assert (cli.folder / "down.txt").exists()
    (cli.folder / "down.txt").unlink()

    script = cli.script("import time; print('ready', flush=True); time.sleep(200)")
    for options in ((), ("--max-restarts", "1")):
        job = cli.submit(*words, *options, script)
        log = cli.run_dir(job).logs(0) / "rank-0.log"
        cli.wait_until(lambda log=log: log.exists() and "ready" in log.read_text())  # type: ignore[misc]
        cli("cancel", job)
        assert cli.wait_for_end(job)["statuses"][0]["state"] == "CANCELLED"
        cli.wait_until((cli.folder / "down.txt").exists, limit=20)
        (cli.folder / "down.txt").unlink()


@WITHOUT_SSH
def test_array_tasks_have_separate_states_and_logs(cli: Cli) -> None:
    script = cli.script(
        "import os, sys; i = os.environ['SLURM_ARRAY_TASK_ID']; print('task', i); sys.exit(i == '3')"
    )
    job = cli.submit("-a", "1-3%2", script)
    statuses = {item["job_id"]: item for item in cli.wait_for_end(job)["statuses"]}
    assert {key: item["state"] for key, item in statuses.items()} == {
        f"{job}_1": "COMPLETED",
        f"{job}_2": "COMPLETED",
        f"{job}_3": "FAILED",
    }
    tasks = cli.run_dir(job).tasks()
    assert sorted(tasks) == ["1", "2", "3"]
    assert (tasks["2"].logs(0) / "rank-0.log").read_text() == "task 2\n"
    assert cli("logs", f"{job}_2").stdout.strip().endswith("task 2")


@WITHOUT_SSH
def test_dependent_jobs_start_by_the_result_of_the_first_job(cli: Cli) -> None:
    good = cli.submit(cli.script("print('first')", "good.py"))
    bad = cli.submit(cli.script("raise SystemExit(3)", "bad.py"))
    after_good = cli.submit("-d", f"afterok:{good}", cli.script("print('second')", "next.py"))
    after_bad = cli.submit("-d", f"afterok:{bad}", "next.py")
    anyway = cli.submit("-d", f"afterany:{bad}", "next.py")
    assert cli.wait_for_end(after_good)["statuses"][0]["state"] == "COMPLETED"
    assert cli.wait_for_end(anyway)["statuses"][0]["state"] == "COMPLETED"
    first, second = cli.status(good)["statuses"][0], cli.status(after_good)["statuses"][0]
    assert first["end_time"] <= second["start_time"]
    cli.wait_until(lambda: cli.status(after_bad)["statuses"][0]["reason"] == "DependencyNeverSatisfied")
    assert "never start" in cli("status", after_bad).stdout.lower()


def test_cancel_ends_running_and_pending_jobs(cli: Cli) -> None:
    job = cli.submit(cli.script("import time; print('up', flush=True); time.sleep(100)"))
    cli.wait_until(lambda: "up" in cli("logs", job).stdout)
    assert f"cancelled: {job}" in cli("cancel", job).stderr
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "CANCELLED"
    assert cli("cancel", job).stderr == f"{job} had already ended: CANCELLED\n"
    assert json.loads(cli("cancel", "--json", job).stdout)["ended"] == {job: "CANCELLED"}

    waiting = cli.submit("--sbatch", "--hold", "train.py") if cli.cluster == "slurm" else None
    if waiting is None:
        blocker = cli.submit("train.py")
        waiting = cli.submit("-d", f"afterany:{blocker}", "train.py")
    cli("cancel", waiting)
    assert cli.wait_for_end(waiting)["statuses"][0]["state"] == "CANCELLED"


def test_job_with_a_record_of_a_later_version_is_shown_and_cancelled_by_id(cli: Cli) -> None:
    job = cli.submit(cli.script(UNTIL), "never")
    cli.wait_until(lambda: cli.state(job) == "RUNNING")
    record = cli.status(job)["record"]
    path = Path(record["mirror"] or record["run_dir"]) / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))

    def shown() -> list[dict[str, Any]]:
        runs = json.loads(cli("status", "--json").stdout)["runs"]
        return [run for run in runs if run["record"]["job_id"] == job]

    [run] = shown()
    assert [status["state"] for status in run["statuses"]] == ["RUNNING"]
    assert "this file is of a later version of dtslurm" in run["record_problem"]
    table = cli("status", "--cluster", cli.cluster)
    assert f"job {job}: the record of the run cannot be read: " in table.stderr
    cli("cancel", job)
    cli.wait_until(
        lambda: all(status["state"] == "CANCELLED" for run in shown() for status in run["statuses"])
    )
    cli.started.remove(job)


@pytest.mark.parametrize("kept_up", [[], ["--max-restarts", "1"]], ids=["plain", "supervised"])
def test_job_that_starts_during_a_cancel_ends_as_cancelled(cli: Cli, kept_up: list[str]) -> None:
    go = cli.folder / "go"
    first = cli.submit(cli.script(UNTIL), str(go))
    job = cli.submit("-d", f"afterany:{first}", *kept_up, cli.script("print('ran')", "quick.py"))
    run = cli.run_dir(job)
    (run.path / "stop").touch()  # as cancel leaves it, before it asks the scheduler
    go.touch()
    cli.wait_until((run.path / "logs/batch.log").exists)
    if cli.cluster == "local":  # its jobs cannot ask their scheduler, and wait 15 s for the cancel
        cli("cancel", job)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "CANCELLED"
    assert not run.ranks(0)


@pytest.mark.parametrize("kept_up", [[], ["--max-restarts", "1"]], ids=["plain", "supervised"])
def test_cancelled_job_has_time_to_save(cli: Cli, kept_up: list[str]) -> None:
    script = cli.script(
        """
        import pathlib, signal, sys, time

        def save(*_):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes from Slurm and from the rank's shell
            time.sleep(3)  # of the 10 that Slurm gives (KillWait)
            pathlib.Path("saved").touch()
            sys.exit(143)

        signal.signal(signal.SIGTERM, save)
        print("up", flush=True)
        time.sleep(100)
        """
    )
    job = cli.submit("-l", "srun", "--no-snapshot", *kept_up, script)
    cli.wait_until(lambda: "up" in cli("logs", job).stdout)
    cli("cancel", job)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "CANCELLED"
    cli.wait_until((cli.folder / "saved").exists)  # Slurm calls it cancelled while it still saves


def test_held_job_waits_until_release(cli: Cli) -> None:
    go = cli.folder / "go"
    first = cli.submit(cli.script(UNTIL), str(go))
    held = cli.submit("-d", f"afterany:{first}", cli.script("print('ran')", "quick.py"))
    cli("hold", held)
    go.touch()
    cli.wait_for_end(first)
    assert cli.state(held) == "PENDING"
    cli("release", held)
    assert cli.wait_for_end(held)["statuses"][0]["state"] == "COMPLETED"


def test_requeue_keeps_the_logs_of_every_attempt(cli: Cli) -> None:
    script = cli.script(
        """
        import os, time
        print("attempt", os.environ["DTSLURM_ATTEMPT"], flush=True)
        if os.environ["DTSLURM_ATTEMPT"] == "0":
            time.sleep(100)
        """
    )
    job = cli.submit("--requeue", script)
    run = cli.run_dir(job)
    cli.wait_until(lambda: "attempt 0" in cli("logs", job).stdout)
    cli("requeue", job)
    cli.wait_until(lambda: 1 in run.attempts() and run.ranks(1) and run.ranks(1)[0].exit_code == 0)
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    assert (run.logs(0) / "rank-0.log").read_text() == "attempt 0\n"
    assert (run.logs(1) / "rank-0.log").read_text() == "attempt 1\n"
    assert cli("logs", job).stdout.splitlines()[-1] == "[0] attempt 1"
    assert "[0] attempt 0" in cli("logs", job, "--attempt", "0").stdout
    assert [event["event"] for event in run.events()].count("started") == 2
    attempts = cli.status(job)["attempts"]
    assert [attempt["number"] for attempt in attempts] == [0, 1]
    assert attempts[0]["how"] != attempts[1]["how"] == "succeeded"
    assert "attempts   0" in cli("status", job).stdout


@WITHOUT_SSH
def test_requeue_of_a_run_that_cannot_continue_is_refused_with_the_reason(cli: Cli) -> None:
    job = cli.submit(cli.script("import time; time.sleep(100)"))
    cli.wait_until(lambda: cli.state(job) == "RUNNING")
    for _ in ("running", "over"):
        refused = cli("requeue", job, code=3).stderr
        assert f"  {job}: submitted with --no-requeue, the default for a run that cannot continue" in refused
        assert f"dtslurm cancel {job} ends the job if it still runs, and dtslurm resubmit {job}" in refused
        cli("cancel", job)
        cli.wait_for_end(job)


@WITHOUT_SSH
def test_completed_training_is_repeated_only_by_an_explicit_requeue(cli: Cli) -> None:
    script = cli.script("import os; print('attempt', os.environ['DTSLURM_ATTEMPT'])")
    job = cli.submit("--max-restarts", "1", script)
    cli.wait_for_end(job)
    run = cli.run_dir(job)
    assert (run.path / "done").read_text() == "0\n"
    cli("requeue", job)
    cli.wait_until(lambda: 1 in run.attempts() and run.ranks(1) and run.ranks(1)[0].exit_code == 0)
    cli.wait_for_end(job)
    assert (run.path / "done").read_text() == "1\n"


@WITHOUT_SSH
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_early_signal_arrives_before_the_time_limit(cli: Cli) -> None:
    script = cli.script(
        """
        import signal, sys, time
        def early(number, frame):
            print("early signal", flush=True)
        signal.signal(signal.SIGUSR2, early)
        print("ready", flush=True)
        end = time.time() + 300
        while time.time() < end:
            time.sleep(0.5)
        """
    )
    # Slurm counts in minutes and looks every 30 s; the embedded scheduler looks all the time.
    limit, lead = ("1", "10") if cli.cluster == "slurm" else ("0:40", "10")
    words = ["-N2", "-l", "srun", "-t", limit, "--signal-before", lead, "--python", sys.executable, script]
    job = cli("submit", "--cluster", cli.cluster, "--parsable", *words).stdout.strip()
    cli.started.append(job)
    assert cli.wait_for_end(job, limit=200)["statuses"][0]["state"] == "TIMEOUT"
    run = cli.run_dir(job)
    for rank in range(2):
        assert "early signal" in (run.logs(0) / f"rank-{rank}.log").read_text()


def test_submit_follow_shows_all_output_and_returns_the_exit_code(cli: Cli) -> None:
    script = cli.script(
        """
        import os, pathlib, sys, time
        for line in range(5):
            print("line", line, flush=True)
            time.sleep(0.1)
            if line == 1:  # the first rank that fails ends the other
                here = pathlib.Path(os.environ["DTSLURM_CHECKPOINT_DIR"])
                (here / os.environ["RANK"]).touch()
                while len(list(here.iterdir())) < 2:
                    time.sleep(0.05)
        sys.stdout.write("no newline at the end")
        sys.exit(7)
        """
    )
    words = [
        "submit",
        "--cluster",
        cli.cluster,
        "-t",
        "10",
        "--ntasks-per-node",
        "2",
        "-l",
        "srun",
        "--follow",
    ]
    done = cli(*words, script, code=7)
    for rank in range(2):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines[:2] == [f"[{rank}] line 0", f"[{rank}] line 1"]
    assert "failed first, with exit code 7" in done.stderr
    assert "rank logs" in done.stderr


def test_submit_wait_returns_the_exit_code(cli: Cli) -> None:
    words = ["submit", "--cluster", cli.cluster, "-t", "10", "--wait"]
    cli(*words, cli.script("raise SystemExit(5)"), code=5)
    done = cli(*words, "--follow", "--json", cli.script("print('fine')"))
    assert json.loads(done.stdout)["statuses"][0]["state"] == "COMPLETED"
    assert "[0] fine" in done.stderr


def test_rank_may_continue_after_the_other_ranks_have_finished(cli: Cli) -> None:
    """Rank 0 often saves or evaluates alone at the end, for longer than the cluster's SLURM_WAIT."""
    script = cli.script(
        """
        import os, time
        if os.environ["RANK"] == "0":
            time.sleep(3)
            print("exported")
        """
    )
    words = ["--ntasks-per-node", "2", "-l", "srun", "--env", "SLURM_WAIT=1"]
    job = cli.submit(*words, script)
    cli.wait_for_end(job)
    assert cli.state(job) == "COMPLETED"
    assert "[0] exported" in cli("logs", job).stdout


def test_logs_are_selected_by_rank_text_and_number(cli: Cli) -> None:
    script = cli.script("import os\nfor i in range(4): print('step', i, 'of rank', os.environ['RANK'])")
    job = cli.submit("--ntasks-per-node", "2", "-l", "srun", script)
    cli.wait_for_end(job)
    assert cli("logs", job, "--rank", "1", "-n", "1").stdout == "[1] step 3 of rank 1\n"
    assert cli("logs", job, "--grep", "step 2").stdout == "[0] step 2 of rank 0\n[1] step 2 of rank 1\n"
    document = json.loads(cli("logs", job, "--json", "--rank", "0").stdout)
    assert (document["schema"], document["job_id"]) == (1, job)
    assert document["lines"][3]["text"] == "step 3 of rank 0"
    cli("logs", job, "--rank", "1-x", code=2)
    cli("logs", job, "--grep", "(", code=2)


def test_f83_variables_of_an_outer_job_are_removed_and_login_variables_are_set(cli: Cli) -> None:
    cli.env.update(
        {"SBATCH_JOB_NAME": "stray", "SBATCH_PARTITION": "nowhere", "SLURM_JOB_ID": "99", "SLURM_NTASKS": "7",
         "RANK": "5", "MASTER_ADDR": "elsewhere", "PYTHONPATH": "/nowhere", "CANARY_TOKEN": "hf_canary"}
    )  # fmt: skip
    script = cli.script("import os; print(sorted(os.environ)); print(os.environ.get('SLURM_JOB_NAME'))")
    job = cli.submit("-J", "mine", "--python", sys.executable, script)
    cli.wait_for_end(job)
    text = (cli.run_dir(job).logs(0) / "rank-0.log").read_text()
    assert text.splitlines()[-1] == "mine"
    for name in ("'RANK'", "MASTER_ADDR", "PYTHONPATH", "CANARY_TOKEN"):
        assert name not in text
    for name in ("'PATH'", "'HOME'", "'USER'"):
        assert name in text


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_auto_launcher_sets_rank_variables_only_for_a_script_that_requires_them(cli: Cli) -> None:
    cli.script(
        "import os\nimport torch.distributed as dist\nprint('distributed', 'RANK' in os.environ)\n", "free.py"
    )
    cli.script("import os\nimport torch.distributed as dist\nprint('rank', os.environ['RANK'])\n", "bound.py")
    words = ("-l", "auto", "--python", sys.executable)
    jobs = [cli.submit(*words, name) for name in ("free.py", "bound.py")]
    assert {cli.wait_for_end(job)["statuses"][0]["state"] for job in jobs} == {"COMPLETED"}
    assert "distributed False" in cli("logs", jobs[0]).stdout
    assert "rank 0" in cli("logs", jobs[1]).stdout


@pytest.mark.parametrize("earlier_run", [True, False])
@pytest.mark.parametrize("state", ["read-only", "full"])
@WITHOUT_SSH
def test_f16_unwritable_home_does_not_hide_runs(
    cli: Cli, tmp_path: Path, state: str, *, earlier_run: bool
) -> None:
    with small_disk(tmp_path / "home", "size=1m") as home:
        cli.env |= {"HOME": str(home), "XDG_STATE_HOME": "", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""}
        script = cli.script(UNTIL)
        jobs = [cli.submit(script, str(tmp_path / "go"))] if earlier_run else []
        if state == "full":
            fill(home)
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
        jobs.append(cli.submit(script, str(tmp_path / "go")))
        cli.wait_until(lambda: cli.state(jobs[-1]) == "RUNNING")
        assert {run["record"]["job_id"] for run in cli.recorded_runs()} == set(jobs)
        assert all(job in cli("top", "--once").stdout for job in jobs)
        cli("logs", jobs[-1])
        assert jobs[-1] in cli("diagnose", jobs[-1]).stdout
        assert "index of runs" in cli("doctor", code=None).stdout.partition("FAIL")[2]
        cli("cancel", *jobs)
        assert all(cli.wait_for_end(job)["statuses"][0]["state"] == "CANCELLED" for job in jobs)
