"""The start and the early stop of one trial of a sweep; the programs run as they do in a job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtslurm import assets
from dtslurm.worker.trial_asha import STOPPED, Rungs
from dtslurm.worker.trial_text import substitute

SETTINGS = {
    "schema": 1,
    "per_task": 1,
    "gpus": 0,
    "metric": "loss",
    "mode": "min",
    "asha": None,
    "optuna": None,
}


def make(folder: Path, **settings: Any) -> Path:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    for name in ("lib/json_records.py", "trial.py", "trial_text.py", "trial_asha.py"):
        shutil.copy(assets.worker(name), run)
    (run / "sweep.json").write_text(json.dumps({**SETTINGS, "sweep": str(run), **settings}))
    trials = [{"number": n, "name": f"lr={n}", "values": {"lr": str(n)}, "checkpoints": ""} for n in range(3)]
    (run / "trials.jsonl").write_text("".join(json.dumps(item) + "\n" for item in trials))
    return run


def environment(run: Path, task: int, **more: str) -> dict[str, str]:
    folder = run / "tasks" / str(task)
    values = {"DTSLURM_RUN_DIR": str(folder), "DTSLURM_ATTEMPT": "0", "SLURM_ARRAY_TASK_ID": str(task)}
    return {**os.environ, **values, "RANK": "0", **more}


def start(run: Path, code: str, task: int = 0, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        "-BES",
        str(run / "trial.py"),
        "--env=TAG",
        "--",
        sys.executable,
        "-c",
        code,
        *words,
    ]
    return subprocess.run(
        argv, env=environment(run, task, **more), capture_output=True, text=True, timeout=600, check=False
    )


SHOW = "import os, sys; print(sys.argv[1:], *(os.environ.get(name) for name in {!r}))"


def test_trial_substitutes_values_and_returns_the_exit_code_of_its_code(tmp_path: Path) -> None:
    run = make(tmp_path)
    code = SHOW.format(["TAG", "DTSLURM_TRIAL", "DTSLURM_TRIAL_NAME"]) + "; sys.exit(7)"
    done = start(run, code, 2, "--lr", "${lr}", "$${lr} ${other}", TAG="a-${lr}")
    assert done.stdout.strip() == "['--lr', '2', '${lr} ${other}'] a-2 2 lr=2"
    assert done.returncode == 7
    assert json.loads((run / "tasks/2/trial.json").read_text())["values"] == {"lr": "2"}


def test_trials_that_share_a_task_have_separate_directories_and_gpus(tmp_path: Path) -> None:
    run = make(tmp_path, per_task=2, gpus=4)
    code = SHOW.format(["DTSLURM_METRICS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "DTSLURM_TRIAL"])
    shared = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_PROCID": "1", "RANK": "1"}
    done = start(run, code, 0, **shared)
    assert done.stdout.split()[1:] == [f"{run}/tasks/0/trials/1/metrics/0/train.jsonl", "2,3", "1", "1"]
    left_over = start(run, code, 1, **shared)
    assert (left_over.returncode, "fewer trials" in left_over.stdout) == (0, True)


@pytest.mark.parametrize(("place", "device"), [(0, "0"), (1, "0"), (2, "1"), (3, "1")])
def test_several_trials_share_a_gpu(tmp_path: Path, place: int, device: str) -> None:
    from dtslurm.worker import trial

    before = dict(os.environ)
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
        trial._share_gpus(place, 4, 2)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == device
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_asha_continues_only_the_best_third(tmp_path: Path, mode: str) -> None:
    settings = {**SETTINGS, "mode": mode, "asha": {"min_steps": 2, "eta": 3, "step": "step"}}
    sign = 1 if mode == "min" else -1
    came = []
    for number, loss in enumerate([5, 4, 6, 3, 7, 8, 2, 1]):
        rungs = Rungs(str(tmp_path), number, settings)
        assert rungs.stops({"step": 1, "loss": sign * 99}) is None  # before the first rung
        assert rungs.stops({"step": 2}) is None  # without a result
        came.append(rungs.stops({"step": 2, "loss": sign * loss}) is None)
    assert came == [True, True, False, True, False, False, True, True]
    again = Rungs(str(tmp_path), 2, settings)  # a second try counts once, as it was
    assert again.stops({"step": 3, "loss": sign * 0}) is not None
    best = Rungs(str(tmp_path), 7, settings)
    assert best.stops({"step": 6, "loss": sign * 1}) is None
    assert sorted(path.name for path in (tmp_path / "asha").iterdir()) == ["0", "1"]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_asha_ranks_non_finite_metrics_last(tmp_path: Path, mode: str, value: str) -> None:
    settings = {**SETTINGS, "mode": mode, "asha": {"min_steps": 1, "eta": 2, "step": "epoch"}}
    assert Rungs(str(tmp_path), 0, settings).stops({"epoch": 1, "loss": 3.0}) is None
    assert Rungs(str(tmp_path), 1, settings).stops({"epoch": 1, "loss": float(value)}) is not None


@pytest.mark.parametrize("step", [float("inf"), float("nan")])
def test_asha_ignores_a_step_that_is_not_finite(tmp_path: Path, step: float) -> None:
    settings = {**SETTINGS, "asha": {"min_steps": 1, "eta": 2, "step": "step"}}
    assert Rungs(str(tmp_path), 0, settings).stops({"step": step, "loss": 3.0}) is None
    assert not (tmp_path / "asha").exists()


TRAIN = """
import json, os, sys, time
with open(os.environ["DTSLURM_METRICS"], "a") as file:
    file.write(json.dumps({"step": 1, "loss": float(sys.argv[1])}) + "\\n")
