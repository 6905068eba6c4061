"""Let Optuna choose a trial's values; Optuna must be installed in the training environment."""

import json
import os
import time
from typing import Any, Callable, Dict, Optional, Tuple

import optuna

_POLL_S = 0.2
_WAIT_S = 300.0


def _open_study(trial: Any) -> Any:
    optuna_settings = trial.settings["optuna"]
    samplers = {
        "tpe": optuna.samplers.TPESampler,
        "random": optuna.samplers.RandomSampler,
        "cmaes": optuna.samplers.CmaEsSampler,
        "gp": getattr(optuna.samplers, "GPSampler", optuna.samplers.TPESampler),
    }
    storage = optuna_settings["storage"]
    if storage is None:
        path = os.path.join(trial.settings["sweep"], "optuna.journal")
        backend = optuna.storages.journal.JournalFileBackend(path)
        storage = optuna.storages.JournalStorage(backend)
    return optuna.create_study(
        storage=storage,
        study_name=optuna_settings["study"] or os.path.basename(trial.settings["sweep"]),
        direction="maximize" if trial.settings["mode"] == "max" else "minimize",
        # Each trial has its own sampler: with the same seed, all trials would draw the same values.
        sampler=samplers[optuna_settings["sampler"]](
            seed=optuna_settings["seed"] + int(trial.line["number"])
        ),
        load_if_exists=True,
    )


def _suggest(trial: Any, name: str, spread: Any) -> str:
    kind, *arguments = spread
    if kind == "choice":
        return str(trial.suggest_categorical(name, arguments))
    if kind == "randint":
        return str(trial.suggest_int(name, int(arguments[0]), int(arguments[1])))
    low, high = (float(bound) for bound in arguments)
    if kind == "normal":  # Optuna has no normal distribution: use the range of nearly all its values
        low, high = low - 3 * high, low + 3 * high
    return "{:.6g}".format(trial.suggest_float(name, low, high, log=kind == "loguniform"))


def ask(trial: Any) -> Tuple[Dict[str, str], Optional[Callable[[Optional[float], bool], None]]]:
    """Return a trial's values and the callback for its end; other ranks wait for the file of rank 0."""
    name = "optuna-{}.json".format(os.environ["DTSLURM_ATTEMPT"])
    path = os.path.join(trial.folder, name)
    if not trial.first:
        deadline = time.monotonic() + _WAIT_S
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with open(path, encoding="utf-8") as file:
            return json.load(file), None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = _open_study(trial)
    optuna_trial = study.ask()
    distributions = trial.settings["optuna"]["random"]
    values = {name: _suggest(optuna_trial, name, spread) for name, spread in distributions.items()}
    optuna_trial.set_user_attr("trial", trial.line["name"])
    trial.keep(name, values)

    def finish(value: Optional[float], good: bool) -> None:
        states = optuna.trial.TrialState
        if value is None or not good:
            study.tell(optuna_trial, state=states.FAIL)
        else:
            study.tell(optuna_trial, value)

    return values, finish
