"""Job files of several jobs, run: stages that follow each other, sweeps, resuming, stopping early."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli

ON_LOCAL = pytest.mark.parametrize("cli", ["local"], indirect=True)

TRAIN = """\
import json, os, sys, time
lr, seed = float(sys.argv[1]), int(sys.argv[2])
print("trial", os.environ["DTSLURM_TRIAL"], os.environ["TAG"], flush=True)
print(os.environ.get("WANDB_NAME"), os.environ.get("WANDB_RUN_ID"), flush=True)
kept = os.path.join(os.environ["DTSLURM_CHECKPOINT_DIR"], "kept")
again = os.path.exists(kept)
open(kept, "a").close()
with open(os.environ["DTSLURM_METRICS"], "a") as metrics:
    for step in (1, 2):
        metrics.write(json.dumps({"step": step, "loss": lr / step + seed}) + "\\n")
sys.exit(3 if (lr, seed) == (2, 1) and not again else 0)
"""

FAILS_ONCE = """\
import os, time
kept = os.path.join(os.environ["DTSLURM_CHECKPOINT_DIR"], "kept")
if not os.path.exists(kept):
    open(kept, "a").close()
    raise SystemExit(3)
time.sleep(600)
"""

# A training script whose step time depends on the layout, and which does not end by itself. A file has the
# seconds of each layout; a layout without seconds runs out of memory.
PROBED = """\
import json, os, pathlib, sys, time
layout, file = sys.argv[1], pathlib.Path(sys.argv[2])
while not file.exists():
    time.sleep(0.05)
step_s = json.loads(file.read_text()).get(layout)
if step_s is None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB in total.")
if os.environ["RANK"] != "0":
    time.sleep(600)
with open(os.environ["DTSLURM_METRICS"], "a") as metrics:
    for step in range(10_000):
        seconds = step_s * (5 if step < 3 else 1)
        metrics.write(json.dumps({"step": step, "step_time_s": seconds, "memory_gib": 11.5}) + "\\n")
        metrics.flush()
        time.sleep(0.05)
"""

SHOW = """\
import os
for name, value in sorted(os.environ.items()):
    if name.startswith("DTSLURM_STAGE_"):
        print(name, value)
"""


def job(cli: Cli, text: str) -> str:
    path = cli.folder / "job.yaml"
    path.write_text(f"cluster: {cli.cluster}\ntime: 10\n{text}")
    path.chmod(0o644)
    return "job.yaml"


def submit(cli: Cli, text: str, *words: str, code: int = 0) -> list[str]:
    jobs = cli("submit", "--parsable", *words, job(cli, text), code=code, timeout=600).stdout.split()
    cli.started += jobs
    return jobs


def trial_results(cli: Cli, selector: str) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads(cli("sweep", "results", "--json", selector).stdout)["trials"]
    return result


@WITHOUT_SSH
def test_stages_run_in_order_with_the_directories_of_earlier_stages(cli: Cli) -> None:
    cli.script(SHOW, "show.py")
    jobs = submit(
        cli,
        """\
script: show.py
stages:
  evaluate: {needs: [train]}
  prepare: {}
  train: {needs: [prepare]}
""",
        "--wait",
    )
    assert len(jobs) == 3
    records = [cli.status(item) for item in jobs]
    assert [record["record"]["stage"] for record in records] == ["prepare", "train", "evaluate"]
    assert [status["state"] for record in records for status in record["statuses"]] == ["COMPLETED"] * 3
    folders = {record["record"]["stage"]: record["record"]["run_dir"] for record in records}
    times = [record["statuses"][0]["start_time"] for record in records]
    assert times == sorted(times)
    stdout = cli("logs", jobs[2]).stdout
    assert f"DTSLURM_STAGE_PREPARE_DIR {folders['prepare']}" in stdout
    assert f"DTSLURM_STAGE_TRAIN_DIR {folders['train']}" in stdout
    shown = cli("status", jobs[1]).stdout
    assert f"prepare {jobs[0]} COMPLETED → train {jobs[1]} COMPLETED (this) → evaluate {jobs[2]}" in shown


@WITHOUT_SSH
def test_stage_after_a_failed_stage_is_cancelled(cli: Cli) -> None:
    cli.script("raise SystemExit(3)")
    cli.script("", "after.py")
    text = """\
