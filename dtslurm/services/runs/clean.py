"""Remove code or run directories of ended runs, and stored file contents that no run uses."""

from __future__ import annotations

import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import PurePosixPath
from typing import Any

from dtslurm.errors import DtslurmError, RequestInvalid, StoreError
from dtslurm.model.runs.record import JobRecord
from dtslurm.model.values import dataclass
from dtslurm.remote.remote_worker import ask_worker
from dtslurm.services.runs.references import find_direct_references, find_transitive_references
from dtslurm.services.runs.runs import every
from dtslurm.services.runs.status import RunView, views
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.services.wiring.login_node import query_login_node
from dtslurm.store.wire_format import objects_folder
from dtslurm.worker.delivery import reclaim
from dtslurm.worker.lib.disk import WorkerError

# A requeue can revive an ended job until Slurm purges the job (MinJobAge, 300 s by default).
LEAST_AGE_S = 300.0
_TIMEOUT_S = 600.0
_REVIVED = "the run was requeued or started again in the meantime, so nothing was deleted; see dtslurm status"


@dataclass(frozen=True)
class CleanRun:
    """One ended run: the end in seconds since the epoch, and the bytes that only this run uses."""

    job_id: str | None
    name: str
    folder: str
    ended: int
    bytes: int


@dataclass(frozen=True)
class CodeOutputs:
    """Files that a job created or changed in the ``code/`` folder of its run.

    Attributes:
        folder: name of the run directory in the run root.
        files, bytes: number of files, and their size on disk.
        names: paths below ``code/``; at most the first thousand.
    """

    job_id: str | None
    name: str
    folder: str
    files: int
    bytes: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class CleanRoot:
    """The items that can be removed, or were removed, in one run root of one cluster.

    Attributes:
        objects, objects_bytes: number and size of stored contents that no remaining run uses.
        outputs: files in the runs' code folders that are not part of the snapshot. They are kept unless their
            removal is requested; if whole runs are removed, a run with such files is kept.
        unfinished: folders that a killed delivery left more than a day ago.
        pinned: folders of runs that are kept, or whose outputs are kept, because they contain pinned results.
        needed: folders of runs that are kept because a remaining run refers to them, with the job id of that
            run: it continues them, shares a job file or a sweep with them, or has its checkpoints there.
        trouble: why the run root could not be examined, or which paths could not be removed; one line each.
    """

    cluster: str
    root: str
    runs: tuple[CleanRun, ...] = ()
    objects: int = 0
    objects_bytes: int = 0
    outputs: tuple[CodeOutputs, ...] = ()
    unfinished: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    needed: Mapping[str, str] = field(default_factory=dict)
    trouble: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The number of bytes that are freed."""
        return self.objects_bytes + sum(run.bytes for run in self.runs)


def clean(
    context: Context,
    *,
    older_than: float,
    whole_runs: bool = False,
    outputs: bool = False,
    remove: bool = False,
    cluster: str | None = None,
) -> list[CleanRoot]:
    """List the removable files of runs that ended over ``older_than`` seconds ago; remove them if ``remove``.

    A run without a certain end (running, pending or UNKNOWN) is never touched.

    Args:
        whole_runs: remove run directories with logs and results instead of only their code, except those
            that a remaining run refers to.
        outputs: also remove the files that the job wrote in the run's code folder; otherwise a whole run with
            such files is kept.
    """
    views_by_root: dict[tuple[str, str, str], list[RunView]] = defaultdict(list)
    for view in views(context, every(context, cluster)):
        record = view.record
        root = str(PurePosixPath(record.run_dir).parent)
        views_by_root[record.cluster, record.profile, root].append(view)
    cutoff = context.clock() - age_used(older_than)
    ended_by_root = {
        root: [
            view
            for view in root_views
            if _end_time(view) is not None and (_end_time(view) or cutoff) < cutoff
        ]
        for root, root_views in views_by_root.items()
    }
    retention = _find_retained(
        context,
        [view for ended_views in ended_by_root.values() for view in ended_views] if whole_runs else [],
    )
    roots = []
    options = {"whole": whole_runs, "outputs": outputs, "remove": remove}
    for key, root_views in sorted(views_by_root.items()):
        name, _, root = key
        try:
            roots.append(_clean_root(context, root_views[0], root, ended_by_root[key], retention, options))
        except DtslurmError as error:
            roots.append(CleanRoot(name, root, trouble=(error.message,)))
    return roots


def age_used(older_than: float) -> float:
    """Return the minimum time since the end of a run to clean, in seconds."""
    return max(older_than, LEAST_AGE_S)


@dataclass(frozen=True)
class _Retention:
    """The ended runs to keep (token: token of the run that refers to it), and the references of each run."""

    needed: Mapping[str, str]
    links: Mapping[str, set[str]]
    records: Mapping[str, JobRecord]

    def who(self, token: str) -> str:
        record = self.records[token]
        return record.job_id or record.name


def _find_retained(context: Context, ended_views: Sequence[RunView]) -> _Retention:
    """Find the ended runs that runs of any cluster refer to, because clusters may share a run root."""
    if not ended_views:
        return _Retention({}, {}, {})
    records = {record.token: record for record in every(context)}
    records |= {view.record.token: view.record for view in ended_views}
    links = find_direct_references(records.values())
    return _Retention(
        find_transitive_references(links, records.keys() - {view.record.token for view in ended_views}),
        links,
        records,
    )


def _end_time(view: RunView) -> int | None:
    """Return the end time of a run's last task; None unless the end of every task is certain."""
    times = [status.end_time for status in view.statuses if status.terminal]
    if view.trouble or len(times) != len(view.statuses) or None in times:
        return None
    return max((time for time in times if time is not None), default=None)


