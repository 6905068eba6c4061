"""The code that a job runs: a snapshot of the working directory, or a folder on the cluster."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dtslurm.errors import DtslurmError
from dtslurm.model.diagnostics import Checked, errors, notes
from dtslurm.model.jobs.job import JobSpec
from dtslurm.model.values import dataclass
from dtslurm.render.script import RunPlace
from dtslurm.services.request.ignored_files import mention_notices
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.store.git_tree import GitFailed, GitState, GitTree
from dtslurm.store.index import cache_folder
from dtslurm.store.snapshot import Snapshot, SnapshotFile, take

# Build products and caches: they are rebuilt at need, and links to them would mix runs up.
_BUILD_PRODUCT = re.compile(
    r"(?:^|/)(?:__pycache__|\.[a-z]+_cache|\.cache|build|dist|[^/]+\.egg-info)$|\.py[co]$"
)


@dataclass(frozen=True)
class Code:
    """A snapshot that will be copied into a run directory.

    Attributes:
        snapshot: the files.
        work_dir: the folder on the cluster that corresponds to the working directory here.
    """

    snapshot: Snapshot
    work_dir: str


def code_of(
    context: Context,
    cluster: ActiveCluster,
    request: JobRequest,
    run_place: RunPlace,
) -> Checked[Code | None]:
    """Return the snapshot to run from; None if the job runs in a folder as it is when the job starts.

    On this machine a job runs in the user's folder, as with ``sbatch``, unless a snapshot is requested.
    """
    is_requested = bool(request.snapshot or request.code_include or request.code_exclude)
    if request.chdir is not None or request.snapshot is False or not (cluster.remote or is_requested):
        return Checked(None)
    try:
        snapshot = take(
            context.transport,
            context.cwd,
            include=request.code_include,
            exclude=request.code_exclude,
            hash_cache=hash_cache(context),
        )
    except DtslurmError as error:
        return Checked(None, errors([error.message]))
    ignored_paths, notices = _find_ignored(context, snapshot), list(snapshot.notices)
    if cluster.remote:
        notices[:0] = mention_notices(context.cwd, request, snapshot, ignored_paths)
    else:
        snapshot = replace(snapshot, files=(*snapshot.files, *_make_links(snapshot, ignored_paths)))
    relative_folder = str(snapshot.inside)
    work_dir = f"{run_place.directory}/code" + ("" if relative_folder in {"", "."} else f"/{relative_folder}")
    return Checked(Code(snapshot, work_dir), [*errors(snapshot.problems), *notes(notices)])


def _find_ignored(context: Context, snapshot: Snapshot) -> list[str]:
    """Return the paths that git ignores, without build products; folders end with ``/``."""
    if snapshot.git is None:
        return []
    try:
        paths = GitTree(context.transport, snapshot.root).ignored()
    except GitFailed:
        return []
    return [path for path in paths if not _BUILD_PRODUCT.search(path.rstrip("/"))]


def _make_links(snapshot: Snapshot, ignored_paths: Sequence[str]) -> list[SnapshotFile]:
    """Return links to ignored paths and runs, so that data beside the code keeps its path."""
    if snapshot.git is None:
        return []
    included_paths = {file.path for file in snapshot.files}
    links = []
    for path in (
        *ignored_paths,
        *(run for run in snapshot.runs if not _BUILD_PRODUCT.search(run.rstrip("/"))),
    ):
        name = path.rstrip("/")
        has_content = any(included_path.startswith(f"{name}/") for included_path in included_paths)
        if name not in included_paths and not has_content:
            links.append(SnapshotFile(name, target=str(snapshot.root / name)))
    return links


def hash_cache(context: Context) -> Path:
    """Return the path of the cache of file digests."""
    return cache_folder(context.env) / "digests"


def git_state(context: Context, cluster: ActiveCluster, code: Code | None, work_dir: str) -> GitState | None:
    """Return the git state of the snapshot, or of the job's folder on this machine; None if unknown."""
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
    """Return the SHA-256 of a script that the user may still edit; empty if there is none."""
    if code is not None or cluster.remote or spec.module:
        return ""
    try:
        return hashlib.sha256((Path(spec.work_dir) / spec.script).read_bytes()).hexdigest()
    except OSError:
        return ""
