"""Loading of job files: follows ``extends``, substitutes variables, and separates stages.

``extends: FILE`` names another job file, relative to the folder of the file that extends it. Mappings are
merged, everything else is replaced. ``${name}`` stands for a variable in every value, ``$${`` for a literal
``${``. Arguments and environment variables reach the job unchanged, except for values of the job such as
``${SLURM_ARRAY_TASK_ID}`` in arguments; a shell interprets only ``setup`` and ``teardown``. Variables of a
sweep are allowed in arguments and environment variables, and each trial substitutes them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path

from dtslurm import assets
from dtslurm.config import chain, decode, files, origins
from dtslurm.config.job_files import roles
from dtslurm.config.tree import Items, Node, Problem, Scalar, Table
from dtslurm.errors import RequestInvalid
from dtslurm.model.jobs import stages
from dtslurm.model.jobs.job_file import JobFile, Stage, Work
from dtslurm.model.jobs.roles import REFERENCE, Roles
from dtslurm.model.paths import expand_home
from dtslurm.model.shell import JOB_VALUES
from dtslurm.model.values import dataclass
from dtslurm.suggestions import suggest_name
from dtslurm.worker.trial_text import MENTION, substitute

_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*")
_ESCAPE = re.compile(r"\$\$\{")
_ESCAPE_BUT_OF_REFERENCES = re.compile(r"\$\$\{(?!(?:role|port)\.)")  # the job removes the others
_PER_TRIAL_KEYS = {"args", "env", "sweep.name"}  # these may differ between trials of a sweep
# Keys in which ${role.NAME.urls} and ${port.NAME} stand for values that are known only in the job.
_MAIN_RUNTIME_KEYS = frozenset({"args", "env"})
_ROLE_RUNTIME_KEYS = frozenset({"command", "args", "env"})
# Keys at the top of a file that apply to its stages.
_SHARED_KEYS = {item.name for item in fields(Work)} - {"sweep"}


@dataclass(frozen=True, kw_only=True)
class LoadedStage:
    """One job of a job file.

    Attributes:
        name: the stage's name, empty for a file with one job.
        work: the job's options; keys at the top of the file are defaults for the stage.
        needs: (kind of dependency, stage) for each stage that this one depends on.
        roles: the roles that run beside the script, None if there are none.
        origins: the location of each written value, such as ``"nodes": "job.yaml:4"``.
    """

    name: str
    work: Work
    needs: tuple[tuple[str, str], ...] = ()
    roles: Roles | None = None
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """The content of a job file.

    Attributes:
        job: the top of the file.
        stages: the file's jobs in dependency order; a single job if the file has no stages.
        origins: the location of each written value, such as ``"nodes": "job.yaml:4"``.
        files: the file and those that it extends.
    """

    job: JobFile
    path: Path
    stages: tuple[LoadedStage, ...]
    origins: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def load(
    path: Path,
    variables: Mapping[str, str],
    *,
    cwd: Path,
    home: Path | None = None,
    per_trial: Collection[str] = (),
) -> LoadedJob:
    """Return the content of a job file, with its variables substituted.

    Args:
        variables: values of variables that override the file's.
        per_trial: further variables that each trial substitutes, unless the file has them.

    Raises:
        ProfileInvalid: the file, or one that it extends, is invalid; each line reads ``file:line: key:
            message``.
        RequestInvalid: ``variables`` names variables that the file does not have.
    """
    root, problems, files_read = _load_chain(path, lambda file: _label_file(file, cwd, home))
    root, role_tables = roles.split(root, problems)
    values, variable_problems = _resolve_variables(root, variables)
    problems += variable_problems
    tables = _build_stage_tables(root, problems)
    further = set(per_trial) - set(values)
    swept_by_stage = {name: _swept_variables(table) | further for name, table in tables.items()}
    _check_overrides(path, variables, values, {name for names in swept_by_stage.values() for name in names})
    job_table = root if "stages" not in root.entries else _remove_keys(root, {*_SHARED_KEYS, "stages"})
    job, stage_problems = decode.read(
        JobFile,
        _substitute_table(
            _remove_keys(job_table, {"variables"}),
            values,
            problems,
            swept_by_stage.get(""),
            runtime_keys=_MAIN_RUNTIME_KEYS if role_tables and role_tables.tables else frozenset(),
        ),
    )
    problems += stage_problems
    loaded_stages: list[tuple[str, Work, Table]] = []
    for name, table in tables.items():
        work: Work | None = job
        stage_problems = []
        if name:
            work, stage_problems = decode.read(
                Stage, _substitute_table(table, values, problems, swept_by_stage[name])
            )
        problems += [*stage_problems, *_find_work_problems(name, table, work)]
        if work is not None:
            loaded_stages.append((name, work, table))
    needs_by_stage = _resolve_needs(loaded_stages, root, problems)
    job_roles = None
    if role_tables is not None and job is not None:
        substituted = {
            name: _substitute_table(table, values, problems, None, runtime_keys=_ROLE_RUNTIME_KEYS)
            for name, table in role_tables.tables.items()
        }
        job_roles = roles.read(role_tables, substituted, job, problems)
    if problems or job is None:
        raise decode.invalid(problems)
    stages_by_name = {
        name: LoadedStage(
            name=name,
            work=work,
            needs=needs_by_stage[name],
            roles=job_roles,
            origins=origins.collect_origins(table),
        )
        for name, work, table in loaded_stages
    }
    order = stages.order_stages(
        {name: [stage for _, stage in items] for name, items in needs_by_stage.items()}
    )
    ordered_stages = tuple(stages_by_name[name] for name in order)
    return LoadedJob(
        job=job,
        path=path,
        stages=ordered_stages,
        origins=origins.collect_origins(root),
        files=tuple(files_read),
    )


def _label_file(path: Path, cwd: Path, home: Path | None) -> str:
    return files.label(path, cwd=cwd, home=home, packaged=assets.cluster_profiles())


def _load_chain(path: Path, label: Callable[[Path], str]) -> tuple[Table, list[Problem], list[Path]]:
    """Return the merged tree of a file and all files that it extends, the problems, and the files."""

    def find(name: str, current: Path) -> Path | str:
        target = Path(os.path.normpath(current.parent / expand_home(name)))
        return target if target.is_file() else f"file {label(target)} does not exist"

    trees, problems, visited = chain.load_chain(
        path,
        read_file=lambda file: files.read(file, label(file)),
        label=label,
        find=find,
        value_description="the path of one job file",
    )
    return chain.merge_all(trees), problems, visited


def _remove_keys(table: Table, keys: set[str]) -> Table:
    return table._replace(entries={key: entry for key, entry in table.entries.items() if key not in keys})


def _build_stage_tables(root: Table, problems: list[Problem]) -> dict[str, Table]:
    """Return each stage's table, merged over the top of the file; without stages, the file as ``""``."""
    entry = root.entries.get("stages")
    if entry is None:
        return {"": _remove_keys(root, {"variables"})}
    if not isinstance(entry.value, Table) or not entry.value.entries:
        problems.append(Problem(entry.source, entry.line, "stages", "should be a mapping of names to jobs"))
        return {}
    if (sweep := root.entries.get("sweep")) is not None:
        problems.append(Problem(sweep.source, sweep.line, "sweep", "belongs in a stage"))
    shared = _remove_keys(root, set(root.entries) - _SHARED_KEYS)
    table_by_stage: dict[str, Table] = {}
    name_by_variable: dict[str, str] = {}
    for name, stage in entry.value.entries.items():
        key = f"stages.{name}"
        first_name = name_by_variable.setdefault(stages.folder_variable(name), name)
        if not stages.NAME.fullmatch(name):
            problems.append(
                Problem(
                    stage.source, stage.line, key, "a stage name may contain only letters, digits, _ and -"
                )
            )
        elif not isinstance(stage.value, Table):
            problems.append(Problem(stage.source, stage.line, key, "should be a mapping, like a job file"))
        elif first_name != name:
            problems.append(Problem(stage.source, stage.line, key, f"is too similar to {first_name!r}"))
        else:
            table_by_stage[name] = chain.merge(shared, stage.value)._replace(line=stage.line)
    return table_by_stage


