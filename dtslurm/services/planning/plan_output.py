"""Writes a plan as a framework's configuration or as a picture."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from dtslurm.errors import RequestInvalid, StoreError
from dtslurm.planner import emit as emitters
from dtslurm.planner import svg
from dtslurm.planner.emit.torchtitan import PYTHON_SINCE
from dtslurm.services.planning.plan import Plan


def check_form(form: str) -> None:
    """Raise `RequestInvalid` if no configuration format has that name."""
    if form not in emitters.FORMS:
        raise RequestInvalid([f"--emit should be one of {', '.join(emitters.FORMS)}, not {form!r}"])


def form_for_installed(form: str, env: Mapping[str, str]) -> str:
    """Return the format that the installed version of a framework reads; the newest if it is not installed.

    The framework is searched in the active environment, else in the one that dtslurm runs in.
    """
    if form != "torchtitan":
        return form
    prefix = env.get("VIRTUAL_ENV") or env.get("CONDA_PREFIX")
    folders = [str(path) for path in Path(prefix).glob("lib/python3*/site-packages")] if prefix else sys.path
    distribution = next(iter(distributions(name="torchtitan", path=folders)), None)
    if distribution is None:
        return form
    version = tuple(int(number) for number in re.findall(r"\d+", distribution.version)[:2])
    return "torchtitan-0.2" if version < PYTHON_SINCE else "torchtitan-0.3"


def emitted(plan: Plan, form: str) -> str:
    """Return the best layout as a framework's configuration.

    Raises:
        RequestInvalid: no layout fits, or the framework cannot run it.
    """
    if not plan.chosen or not plan.chosen[0].fits:
        raise RequestInvalid(["no layout fits, so there is no configuration to print", *plan.unfit])
    layout = plan.chosen[0].layout
    if problems := emitters.check(form, plan.task, layout):
        raise RequestInvalid([f"--emit {form}: {problem}" for problem in problems])
    text = emitters.emit(form, plan.task, layout)
    return text + _cluster_lines(plan) if form == "job" else text


def _cluster_lines(plan: Plan) -> str:
    """Return the lines of a job file that name the cluster and the node type of the plan."""
    settings = {"cluster": plan.cluster, "node_type": plan.node_type}
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items() if value)


def draw(plan: Plan, path: Path) -> None:
    """Write the plan's diagrams as an SVG file.

    Raises:
        RequestInvalid: there is nothing to draw.
        StoreError: the file cannot be written.
    """
    if not plan.chosen:
        raise RequestInvalid(["no layout fits, so there is no plan to draw", *plan.unfit])
    text = svg.picture(plan.task, plan.chosen, plan.curve)
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise StoreError(f"{path}: {(error.strerror or 'cannot be written').lower()}") from None