if len(sys.argv) > 2:
    time.sleep(600)
"""


def test_beaten_trial_is_stopped_and_exits_with_0(tmp_path: Path) -> None:
    run = make(tmp_path, asha={"min_steps": 1, "eta": 2, "step": "step"})
    assert start(run, TRAIN, 0, "${lr}").returncode == 0
    done = start(run, TRAIN, 1, "${lr}", "sleep")
    assert (done.returncode, "stopped early" in done.stdout) == (0, True)
    document = json.loads((run / "tasks/1" / STOPPED).read_text())
    assert (document["place"], document["of"], document["step"]) == (2, 2, 1)
    other_rank = start(run, TRAIN, 1, "9", "sleep", RANK="1")
    assert other_rank.returncode == 0


def test_watched_trial_returns_the_exit_code_of_training(tmp_path: Path) -> None:
    run = make(tmp_path, asha={"min_steps": 1, "eta": 2, "step": "step"})
    assert start(run, "import sys; sys.exit(5)").returncode == 5
    assert start(run, "import os; os.kill(os.getpid(), 9)").returncode == 137


def test_watched_trial_forwards_term(tmp_path: Path) -> None:
    run = make(tmp_path, asha={"min_steps": 1, "eta": 2, "step": "step"})
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(85)); print(1, flush=True)"
    code += "; time.sleep(600)"
    argv = [sys.executable, str(run / "trial.py"), "--", sys.executable, "-c", code]
    with subprocess.Popen(argv, env=environment(run, 0), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its handler is there
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 85


def test_substitution_fills_or_keeps_placeholders() -> None:
    assert substitute("${a} $${a} ${b}", {"a": "1"}) == "1 ${a} ${b}"
    assert substitute("${a} $${a}", {"a": "1"}, keep=True) == "1 $${a}"


def test_a_trial_of_a_few_steps_is_killed_after_them_and_its_other_ranks_too(tmp_path: Path) -> None:
    run = make(tmp_path, metric="step_time_s", steps=3)
    code = (
        "import json, os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1], 'w').close())\n"
        "if os.environ['RANK'] == '0':\n"
        "    lines = [json.dumps(dict(step=n, step_time_s=n) if n else dict(loss=1)) for n in range(5)]\n"
        "    open(os.environ['DTSLURM_METRICS'], 'a').write('\\n'.join(lines) + '\\n')\n"
        "while True: time.sleep(1)\n"
    )
    saved = tmp_path / "saved"
    done = start(run, code, 0, str(saved))
    assert done.returncode == 0, done.stderr
    assert "stopped after 3 values of step_time_s" in done.stdout
    assert json.loads((run / "tasks/0" / STOPPED).read_text())["step"] == 3
    assert start(run, code, 0, str(saved), RANK="1").returncode == 0
    assert not saved.exists()  # no time for a checkpoint that nobody needs


def test_a_trial_has_arguments_of_its_own_after_those_of_all(tmp_path: Path) -> None:
    run = make(tmp_path)
    trials = [{"number": 0, "name": "a", "values": {"lr": "1"}, "args": ["--pp", "${lr}"]}]
    (run / "trials.jsonl").write_text(json.dumps(trials[0]) + "\n")
    done = start(run, SHOW.format([]), 0, "--lr=${lr}")
    assert done.stdout.strip() == "['--lr=1', '--pp', '${lr}']"
