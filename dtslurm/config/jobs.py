"""Reads job files: follows ``extends``, fills variables in, and takes stages apart.

``extends: FILE`` is another job file, from the folder of the one that names it; mappings are merged, all else
replaced. ``${name}`` stands for a variable in every value, ``$${`` for ``${`` itself: arguments and
variables of the environment reach the job as they are, but for values of the job such as
``${SLURM_ARRAY_TASK_ID}`` in arguments; a shell reads ``setup`` and ``teardown`` alone. What
a sweep goes over stands in arguments and variables of the environment, for each trial to fill in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path

from dtslurm import assets
from dtslurm.config import chain, decode, files, origins
from dtslurm.config.tree import Items, Node, Problem, Scalar, Table
from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs import stages
from dtslurm.model.jobs.job_file import JobFile, Stage, Work
from dtslurm.model.paths import expanded
from dtslurm.model.shell import JOB_VALUES
from dtslurm.model.values import dataclass
from dtslurm.suggestions import suggest_name
from dtslurm.worker.trial_text import MENTION, substitute

_NAME = re.compile(r"[A-Za-z_]\w*")
_OF_TRIALS = {"args", "env", "sweep.name"}  # what may differ between the trials of a sweep
_SHARED = {item.name for item in fields(Work)} - {"sweep"}  # of the top of a file, for its stages


@dataclass(frozen=True, kw_only=True)
class LoadedStage:
    """One job of a file.

    Attributes:
        name: the stage's, empty for a file of one job.
        work: what it is, with what the top of the file says where the stage says nothing.
        needs: (kind of dependency, stage) for each stage that it waits for.
        origins: ``"nodes": "job.yaml:4"``, the place of each value that is written.
    """

    name: str
    work: Work
    needs: tuple[tuple[str, str], ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """A job file's content.

    Attributes:
        job: the top of the file.
        stages: its jobs, each after those that it needs; one where the file has no stages.
        origins: ``"nodes": "job.yaml:4"``, the place of each value that is written.
        files: it and those that it extends.
    """

    job: JobFile
    path: Path
    stages: tuple[LoadedStage, ...]
    origins: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def load(path: Path, given: Mapping[str, str], *, cwd: Path, home: Path | None = None) -> LoadedJob:
    """Return a job file's content with its variables filled in.

    Args:
        given: values of variables that replace the file's.

    Raises:
        ProfileInvalid: the file, or one it extends, is wrong; each line reads ``file:line: key: message``.
        RequestInvalid: ``given`` names variables that the file does not have.
    """
    root, problems, read = _chain(path, lambda file: _label(file, cwd, home))
    values, more = _variables(root, given)
    problems += more
    tables = _stage_tables(root, problems)
    swept = {name: _swept(table) for name, table in tables.items()}
    _check_given(path, given, values, {word for words in swept.values() for word in words})
    whole = root if "stages" not in root.entries else _without(root, {*_SHARED, "stages"})
    job, found = decode.read(
        JobFile, _filled_table(_without(whole, {"variables"}), values, problems, swept.get(""))
    )
    problems += found
    loaded: list[tuple[str, Work, Table]] = []
    for name, table in tables.items():
        work: Work | None = job
        found = []
        if name:
            work, found = decode.read(Stage, _filled_table(table, values, problems, swept[name]))
        problems += [*found, *_work_problems(name, table, work)]
        if work is not None:
            loaded.append((name, work, table))
    needs = _needs(loaded, root, problems)
    if problems or job is None:
        raise decode.invalid(problems)
    made = {
        name: LoadedStage(name=name, work=work, needs=needs[name], origins=origins.of(table))
        for name, work, table in loaded
    }
    order = stages.ordered({name: [stage for _, stage in items] for name, items in needs.items()})
    ordered = tuple(made[name] for name in order)
    return LoadedJob(job=job, path=path, stages=ordered, origins=origins.of(root), files=tuple(read))


def _label(path: Path, cwd: Path, home: Path | None) -> str:
    return files.label(path, cwd=cwd, home=home, packaged=assets.cluster_profiles())


def _chain(path: Path, label: Callable[[Path], str]) -> tuple[Table, list[Problem], list[Path]]:
    """Return the merged tree of a file and all it extends, the problems met, and the files."""

    def find(name: str, current: Path) -> Path | str:
        found = Path(os.path.normpath(current.parent / expanded(name)))
        return found if found.is_file() else f"there is no file {label(found)}"

    trees, problems, visited = chain.follow(
        path,
        read=lambda file: files.read(file, label(file)),
        label=label,
        find=find,
        what="the path of one job file",
    )
    return chain.merged(trees), problems, visited


def _without(table: Table, keys: set[str]) -> Table:
    return table._replace(entries={key: entry for key, entry in table.entries.items() if key not in keys})


def _stage_tables(root: Table, problems: list[Problem]) -> dict[str, Table]:
    """Return what each stage says, over what the top of the file says; one without name without stages."""
    entry = root.entries.get("stages")
    if entry is None:
        return {"": _without(root, {"variables"})}
    if not isinstance(entry.value, Table) or not entry.value.entries:
        problems.append(Problem(entry.source, entry.line, "stages", "should be a mapping of names to jobs"))
        return {}
    if (sweep := root.entries.get("sweep")) is not None:
        problems.append(Problem(sweep.source, sweep.line, "sweep", "belongs into the stage that it is of"))
    top = _without(root, set(root.entries) - _SHARED)
    found: dict[str, Table] = {}
    variables: dict[str, str] = {}
    for name, item in entry.value.entries.items():
        key = f"stages.{name}"
        other = variables.setdefault(stages.folder_variable(name), name)
        if not stages.NAME.fullmatch(name):
            problems.append(Problem(item.source, item.line, key, "a name is of letters, digits, _ and -"))
        elif not isinstance(item.value, Table):
            problems.append(Problem(item.source, item.line, key, "should be a mapping, as a job file is"))
        elif other != name:
            problems.append(Problem(item.source, item.line, key, f"is too much like {other!r}"))
        else:
            found[name] = chain.merge(top, item.value)._replace(line=item.line)
    return found


def _needs(
    loaded: list[tuple[str, Work, Table]], root: Table, problems: list[Problem]
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return what each stage waits for; stages that there are not, or that wait in a circle, are problems."""
    names = [name for name, _, _ in loaded]
    needs: dict[str, tuple[tuple[str, str], ...]] = {}
    for name, work, table in loaded:
        found = []
        for text in work.needs if isinstance(work, Stage) else ():
            place = table.entries["needs"]
            key = f"stages.{name}.needs"
            try:
                kind, stage = stages.need(text)
            except ValueError as error:
                problems.append(Problem(place.source, place.line, key, str(error)))
                continue
            if stage not in names:
                message = f"there is no stage {stage!r}{suggest_name(stage, names)}"
                problems.append(Problem(place.source, place.line, key, message))
                continue
            found.append((kind, stage))
        needs[name] = tuple(found)
    try:
        stages.ordered({name: [stage for _, stage in items] for name, items in needs.items()})
    except ValueError as error:
        entry = root.entries["stages"]
        problems.append(Problem(entry.source, entry.line, "stages", f"wait for each other: {error}"))
    return needs


