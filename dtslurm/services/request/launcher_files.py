"""The files that options of a launcher name, which must exist when the job starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from dtslurm.errors import RequestInvalid
from dtslurm.launch import registry
from dtslurm.model.diagnostics import Diagnostic, errors
from dtslurm.model.jobs.job import JobSpec, Submission
from dtslurm.services.request.code_snapshot import Code
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context


def list_needed_files(submission: Submission, host_text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (``f``, path, problem if it is no file) for each file that must exist on the job's machine.

    `find_unsent` checks the files of the snapshot, which is not on that machine yet.
    """
    spec = submission.spec
    for option, path in _named_files(spec):
        full_path = str(PurePosixPath(spec.work_dir) / path)
        if not (spec.container if path.startswith("/") else submission.runs_from_snapshot):
            yield "f", full_path, f"{option}: {full_path} does not exist {host_text}"


def find_unsent(
    context: Context, cluster: ActiveCluster, request: JobRequest, spec: JobSpec, code: Code | None
) -> Sequence[Diagnostic]:
    """Return a problem for each file that the snapshot lacks; none with ``--no-check``."""
    if request.no_check or code is None or code.snapshot.problems:
        return ()
    problems = []
    for option, path in _named_files(spec):
        file = context.cwd.resolve() / path
        if path.startswith("/"):
            continue
        if not file.is_file():
            problems.append(f"{option}: {file} does not exist here")
        elif cluster.remote and not (code.snapshot.holds(file) or code.snapshot.holds(file.resolve())):
            problems.append(
                f"{option}: the file is not copied with the code of {code.snapshot.root}; include it with "
                "--code-include, or give its path on the cluster"
            )
    return errors(problems)


def _named_files(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield (option as written, path); setup lines of the job may write the files, so it then has none."""
    if spec.setup:
        return
    try:
        launcher = registry.load(spec.launcher).chosen(spec)
    except RequestInvalid:
        return
    for name, option in launcher.options.items():
        if option.file and (path := launcher.option(spec, name)):
            yield f"--launcher-option {name}={path}", path
