"""Start one trial of a sweep in a job array: ``python trial.py [--env=NAME]... -- COMMAND...``.

The trial's values are in the line of ``trials.jsonl``, next to this file, that belongs to this array task
(and process, if several trials share a task). ``${name}`` in the command's words and in the named variables
is replaced with a value.
"""

import json
import os
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

try:
    from .lib.json_records import write_atomically
    from .trial_text import substitute
except ImportError:  # beside this file, in a run directory
    from json_records import write_atomically  # type: ignore[import-not-found,no-redef]
    from trial_text import substitute  # type: ignore[import-not-found,no-redef]

HERE = os.path.dirname(os.path.abspath(__file__))
_PLACES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class RunningTrial(NamedTuple):
    """The trial that this process runs.

    Attributes:
        folder: the trial's own folder: its array task's folder, or a subfolder if several trials share a
            task.
        first: whether this process is the trial's rank 0, which writes the trial's files.
    """

    line: Dict[str, Any]
    settings: Dict[str, Any]
    folder: str
    metrics: str
    first: bool

    def keep(self, name: str, value: Any) -> None:
        """Write a small JSON file into the trial's folder, atomically."""
        write_atomically(os.path.join(self.folder, name), json.dumps(value))


def main(argv: List[str]) -> int:
    """Run this process's trial and return its exit code; without early stopping, exec the command."""
    separator = argv.index("--")
    names, command = [word.split("=", 1)[1] for word in argv[:separator]], argv[separator + 1 :]
    with open(os.path.join(HERE, "sweep.json"), encoding="utf-8") as file:
        settings = json.load(file)
    task, shared = int(os.environ["SLURM_ARRAY_TASK_ID"]), settings["per_task"] > 1
    index_in_task = int(os.environ.get("SLURM_PROCID", "0")) if shared else 0
    line = _read_trial_line(task * settings["per_task"] + index_in_task)
    if line is None:
        print("this process has no trial, because this array task has fewer trials than the others")
        return 0
    trial = _prepare_trial(line, settings, index_in_task, shared)
    values = dict(line["values"])
    finish = None
    # An earlier attempt may have the values already.
    if settings["optuna"] and not set(settings["optuna"]["random"]) <= set(values):
        values, finish = _ask_optuna(trial, values)
    if trial.first:
        _write_summary(trial, values)
    _set_environment(trial, names, values)
    words = [*(substitute(word, values) for word in command), *(line.get("args") or ())]
    sys.stdout.flush()
    if not settings["asha"] and not settings.get("steps") and finish is None:
        os.execvp(words[0], words)  # noqa: S606 - as a shell's exec
    try:
        from .trial_asha import watch
    except ImportError:
        from trial_asha import watch  # type: ignore[import-not-found,no-redef]
    return int(watch(words, trial, finish))


def _read_trial_line(index: int) -> Optional[Dict[str, Any]]:
    with open(os.path.join(HERE, "trials.jsonl"), encoding="utf-8") as file:
        for number, text in enumerate(file):
            if number == index:
                return dict(json.loads(text))
    return None


def _prepare_trial(
    line: Dict[str, Any], settings: Dict[str, Any], slot: int, shares_gpu: bool
) -> RunningTrial:
    folder = os.environ["DTSLURM_RUN_DIR"]
    attempt = os.environ["DTSLURM_ATTEMPT"]
    if shares_gpu:
        folder = os.path.join(folder, "trials", str(slot))
        _share_gpus(slot, settings["per_task"], settings["gpus"])
        os.environ.update(
            DTSLURM_RUN_DIR=folder, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1"
        )
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    metrics = os.path.join(folder, "metrics", attempt, "train.jsonl")
    os.makedirs(os.path.dirname(metrics), mode=0o700, exist_ok=True)
    return RunningTrial(line, settings, folder, metrics, int(os.environ.get("RANK", "0")) == 0)


def _share_gpus(slot: int, trials: int, gpus: int) -> None:
    """Make a trial's share of the task's GPUs visible: one shared GPU, or several exclusive ones."""
    if not gpus:
        return
    name = next((variable for variable in _PLACES if os.environ.get(variable)), _PLACES[0])
    devices = [word for word in os.environ.get(name, "").split(",") if word]
    devices = devices or [str(number) for number in range(gpus)]
    count = max(1, len(devices) // trials)
    first_device = slot * len(devices) // trials
    os.environ[name] = ",".join(devices[first_device : first_device + count])


def _ask_optuna(trial: RunningTrial, values: Dict[str, str]) -> Tuple[Dict[str, str], Any]:
    try:
        import optuna  # noqa: F401 - to report a missing installation
    except ImportError as error:
        sys.exit(
            "Optuna chooses the values of this sweep, but {} cannot import it: {}".format(
                sys.executable, error
            )
        )
    try:
        from .trial_optuna import ask
    except ImportError:
        from trial_optuna import ask  # type: ignore[import-not-found,no-redef]
    suggested, finish = ask(trial)  # type: Dict[str, str], Any
    return dict(values, **suggested), finish


def _write_summary(trial: RunningTrial, values: Dict[str, str]) -> None:
    summary = {"number": trial.line["number"], "name": trial.line["name"], "values": values}
    trial.keep("trial.json", summary)


def _set_environment(trial: RunningTrial, names: List[str], values: Dict[str, str]) -> None:
    """Set the trial's environment variables; folders of an earlier attempt are reused."""
    checkpoints = trial.line.get("checkpoints") or os.path.join(trial.folder, "checkpoints")
    os.makedirs(checkpoints, mode=0o700, exist_ok=True)
    trial_variables = {"DTSLURM_TRIAL": str(trial.line["number"]), "DTSLURM_TRIAL_NAME": trial.line["name"]}
    for name in names:
        if name in os.environ:
            os.environ[name] = substitute(os.environ[name], dict(values, **trial_variables))
    os.environ.update(
        DTSLURM_METRICS=trial.metrics,
        DTSLURM_CHECKPOINT_DIR=checkpoints,
        DTSLURM_SWEEP_DIR=trial.settings["sweep"],
        **trial_variables,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
