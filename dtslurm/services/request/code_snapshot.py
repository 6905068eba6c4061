"""Which code a job runs: a copy of what is here now, or a folder on the cluster as it is then."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dtslurm.errors import DtslurmError
from dtslurm.model.jobs.job import JobSpec
from dtslurm.model.values import dataclass
from dtslurm.render.script import RunPlace
from dtslurm.services.request.ignored_files import mention_notices
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.git_tree import GitFailed, GitState, GitTree
from dtslurm.store.index import cache_folder
from dtslurm.store.snapshot import Snapshot, SnapshotFile, take

# What is made again at need; links to it would only mix runs up.
_MADE = re.compile(r"(?:^|/)(?:__pycache__|\.[a-z]+_cache|\.cache|build|dist|[^/]+\.egg-info)$|\.py[co]$")


@dataclass(frozen=True)
class Code:
    """A snapshot on its way into a run directory.

    Attributes:
        work_dir: the folder on the cluster that stands for the one here.
        notices: what the user should know of it, each one line.
    """

    snapshot: Snapshot
    work_dir: str
    notices: tuple[str, ...] = ()


def code_of(
    context: Context,
    cluster: ActiveCluster,
    request: JobRequest,
    where: RunPlace,
    problems: list[str],
    notices: list[str],
) -> Code | None:
    """Return the snapshot to run from; None where the job runs in a folder as that is when it starts.

    On this machine the job runs in the user's folder, as one of ``sbatch`` does, unless a snapshot is asked
    for.
    """
    asked = bool(request.snapshot or request.code_include or request.code_exclude)
    if request.chdir is not None or request.snapshot is False or not (cluster.remote or asked):
        return None
    try:
        snapshot = take(
            context.transport,
            context.cwd,
            include=request.code_include,
            exclude=request.code_exclude,
            hash_cache=hash_cache(context),
        )
    except DtslurmError as error:
        problems.append(error.message)
        return None
    problems += snapshot.problems
    ignored = _ignored(context, snapshot)
    if cluster.remote:
        notices += mention_notices(context.cwd, request, snapshot, ignored)
    else:
        snapshot = replace(snapshot, files=(*snapshot.files, *_links(snapshot, ignored)))
    inside = str(snapshot.inside)
    work_dir = f"{where.directory}/code" + ("" if inside in {"", "."} else f"/{inside}")
    return Code(snapshot, work_dir, tuple(snapshot.notices))


def _ignored(context: Context, snapshot: Snapshot) -> list[str]:
    """Return what git ignores of a work tree, without what is made again at need; folders end with ``/``."""
    if snapshot.git is None:
        return []
    try:
        ignored = GitTree(context.transport, snapshot.root).ignored()
    except GitFailed:
        return []
    return [path for path in ignored if not _MADE.search(path.rstrip("/"))]


def _links(snapshot: Snapshot, ignored: Sequence[str]) -> list[SnapshotFile]:
    """Return links for what git ignores, and runs: data beside the code is found where it always was."""
    if snapshot.git is None:
        return []
    taken = {one.path for one in snapshot.files}
    links = []
    for path in (*ignored, *(run for run in snapshot.runs if not _MADE.search(run.rstrip("/")))):
        name = path.rstrip("/")
        inside = any(one.startswith(f"{name}/") for one in taken)
        if name not in taken and not inside:
            links.append(SnapshotFile(name, target=str(snapshot.root / name)))
    return links


def hash_cache(context: Context) -> Path:
    """Return where digests of files are remembered."""
    return cache_folder(context.env) / "digests"


def git_state(context: Context, cluster: ActiveCluster, code: Code | None, work_dir: str) -> GitState | None:
    """Return the commit that the snapshot was taken at, or the job's folder on this machine is at."""
    if code is not None:
        return code.snapshot.git
    if cluster.remote:
        return None
    try:
        tree = GitTree.around(context.transport, Path(work_dir))
        return tree.state() if tree else None
    except GitFailed:
        return None


def script_digest(cluster: ActiveCluster, code: Code | None, spec: JobSpec) -> str:
    """Return the SHA-256 of a script that the user may still edit, empty where there is none."""
    if code is not None or cluster.remote or spec.module:
        return ""
    try:
        return hashlib.sha256((Path(spec.work_dir) / spec.script).read_bytes()).hexdigest()
    except OSError:
        return ""
