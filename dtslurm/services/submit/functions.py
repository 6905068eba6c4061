"""Python functions as jobs: pickles in the run directory, results back from it."""

from __future__ import annotations

import contextlib
import operator
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from dtslurm import assets
from dtslurm.errors import JobNotFound, RequestInvalid, TransportError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.remote import answers
from dtslurm.services.request.request import INTERNAL, JobRequest
from dtslurm.services.results.fetch import fetch
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.rundir import RunDir
from dtslurm.suggestions import suggest_name

FOLDER = "functions"
_RUNNER = f"{FOLDER}/dtslurm_function.py"
_PLUGIN = {  # registers `DtslurmJobEnvironment` with submitit in the rank and its child processes
    f"{FOLDER}/dtslurm_function-1.dist-info/METADATA": (
        b"Metadata-Version: 2.1\nName: dtslurm-function\nVersion: 1\n"
    ),
    f"{FOLDER}/dtslurm_function-1.dist-info/entry_points.txt": (
        b"[submitit]\njob_environment = dtslurm_function:DtslurmJobEnvironment\n"
    ),
}
_NOT_OF_FUNCTIONS = {"script", "args", "module"} | INTERNAL
_MUST_MATCH = ("submitit", "cloudpickle")
_TELL = """
import json, platform
from importlib import metadata
found = {"python": platform.python_version()}
for name in %r:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = ""
print("\\n" + json.dumps(found))
"""


def option_names() -> set[str]:
    """Return the options of ``submit`` that a job of a function takes."""
    return {item.name for item in fields(JobRequest)} - _NOT_OF_FUNCTIONS


def request_of(options: Mapping[str, Any]) -> JobRequest:
    """Return a request without script whose options are given as Python has them.

    Mappings stand for ``NAME=VALUE``, lists for options given more than once, numbers for their text.

    Raises:
        RequestInvalid: there is no option of that name, or it takes another kind of value.
    """
    known = option_names()
    if unknown := [name for name in options if name not in known]:
        raise RequestInvalid(
            [f"there is no option {name!r}{suggest_name(name, sorted(known))}" for name in unknown]
        )
    types = {item.name: str(item.type) for item in fields(JobRequest)}
    values: dict[str, Any] = {}
    problems = []
    for name, value in options.items():
        if value is None:
            continue
        try:
            convert: Callable[[Any], Any] = _AS_WRITTEN.get(types[name], _listed)
            values[name] = convert(value)
        except (TypeError, ValueError) as error:
            problems.append(f"{name} should be {error}, not {value!r}")
    if problems:
        raise RequestInvalid(problems)
    return JobRequest(script="", **values)


def _whole(value: Any) -> int:
    try:
        return int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        raise ValueError("a whole number") from None


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("True or False")
    return value


_AS_WRITTEN: Mapping[str, Callable[[Any], Any]] = {
    "str | None": str,
    "int | None": _whole,
    "bool | None": _truth,
}