script: train.py
stages: {first: {}, second: {needs: [first]}, last: {needs: ["afterany:second"], script: after.py}}
"""
    jobs = submit(cli, text)
    cli.wait_for_end(jobs[0])
    assert cli.wait_for_end(jobs[1])["statuses"][0]["state"] == "CANCELLED"
    assert cli.wait_for_end(jobs[2])["statuses"][0]["state"] == "COMPLETED"


@ON_SLURM
def test_failed_submission_of_a_stage_cancels_the_other_stages(cli: Cli) -> None:
    cli.script("import time; time.sleep(600)")
    text = "script: train.py\nno_check: true\nstages: {a: {}, second: {needs: [a], constraint: nosuch}}\n"
    done = cli("submit", job(cli, text), code=3)
    assert "so no stage runs" in done.stderr
    [run] = cli.recorded_runs()
    assert cli.wait_for_end(run["record"]["job_id"])["statuses"][0]["state"] == "CANCELLED"


@pytest.mark.parametrize(
    "cli", ["local", pytest.param("far", marks=[pytest.mark.slurm, pytest.mark.ssh])], indirect=True
)
def test_sweep_runs_and_resumes_its_failed_trials(cli: Cli) -> None:
    cli.script(TRAIN)
    text = """\
script: train.py
args: ["${lr}", "${seed}"]
env: {TAG: "lr${lr}"}
tracker: [wandb]
sweep: {grid: {lr: [1, 2, 3], seed: [0, 1]}, max_parallel: 4}
"""
    [queued] = submit(cli, text, "--wait", code=3)
    result = trial_results(cli, queued)
    assert [item["state"] for item in result] == ["done"] * 5 + ["failed"]
    assert [item["name"] for item in result[:2]] == ["lr=1,seed=0", "lr=2,seed=0"]
    assert [(item["best"], item["last"], item["step"]) for item in result[:2]] == [
        (0.5, 0.5, 2),
        (1.0, 1.0, 2),
    ]
    stdout = cli("logs", f"{queued}_3").stdout
    token = cli.status(queued)["record"]["token"]
    assert "trial 3 lr2" in stdout
    assert f"lr=2,seed=1 {token}-3" in stdout
    assert "1 failed" in cli("sweep", "status", queued).stdout
    assert "sweep resume" in cli("resubmit", queued, code=2).stderr

    again = json.loads(cli("sweep", "resume", "--json", queued).stdout)["runs"][0]["job_id"]
    cli.started.append(again)
    cli.wait_for_end(again)
    result = trial_results(cli, again)
    assert [item["state"] for item in result] == ["done"] * 6
    resumed = next(item for item in result if item["number"] == 3)
    assert resumed["job"] == f"{again}_0"  # and its checkpoints were those of its first try
    assert f"lr=2,seed=1 {token}-3" in cli("logs", f"{again}_0").stdout  # one run of the tracker
    rows = list(csv.DictReader(io.StringIO(cli("sweep", "results", "--csv", queued).stdout)))
    assert [row["lr"] for row in rows[:2]] == ["1", "2"]
    assert "no trial to run again" in cli("sweep", "resume", queued).stderr


@WITHOUT_SSH
def test_concurrent_resumes_of_a_sweep_start_a_single_resume(cli: Cli) -> None:
    cli.script(FAILS_ONCE)
    [queued] = submit(
        cli, "script: train.py\nargs: ['${lr}']\nsweep: {points: [{lr: 1}, {lr: 2}]}\n", "--wait", code=3
    )
    with ThreadPoolExecutor() as several:
        tried = list(several.map(lambda _: cli("sweep", "resume", "--json", queued, code=None), range(3)))
    [again] = [json.loads(done.stdout)["runs"][0]["job_id"] for done in tried if done.returncode == 0]
    cli.started.append(again)
    assert [done.returncode for done in tried].count(2) == 2
    assert [item["job"] for item in trial_results(cli, queued)] == [f"{again}_0", f"{again}_1"]


@ON_SLURM
def test_large_sweep_is_split_into_arrays_and_reported_as_a_single_sweep(cli: Cli) -> None:
    cli.script(TRAIN)
    profiles = cli.folder / "cluster_profiles"
    profiles.mkdir()
    (profiles / "small.yaml").write_text("extends: slurm\nslurm: {max_array_size: 2}\n")
    (profiles / "small.yaml").chmod(0o644)
    cli.cluster = "small"
    text = """\
