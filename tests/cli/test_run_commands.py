"""Commands for finished runs: fetch, report, resubmit, cancel, requeue, clean."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.state import JobState, StateFlag
from dtslurm.services.runs.status import RunView
from dtslurm.services.submit import resubmit
from tests.cli.conftest import Run
from tests.cli.sample_runs import ENDED, Runs, ended_job, rank_record

LOG = {"logs/0/rank-0.log": "hello\n", "checkpoints/a.pt": "x" * 3000}
CODE = {"train.py": "pass\n"}
SNAPSHOT = (
    " of the snapshot in code/, unchanged since the submission; the pattern 'code/*' downloads all of code/"
)


def test_fetch_copies_only_new_files_and_skips_the_snapshot(invoke: Run, runs: Runs, folder: Path) -> None:
    runs.deliver(runs.add("train", "7", files=LOG), CODE)
    first = invoke("fetch", "train", code=0)
    brought, left = first.stderr.splitlines()
    assert re.fullmatch(r"3 files, [34]\.\d KiB, in .*/train-7", brought)
    assert left == f"skipped: 1 file{SNAPSHOT}"
    assert (folder / "train-7" / "logs" / "0" / "rank-0.log").read_text() == "hello\n"
    assert not (folder / "train-7" / "code").exists()
    assert invoke("fetch", "train", code=0).stderr.startswith("no new files; all files are already in ")
    result = invoke("fetch", "-o", "other", "train", "checkpoints", code=0)
    assert result.stderr == f"1 file, 2.9 KiB, in {folder / 'other'}\n"
    document = json.loads(invoke("fetch", "--json", "-o", "third", "train", "logs/*", "code", code=0).stdout)
    assert sorted(Path(name).name for name in document["files"]) == ["rank-0.log", "train.py"]
    assert "uploaded" not in document


def test_c24_fetch_never_copies_secrets(invoke: Run, runs: Runs, folder: Path) -> None:
    secrets = {"secrets": "export TOKEN=hush", "secrets.md": "", "sub/secrets": "", "notify.json": "hush"}
    secrets |= {"ray-token": "hush", "tasks/1/ray-token": "hush", "sub/ray-token": ""}
    runs.deliver(runs.add("train", "7", files={**LOG, **secrets}), CODE)
    invoke("fetch", "train", code=0)
    invoke("fetch", "train", "*", "secrets*", "sec*", "code", code=0)
    for name in ("secrets", "notify.json"):
        refused = invoke("fetch", "train", name, code=2)
        assert "they hold the values of --secret and --notify, which stay on the cluster" in refused.stderr
    got = folder / "train-7"
    assert not (got / "secrets").exists()
    assert not (got / "notify.json").exists()
    assert (got / "secrets.md").exists()
    assert (got / "sub" / "secrets").exists()
    assert [str(path.relative_to(got)) for path in got.rglob("ray-token")] == ["sub/ray-token"]
    assert (got / "code" / "train.py").exists()


def add_job_outputs(runs: Runs, record: JobRecord) -> JobRecord:
    """Deliver code to a run, and write job outputs beside the code."""
    runs.deliver(record, {**CODE, "lib/model.py": "pass\n", "lib/data.py": "pass\n"})
    code = Path(record.run_dir) / "code"
    for name in ("out/ckpt.pt", "lib/model.py", "__pycache__/train.cpython-310.pyc"):
        runs.write(code / name, "written by the job")
    (code / "out" / "last.pt").symlink_to("ckpt.pt")
    return record


def test_fetch_copies_files_that_the_job_wrote_in_the_code_folder(
    invoke: Run, runs: Runs, folder: Path
) -> None:
    add_job_outputs(runs, runs.add("train", "7", files={**LOG, "secrets": "export TOKEN=hush"}))
    shown = invoke("fetch", "train", code=0).stderr.splitlines()
    code = folder / "train-7" / "code"
    assert sorted(str(path.relative_to(code)) for path in code.rglob("*.*")) == [
        "lib/model.py",
        "out/ckpt.pt",
    ]
    assert (code / "out" / "ckpt.pt").read_text() == "written by the job"
    assert shown[0].startswith("5 files, ")
    assert shown[1:] == [
        f"skipped: 2 files{SNAPSHOT}",
        "skipped: 1 file of byte code in code/, which Python creates again",
        "skipped: links, pipes and sockets (1), because only regular files are downloaded: code/out/last.pt",
        "skipped: the values of --secret, which stay on the cluster: secrets",
    ]
    assert "skipped: 2 files of the snapshot" in invoke("fetch", "train", code=0).stderr  # nothing is new
    document = json.loads(invoke("fetch", "--json", "-o", "other", "train", "*.pt", code=0).stdout)
    assert sorted(Path(name).name for name in document["files"]) == ["a.pt", "ckpt.pt"]
    [left] = document["left_out"]
    assert (left["kind"], left["files"], left["names"]) == ("not_files", 1, ["code/out/last.pt"])
    everything = json.loads(invoke("fetch", "--json", "-o", "third", "train", "code/*", code=0).stdout)
    assert len(everything["files"]) == 5
    assert [item["kind"] for item in everything["left_out"]] == ["not_files"]


def test_fetch_sync_uploads_offline_wandb_runs(
    invoke: Run, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "wandb"
    offline = {"wandb/offline-run-1/run.wandb": "x", "tensorboard/events": "x"}
    runs.add("train", "7", files=offline)
    runs.add("bare", "8", files={"logs/0/rank-0.log": "x"})
    absent = invoke("fetch", "--sync", "train", code=2)
    assert "wandb is not installed on this machine" in absent.stderr
    program.write_text('#!/bin/sh\necho "$*" >>"$0.asked"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    done = invoke("fetch", "--sync", "train", code=0)
    assert "uploaded 1 W&B run\n  tensorboard --logdir " in done.stderr
    assert re.fullmatch(r"sync -- .*/train-7/wandb/offline-run-1\n", Path(f"{program}.asked").read_text())
    document = json.loads(invoke("fetch", "--sync", "--json", "train", code=0).stdout)
    assert [Path(place).name for place in document["uploaded"]] == ["offline-run-1"]
    assert "no W&B run to upload" in invoke("fetch", "--sync", "bare", code=0).stderr
    program.write_text("#!/bin/sh\necho 'not logged in' >&2\nexit 1\n")
    failed = invoke("fetch", "--sync", "train", code=4)
    assert "offline-run-1 failed" in failed.stderr
    assert "not logged in" in failed.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("train", "nothing/*"), 3, "matches nothing/*"),
        (("train", "-o", "../runs/train-7"), 2, "already"),
    ],
)
def test_fetch_reports_patterns_without_a_match_and_an_unusable_destination(
    invoke: Run, runs: Runs, words: tuple[str, ...], code: int, message: str
) -> None:
    runs.add("train", "7", files=LOG)
    assert message in invoke("fetch", *words, code=code).stderr


def test_report_writes_an_html_page(invoke: Run, runs: Runs, folder: Path) -> None:
    started = {"time": ENDED - 90, "event": "started", "attempt": 0, "nodes": "n1"}
    over = {"time": ENDED, "event": "ended", "attempt": 0, "exit_code": 1}
    files = {
        "logs/0/rank-0.log": "RuntimeError: \x1b]0;evil title\x07\x1b[31m<b>no</b>\x1b[0m\n",
        "ranks/0/0.json": rank_record(0, "n1", 1),
        "ranks/0/first-failure": "0 1\n",
        "events.jsonl": [started, over],
        "metrics/0/train.jsonl": [{"step": step, "loss": 3.0 - step} for step in range(3)],
        "script.sbatch": "#!/bin/bash\n#SBATCH --nodes=1\n\techo '\x1b[1mbold'\n",
    }
    runs.add(
        "train", "7", ended_job("7", JobState.FAILED), files=files, command="train.py --lr 1", time_limit=3600
    )
    assert invoke("report", "train", code=0).stdout == f"{folder / 'train-7.html'}\n"
    page = (folder / "train-7.html").read_text()
    for word in ("train.py --lr 1", "#SBATCH --nodes=1", "FAILED", "1h00m", "RuntimeError: &lt;b&gt;no"):
        assert word in page, word
    assert "#!/bin/bash\n#SBATCH --nodes=1\n\techo &#39;bold&#39;" in page
    assert not any(mark in page for mark in ("<b>no", "\x1b", "evil title"))
    assert invoke("report", "-o", "page.html", "train", code=0).stdout == f"{folder / 'page.html'}\n"
    assert "it is a folder" in invoke("report", "-o", ".", "train", code=5).stderr


def test_report_of_a_run_that_never_started_is_refused(invoke: Run, runs: Runs) -> None:
    runs.add("train", "7", ended_job("7", JobState.CANCELLED, start_time=None))
    assert "train has not started, so it has nothing to report" in invoke("report", code=2).stderr


# ---- One task of an array ----


@pytest.fixture
def array_run(runs: Runs) -> JobRecord:
    files = {f"tasks/{task}/logs/0/rank-0.log": f"of {task}\n" for task in (1, 2)}
    files |= {f"tasks/{task}/ranks/0/0.json": rank_record(0, f"n{task}") for task in (1, 2)}
    files |= {f"logs/batch-{task}.log": f"batch {task}\n" for task in (1, 2)}
    return runs.add(
        "many", "7", ended_job("7_1"), ended_job("7_2", JobState.FAILED), array="1-2", files={**LOG, **files}
    )


@pytest.mark.usefixtures("array_run")
def test_status_can_show_a_single_array_task(invoke: Run) -> None:
    whole, result = invoke("status", "7", code=0).stdout, invoke("status", "7_1", code=0).stdout
    assert ("FAILED" in whole.upper(), "FAILED" in result.upper()) == (True, False)
    [run] = json.loads(invoke("status", "--json", "7_2", code=0).stdout)["runs"]
    assert [item["job_id"] for item in run["statuses"]] == ["7_2"]


@pytest.mark.usefixtures("array_run")
def test_fetch_can_copy_the_files_of_a_single_array_task(invoke: Run, folder: Path) -> None:
    invoke("fetch", "7_2", code=0)
    got = sorted(str(path.relative_to(folder / "many-7")) for path in (folder / "many-7").rglob("*.*"))
    assert got == ["logs/batch-2.log", "tasks/2/logs/0/rank-0.log", "tasks/2/ranks/0/0.json"]
    invoke("fetch", "-o", "other", "7_1", "logs/*", code=0)
    assert [path.name for path in (folder / "other").rglob("*.*")] == ["rank-0.log"]


def test_fetch_of_a_task_mentions_the_outputs_in_the_shared_code_folder(
    invoke: Run, runs: Runs, array_run: JobRecord
) -> None:
    add_job_outputs(runs, array_run)
    shown = invoke("fetch", "7_2", code=0).stderr
    assert shown.splitlines()[1:] == [
        (
            "skipped: 2 files that the array tasks wrote to code/, which they share; dtslurm fetch 7 "
            "downloads them"
        )
    ]
    assert "left out" not in invoke("fetch", "7_2", "logs/*", code=0).stderr


@pytest.mark.usefixtures("array_run")
def test_each_array_task_has_its_own_report(invoke: Run, folder: Path) -> None:
    for task in ("1", "2"):
        assert invoke("report", f"7_{task}", code=0).stdout == f"{folder / f'many-7_{task}.html'}\n"


@pytest.mark.parametrize(
    "words", [("status",), ("fetch",), ("logs",), ("logs", "-f"), ("report",), ("diagnose",), ("resubmit",)]
)
def test_an_array_task_that_does_not_exist_is_refused(
    invoke: Run, runs: Runs, array_run: JobRecord, words: tuple[str, ...]
) -> None:
    assert array_run.array == "1-2"
    assert invoke(*words, "7_9", code=3).stderr == "error: job 7 has no task 9, only 1-2\n"
    runs.add("one", "8")
    assert invoke(*words, "8_1", code=3).stderr == "error: job 8 has no task 1: it is not a job array\n"


# ---- Again ----


def test_resubmit_repeats_or_continues_a_run(invoke: Run, tmp_path: Path) -> None:
    first = invoke("submit", "--cluster", "local", "-t", "5", "--parsable", "--wait", "train.py", "--lr", "1")
    job = first.stdout.strip()
    again = invoke("resubmit", job, code=0)
    assert re.search(
        r"^submitted job \d+ \(train\) to local\n  repeats  .*/train-", again.stderr, re.MULTILINE
    )
    onward = invoke("resubmit", "--from-checkpoint", job, code=0)
    assert f"  continues  {tmp_path / 'runs'}" in onward.stderr
    assert invoke("resubmit", "--parsable", job, code=0).stdout.strip().isdecimal()
    [made] = [json.loads(invoke("resubmit", "--json", job, code=0).stdout)["run"]]
    assert Path(made["parent"]).name.startswith("train-")
    assert made["script"].endswith("train.py")
    invoke(
        "cancel", *(run["record"]["job_id"] for run in json.loads(invoke("status", "--json").stdout)["runs"])
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "7: the record does not contain the request"),
        ({"sweep": "/runs/tune-1"}, "train is a sweep; dtslurm sweep resume runs its failed trials again"),
    ],
)
def test_resubmit_refuses_runs_without_a_request_and_sweeps(
    invoke: Run, runs: Runs, values: dict[str, Any], message: str
) -> None:
    runs.add("train", "7", **values)
    assert message in invoke("resubmit", "train", code=2).stderr


def add_second_cluster(folder: Path) -> None:
    """Describe a second cluster, on which jobs run on this machine too."""
    profiles = folder / "cluster_profiles"
    profiles.mkdir()
    (profiles / "other.yaml").write_text("extends: local\n")


def test_resubmit_uses_the_cluster_of_the_run_not_the_default(
    invoke: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_second_cluster(folder)
    monkeypatch.setenv("DTSLURM_CLUSTER", "other")
    job = invoke("submit", "-t", "5", "--parsable", "--wait", "train.py", code=0).stdout.strip()
    monkeypatch.setenv("DTSLURM_CLUSTER", "local")
    again = json.loads(invoke("resubmit", "--json", job, code=0).stdout)["run"]
    assert again["cluster"] == "other"
    (folder / "cluster_profiles" / "other.yaml").rename(folder / "named_by_its_path.yaml")
    monkeypatch.setenv("DTSLURM_CLUSTER", "./named_by_its_path.yaml")
    job = invoke("submit", "-t", "5", "--parsable", "--wait", "train.py", code=0).stdout.strip()
    monkeypatch.delenv("DTSLURM_CLUSTER")
    assert (
        json.loads(invoke("resubmit", "--json", job, code=0).stdout)["run"]["cluster"] == "named_by_its_path"
    )


def test_resubmit_with_cluster_uses_the_named_cluster(invoke: Run, folder: Path) -> None:
    add_second_cluster(folder)
    job = invoke("submit", "--cluster", "local", "-t", "5", "--parsable", "--wait", "train.py", code=0).stdout
    again = json.loads(invoke("resubmit", "--json", "--cluster", "other", job.strip(), code=0).stdout)["run"]
    assert again["cluster"] == "other"
    refused = invoke("resubmit", "--from-checkpoint", "--cluster", "other", job.strip(), code=2)
    assert "its checkpoints are on local, not on other" in refused.stderr
    assert "leave out --cluster other, or leave out --from-checkpoint" in refused.stderr
    assert (
        "no cluster profile 'nosuch'" in invoke("resubmit", "--cluster", "nosuch", job.strip(), code=2).stderr
    )


def extend_record(record: JobRecord, **values: object) -> None:
    """Write more into a run's record."""
    path = Path(record.run_dir) / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def add_array_with_request(runs: Runs, folder: Path, **values: object) -> None:
    record = runs.add("train", "7", array="0-1", final=(ended_job("7_0"), ended_job("7_1")))
    asked = {"request": {"script": "train.py", "env": []}, "submitted_in": str(folder)}
    extend_record(record, **{**asked, **values})


