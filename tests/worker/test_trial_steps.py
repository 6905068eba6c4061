"""The setup and the supervision of one trial of a sweep, step by step in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.worker import trial, trial_asha
from tests.worker.test_trial import make

ASHA = {"min_steps": 1, "eta": 2, "step": "step"}
OPTUNA = {"sampler": "tpe", "seed": 3, "storage": None, "study": "", "random": {}}


class Started(Exception):
    """The training code would have taken this process's place."""


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A sweep's folder, in an array task of a job; the process is left as it was."""
    run = make(tmp_path)
    monkeypatch.setattr(trial, "HERE", str(run))
    for name in trial._PLACES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"DTSLURM_ATTEMPT": "0", "SLURM_ARRAY_TASK_ID": "1", "RANK": "0", "TAG": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DTSLURM_RUN_DIR", str(run / "tasks/1"))
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before, environment = {number: signal.getsignal(number) for number in numbers}, dict(os.environ)

    def execvp(_name: str, words: list[str]) -> None:
        raise Started(*words)

    monkeypatch.setattr(os, "execvp", execvp)
    yield run
    os.environ.clear()
    os.environ.update(environment)
    for number, handler in before.items():
        signal.signal(number, handler)


def start_trial(*words: str) -> tuple[str, ...]:
    """Start the trial; return the words of the training code."""
    with pytest.raises(Started) as caught:
        trial.main(["--env=TAG", "--env=UNSET", "--", *words])
    return caught.value.args


def run_watched(code: str, *words: str) -> int:
    return trial.main(["--", sys.executable, "-S", "-c", code, *words])


# ---- Setting up ----


def test_trial_has_its_values_directories_and_name(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAG", "${lr} of ${DTSLURM_TRIAL_NAME}")
    assert start_trial("train", "--lr=${lr}", "${other}") == ("train", "--lr=1", "${other}")
    result = {
        name: value for name, value in os.environ.items() if name.startswith("DTSLURM_") or name == "TAG"
    }
    own = job / "tasks/1"
    assert (
        result.items()
        >= {
            "TAG": "1 of lr=1",
            "DTSLURM_TRIAL": "1",
            "DTSLURM_TRIAL_NAME": "lr=1",
            "DTSLURM_METRICS": f"{own}/metrics/0/train.jsonl",
            "DTSLURM_CHECKPOINT_DIR": f"{own}/checkpoints",
            "DTSLURM_SWEEP_DIR": str(job),
        }.items()
    )
    assert "UNSET" not in os.environ
    assert (own / "checkpoints").is_dir()
    assert json.loads((own / "trial.json").read_text()) == {
        "number": 1,
        "name": "lr=1",
        "values": {"lr": "1"},
    }


def test_only_the_first_rank_writes_the_trial_record(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    start_trial("train")
    assert not (job / "tasks/1/trial.json").exists()


def test_task_without_a_trial_exits_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert trial.main(["--", "train"]) == 0
    assert "fewer trials than the others" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "devices", "mine"),
    [
        ("CUDA_VISIBLE_DEVICES", "4,5,6,7", "6,7"),
        ("ROCR_VISIBLE_DEVICES", "0,3", "3"),
        ("CUDA_VISIBLE_DEVICES", "", "2,3"),  # none is told: those that were asked for
    ],
)
def test_trials_that_share_a_task_have_separate_job_variables(
    job: Path, monkeypatch: pytest.MonkeyPatch, variable: str, devices: str, mine: str
) -> None:
    make(job.parent, per_task=2, gpus=4)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "n1")
    monkeypatch.setenv(variable, devices)
    assert start_trial("${lr}") == ("1",)
    assert os.environ[variable] == mine
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    assert "MASTER_ADDR" not in os.environ
    assert os.environ["DTSLURM_RUN_DIR"] == f"{job}/tasks/1/trials/1"
    assert (job / "tasks/1/trials/1/trial.json").exists()