script: train.py
args: ["${lr}", "0"]
env: {TAG: "lr${lr}"}
sweep: {grid: {lr: [1, 2, 3, 4, 5]}, when: lr != 4, max_parallel: 1}
"""
    jobs = submit(cli, text, "--wait")
    assert len(jobs) == 2
    result = trial_results(cli, jobs[1])
    assert [(item["number"], item["job"]) for item in result] == [
        (number, f"{jobs[number // 2]}_{number % 2}") for number in range(4)
    ]
    assert [item["values"]["lr"] for item in result] == ["1", "2", "3", "5"]


@ON_SLURM
def test_trials_that_share_a_node_fail_independently(cli: Cli) -> None:
    cli.script(TRAIN)
    text = """\
script: train.py
args: ["${lr}", "${seed}"]
env: {TAG: "lr${lr}"}
cpus_per_task: 1
sweep: {points: [{lr: 1, seed: 0}, {lr: 2, seed: 1}, {lr: 3, seed: 0}], trials_per_node: 2}
"""
    [queued] = submit(cli, text, "--wait", code=3)
    result = {item["number"]: item for item in trial_results(cli, queued)}
    assert [result[number]["state"] for number in range(3)] == ["done", "failed", "done"]
    assert [result[number]["job"] for number in range(3)] == [f"{queued}_0", f"{queued}_0", f"{queued}_1"]
    assert [result[number]["best"] for number in (0, 2)] == [0.5, 1.5]


ASHA = """\
import json, os, sys, time
lr = float(sys.argv[1])
for step in range(1, 5):
    with open(os.environ["DTSLURM_METRICS"], "a") as metrics:
        metrics.write(json.dumps({"step": step, "loss": lr / step}) + "\\n")
if lr > 1:
    time.sleep(600)  # only its end helps
"""


@ON_SLURM
def test_beaten_trials_are_stopped_early(cli: Cli) -> None:
    cli.script(ASHA)
    text = """\
script: train.py
args: ["${lr}"]
sweep: {grid: {lr: [1, 2, 3]}, asha: {min_steps: 1, eta: 2}, max_parallel: 1}
"""
    [queued] = submit(cli, text, "--wait")
    assert [item["state"] for item in trial_results(cli, queued)] == ["done", "stopped", "stopped"]
    assert "stopped early" in cli("logs", f"{queued}_1").stdout


@ON_LOCAL
def test_stopped_sweep_is_resumed(cli: Cli) -> None:
    cli.script("import os, sys, time\ntime.sleep(0 if os.path.exists(sys.argv[2]) else 600)")
    flag = cli.folder / "go"
    text = f"""\
script: train.py
snapshot: false
args: ["${{lr}}", {flag}]
sweep: {{grid: {{lr: [1, 2]}}, max_parallel: 1}}
"""
    [queued] = submit(cli, text)
    cli.wait_until(lambda: any(item["state"] == "running" for item in trial_results(cli, queued)))
    assert "pending or running" in cli("sweep", "resume", queued, code=2).stderr
    cli("sweep", "stop", queued)
    cli.wait_for_end(queued)
    cli.wait_until(lambda: {item["state"] for item in trial_results(cli, queued)} <= {"failed", "never ran"})
    flag.touch()
    again = json.loads(cli("sweep", "resume", "--json", queued).stdout)["runs"][0]["job_id"]
    cli.wait_for_end(again)
    assert [item["state"] for item in trial_results(cli, queued)] == ["done", "done"]


@ON_LOCAL
def test_optuna_chooses_the_values_of_trials(cli: Cli) -> None:
    pytest.importorskip("optuna")
    cli.script(
        "import json, os, sys\n"
        "with open(os.environ['DTSLURM_METRICS'], 'a') as file:\n"
        "    file.write(json.dumps({'step': 1, 'loss': (float(sys.argv[1]) - 0.3) ** 2}) + '\\n')\n"
    )
    text = f"""\