def _listed(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        return tuple(key if text is None else f"{key}={text}" for key, text in value.items())
    if not isinstance(value, str | Iterable):
        raise TypeError("a text or a list of them")
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def submit_functions(
    context: Context,
    pickles: Sequence[bytes],
    options: Mapping[str, Any],
    folder: Path,
    parallelism: int = 0,
    *,
    separate_streams: bool = False,
) -> list[tuple[JobRecord, str]]:
    """Queue pickled functions: one job of one, else as few arrays as the site's limit allows.

    Args:
        options: of ``submit``.
        folder: submitit's folder, where results go; on another machine they stay in the run directory.
        parallelism: how many of an array may run at once; 0 for all.
        separate_streams: as in `JobSpec`.

    Returns:
        The run and the job id, with the array index if there is one, for each pickle.

    Raises:
        RequestInvalid, SubmitRejected, …: as ``submit`` does.
    """
    request = request_of(options)
    cluster = context.live_cluster(request.cluster, request.transport)
    if request.requeue is None and cluster.profile.slurm.requeue == "allowed":
        request = replace(request, requeue=True)  # a function goes on by its checkpoint, as with submitit
    python = _python(context, cluster, request)
    size = cluster.profile.slurm.max_array_size or len(pickles)
    queued: list[tuple[JobRecord, str]] = []
    for start in range(0, len(pickles), max(1, size)):
        part = pickles[start : start + size]
        asked = replace(
            request,
            script=_RUNNER,
            args=() if cluster.remote else (str(folder),),
            python=python,
            launcher=request.launcher or "srun",
            array=_array(len(part), parallelism),
            separate_streams=separate_streams,
            payload={
                _RUNNER: assets.worker("dtslurm_function.py").read_bytes(),
                **_PLUGIN,
                **{f"{FOLDER}/{number}.pkl": data for number, data in enumerate(part)},
            },
        )
        record = submit(context, prepare(context, asked, standalone=False))
        ids = [f"{record.job_id}_{number}" for number in range(len(part))] if asked.array else [record.job_id]
        queued += [(record, job_id or "") for job_id in ids]
    return queued


def _array(count: int, parallelism: int) -> str | None:
    if count == 1:
        return None
    return f"0-{count - 1}" + (f"%{parallelism}" if 0 < parallelism < count else "")


def _python(context: Context, cluster: ActiveCluster, request: JobRequest) -> str:
    """Return the interpreter of the job; on another machine one that can read our pickles.

    Raises:
        RequestInvalid: it cannot.
    """
    if request.container:
        return request.python or "python"
    if not cluster.remote:
        return request.python or sys.executable
    python = request.python or cluster.profile.environment.python or "python3"
    answer = cluster.transport.run([python, "-c", _TELL % (_MUST_MATCH,)], timeout=60)
    try:
        there = answers.parse_object(answer.stdout.splitlines()[-1], python)
        problems = answers.interpret(there, partial(_differences, host=cluster.transport.host), python)
    except (IndexError, TransportError):
        raise RequestInvalid(
            [f"{python} on {cluster.transport.host} does not run: {answer.stderr.strip()[-500:]}"],
            hint="name the project's interpreter there by python=, or by environment.python in the profile",
        ) from None
    if problems:
        raise RequestInvalid(problems, hint=f"the interpreter there is {python}; python= names another")
    return python


def _differences(there: Mapping[str, str], host: str) -> list[str]:
    """Return why pickles made here may not be read there."""
    here = platform.python_version()
    problems = []
    if there["python"].split(".")[:2] != here.split(".")[:2]:
        problems.append(f"Python is {here} here and {there['python']} on {host}; pickled code needs the same")
    for name in _MUST_MATCH:
        mine = metadata.version(name)
        if not there.get(name):
            problems.append(f"{host} has no {name}; pip install {name}=={mine} there")
        elif there[name].split(".")[0] != mine.split(".")[0]:
            problems.append(f"{name} is {mine} here and {there[name]} on {host}")
    return problems


def bring(context: Context, record: JobRecord, name: str, folder: Path) -> bool:
    """Copy one result from a run's folder on another machine; return whether it was there."""
    away = replace(record, run_dir=f"{record.run_dir}/{FOLDER}")
    try:
        return bool(fetch(context, away, [name], folder).files)
    except (JobNotFound, TransportError):  # not written yet, or not to be had now
        return False


def log_of(context: Context, record: JobRecord, task: str, rank: int, stream: str = "log") -> str | None:
    """Return what a rank has written in all attempts, the oldest first; None where there is nothing yet.

    Args:
        task: the array task's index, empty for a job that is no array.
        stream: ``out``, ``err``, or ``log`` for both.
    """
    below = f"tasks/{task}/" if task else ""
    if record.mirror:
        with contextlib.suppress(JobNotFound, TransportError):  # what is here is told
            fetch(context, record, [f"{below}logs/*/rank-{rank}.{stream}"], Path(record.mirror))
    run = RunDir(Path(record.folder) / below)
    paths = [run.logs(attempt) / f"rank-{rank}.{stream}" for attempt in run.attempts()]
    texts = [path.read_text("utf-8", "replace") for path in paths if path.is_file()]
    return "".join(texts) if texts else None
