"""Lets Optuna choose a trial's values; it must be installed where training is."""

import json
import os
import time
from typing import Any, Callable, Dict, Optional, Tuple

import optuna

_LOOK_S = 0.2
_PATIENCE_S = 300.0


def _study(trial: Any) -> Any:
    wanted = trial.settings["optuna"]
    samplers = {
        "tpe": optuna.samplers.TPESampler,
        "random": optuna.samplers.RandomSampler,
        "cmaes": optuna.samplers.CmaEsSampler,
        "gp": getattr(optuna.samplers, "GPSampler", optuna.samplers.TPESampler),
    }
    storage = wanted["storage"]
    if storage is None:
        path = os.path.join(trial.settings["sweep"], "optuna.journal")
        backend = optuna.storages.journal.JournalFileBackend(path)
        storage = optuna.storages.JournalStorage(backend)
    return optuna.create_study(
        storage=storage,
        study_name=wanted["study"] or os.path.basename(trial.settings["sweep"]),
        direction="maximize" if trial.settings["mode"] == "max" else "minimize",
        # Each trial draws by itself: with one seed for all, they would all draw the same.
        sampler=samplers[wanted["sampler"]](seed=wanted["seed"] + int(trial.line["number"])),
        load_if_exists=True,
    )


def _suggest(asked: Any, name: str, spread: Any) -> str:
    kind, *words = spread
    if kind == "choice":
        return str(asked.suggest_categorical(name, words))
    if kind == "randint":
        return str(asked.suggest_int(name, int(words[0]), int(words[1])))
    low, high = (float(word) for word in words)
    if kind == "normal":  # Optuna has none: where nearly all of it lies
        low, high = low - 3 * high, low + 3 * high
    return "{:.6g}".format(asked.suggest_float(name, low, high, log=kind == "loguniform"))


def ask(trial: Any) -> Tuple[Dict[str, str], Optional[Callable[[Optional[float], bool], None]]]:
    """Return the values of a trial, and what is to be told at its end; ranks other than 0 wait for rank 0."""
    name = "optuna-{}.json".format(os.environ["DTSLURM_ATTEMPT"])
    path = os.path.join(trial.folder, name)
    if not trial.first:
        end = time.monotonic() + _PATIENCE_S
        while not os.path.exists(path) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        with open(path, encoding="utf-8") as file:
            return json.load(file), None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = _study(trial)
    asked = study.ask()
    wanted = trial.settings["optuna"]["random"]
    values = {name: _suggest(asked, name, spread) for name, spread in wanted.items()}
    asked.set_user_attr("trial", trial.line["name"])
    trial.keep(name, values)

    def finish(value: Optional[float], good: bool) -> None:
        states = optuna.trial.TrialState
        if value is None or not good:
            study.tell(asked, state=states.FAIL)
        else:
            study.tell(asked, value)

    return values, finish