def _resolve_needs(
    loaded_stages: list[tuple[str, Work, Table]], root: Table, problems: list[Problem]
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return the dependencies of each stage; unknown stages and dependency cycles are problems."""
    names = [name for name, _, _ in loaded_stages]
    needs_by_stage: dict[str, tuple[tuple[str, str], ...]] = {}
    for name, work, table in loaded_stages:
        stage_needs = []
        for text in work.needs if isinstance(work, Stage) else ():
            needs_entry = table.entries["needs"]
            key = f"stages.{name}.needs"
            try:
                kind, stage = stages.parse_need(text)
            except ValueError as error:
                problems.append(Problem(needs_entry.source, needs_entry.line, key, str(error)))
                continue
            if stage not in names:
                message = f"unknown stage {stage!r}{suggest_name(stage, names)}"
                problems.append(Problem(needs_entry.source, needs_entry.line, key, message))
                continue
            stage_needs.append((kind, stage))
        needs_by_stage[name] = tuple(stage_needs)
    try:
        stages.order_stages({name: [stage for _, stage in items] for name, items in needs_by_stage.items()})
    except ValueError as error:
        entry = root.entries["stages"]
        problems.append(Problem(entry.source, entry.line, "stages", f"wait for each other: {error}"))
    return needs_by_stage


def _find_work_problems(name: str, table: Table, work: Work | None) -> Iterator[Problem]:
    """Yield the problems of one job that concern more than one key."""
    prefix = f"stages.{name}." if name else ""
    if "script" not in table.entries:
        yield Problem(table.source, table.line, f"{prefix}script", "is missing")
    if work is None or work.sweep is None:
        return
    entry = table.entries["sweep"]
    for key, message in work.sweep.problems():
        child = (
            entry.value.entries.get(key.split(".")[0].split("[")[0])
            if isinstance(entry.value, Table)
            else None
        )
        location = child or entry
        yield Problem(
            location.source, location.line, ".".join(filter(None, (f"{prefix}sweep", key))), message
        )
    if work.array is not None:
        yield Problem(entry.source, entry.line, f"{prefix}sweep", "makes a job array; remove array")
    text_of_options = " ".join((*work.args, *(value or "" for value in work.env.values())))
    mentioned_names = set(_find_mentions(text_of_options))
    for variable in dict.fromkeys(work.sweep.variables()):
        if variable not in mentioned_names:
            message = f"has no effect: use ${{{variable}}} in args or env"
            yield Problem(entry.source, entry.line, f"{prefix}sweep: {variable}", message)


def _swept_variables(table: Table) -> set[str]:
    """Return the variables of a sweep, ignoring malformed parts of it."""
    entry = table.entries.get("sweep")
    sweep = entry.value.entries if entry and isinstance(entry.value, Table) else {}
    tables = [sweep[key].value for key in ("grid", "zipped", "random") if key in sweep]
    if "points" in sweep and isinstance(sweep["points"].value, Items):
        tables += sweep["points"].value.items
    return {name for values in tables if isinstance(values, Table) for name in values.entries}


def _check_overrides(
    path: Path, variables: Mapping[str, str], values: Mapping[str, str], swept_names: set[str]
) -> None:
    problems = []
    for name in variables:
        if name in swept_names:
            problems.append(f"--set {name}: the sweep of {path.name} sets this variable")
        elif name not in values:
            variable_names = ", ".join(values) or "none"
            suggestion = suggest_name(name, list(values))
            problems.append(
                f"--set {name}: {path.name} has no such variable{suggestion} (variables: {variable_names})"
            )
    if problems:
        raise RequestInvalid(problems)


def _resolve_variables(root: Table, variables: Mapping[str, str]) -> tuple[dict[str, str], list[Problem]]:
    """Return the value of each variable, with references to other variables substituted, and the problems."""
    entry = root.entries.get("variables")
    if entry is None:
        return {}, []
    if not isinstance(entry.value, Table):
        return {}, [Problem(entry.source, entry.line, "variables", "should be a mapping of names to values")]
    problems: list[Problem] = []
    texts: dict[str, str] = {}
    for name, variable in entry.value.entries.items():
        key = f"variables.{name}"
        if not _VARIABLE_NAME.fullmatch(name):
            problems.append(
                Problem(
                    variable.source,
                    variable.line,
                    key,
                    "a variable name may contain only letters, digits and _",
                )
            )
        elif not isinstance(variable.value, Scalar):
            problems.append(Problem(variable.source, variable.line, key, "should be a single value"))
        texts[name] = (
            variables.get(name, variable.value.text or "") if isinstance(variable.value, Scalar) else ""
        )
    for _ in texts:  # a variable may refer to another, and so on
        texts = {name: substitute(text, texts, keep=True) for name, text in texts.items()}
    for name, text in texts.items():
        if cyclic := [word for word in _find_mentions(text) if word in texts]:
            variable = entry.value.entries[name]
            message = f"refers to itself through ${{{cyclic[0]}}}"
            problems.append(Problem(variable.source, variable.line, f"variables.{name}", message))
    return texts, problems


def _find_mentions(text: str) -> Iterator[str]:
    return (match[2] for match in MENTION.finditer(text) if not match[1])


def _substitute_table(
    table: Table,
    values: Mapping[str, str],
    problems: list[Problem],
    swept_names: set[str] | None,
    *,
    runtime_keys: frozenset[str] = frozenset(),
) -> Table:
    """Return the table with its variables substituted.

    Args:
        runtime_keys: keys whose values may refer to roles and ports, which are replaced in the job.
    """
    substitution = _Substitution(values, problems, swept_names or set(), runtime_keys)
    entries = {
        key: entry._replace(value=substitution.node(entry.value, key)) for key, entry in table.entries.items()
    }
    return table._replace(entries=entries)


class _Substitution:
    """Substitutes variables, and records variables without a value; trials substitute a sweep's variables."""

    def __init__(
        self,
        values: Mapping[str, str],
        problems: list[Problem],
        swept_names: set[str],
        runtime_keys: frozenset[str],
    ) -> None:
        self._values = {name: text for name, text in values.items() if name not in swept_names}
        self._problems = problems
        self._swept_variables = swept_names
        self._runtime_keys = runtime_keys

    def node(self, node: Node, key: str) -> Node:
        """Return a value with its variables substituted."""
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
        is_per_trial = bool(self._swept_variables) and (
            key in _PER_TRIAL_KEYS or re.split(r"[.\[]", key)[0] in _PER_TRIAL_KEYS
        )
        text = substitute(node.text, self._values, keep=True)
        top_key = re.split(r"[.\[]", key)[0]
        for name in _find_mentions(text):
            if name in JOB_VALUES and (top_key == "args" or top_key in self._runtime_keys):
                continue
            if top_key in self._runtime_keys and REFERENCE.fullmatch(f"${{{name}}}"):
                continue
            if name not in self._swept_variables:
                self._report_unknown(node, key, name)
            elif not is_per_trial:
                message = f"${{{name}}} is a variable of the sweep, and is allowed only in args and env"
                self._problems.append(Problem(node.source, node.line, key, message))
        if is_per_trial:
            return node._replace(text=text)
        escape = _ESCAPE_BUT_OF_REFERENCES if top_key in self._runtime_keys else _ESCAPE
        return node._replace(text=escape.sub("${", text))

    def _report_unknown(self, node: Scalar, key: str, name: str) -> None:
        suggestion = suggest_name(name, [*self._values, *self._swept_variables])
        escape_hint = f"; $${{{name}}} gives the literal text ${{{name}}}, for the shell in setup or teardown"
        message = f"no variable {name!r}{suggestion or escape_hint}"
        self._problems.append(Problem(node.source, node.line, key, message))


def assignments(texts: tuple[str, ...]) -> dict[str, str]:
    """Return ``NAME=VALUE`` texts as a mapping.

    Raises:
        RequestInvalid: a text is not of that form.
    """
    problems = [f"--set {text!r}: write NAME=VALUE" for text in texts if "=" not in text]
    if problems:
        raise RequestInvalid(problems)
    return dict(text.split("=", 1) for text in texts)