def test_resubmit_can_repeat_a_single_array_task(invoke: Run, runs: Runs, folder: Path) -> None:
    add_array_with_request(
        runs, folder, request={"script": "train.py", "env": [], "cluster": "local", "array": "0-1"}
    )
    run = json.loads(invoke("resubmit", "--json", "7_1", code=0).stdout)["run"]
    assert run["array"] == "1"
    text = " ".join(invoke("status", run["job_id"], code=0).stdout.split())
    assert "the base of relative paths of all tasks" in text  # what one writes, another overwrites
    onward = json.loads(invoke("resubmit", "--from-checkpoint", "--json", "7_0", code=0).stdout)["run"]
    assert onward["array"] == "0"
    env = json.loads((Path(onward["run_dir"]) / "job.json").read_text())["request"]["env"]
    assert env == [f"DTSLURM_CHECKPOINT_DIR={onward['parent']}/tasks/0/checkpoints"]
    invoke("cancel", run["job_id"], onward["job_id"], code=0)


def test_resubmit_refuses_a_run_whose_submission_folder_was_deleted(
    invoke: Run, runs: Runs, tmp_path: Path
) -> None:
    add_array_with_request(runs, tmp_path / "gone")
    assert (
        f"7 was submitted from {tmp_path / 'gone'}, which no longer exists"
        in invoke("resubmit", "7", code=2).stderr
    )


