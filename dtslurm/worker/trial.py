"""Starts one trial of a sweep: ``python trial.py [--env=NAME]... -- COMMAND...`` in a job array.

The line of ``trials.jsonl`` beside this file that belongs to this array task (and process, where trials share
one) has the trial's values; ``${name}`` in the command's words and in the variables named stands for them.
"""

import json
import os
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

try:
    from .trial_text import substitute
except ImportError:  # beside this file, in a run directory
    from trial_text import substitute  # type: ignore[import-not-found,no-redef]

HERE = os.path.dirname(os.path.abspath(__file__))
_PLACES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class RunningTrial(NamedTuple):
    """A trial as it runs here.

    Attributes:
        folder: the trial's own folder: its array task's, or one in that where trials share a task.
        first: this process is the trial's rank 0, which speaks for it.
    """

    line: Dict[str, Any]
    settings: Dict[str, Any]
    folder: str
    metrics: str
    first: bool

    def keep(self, name: str, value: Any) -> None:
        """Write a small JSON file into the trial's folder, whole or not at all."""
        path = os.path.join(self.folder, name)
        draft = "{}.{}".format(path, os.getpid())
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(draft, path)


def main(argv: List[str]) -> int:
    """Run the trial of this process and return its exit code; without early stopping it takes our place."""
    split = argv.index("--")
    names, command = [word.split("=", 1)[1] for word in argv[:split]], argv[split + 1 :]
    with open(os.path.join(HERE, "sweep.json"), encoding="utf-8") as file:
        settings = json.load(file)
    task, shared = int(os.environ["SLURM_ARRAY_TASK_ID"]), settings["per_task"] > 1
    place = int(os.environ.get("SLURM_PROCID", "0")) if shared else 0
    line = _line(task * settings["per_task"] + place)
    if line is None:
        print("this array task has fewer trials than the others: nothing to do here")
        return 0
    trial = _trial(line, settings, place, shared)
    values = dict(line["values"])
    finish = None
    if settings["optuna"] and not set(settings["optuna"]["random"]) <= set(values):  # or an earlier try has
        values, finish = _asked(trial, values)
    if trial.first:
        _note(trial, values)
    _set_up(trial, names, values)
    words = [substitute(word, values) for word in command]
    sys.stdout.flush()
    if not settings["asha"] and finish is None:
        os.execvp(words[0], words)  # noqa: S606 - as a shell's exec
    try:
        from .trial_asha import watch
    except ImportError:
        from trial_asha import watch  # type: ignore[import-not-found,no-redef]
    return int(watch(words, trial, finish))


def _line(index: int) -> Optional[Dict[str, Any]]:
    with open(os.path.join(HERE, "trials.jsonl"), encoding="utf-8") as file:
        for number, text in enumerate(file):
            if number == index:
                return dict(json.loads(text))
    return None


def _trial(line: Dict[str, Any], settings: Dict[str, Any], place: int, shared: bool) -> RunningTrial:
    folder = os.environ["DTSLURM_RUN_DIR"]
    attempt = os.environ["DTSLURM_ATTEMPT"]
    if shared:
        folder = os.path.join(folder, "trials", str(place))
        _share_gpus(place, settings["per_task"], settings["gpus"])
        os.environ.update(
            DTSLURM_RUN_DIR=folder, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1"
        )
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    metrics = os.path.join(folder, "metrics", attempt, "train.jsonl")
    os.makedirs(os.path.dirname(metrics), mode=0o700, exist_ok=True)
    return RunningTrial(line, settings, folder, metrics, int(os.environ.get("RANK", "0")) == 0)


def _share_gpus(place: int, trials: int, gpus: int) -> None:
    """Show a trial its share of the task's GPUs: one of them with others, or several of its own."""
    if not gpus:
        return
    name = next((one for one in _PLACES if os.environ.get(one)), _PLACES[0])
    devices = [word for word in os.environ.get(name, "").split(",") if word]
    devices = devices or [str(number) for number in range(gpus)]
    count = max(1, len(devices) // trials)
    first = place * len(devices) // trials
    os.environ[name] = ",".join(devices[first : first + count])


def _asked(trial: RunningTrial, values: Dict[str, str]) -> Tuple[Dict[str, str], Any]:
    try:
        import optuna  # noqa: F401 - to say so where it is not there
    except ImportError as error:
        sys.exit("this sweep's values are chosen by Optuna, and {}: {}".format(sys.executable, error))
    try:
        from .trial_optuna import ask
    except ImportError:
        from trial_optuna import ask  # type: ignore[import-not-found,no-redef]
    found, finish = ask(trial)  # type: Dict[str, str], Any
    return dict(values, **found), finish


def _note(trial: RunningTrial, values: Dict[str, str]) -> None:
    line = {"number": trial.line["number"], "name": trial.line["name"], "values": values}
    trial.keep("trial.json", line)


def _set_up(trial: RunningTrial, names: List[str], values: Dict[str, str]) -> None:
    """Set the trial's variables; folders of an earlier try stay its own."""
    checkpoints = trial.line.get("checkpoints") or os.path.join(trial.folder, "checkpoints")
    os.makedirs(checkpoints, mode=0o700, exist_ok=True)
    told = {"DTSLURM_TRIAL": str(trial.line["number"]), "DTSLURM_TRIAL_NAME": trial.line["name"]}
    for name in names:
        if name in os.environ:
            os.environ[name] = substitute(os.environ[name], dict(values, **told))
    os.environ.update(
        DTSLURM_METRICS=trial.metrics,
        DTSLURM_CHECKPOINT_DIR=checkpoints,
        DTSLURM_SWEEP_DIR=trial.settings["sweep"],
        **told,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