def _work_problems(name: str, table: Table, work: Work | None) -> Iterator[Problem]:
    """Yield what is wrong with one job as a whole."""
    above = f"stages.{name}." if name else ""
    if "script" not in table.entries:
        yield Problem(table.source, table.line, f"{above}script", "is missing")
    if work is None or work.sweep is None:
        return
    entry = table.entries["sweep"]
    for key, message in work.sweep.problems():
        below = (
            entry.value.entries.get(key.split(".")[0].split("[")[0])
            if isinstance(entry.value, Table)
            else None
        )
        place = below or entry
        yield Problem(place.source, place.line, ".".join(filter(None, (f"{above}sweep", key))), message)
    if work.array is not None:
        yield Problem(entry.source, entry.line, f"{above}sweep", "is a job array; it does not go with array")
    written = " ".join((*work.args, *(text or "" for text in work.env.values())))
    mentioned = set(_mentioned(written))
    for variable in dict.fromkeys(work.sweep.variables()):
        if variable not in mentioned:
            message = f"changes nothing: write ${{{variable}}} in args or env"
            yield Problem(entry.source, entry.line, f"{above}sweep: {variable}", message)


def _swept(table: Table) -> set[str]:
    """Return the variables that a sweep goes over, as far as it is well written."""
    entry = table.entries.get("sweep")
    sweep = entry.value.entries if entry and isinstance(entry.value, Table) else {}
    tables = [sweep[key].value for key in ("grid", "zipped", "random") if key in sweep]
    if "points" in sweep and isinstance(sweep["points"].value, Items):
        tables += sweep["points"].value.items
    return {name for one in tables if isinstance(one, Table) for name in one.entries}


