"""Submit pickled Python functions as jobs, and read their results and logs from the run directory."""

from __future__ import annotations

import contextlib
import operator
import platform
import sys
import time
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
from dtslurm.services.request.spec import remote_python
from dtslurm.services.results.fetch import fetch
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.submit.submit import submit
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.rundir import RunDir
from dtslurm.suggestions import suggest_name

FOLDER = "functions"
LAST_OUTPUT_S = 10.0  # for the output of a rank that has written its result
_RUNNER = f"{FOLDER}/dtslurm_function.py"
_PLUGIN = {  # registers `DtslurmJobEnvironment` with submitit in the rank and in its child processes
    f"{FOLDER}/dtslurm_function-1.dist-info/METADATA": (
        b"Metadata-Version: 2.1\nName: dtslurm-function\nVersion: 1\n"
    ),
    f"{FOLDER}/dtslurm_function-1.dist-info/entry_points.txt": (
        b"[submitit]\njob_environment = dtslurm_function:DtslurmJobEnvironment\n"
    ),
}
_EXCLUDED_OPTIONS = {"script", "args", "module"} | INTERNAL
_MUST_MATCH = ("submitit", "cloudpickle")
_PRINT_VERSIONS = """
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
    """Return the names of the ``submit`` options that apply to a function job."""
    return {option.name for option in fields(JobRequest)} - _EXCLUDED_OPTIONS


def request_of(options: Mapping[str, Any]) -> JobRequest:
    """Return a job request without a script, built from options given as Python values.

    A mapping stands for ``NAME=VALUE`` pairs, a list for a repeated option, a number for its text.

    Raises:
        RequestInvalid: an option does not exist, or its value has the wrong type.
    """
    names = option_names()
    if unknown := [name for name in options if name not in names]:
        raise RequestInvalid(
            [f"unknown option {name!r}{suggest_name(name, sorted(names))}" for name in unknown]
        )
    types = {option.name: str(option.type) for option in fields(JobRequest)}
    values: dict[str, Any] = {}
    problems = []
    for name, value in options.items():
        if value is None:
            continue
        try:
            convert: Callable[[Any], Any] = _CONVERTERS.get(types[name], _as_tuple)
            values[name] = convert(value)
        except (TypeError, ValueError) as error:
            problems.append(f"{name} should be {error}, not {value!r}")
    if problems:
        raise RequestInvalid(problems)
    return JobRequest(script="", **values)


def _parse_int(value: Any) -> int:
    try:
        return int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        raise ValueError("a whole number") from None


def _check_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("True or False")
    return value


_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "str | None": str,
    "int | None": _parse_int,
    "bool | None": _check_bool,
}


def _as_tuple(value: Any) -> tuple[str, ...]:
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
    """Queue pickled functions: one function as a plain job, more as job arrays.

    The number of arrays is the smallest that the cluster's MaxArraySize allows.

    Args:
        options: options of ``submit``, by name.
        folder: submitit's folder, where results are written; on a remote cluster they stay in the run
            directory.
        parallelism: how many tasks of an array may run at once; 0 for all.
        separate_streams: as in `JobSpec`.

    Returns:
        For each pickle, the run's record and the job id, with the array index if the job is an array.

    Raises:
        RequestInvalid, SubmitRejected, …: as `submit` does.
    """
    request = request_of(options)
    cluster = context.live_cluster(request.cluster, request.transport)
    if request.requeue is None and cluster.profile.slurm.requeue == "allowed":
        request = replace(request, requeue=True)  # a function resumes from its checkpoint, as with submitit
    python = _python(context, cluster, request)
    max_size = cluster.profile.slurm.max_array_size or len(pickles)
    submitted: list[tuple[JobRecord, str]] = []
    for start in range(0, len(pickles), max(1, max_size)):
        batch = pickles[start : start + max_size]
        array_request = replace(
            request,
            script=_RUNNER,
            args=() if cluster.remote else (str(folder),),
            python=python,
            launcher=request.launcher or "srun",
            array=_array(len(batch), parallelism),
            separate_streams=separate_streams,
            payload={
                _RUNNER: assets.worker("dtslurm_function.py").read_bytes(),
                **_PLUGIN,
                **{f"{FOLDER}/{number}.pkl": data for number, data in enumerate(batch)},
            },
        )
        record = submit(context, prepare(context, array_request, standalone=False))
        job_ids = (
            [f"{record.job_id}_{number}" for number in range(len(batch))]
            if array_request.array
            else [record.job_id]
        )
        submitted += [(record, job_id or "") for job_id in job_ids]
    return submitted


def _array(count: int, parallelism: int) -> str | None:
    if count == 1:
        return None
    return f"0-{count - 1}" + (f"%{parallelism}" if 0 < parallelism < count else "")


def _python(context: Context, cluster: ActiveCluster, request: JobRequest) -> str:
    """Return the job's Python interpreter, after checking that a remote interpreter can read local pickles.

    Raises:
        RequestInvalid: the remote interpreter does not run, or its versions do not match.
    """
    if request.container:
        return request.python or "python"
    if not cluster.remote:
        return request.python or sys.executable
    python = remote_python(context, cluster, request)
    output = cluster.transport.run([python, "-c", _PRINT_VERSIONS % (_MUST_MATCH,)], timeout=60)
    try:
        versions = answers.parse_object(output.stdout.splitlines()[-1], python)
        problems = answers.interpret(
            versions, partial(_find_version_differences, host=cluster.transport.host), python
        )
    except (IndexError, TransportError):
        raise RequestInvalid(
            [f"{python} on {cluster.transport.host} does not run: {output.stderr.strip()[-500:]}"],
            hint="name the project's interpreter on the cluster with python=, or with environment.python "
            "in the profile",
        ) from None
    if problems:
        raise RequestInvalid(
            problems, hint=f"the interpreter on the cluster is {python}; python= selects another"
        )
    return python


def _find_version_differences(there: Mapping[str, str], host: str) -> list[str]:
    """Return the version differences that may keep the remote interpreter from reading local pickles."""
    local_python = platform.python_version()
    problems = []
    if there["python"].split(".")[:2] != local_python.split(".")[:2]:
        problems.append(
            f"Python is {local_python} on this machine and {there['python']} on {host}; pickled "
            "functions need the same version"
        )
    for name in _MUST_MATCH:
        local_version = metadata.version(name)
        if not there.get(name):
            problems.append(f"{host} has no {name}; run pip install {name}=={local_version} on {host}")
        elif there[name].split(".")[0] != local_version.split(".")[0]:
            problems.append(f"{name} is {local_version} on this machine and {there[name]} on {host}")
    return problems


def fetch_result(context: Context, record: JobRecord, name: str, folder: Path) -> bool:
    """Copy one result file from a remote run directory; return whether the file existed."""
    functions_record = replace(record, run_dir=f"{record.run_dir}/{FOLDER}")
    try:
        return bool(fetch(context, functions_record, [name], folder).files)
    except (JobNotFound, TransportError):  # not written yet, or the cluster cannot be reached now
        return False


def wait_for_rank_end(record: JobRecord, task: str, rank: int) -> None:
    """Wait until a rank that has written its result has also ended, so that its output is complete.

    The wait ends after LAST_OUTPUT_S, because a node may be lost between the two, and if the run directory
    has been removed.
    """
    run = RunDir(Path(record.folder) / (f"tasks/{task}/" if task else ""))
    deadline = time.monotonic() + LAST_OUTPUT_S
    while time.monotonic() < deadline and (attempts := run.attempts()):
        ranks = run.ranks(attempts[-1])
        if any(item.rank == rank and item.exit_code is not None for item in ranks):
            return
        time.sleep(0.05)


def log_of(context: Context, record: JobRecord, task: str, rank: int, stream: str = "log") -> str | None:
    """Return the output of a rank over all attempts, oldest first; None if there is no output yet.

    Args:
        task: the array task's index, empty if the job is not an array.
        stream: ``out``, ``err``, or ``log`` for both.
    """
    prefix = f"tasks/{task}/" if task else ""
    if record.mirror:
        with contextlib.suppress(JobNotFound, TransportError):  # without a connection, read the local copy
            fetch(context, record, [f"{prefix}logs/*/rank-{rank}.{stream}"], Path(record.mirror))
    run = RunDir(Path(record.folder) / prefix)
    paths = [run.logs(attempt) / f"rank-{rank}.{stream}" for attempt in run.attempts()]
    texts = [path.read_text("utf-8", "replace") for path in paths if path.is_file()]
    return "".join(texts) if texts else None
