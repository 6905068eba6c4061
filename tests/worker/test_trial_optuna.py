"""The values that Optuna chooses for a trial; the study is a stand-in."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.trial import RunningTrial

optuna = pytest.importorskip("optuna")

OPTUNA = {"sampler": "tpe", "seed": 3, "storage": None, "study": "", "random": {}}


def trial_of(folder: Path, *, first: bool = True, mode: str = "min", **options: Any) -> RunningTrial:
    settings = {"sweep": str(folder), "mode": mode, "optuna": {**OPTUNA, **options}}
    return RunningTrial({"number": 5, "name": "five"}, settings, str(folder), "", first)


class Suggestions:
    """A trial of Optuna that notes what it is asked for, and chooses the last possibility."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.attributes: dict[str, str] = {}

    def suggest_categorical(self, name: str, choices: list[str]) -> str:
        self.asked.append((name, choices))
        return choices[-1]

    def suggest_int(self, name: str, low: int, high: int) -> int:
        self.asked.append((name, low, high))
        return high

    def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float:
        self.asked.append((name, pytest.approx(low), pytest.approx(high), log))
        return high

    def set_user_attr(self, name: str, value: str) -> None:
        self.attributes[name] = value


@pytest.mark.parametrize(
    ("spread", "asked", "text"),
    [
        (["choice", "pre", "post"], (["pre", "post"],), "post"),
        (["randint", "2", "9"], (2, 9), "9"),
        (["uniform", "0", "0.123456789"], (0.0, 0.123456789, False), "0.123457"),
        (["loguniform", "1e-4", "1e-1"], (1e-4, 1e-1, True), "0.1"),
        (["normal", "5", "0.5"], (3.5, 6.5, False), "6.5"),
    ],
)
def test_distribution_of_a_sweep_is_one_of_optuna(
    spread: list[str], asked: tuple[Any, ...], text: str
) -> None:
    from dtslurm.worker import trial_optuna

    suggestions = Suggestions()
    assert trial_optuna._suggest(suggestions, "lr", spread) == text
    assert suggestions.asked == [("lr", *asked)]


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("min", {}, ("run", "minimize", ("tpe", 8))),
        ("max", {"study": "mine", "sampler": "random"}, ("mine", "maximize", ("random", 8))),
        ("min", {"seed": 0, "sampler": "cmaes"}, ("run", "minimize", ("cmaes", 5))),
    ],
)
def test_study_is_shared_by_the_trials_and_each_has_a_seed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    options: dict[str, Any],
    expected: tuple[Any, ...],
) -> None:
    from dtslurm.worker import trial_optuna

    for name, kind in (("tpe", "TPESampler"), ("random", "RandomSampler"), ("cmaes", "CmaEsSampler")):
        monkeypatch.setattr(optuna.samplers, kind, lambda seed, name=name: (name, seed))
    monkeypatch.setattr(optuna, "create_study", lambda **values: values)
    values = trial_optuna._open_study(trial_of(tmp_path / "run", mode=mode, storage="sqlite://", **options))
    assert (values["study_name"], values["direction"], values["sampler"]) == expected
    assert (values["storage"], values["load_if_exists"]) == ("sqlite://", True)


def test_study_without_a_storage_is_in_the_folder_of_the_sweep(tmp_path: Path) -> None:
    from dtslurm.worker import trial_optuna

    trial_optuna._open_study(trial_of(tmp_path))
    assert (tmp_path / "optuna.journal").exists()


@pytest.mark.parametrize(
    ("value", "good", "told"),
    [
        (0.5, True, (0.5, None)),
        (0.0, True, (0.0, None)),
        (0.5, False, (None, "FAIL")),
        (None, True, (None, "FAIL")),
    ],
)
def test_first_rank_asks_the_study_and_tells_it_the_result(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: float | None,
    good: bool,
    told: tuple[float | None, str | None],
) -> None:
    from dtslurm.worker import trial_optuna

    suggestions, results = Suggestions(), []

    def tell(trial: object, value: float | None = None, state: Any = None) -> None:
        results.append((trial, value, state.name if state else None))

    study = SimpleNamespace(ask=lambda: suggestions, tell=tell)
    monkeypatch.setattr(trial_optuna, "_open_study", lambda _trial: study)
    monkeypatch.setenv("DTSLURM_ATTEMPT", "2")
    spread = {"layers": ["randint", "2", "9"], "norm": ["choice", "pre"]}
    values, finish = trial_optuna.ask(trial_of(tmp_path, random=spread))
    assert values == {"layers": "9", "norm": "pre"}
    assert json.loads((tmp_path / "optuna-2.json").read_text()) == values
    assert suggestions.attributes == {"trial": "five"}
    assert finish is not None
    finish(value, good)
    assert results == [(suggestions, *told)]


def test_other_ranks_wait_for_the_values_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtslurm.worker import trial_optuna

    clock = SimpleNamespace(now=10.0, waits=0)

    def wait(seconds: float) -> None:
        clock.now += seconds
        clock.waits += 1
        assert clock.waits < 9999, "it waits without end"
        if clock.waits == 3:
            (tmp_path / "optuna-0.json").write_text('{"lr": "1"}')

    monkeypatch.setattr(trial_optuna, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=wait))
    monkeypatch.setenv("DTSLURM_ATTEMPT", "0")
    assert trial_optuna.ask(trial_of(tmp_path, first=False)) == ({"lr": "1"}, None)
    assert clock.waits == 3
    monkeypatch.setenv("DTSLURM_ATTEMPT", "1")
    with pytest.raises(FileNotFoundError):
        trial_optuna.ask(trial_of(tmp_path, first=False))
    assert clock.waits - 3 in {1500, 1501}  # five minutes