def _check_given(path: Path, given: Mapping[str, str], values: Mapping[str, str], swept: set[str]) -> None:
    wrong = []
    for name in given:
        if name in swept:
            wrong.append(f"--set {name}: the sweep of {path.name} goes over it")
        elif name not in values:
            known = ", ".join(values) or "none"
            meant = suggest_name(name, list(values))
            wrong.append(f"--set {name}: {path.name} has no such variable{meant} (variables: {known})")
    if wrong:
        raise RequestInvalid(wrong)


def _variables(root: Table, given: Mapping[str, str]) -> tuple[dict[str, str], list[Problem]]:
    """Return the value of each variable, those that stand for others filled in, and what is wrong."""
    entry = root.entries.get("variables")
    if entry is None:
        return {}, []
    if not isinstance(entry.value, Table):
        return {}, [Problem(entry.source, entry.line, "variables", "should be a mapping of names to values")]
    problems: list[Problem] = []
    texts: dict[str, str] = {}
    for name, item in entry.value.entries.items():
        key = f"variables.{name}"
        if not _NAME.fullmatch(name):
            problems.append(Problem(item.source, item.line, key, "a name is of letters, digits and _"))
        elif not isinstance(item.value, Scalar):
            problems.append(Problem(item.source, item.line, key, "should be a single value"))
        texts[name] = given.get(name, item.value.text or "") if isinstance(item.value, Scalar) else ""
    for _ in texts:  # a variable may stand for another, which may stand for a third
        texts = {name: substitute(text, texts, keep=True) for name, text in texts.items()}
    for name, text in texts.items():
        if own := [word for word in _mentioned(text) if word in texts]:
            item = entry.value.entries[name]
            message = f"goes in a circle by ${{{own[0]}}}"
            problems.append(Problem(item.source, item.line, f"variables.{name}", message))
    return texts, problems


def _mentioned(text: str) -> Iterator[str]:
    return (found[2] for found in MENTION.finditer(text) if not found[1])


def _filled_table(
    table: Table, values: Mapping[str, str], problems: list[Problem], swept: set[str] | None
) -> Table:
    filler = _Filler(values, problems, swept or set())
    entries = {
        key: entry._replace(value=filler.node(entry.value, key)) for key, entry in table.entries.items()
    }
    return table._replace(entries=entries)


class _Filler:
    """Fills variables in, and notes those that nobody gave a value; trials fill in what is swept over."""

    def __init__(self, values: Mapping[str, str], problems: list[Problem], swept: set[str]) -> None:
        self._values = {name: text for name, text in values.items() if name not in swept}
        self._problems = problems
        self._swept = swept

    def node(self, node: Node, key: str) -> Node:
        """Return a value with its variables filled in."""
        if isinstance(node, Table):
            entries = {
                name: entry._replace(value=self.node(entry.value, f"{key}.{name}"))
                for name, entry in node.entries.items()
            }
            return node._replace(entries=entries)
        if isinstance(node, Items):
            items = tuple(self.node(item, f"{key}[{number}]") for number, item in enumerate(node.items))
            return node._replace(items=items)
        if node.text is None or "${" not in node.text:
            return node
        of_trials = bool(self._swept) and (key in _OF_TRIALS or re.split(r"[.\[]", key)[0] in _OF_TRIALS)
        text = substitute(node.text, self._values, keep=True)
        for name in _mentioned(text):
            if name in JOB_VALUES and re.split(r"[.\[]", key)[0] == "args":
                continue
            if name not in self._swept:
                self._unknown(node, key, name)
            elif not of_trials:
                message = f"${{{name}}} is what the sweep goes over, and can stand in args and env only"
                self._problems.append(Problem(node.source, node.line, key, message))
        return node._replace(text=text if of_trials else text.replace("$${", "${"))

    def _unknown(self, node: Scalar, key: str, name: str) -> None:
        meant = suggest_name(name, [*self._values, *self._swept])
        literal = f"; $${{{name}}} stands for ${{{name}}} as it is, for a shell to read in setup or teardown"
        message = f"no variable {name!r}{meant or literal}"
        self._problems.append(Problem(node.source, node.line, key, message))


def assignments(texts: tuple[str, ...]) -> dict[str, str]:
    """Return ``NAME=VALUE`` texts as a mapping.

    Raises:
        RequestInvalid: one is not of that form.
    """
    wrong = [f"--set {text!r}: write NAME=VALUE" for text in texts if "=" not in text]
    if wrong:
        raise RequestInvalid(wrong)
    return dict(text.split("=", 1) for text in texts)