def test_resubmit_from_checkpoint_refuses_a_whole_array(invoke: Run, runs: Runs, folder: Path) -> None:
    add_array_with_request(runs, folder)
    done = invoke("resubmit", "--from-checkpoint", "7", code=2)
    assert "each task of a job array has its own checkpoints" in done.stderr
    assert "resubmit single tasks, such as 7_0" in done.stderr


def test_resubmit_from_checkpoint_refuses_a_job_that_is_still_active(invoke: Run, folder: Path) -> None:
    (folder / "long.py").write_text("import time; time.sleep(50)\n")
    job = invoke("submit", "--cluster", "local", "-t", "5", "--parsable", "long.py", code=0).stdout.strip()
    again = ""
    try:
        done = invoke("resubmit", "--from-checkpoint", job, code=2)
        assert re.search(
            rf"{job} is (PENDING|RUNNING|CONFIGURING), and it writes its checkpoints to ", done.stderr
        )
        assert f"cancel the job first: dtslurm cancel {job}" in done.stderr
        again = invoke("resubmit", "--parsable", job, code=0).stdout.strip()  # from the beginning
    finally:
        invoke("cancel", *filter(None, (job, again)), code=0)


def test_resubmit_from_checkpoint_advises_to_wait_for_a_job_that_is_completing(
    invoke: Run, runs: Runs, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After dtslurm cancel, Slurm shows the job as COMPLETING for some seconds."""
    record = runs.add("train", "7")
    extend_record(
        record,
        request={"script": "train.py", "env": [], "cluster": "local"},
        submitted_in=str(folder),
    )
    ending = ended_job("7", JobState.CANCELLED, flags=frozenset({StateFlag.COMPLETING}))
    view = RunView(record, (ending,))
    monkeypatch.setattr(resubmit, "views", lambda *_: [view])
    done = invoke("resubmit", "--from-checkpoint", "7", code=2)
    assert "7 is COMPLETING, and it writes its checkpoints to " in done.stderr
    assert "wait some seconds until the job has ended, and run the command again" in done.stderr
    assert "cancel the job" not in done.stderr


def test_resubmit_from_checkpoint_refuses_a_chain_with_an_active_run(
    invoke: Run, runs: Runs, folder: Path
) -> None:
    first = runs.add("train", "7")
    asked = {"script": "train.py", "env": [], "cluster": "local"}
    for_it = {"request": asked, "submitted_in": str(folder)}
    extend_record(first, **for_it)
    alive = ended_job("8", JobState.UNKNOWN, end_time=None)
    onward = runs.add("train", "8", alive, parent=first.run_dir)
    env = [f"DTSLURM_CHECKPOINT_DIR={first.run_dir}/checkpoints"]
    extend_record(onward, **{**for_it, "request": {**asked, "env": env}})
    for job in ("7", "8"):
        done = invoke("resubmit", "--from-checkpoint", job, code=2)
        assert re.search(
            r"it is not known whether 8 has ended \(.+\), and this job writes its checkpoints to ",
            done.stderr,
        )
        assert f"submit a new run with --env {env[0]}" in done.stderr
    runs.add("train", "9", alive, parent=first.run_dir)  # a repetition has checkpoints of its own
    extend_record(
        runs.change(onward, final=(ended_job("8"),)), **{**for_it, "request": {**asked, "env": env}}
    )
    job = invoke("resubmit", "--from-checkpoint", "--parsable", "7", code=0).stdout.strip()
    invoke("cancel", job)


# ---- What has ended ----


def test_cancel_reports_that_a_job_had_already_ended(invoke: Run) -> None:
    asked = ("submit", "--cluster", "local", "-t", "5", "--parsable", "--wait", "train.py")
    job = invoke(*asked, code=0).stdout.strip()
    assert invoke("cancel", job, code=0).stderr == f"{job} had already ended: COMPLETED\n"
    document = json.loads(invoke("cancel", "--json", job, code=0).stdout)
    assert (document["cancelled"], document["ended"]) == ([], {job: "COMPLETED"})


def test_a_run_without_a_job_id_cannot_be_changed(invoke: Run, runs: Runs) -> None:
    record = runs.add("train", "7")
    runs.change(record, job_id=None, phase="unknown", final=())
    done = invoke("hold", "train", code=2)
    assert "train: the job of this run is not known yet; see dtslurm status" in done.stderr


# ---- Gone and moved ----


@pytest.mark.parametrize("verb", ["logs", "status", "cancel", "requeue"])
def test_a_deleted_run_directory_is_distinguished_from_an_unknown_run(
    invoke: Run, runs: Runs, tmp_path: Path, verb: str
) -> None:
    record = runs.add("lost", "62", cluster="big")
    Path(record.run_dir).rename(tmp_path / "elsewhere")
    for name in ("62", "lost"):
        stderr = invoke(verb, name, code=3).stderr
        assert (
            f"error: run {name} is known on this machine, but its run directory {record.run_dir} "
            "does not exist\n"
        ) in stderr
        assert "scancel 62 on big ends its job if it still runs" in stderr
    here_too = runs.add("own", "63", cluster="local")
    (Path(here_too.run_dir) / "job.json").unlink()
    stderr = invoke(verb, "63", code=3).stderr
    assert (
        "63 is known on this machine, but the record in its run directory, "
        f"{here_too.run_dir}/job.json, does not exist"
    ) in stderr
    assert "dtslurm cancel 63 --cluster local ends its job if it still runs" in stderr


def test_a_damaged_record_is_reported(invoke: Run, runs: Runs) -> None:
    record = runs.add("torn", "7")
    (Path(record.run_dir) / "job.json").write_text("{")
    assert f"{record.run_dir}/job.json is not JSON" in invoke("status", "7", code=5).stderr


@pytest.mark.parametrize("verb", ["logs", "status", "cancel", "requeue"])
def test_a_moved_run_directory_is_reported_before_any_action(
    invoke: Run, runs: Runs, tmp_path: Path, verb: str
) -> None:
    record = runs.add("train", "7")
    old, new = Path(record.run_dir), tmp_path / "elsewhere"
    old.rename(new)
    stderr = invoke(verb, str(new), code=3).stderr
    assert f"error: {new} was moved: job 7 has its run directory in {old}\n" in stderr
    assert f"ln -s {new} {old} makes both paths valid" in stderr
    assert not (new / "events.jsonl").exists()
    old.symlink_to(new)
    assert "train" in invoke("status", str(new), code=0).stdout
    old.unlink()
    shutil.copytree(new, old)
    assert f"{new} is a copy of the run in {old}" in invoke(verb, str(new), code=3).stderr


# ---- Clean ----


def test_clean_lists_files_to_delete_and_runs_to_keep(invoke: Run, runs: Runs) -> None:
    record = runs.add("old", "7", files=LOG)
    runs.deliver(record, CODE)
    old = Path(record.run_dir)
    path = Path(runs.add("kept", "8", files=LOG).run_dir)
    (path / "pins.json").write_text(json.dumps({"pinned": ["a.pt"]}))
    shown = invoke("clean", code=0)
    assert shown.stdout.splitlines()[0].split() == ["JOB", "NAME", "CLUSTER", "ENDED", "SIZE", "FOLDER"]
    assert f"{old}/code" in shown.stdout
    assert "would be freed; nothing was deleted, because --yes was not given" in shown.stderr
    result = invoke("clean", "--runs", code=0)
    assert re.search(rf"{re.escape(str(old))}$", result.stdout, re.MULTILINE)
    assert f"{path}: kept, because results in it are pinned (dtslurm artifacts unpin)" in result.stderr
    assert "freed" in invoke("clean", "--runs", "--yes", code=0).stderr
    assert (old.exists(), path.exists()) == (False, True)


def test_clean_reports_a_run_root_whose_profile_is_missing(invoke: Run, runs: Runs) -> None:
    runs.add("old", "7", cluster="gone")
    done = invoke("clean", code=0)
    assert re.search(r"^gone: .*no cluster profile", done.stderr, re.MULTILINE)
    assert done.stdout == ""


def test_clean_names_the_run_that_needs_a_kept_run(invoke: Run, runs: Runs) -> None:
    old = runs.add("old", "7", files=LOG)
    alive = ended_job("8", JobState.UNKNOWN, end_time=None)
    runs.add("onward", "8", alive, parent=old.run_dir)
    stderr = invoke("clean", "--runs", "--yes", code=0).stderr
    assert f"{old.run_dir}: kept, because job 8 continues from it or belongs to it and is kept" in stderr
    assert (Path(old.run_dir) / "checkpoints" / "a.pt").exists()