@pytest.mark.parametrize(
    ("slot", "trials", "gpus", "devices", "mine"),
    [
        (0, 2, 8, "", "0,1,2,3"),
        (1, 2, 8, "", "4,5,6,7"),
        (2, 3, 6, "a,b,c,d,e,f", "e,f"),
        (1, 2, 3, "4,5,6", "5"),
        (3, 5, 2, "", "1"),
        (1, 2, 0, "4,5", "4,5"),  # the task has no GPUs for its trials
    ],
)
def test_trials_of_a_task_share_its_gpus_evenly(
    monkeypatch: pytest.MonkeyPatch, slot: int, trials: int, gpus: int, devices: str, mine: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    trial._share_gpus(slot, trials, gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mine


# ---- Values that Optuna chooses ----


def test_optuna_chooses_the_values_and_receives_the_result(job: Path) -> None:
    optuna = pytest.importorskip("optuna")
    spread = {
        "lr": ["loguniform", "1e-4", "1e-1"],
        "wd": ["normal", "1", "0.1"],
        "layers": ["randint", "2", "9"],
        "norm": ["choice", "pre", "post"],
    }
    make(job.parent, optuna={**OPTUNA, "random": spread}, mode="max")
    code = """import os, sys; open(os.environ["DTSLURM_METRICS"], "a").write('{"loss": 0.5}\\n')"""
    words = ["${lr}", "${wd}", "${layers}", "${norm}"]
    assert run_watched(f"{code}; open('{job}/said', 'w').write(' '.join(sys.argv[1:]))", *words) == 0
    assert run_watched("raise SystemExit(3)") == 3
    path = str(job / "optuna.journal")
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    study = optuna.load_study(study_name="run", storage=storage)
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    good, bad = study.trials
    assert (good.value, good.user_attrs["trial"], bad.state.name) == (0.5, "lr=1", "FAIL")
    lr, wd, layers, norm = (job / "said").read_text().split()
    assert 1e-4 <= float(lr) <= 1e-1
    assert float(wd) == pytest.approx(1, abs=0.3)
    assert (good.params["layers"], good.params["norm"]) == (int(layers), norm)
    values = json.loads((job / "tasks/1/trial.json").read_text())["values"]
    assert set(values) == {"lr", "wd", "layers", "norm"}


def test_other_ranks_read_the_optuna_values_of_the_first_rank(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    make(job.parent, optuna={**OPTUNA, "random": {"wd": ["uniform", "0", "1"]}})
    monkeypatch.setenv("RANK", "1")
    (job / "tasks/1").mkdir(parents=True)
    (job / "tasks/1/optuna-0.json").write_text('{"wd": "0.25"}')
    assert start_trial("${lr}", "${wd}") == ("1", "0.25")


def test_trial_reports_a_missing_optuna_installation(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(job.parent, optuna={**OPTUNA, "random": {"wd": ["uniform", "0", "1"]}})
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit, match=r"Optuna chooses the values of this sweep, but .*optuna"):
        trial.main(["--", "train"])


# ---- Watching ----

TELL = """
import json, os, sys, time
for value in sys.argv[1:]:
    with open(os.environ["DTSLURM_METRICS"], "a") as file:
        file.write(value + "\\n")
"""


def test_beaten_trial_is_stopped_and_recorded(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(job.parent, asha=ASHA)
    (job / "asha/0").mkdir(parents=True)
    (job / "asha/0/7=0.5").touch()
    lines = ["no JSON", "[1]", '{"step": 1, "loss": 0.1, "rank": 3}', '{"step": 1, "loss": 9.0}']
    assert run_watched(TELL + "time.sleep(600)", *lines) == 0
    assert (
        f"stopped early: other trials are better at this step; {job}/tasks/1/stopped.json"
        in capsys.readouterr().out
    )
    document = json.loads((job / "tasks/1/stopped.json").read_text())
    assert (document["rung"], document["place"], document["of"], document["loss"]) == (0, 2, 2, 9.0)
    assert run_watched("raise SystemExit(3)") == 0  # and so is a second try


def test_ended_trial_is_recorded_without_a_stop(job: Path) -> None:
    make(job.parent, asha=ASHA)
    (job / "asha/0").mkdir(parents=True)
    (job / "asha/0/7=0.5").touch()
    own = job / "tasks/1/metrics/0"
    own.mkdir(parents=True)
    settings = {"asha": ASHA, "metric": "loss", "mode": "min", "sweep": str(job)}
    metrics = str(own / "train.jsonl")
    watch = trial_asha._Watch(
        trial.RunningTrial({"number": 1}, settings, str(job / "tasks/1"), metrics, True)
    )
    watch.look(False)  # nothing is written yet
    (own / "train.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "lo')
    watch.look(True)
    assert not watch.stopped
    assert (job / "asha/0/1=9.0").exists()  # others compare with it all the same
    assert watch.last == 9.0


def test_other_ranks_stop_only_by_the_stop_mark(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(job.parent, asha=ASHA)
    monkeypatch.setenv("RANK", "1")
    line = '{"step": 1, "loss": 9.0}'
    assert run_watched(TELL, line) == 0
    assert not (job / "asha").exists()
    (job / "tasks/1/stopped.json").write_text("{}")
    assert run_watched(TELL + "time.sleep(600)", line) == 0


@pytest.mark.parametrize(
    ("code", "ends"), [("raise SystemExit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_watched_trial_returns_the_exit_code_of_its_code(job: Path, code: str, ends: int) -> None:
    make(job.parent, asha=ASHA)
    assert run_watched(code) == ends


def test_training_code_receives_each_signal_once(job: Path) -> None:
    make(job.parent, asha=ASHA)
    # TERM comes to this process alone and is passed on; Slurm sends USR1 to the code as well. Short sleeps:
    # Python sees a signal that comes just before one only after it.
    code = "import os, signal, time; signal.signal(15, lambda *_: os._exit(85));"
    code += f"os.kill({os.getpid()}, 10); os.kill({os.getpid()}, 15);"
    code += "[time.sleep(0.05) for _ in range(12_000)]"
    assert run_watched(code) == 85


def test_signal_during_the_start_of_the_code_is_forwarded(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(job.parent, asha=ASHA)

    started = subprocess.Popen

    def interrupted(words: list[str]) -> subprocess.Popen[bytes]:
        child = started(words)
        os.kill(os.getpid(), signal.SIGTERM)
        return child

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert run_watched("import time; time.sleep(600)") == 128 + signal.SIGTERM


def test_code_that_ignores_term_is_killed(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(job.parent, asha=ASHA)
    monkeypatch.setattr(trial_asha, "_GRACE_S", 0.05)
    mark = job / "tasks/1/stopped.json"
    code = f"import signal, time; signal.signal(15, signal.SIG_IGN); open('{mark}', 'w'); time.sleep(600)"
    assert run_watched(code) == 0


@pytest.mark.parametrize(
    ("line", "message"), [({"step": 1, "loss": 2.0}, "keys found: step, loss"), (None, "none")]
)
def test_metric_that_is_never_written_is_reported_in_the_log(
    job: Path, capsys: pytest.CaptureFixture[str], line: object, message: str
) -> None:
    make(job.parent, asha=ASHA, metric="acc")
    written = "" if line is None else json.dumps(line) + "\n"
    code = f'import os; open(os.environ["DTSLURM_METRICS"], "a").write({written!r})'
    assert run_watched(code) == 0
    [result] = [text for text in capsys.readouterr().out.splitlines() if "wrote no number as 'acc'" in text]
    assert message in result