def _clean_root(
    context: Context,
    any_view: RunView,
    root: str,
    ended_views: Sequence[RunView],
    retention: _Retention,
    options: Mapping[str, bool],
) -> CleanRoot:
    cluster = context.cluster_of(any_view.record)
    folders = {view.record.token: PurePosixPath(view.record.run_dir).name for view in ended_views}
    needed_folders = {
        folders[token]: retention.who(referrer)
        for token, referrer in retention.needed.items()
        if token in folders
    }
    by_folder = {folders[view.record.token]: view for view in ended_views}
    removable = {
        folder: view.record.token for folder, view in by_folder.items() if folder not in needed_folders
    }
    request = {
        "root": root,
        "objects": objects_folder(root),
        "runs": sorted(removable),
        "names": {
            folder: sorted(
                folders[other_token]
                for other_token in retention.links.get(token, ())
                if other_token in folders
            )
            for folder, token in removable.items()
        },
        "ends": {folder: _end_time(by_folder[folder]) for folder in removable},
        **options,
    }
    report = _reclaim(context, cluster, request)
    runs = []
    for folder, size in report["runs"].items():
        if folder in report["revived"]:
            continue
        view = by_folder[folder]
        runs.append(CleanRun(view.record.job_id, view.record.name, folder, _end_time(view) or 0, size))
        if options["whole"] and options["remove"] and f"{root}/{folder}" not in report["trouble"]:
            _remove_from_index(context, view)
    if not options["whole"]:  # leave out runs whose code was already removed
        runs = [run for run in runs if run.folder in report["with_code"]]
    return CleanRoot(
        cluster.name,
        root,
        tuple(sorted(runs, key=lambda run: run.ended)),
        report["objects"]["files"],
        report["objects"]["bytes"],
        tuple(
            CodeOutputs(
                record.job_id,
                record.name,
                folder,
                output["files"],
                output["bytes"],
                tuple(output["names"]),
            )
            for folder, output in sorted(report["outputs"].items())
            for record in [by_folder[folder].record]
        ),
        tuple(report["unfinished"]),
        tuple(report["pinned"]),
        {
            **needed_folders,
            **{folder: retention.who(removable[referrer]) for folder, referrer in report["needed"].items()},
        },
        (
            *(f"could not delete {path}" for path in report["trouble"]),
            *(f"{by_folder[folder].record.job_id}: {_REVIVED}" for folder in report["revived"]),
        ),
    )


def _remove_from_index(context: Context, view: RunView) -> None:
    try:
        context.index.remove(view.record.token)
    except StoreError:  # readers of the index skip missing runs
        return


def _reclaim(context: Context, cluster: ActiveCluster, request: dict[str, Any]) -> dict[str, Any]:
    """Run the worker program that lists or removes files on the machine of the run root."""
    if cluster.transport.local:
        try:
            return reclaim.reclaim(request)
        except WorkerError as outcome:
            raise RequestInvalid([str(outcome.value)]) from None
    payload = zlib.compress(json.dumps(request).encode("ascii"))
    parts = [struct.pack(">I", len(payload)), payload]
    python = query_login_node(context, cluster).python or "python3"
    answer = ask_worker(
        cluster.transport,
        ("lib.disk", "lib.json_records", "delivery.objects", "delivery.code_files", "delivery.reclaim"),
        parts,
        python=python,
        timeout=_TIMEOUT_S,
    )
    if "done" not in answer:
        raise RequestInvalid([str(answer.get("refused", answer))])
    report: dict[str, Any] = answer["done"]
    return report