script: train.py
python: {sys.executable}
args: ["${{x}}"]
sweep: {{random: {{x: "uniform(0, 1)"}}, samples: 4, max_parallel: 2, optuna: {{sampler: tpe}}}}
"""
    [queued] = submit(cli, text, "--wait")
    result = trial_results(cli, queued)
    assert {item["state"] for item in result} == {"done"}
    assert len({item["values"]["x"] for item in result}) == 4
    import optuna

    journal = Path(cli.status(queued)["record"]["run_dir"]) / "optuna.journal"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    [summary] = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert (len(study.trials), study.best_value) == (4, pytest.approx(result[0]["best"]))


@ON_LOCAL
def test_sweep_is_resumed_on_its_original_cluster(cli: Cli) -> None:
    cli.script(FAILS_ONCE)
    (cli.folder / "cluster_profiles").mkdir()
    (cli.folder / "cluster_profiles" / "other.yaml").write_text("extends: local\n")
    path = cli.folder / job(cli, "script: train.py\nargs: ['${lr}']\nsweep: {points: [{lr: 1}, {lr: 2}]}\n")
    path.write_text(path.read_text().replace("cluster: local\n", ""))
    cli.env["DTSLURM_CLUSTER"] = "other"
    [queued] = cli("submit", "--parsable", "--wait", "job.yaml", code=3).stdout.split()
    cli.env["DTSLURM_CLUSTER"] = "local"
    [again] = json.loads(cli("sweep", "resume", "--json", queued).stdout)["runs"]
    cli.started.append(again["job_id"])
    assert again["cluster"] == "other"


def probed_plan(cli: Cli) -> list[str]:
    """Describe a cluster with GPUs, and write a job of it; return the words of a plan of three layouts."""
    folder = cli.folder / "cluster_profiles"
    folder.mkdir()
    gpus = "{model: H100-SXM5-80GB, count: 8, memory: 80G}"
    (folder / "gpus.yaml").write_text(f"extends: {cli.cluster}\nnode_types:\n  n: {{gpus: {gpus}}}\n")
    (cli.folder / "probed.py").write_text(PROBED)
    (cli.folder / "job.yaml").write_text("script: probed.py\nlauncher: srun\nargs: ['${layout}']\n")
    size = ["--cluster", "gpus", "--gpus-per-node", "2", "--gbs", "64", "--precision", "fp16"]
    return ["plan", "gpt2", *size, "--top", "3"]


def layouts_of(plan: dict[str, Any]) -> list[str]:
    return [item["layout"]["text"] for item in plan["candidates"]]


@pytest.mark.parametrize(
    "cli",
    [
        pytest.param("slurm", marks=pytest.mark.slurm),
        pytest.param("far", marks=[pytest.mark.slurm, pytest.mark.ssh]),
    ],
    indirect=True,
)
def test_a_probe_measures_the_layouts_of_a_plan_and_changes_its_choice(cli: Cli) -> None:
    words = probed_plan(cli)
    first, second, third = layouts_of(json.loads(cli(*words, "--json").stdout))
    start = cli.folder / "start"
    start.write_text(json.dumps({first: 0.4, second: 0.09}))
    done = cli(*words, "--json", "--yes", "--probe", "job.yaml", "--", str(start), timeout=600)
    plan = json.loads(done.stdout)
    assert "10 steps of 3 layouts on 2 GPUs" in done.stderr
    assert "GPU-hours" in done.stderr
    assert layouts_of(plan)[0] == second
    assert third not in layouts_of(plan)
    best = plan["candidates"][0]["step_time_s"]
    assert best["total"] == pytest.approx(0.09)
    assert best["predicted"] > 0.1
    slow, fast, failed = plan["probe"]
    assert (slow["step_s"], fast["step_s"]) == (pytest.approx(0.4), pytest.approx(0.09))
    assert fast["memory_gib"] == pytest.approx(11.5)
    assert failed["failed"]
    assert failed["cause"] == "gpu-out-of-memory"
    assert f"{third} (job " in done.stderr
    assert any(line.startswith(f"{third}: failed when it was run") for line in plan["otherwise"])

    [run] = cli.recorded_runs()
    assert run["record"]["array"] == "0-2%1"  # two GPUs of eight: the layouts would share a node
    job = run["record"]["job_id"]
    assert "2 stopped, 1 failed" in cli("sweep", "status", job).stdout
    shown = cli(*words).stdout  # without a probe, the answer is the same
    assert "MEASURED" in shown
    assert next(line for line in shown.splitlines() if line.startswith("1 ")).split()[2:4] == ["0.09", "s"]
    file = cli.folder / "cluster_profiles" / "gpus.plan.json"
    saved = json.loads(file.read_text())
    file.unlink()
    assert layouts_of(
        json.loads(cli("plan", "--calibrate", job, "--top", "3", "--json").stdout)
    ) == layouts_of(plan)
    assert json.loads(file.read_text()) == saved
    other = cli("plan", "gpt2", "-N", "2", "--calibrate", job, code=2).stderr
    assert "nodes is 2, and was None in the probe" in other


@ON_SLURM
def test_a_probe_that_is_left_goes_on_and_is_taken_up(cli: Cli) -> None:
    words = probed_plan(cli)
    layouts = layouts_of(json.loads(cli(*words, "--json").stdout))
    start = cli.folder / "start"
    argv = [sys.executable, "-m", "dtslurm", *words, "--yes", "--probe", "job.yaml", "--", str(start)]
    with subprocess.Popen(
        argv, cwd=cli.folder, env={**os.environ, **cli.env}, stderr=subprocess.PIPE, text=True
    ) as leaving:
        cli.wait_until(lambda: any(run["record"]["job_id"] for run in cli.recorded_runs()))
        [run] = cli.recorded_runs()
        job = run["record"]["job_id"]
        cli.started.append(job)
        cli.wait_until(lambda: "RUNNING" in cli.state(job))
        leaving.send_signal(signal.SIGINT)
        assert leaving.stderr is not None
        said = leaving.stderr.read()
    assert f"the jobs continue; dtslurm plan --calibrate {job} waits for them" in said
    assert leaving.returncode == 130
    start.write_text(json.dumps(dict.fromkeys(layouts, 0.4)))
    taken_up = cli("plan", "--calibrate", job, timeout=600)
    assert "MEASURED" in taken_up.stdout


@ON_SLURM
def test_where_all_layouts_fail_for_another_reason_than_memory_the_ranking_stays(cli: Cli) -> None:
    words = [*probed_plan(cli)[:-1], "2"]
    before = cli(*words, "--json").stdout
    cli.script(
        """
        import os, sys, time
        if os.environ["RANK"] != "0":
            time.sleep(600)  # the first that fails ends the other, which may not have printed yet
        print(' '.join(sys.argv[1:]))
        sys.exit('no data')
        """
    )
    (cli.folder / "job.yaml").write_text("script: train.py\nlauncher: srun\nargs: [--data, all]\n")
    done = cli(*words, "--yes", "--probe", "job.yaml", code=2, timeout=600)
    [run] = cli.recorded_runs()
    job = run["record"]["job_id"]
    assert f"the probe {job} measured no layout" in done.stderr
    assert f"hint: dtslurm diagnose {job}_0 shows the evidence" in done.stderr
    assert cli(*words, "--json").stdout == before
    # Without placeholders, the script has the arguments of Megatron-LM after its own.
    stdout = cli("logs", f"{job}_1", "--rank", "0").stdout
    assert "--data all --tensor-model-parallel-size 1 " in stdout
    assert "--train-iters 10" in stdout
    for number, layout in enumerate(json.loads(before)["candidates"]):
        mbs = f"--micro-batch-size {layout['layout']['mbs']} "
        assert mbs in cli("logs", f"{job}_{number}", "--rank", "0").stdout
