"""Sweeps: the definition of a sweep, and the computation of its points one at a time."""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from dtslurm.model.values import dataclass

SETTINGS, TRIALS, MEMBERS = "sweep.json", "trials.jsonl", "members.json"  # files in the run directory
_CALL = re.compile(r"\s*([a-z]+)\s*\((.*)\)\s*", re.DOTALL)
_SIGNIFICANT_DIGITS = 6  # of a drawn number, which is part of a trial's name
_TRUTH_VALUES = {"true": True, "false": False}
_ARGUMENT_COUNTS = {"uniform": 2, "loguniform": 2, "normal": 2, "randint": 2, "choice": None}
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, group: item in group,
    ast.NotIn: lambda item, group: item not in group,
}


@dataclass(frozen=True)
class Distribution:
    """A distribution that values are drawn from.

    One of ``uniform(0, 1)``, ``loguniform(1e-5, 1e-3)``, ``normal(0, 1)``, ``randint(1, 8)`` with both ends
    included, or ``choice(relu, gelu)``.
    """

    kind: str
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Parse a distribution.

        Raises:
            ValueError: the text is no distribution.
        """
        match = _CALL.fullmatch(text)
        if not match or match[1] not in _ARGUMENT_COUNTS:
            raise ValueError(f"{text!r} is not one of {', '.join(f'{kind}(…)' for kind in _ARGUMENT_COUNTS)}")
        kind, arguments = match[1], tuple(word.strip() for word in match[2].split(","))
        if kind == "choice":
            if not all(arguments):
                raise ValueError(f"{text!r}: write the choices as words, separated by commas")
            return cls(kind, arguments)
        if len(arguments) != _ARGUMENT_COUNTS[kind]:
            raise ValueError(f"{text!r}: {kind} needs two numbers")
        try:
            low, high = (int(word) if kind == "randint" else float(word) for word in arguments)
        except ValueError:
            raise ValueError(f"{text!r}: {kind} takes two {'whole ' * (kind == 'randint')}numbers") from None
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(f"{text!r}: {kind} takes two finite numbers")
        if kind != "normal" and low >= high:
            raise ValueError(f"{text!r}: the first number must be less than the second")
        if (kind == "loguniform" and low <= 0) or (kind == "normal" and high <= 0):
            raise ValueError(
                f"{text!r}: the {'first' if kind == 'loguniform' else 'second'} must be greater than 0"
            )
        return cls(kind, arguments)

    def __str__(self) -> str:
        """Return the distribution as it is written."""
        return f"{self.kind}({', '.join(self.arguments)})"

    def draw(self, dice: random.Random) -> str:
        """Draw a value and return its text."""
        if self.kind == "choice":
            return dice.choice(self.arguments)
        if self.kind == "randint":
            return str(dice.randint(int(self.arguments[0]), int(self.arguments[1])))
        low, high = map(float, self.arguments)
        if self.kind == "normal":
            return _format_number(dice.gauss(low, high))
        if self.kind == "loguniform":
            return _format_number(math.exp(dice.uniform(math.log(low), math.log(high))))
        return _format_number(dice.uniform(low, high))


def _format_number(number: float) -> str:
    return f"{number:.{_SIGNIFICANT_DIGITS}g}"


@dataclass(frozen=True)
class Condition:
    """An expression over a point's values, such as ``lr < 1e-3 and model in ('7b', '13b')``."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition of comparisons, + - * / // %, and, or, not, in; nothing with side effects.

        Raises:
            ValueError: the text is no such condition.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"{text!r} is not an expression such as lr < 1e-3 and seed == 0") from None
        for node in ast.walk(tree):
            allowed = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Name, ast.Constant)
            structural = (
                ast.Tuple,
                ast.List,
                ast.operator,
                ast.boolop,
                ast.unaryop,
                ast.cmpop,
                ast.expr_context,
            )
            is_allowed = isinstance(node, (*allowed, *structural)) and not isinstance(
                node, ast.Pow | ast.LShift
            )
            if not is_allowed:
                raise ValueError(
                    f"{text!r}: a condition may contain only comparisons, + - * / // %, and, or, not and in"
                )
        return cls(text)

    def __str__(self) -> str:
        """Return the condition as it is written."""
        return self.text

    @property
    def names(self) -> set[str]:
        """The variables that the condition uses."""
        return {node.id for node in ast.walk(self._parse_tree()) if isinstance(node, ast.Name)}

    def _parse_tree(self) -> ast.expr:
        return ast.parse(self.text.strip(), mode="eval").body

    def holds(self, point: Mapping[str, str]) -> bool:
        """Return whether the condition is true of a point; numbers compare as numbers.

        Raises:
            ValueError: the condition cannot be evaluated, as ``model < 3`` if the model is ``7b``.
        """
        try:
            return bool(
                _evaluate(self._parse_tree(), {name: _parse_value(text) for name, text in point.items()})
            )
        except (TypeError, ArithmeticError, KeyError, MemoryError) as error:
            values_text = ", ".join(f"{name}={text}" for name, text in point.items())
            raise ValueError(f"{self.text!r} cannot be evaluated for {values_text}: {error}") from None


