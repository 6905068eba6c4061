"""Messages of ``submit`` and ``render``, and the exit codes of ``submit``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from dtslurm.cli import main as program
from dtslurm.cli.commands import submit
from dtslurm.cli.printing.summary import show_end
from dtslurm.cli.setup.manual import render_manual
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState
from dtslurm.presentation.quantities import format_any_value
from dtslurm.services.logs import logs
from dtslurm.services.runs.status import RunView
from dtslurm.services.runs.tasks import number_in
from dtslurm.services.wiring.context import Context
from tests.cli.conftest import Run
from tests.cli.sample_runs import Runs, ended_job, rank_record

SUBMIT = ("submit", "--cluster", "local", "-t", "5")
STAGES = "time: 5\ncluster: local\nstages:\n  a: {script: train.py}\n  b: {script: train.py, needs: [a]}\n"


def write_job_file(folder: Path, text: str) -> None:
    (folder / "job.yaml").write_text(text)
    (folder / "job.yaml").chmod(0o644)


def test_refused_options_name_existing_commands(invoke: Run, folder: Path) -> None:
    (folder / "train.py").write_text("")
    for option in ("wait", "test-only", "parsable"):
        stderr = invoke(*SUBMIT, f"--sbatch=--{option}", "train.py", code=2).stderr
        for command in re.findall(r"dtslurm (\w+)(?= --| shows| waits)", stderr):
            invoke(command, "--help")
    assert "dtslurm submit --wait" in invoke(*SUBMIT, "--sbatch=--wait", "train.py", code=2).stderr


def test_a_job_without_time_on_cluster_local_has_no_limit(invoke: Run, folder: Path) -> None:
    (folder / "train.py").write_text("")
    stderr = invoke("submit", "--cluster", "local", "--dry-run", "train.py").stderr
    assert "no --time given: the job has no time limit" in stderr


def test_the_help_describes_the_default_number_of_gpus(invoke: Run) -> None:
    text = " ".join(invoke("submit", "--help").stdout.split())
    assert "[default: all if --node-type or the profile names the node type, else none]" in text


def test_submit_follow_prints_the_output_and_exits_with_the_code_of_the_job(
    invoke: Run, folder: Path
) -> None:
    (folder / "train.py").write_text("print('hello')\nraise SystemExit(7)\n")
    done = invoke(*SUBMIT, "-f", "train.py", code=7)
    assert "[0] hello\n" in done.stdout
    assert re.search(r"^submitted job \d+ \(train\) to local$", done.stderr, re.MULTILINE)
    assert re.search(r"^job \d+ \(train\): FAILED", done.stderr, re.MULTILINE)
    assert "rank 0 on " in done.stderr
    assert "failed first, with exit code 7" in done.stderr
    assert "  why            dtslurm diagnose " in done.stderr


def test_submit_follow_with_json_prints_only_json_to_stdout(invoke: Run) -> None:
    done = invoke(*SUBMIT, "-f", "--json", "train.py", code=0)
    document = json.loads(done.stdout)
    assert [status["state"] for status in document["statuses"]] == ["COMPLETED"]
    assert "[0] hello\n" in done.stderr


def test_submit_wait_with_json_describes_each_stage(invoke: Run, folder: Path) -> None:
    write_job_file(folder, STAGES)
    document = json.loads(invoke("submit", "--wait", "--json", "job.yaml", code=0).stdout)
    assert [run["run"]["stage"] for run in document["runs"]] == ["a", "b"]
    assert document["run"]["stage"] == "a"


def test_submit_lists_all_queued_stages(invoke: Run, folder: Path) -> None:
    write_job_file(folder, STAGES)
    done = invoke("submit", "job.yaml", code=0)
    jobs = re.findall(r"^submitted job (\d+) \([ab], stage [ab]\) to local$", done.stderr, re.MULTILINE)
    assert len(jobs) == 2
    assert f"  all of them    dtslurm status {jobs[0]} {jobs[1]}\n" in done.stderr
    document = json.loads(invoke("submit", "--json", "job.yaml", code=0).stdout)
    assert [run["stage"] for run in document["runs"]] == ["a", "b"]
    invoke("cancel", *jobs, *(run["job_id"] for run in document["runs"]))


def test_a_dry_run_as_json_contains_every_stage(invoke: Run, folder: Path) -> None:
    write_job_file(folder, STAGES)
    result = json.loads(invoke("submit", "--dry-run", "--json", "job.yaml", code=0).stdout)
    assert [stage["launcher"] for stage in result["stages"]] == ["single", "single"]
    document = json.loads(invoke(*SUBMIT, "--dry-run", "--json", "train.py", code=0).stdout)
    assert "stages" not in document
    assert document["script"].startswith("#!/bin/bash\n")


def test_submitting_a_sweep_names_the_sweep_status_command(invoke: Run, folder: Path) -> None:
    write_job_file(
        folder, "time: 5\ncluster: local\nscript: train.py\nargs: ['${x}']\nsweep: {grid: {x: [1, 2]}}\n"
    )
    done = invoke("submit", "job.yaml", code=0)
    [job] = re.findall(r"its trials     dtslurm sweep status (\d+)", done.stderr)
    invoke("sweep", "stop", job)


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 2)])
def test_a_very_large_sweep_requires_a_confirmation(
    invoke: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    asked: list[str] = []
    write_job_file(
        folder, "time: 5\ncluster: local\nscript: train.py\nargs: ['${x}', '${y}']\n"
        f"sweep: {{grid: {{x: {list(range(110))}, y: {list(range(100))}}}}}\n",
    )  # fmt: skip

    def said(prompt: str = "") -> str:
        asked.append(prompt)
        return answer

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", said)
    monkeypatch.setattr(submit, "_queue", lambda *_: (_ for _ in ()).throw(click.exceptions.Exit(0)))
    done = invoke("submit", "job.yaml", code=code)
    assert len(asked) == 1
    assert "The sweep has 11,000 points. Queue them all?" in asked[0] + done.stderr
    assert ("no job was queued" in done.stderr) is (code == 2)


def test_render_write_creates_a_private_executable_file(invoke: Run, folder: Path) -> None:
    done = invoke("render", "--cluster", "local", "--write", "out.sbatch", "train.py", code=0)
    assert done.stdout == ""
    assert (folder / "out.sbatch").read_text().startswith("#!/bin/bash\n")
    assert (folder / "out.sbatch").stat().st_mode & 0o777 == 0o700
    refused = invoke("render", "--cluster", "local", "--write", ".", "train.py", code=5)
    assert "it is a folder" in refused.stderr


# ---- The last words on a run ----


def end_summary(record: JobRecord, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    show_end(Context(), RunView(record, record.final))
    return capsys.readouterr().err


def test_the_end_summary_lists_metrics_results_and_paths(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = [{"step": 9, "time": 1.0, "loss": 1.23456789, "tokens_per_s": 7, "total_steps": 9}]
    files = {
        "checkpoints/a.pt": "x",
        "logs/0/rank-0.log": "",
        "logs/1/rank-0.log": "",
        "metrics/0/train.jsonl": metrics,
        "metrics/1/train.jsonl": "",
    }
    record = runs.add("train", "7", files=files)
    assert end_summary(record, capsys).splitlines() == [
        "job 7 (train): COMPLETED after 1m30s",
        "  loss 1.235, tokens per s 7",
        f"  results        {record.run_dir}/checkpoints",
        f"  script         {record.run_dir}/script.sbatch",
        f"  rank logs      {record.run_dir}/logs/1",
    ]
    assert [format_any_value(value) for value in (0.00001234, 12, "x")] == ["1.234e-05", "12", "x"]


def test_the_end_summary_of_a_failure_quotes_the_last_log_lines(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "".join(f"line {number}\n\n" for number in range(9))
    files = {
        "ranks/0/first-failure": "0 7\n",
        "ranks/0/0.json": rank_record(0, "n3", 7),
        "logs/0/rank-0.log": log,
    }
    record = runs.add("train", "7", ended_job("7", JobState.FAILED), files=files)
    said = end_summary(record, capsys)
    assert "  rank 0 on n3 failed first, with exit code 7\n  | line 3\n" in said
    assert "  | line 2" not in said
    (Path(record.run_dir) / "logs/0/rank-0.log").unlink()
    assert "  | " not in end_summary(record, capsys)


def test_the_end_summary_of_a_remote_run_suggests_fetch(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    record = runs.add("train", "7", ended_job("7", start_time=None))
    far = runs.change(record, mirror=record.run_dir)
    said = end_summary(far, capsys)
    assert said.startswith("job 7 (train): COMPLETED\n")
    assert said.endswith("  bring it here  dtslurm fetch 7\n")


@pytest.mark.parametrize("options", [(), ("--json",), ("--parsable",)])
def test_an_interrupt_of_submit_wait_prints_that_the_job_continues(
    invoke: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setattr(logs, "wait", raise_interrupt)
    stderr = invoke(*SUBMIT, "--wait", *options, "train.py", code=130).stderr
    match = re.search(r"^the job continues; dtslurm logs -f (\d+) follows it again$", stderr, re.MULTILINE)
    assert match, stderr
    invoke("cancel", match[1])


def test_an_interrupt_of_submit_wait_lists_all_stages(
    invoke: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "wait", raise_interrupt)
    write_job_file(folder, STAGES)
    stderr = invoke("submit", "--wait", "--json", "job.yaml", code=130).stderr
    match = re.search(r"^the jobs continue; dtslurm status (\d+) (\d+) shows them$", stderr, re.MULTILINE)
    assert match, stderr
    invoke("cancel", *match.groups())


def raise_interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


# ---- The program itself ----


@pytest.mark.parametrize(
    ("job", "known", "task"),
    [
        ("17_3", "17", "3"),
        ("17", "17", None),
        ("run_3", "17", None),
        ("17_x", "17", None),
        (None, "17", None),
    ],
)
def test_number_in_extracts_the_array_index_of_a_job_id(
    job: str | None, known: str, task: str | None
) -> None:
    assert number_in(job, known) == task


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (click.Abort(), 130),
        (KeyboardInterrupt(), 130),
        (click.exceptions.Exit(3), 3),
        (click.UsageError("no"), 2),
    ],
)
def test_the_exit_code_depends_on_the_exception(
    invoke: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def broken(**_: object) -> None:
        raise error

    monkeypatch.setattr(program.cli, "main", broken)
    assert invoke("status").returncode == code


def test_a_closed_stdout_ends_the_program_with_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone() -> None:
        raise BrokenPipeError

    with (tmp_path / "out").open("w") as stdout:
        monkeypatch.setattr(program.cli, "main", lambda **_: 0)
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=gone, fileno=stdout.fileno))
        with pytest.raises(SystemExit) as left:
            program.main()
        stdout.write("more")  # as the interpreter does at its end: it goes nowhere, and is no error
    assert (left.value.code, (tmp_path / "out").read_text()) == (0, "")


def test_resilient_parsing_does_not_print_the_version(invoke: Run) -> None:
    assert invoke("--version", code=0).stdout.startswith("dtslurm ")
    with program.cli.make_context("dtslurm", ["--version"], resilient_parsing=True) as context:
        assert context.params == {}


def test_the_manual_command_prints_the_manual_page(invoke: Run) -> None:
    shown = invoke("manual", code=0).stdout
    assert shown == render_manual(program.cli) + "\n"
    assert shown.startswith('.TH DTSLURM 1 "" "dtslurm ')
    assert ".SS dtslurm sweep results [OPTIONS] JOB" in shown.replace("\\-", "-")


@pytest.mark.parametrize("verb", ["render", "submit"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--secret", "KEY=hush"), "--secret accepts only a name"),
        (("--secret", "A B;$(id)"), "--secret 'A B;$(id)' is not a variable name"),
        (("--secret", "KEY", "--env", "KEY"), "--secret KEY: --env also sets KEY"),
        (("--secret", "KEY", "--env", "KEY=hush"), "--secret KEY: --env also sets KEY"),
        (("--once", ""), "--once has an empty key"),
        (("--once", " \t"), "--once has an empty key"),
    ],
)
def test_unsafe_secrets_and_empty_idempotency_keys_are_refused(
    invoke: Run, monkeypatch: pytest.MonkeyPatch, verb: str, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("KEY", "hush")
    done = invoke(verb, "--cluster", "local", "-t", "5", *words, "train.py", code=2)
    assert message in done.stderr
    assert "hush" not in done.stdout + done.stderr


def test_a_job_file_with_unsafe_secrets_or_an_empty_key_is_refused(
    invoke: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "hush")
    write_job_file(
        folder,
        "script: train.py\ncluster: local\ntime: 5\nonce: ''\nsecrets: [KEY]\nenv: {KEY: x}\n",
    )
    done = invoke("submit", "job.yaml", code=2)
    assert "--once has an empty key" in done.stderr
    assert "--secret KEY: --env also sets KEY" in done.stderr


def test_a_secret_replaces_the_variable_of_a_tracker(invoke: Run) -> None:
    words = ("--tracker", "mlflow", "--secret", "MLFLOW_TRACKING_URI", "train.py")
    script = invoke("render", "--cluster", "local", "-t", "5", *words, code=0).stdout
    assert "export MLFLOW_TRACKING_URI" not in script


def test_once_compares_only_the_key_and_lists_the_differences(invoke: Run, folder: Path) -> None:
    (folder / "other.py").write_text("")
    once = (*SUBMIT, "--parsable", "--once", "k")
    first = invoke(*once, "train.py", code=0)
    again = invoke(*once, "train.py", code=0)
    other = invoke(*once, "-J", "x", "--env", "A=b", "other.py", code=0)
    assert first.stdout == again.stdout == other.stdout != ""
    assert "note: job" not in first.stderr + again.stderr
    assert "differs from this request in job-name, script, env\n" in other.stderr
    assert invoke(*SUBMIT, "--parsable", "--once", "k2", "train.py", code=0).stdout != first.stdout