def _parse_value(text: str) -> float | int | bool | str:
    if text in _TRUTH_VALUES:
        return _TRUTH_VALUES[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id] if node.id in values else _TRUTH_VALUES[node.id]
    if isinstance(node, ast.Tuple | ast.List):
        return [_evaluate(item, values) for item in node.elts]
    if isinstance(node, ast.UnaryOp):
        value = _evaluate(node.operand, values)
        return not value if isinstance(node.op, ast.Not) else -value
    if isinstance(node, ast.BoolOp):
        parts = (_evaluate(item, values) for item in node.values)
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, values), _evaluate(node.right, values)
        if isinstance(left, str) or isinstance(right, str):
            raise TypeError("strings can only be compared")
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare):
        return _evaluate_comparison(node, values)
    raise TypeError(f"{type(node).__name__} is not allowed in a condition")


def _evaluate_comparison(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left = _evaluate(node.left, values)
    for operation, item in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(item, values)
        if not _OPERATORS[type(operation)](left, right):
            return False
        left = right
    return True


@dataclass(frozen=True, kw_only=True)
class Asha:
    """Successive halving without waiting: at steps ``min_steps``, ``min_steps * eta``, ``* eta^2`` … a trial
    continues only if its metric is among the best ``1/eta`` of those that came so far.

    Li et al., A System for Massively Parallel Hyperparameter Tuning (2020), in the form that stops trials.

    Attributes:
        min_steps: the first such step; no trial is stopped before it.
        eta: how many trials come to a step for each that continues.
        step: the key of the metrics file that counts; ``step``, or ``epoch``.
    """

    min_steps: int = 1
    eta: int = 3
    step: str = "step"


@dataclass(frozen=True, kw_only=True)
class Optuna:
    """Values that Optuna chooses when a trial starts, from what earlier ones came to; the job needs optuna.

    Attributes:
        sampler: which of Optuna's samplers chooses.
        storage: a database's URL; by default a journal in the sweep's folder.
        study: the study's name in it.
    """

    sampler: Literal["tpe", "random", "cmaes", "gp"] = "tpe"
    storage: str | None = None
    study: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep goes over: all combinations of ``grid``, ``points``, ``zipped`` and draws of ``random``.

    Attributes:
        grid: values of each variable; every combination is a point.
        points: points written out, each with the same variables.
        zipped: lists of equal length that go side by side.
        random: what each variable is drawn from, ``samples`` times for each other combination.
        samples: how many draws.
        seed: the same seed draws the same values.
        when: only points of which it is true.
        unless: no points of which it is true.
        name: a trial's name, such as ``lr${lr}``; by default all values.
        max_parallel: how many array tasks may run at once.
        trials_per_node: this many trials of one process each share a node of their job.
        trials_per_gpu: this many share each GPU.
        metric: the key of the metrics file that trials are compared by.
        mode: whether less or more of it is better.
        asha: stop trials early.
        optuna: let Optuna draw the values that ``random`` describes.
    """

    grid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    points: tuple[Mapping[str, str], ...] = ()
    zipped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    random: Mapping[str, Distribution] = field(default_factory=dict)
    samples: int | None = None
    seed: int = 0
    when: Condition | None = None
    unless: Condition | None = None
    name: str | None = None
    max_parallel: int | None = None
    trials_per_node: int | None = None
    trials_per_gpu: int | None = None
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    asha: Asha | None = None
    optuna: Optuna | None = None

    @property
    def packed(self) -> bool:
        """Whether several trials share a job."""
        return self.trials_per_node is not None or self.trials_per_gpu is not None

    def variables(self) -> list[str]:
        """Return the names of the sweep's variables in order, a duplicate once for each definition."""
        point_variables = list(self.points[0]) if self.points else []
        return [*self.grid, *point_variables, *self.zipped, *self.random]

    def _build_factors(self) -> list[list[dict[str, str]]]:
        """Return the lists to combine, without random draws; the last list varies fastest."""
        lists = [[{name: value} for value in values] for name, values in self.grid.items()]
        if self.points:
            lists.append([dict(point) for point in self.points])
        if self.zipped:
            rows = zip(*self.zipped.values(), strict=True)
            lists.append([dict(zip(self.zipped, row, strict=True)) for row in rows])
        return lists

    def size(self) -> int:
        """Return the number of points before ``when`` and ``unless`` are applied."""
        return math.prod(map(len, self._build_factors())) * (self.samples or 1)

    def __iter__(self) -> Iterator[dict[str, str]]:
        """Yield the points, one at a time.

        Raises:
            ValueError: a condition cannot be evaluated.
        """
        factors = self._build_factors()
        for number in range(self.size()):
            point = self._build_point(number, factors)
            if self.when is not None and not self.when.holds(point):
                continue
            if self.unless is not None and self.unless.holds(point):
                continue
            yield point

    def _build_point(self, number: int, factors: Sequence[list[dict[str, str]]]) -> dict[str, str]:
        remaining = number // (self.samples or 1)
        value_sets: list[dict[str, str]] = []
        for values in reversed(factors):
            remaining, index = divmod(remaining, len(values))
            value_sets.append(values[index])
        point = {name: value for values in reversed(value_sets) for name, value in values.items()}
        if self.random and self.optuna is None:
            generator = random.Random(f"{self.seed}:{number}")  # noqa: S311 - not for cryptography
            point |= {name: distribution.draw(generator) for name, distribution in self.random.items()}
        return point

    def problems(self) -> list[tuple[str, str]]:
        """Return the inconsistencies of the sweep, as (key, what is wrong)."""
        names = self.variables()
        problems = [(name, "is in the sweep twice") for name in dict.fromkeys(names) if names.count(name) > 1]
        if not names:
            problems.append(("", "has no values; give grid, points, zipped or random"))
        if bool(self.random) != (self.samples is not None):
            problems.append(("samples", "belongs with random; it sets how many values are drawn"))
        if self.optuna and not self.random:
            problems.append(("optuna", "needs random, which defines the values to choose from"))
        if self.trials_per_node is not None and self.trials_per_gpu is not None:
            problems.append(("trials_per_gpu", "cannot be combined with trials_per_node"))
        if self.asha and self.asha.eta < 2:
            problems.append(("asha", "eta should be at least 2"))
        return [*problems, *self._find_list_problems(), *self._find_condition_problems()]

    def _find_list_problems(self) -> Iterator[tuple[str, str]]:
        for name, values in self.grid.items():
            if not values:
                yield "grid", f"{name} has no values"
        if len({len(values) for values in self.zipped.values()}) > 1:
            lengths = ", ".join(f"{name} has {len(values)}" for name, values in self.zipped.items())
            yield "zipped", f"its lists should have the same length ({lengths})"
        elif self.zipped and not all(self.zipped.values()):
            yield "zipped", "has no values"
        for number, point in enumerate(self.points):
            if set(point) != set(self.points[0]):
                first_names = ", ".join(self.points[0])
                yield f"points[{number}]", f"should have the variables of the first point: {first_names}"

    def _find_condition_problems(self) -> Iterator[tuple[str, str]]:
        names = self.variables()
        random_names = set(self.random) if self.optuna else set()
        for key, condition in (("when", self.when), ("unless", self.unless)):
            for name in sorted((condition.names if condition else set()) - set(_TRUTH_VALUES)):
                if name not in names:
                    yield key, f"{name!r} is not a variable of the sweep"
                elif name in random_names:
                    yield key, f"{name!r} is chosen by Optuna when the trial starts"
