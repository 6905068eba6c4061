"""Remove what ended runs no longer need, and file contents that no run uses any more."""

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
from dtslurm.services.wiring.login_node import site_of
from dtslurm.store.wire_format import objects_folder
from dtslurm.worker.delivery import reclaim
from dtslurm.worker.lib.disk import WorkerError

# An ended job may come back by requeue until Slurm forgets it (MinJobAge, 300 s by default).
LEAST_AGE_S = 300.0
_TIMEOUT_S = 600.0
_REVIVED = (
    "it was requeued or started again meanwhile, and nothing of it was removed; dtslurm status tells more"
)


@dataclass(frozen=True)
class CleanRun:
    """One run that is over: when it ended (seconds since the epoch), and the bytes that are its own."""

    job_id: str | None
    name: str
    folder: str
    ended: int
    bytes: int


@dataclass(frozen=True)
class CodeOutputs:
    """Files that a job wrote in the ``code/`` of its run, or changed there.

    Attributes:
        folder: of the run, in the run root.
        files, bytes: how many there are, and their size on the disk.
        names: paths below ``code/``, of many the first thousand.
    """

    job_id: str | None
    name: str
    folder: str
    files: int
    bytes: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class CleanRoot:
    """What can go, or has gone, in one run root of one cluster.

    Attributes:
        objects, objects_bytes: contents that no remaining run uses.
        outputs: files in the code folders of the runs that no snapshot delivered; they are kept unless the
            user wants them deleted, and of whole runs each that has some.
        unfinished: folders that a killed delivery left more than a day ago.
        pinned: folders of runs that are kept, or whose outputs are, for the results that are pinned in them.
        needed: folders of runs that are kept as a run that stays names them, with that run's job id: it goes
            on from them, is a stage or a trial with them, or has its checkpoints there.
        trouble: why nothing could be looked at, or what could not be removed; one line each.
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
        """Bytes that are freed."""
        return self.objects_bytes + sum(run.bytes for run in self.runs)


def clean(
    context: Context,
    *,
    older_than: float,
    whole: bool = False,
    outputs: bool = False,
    remove: bool = False,
    cluster: str | None = None,
) -> list[CleanRoot]:
    """Return what can go of runs that ended over ``older_than`` seconds ago; with ``remove``, remove it.

    A run whose end is not known for sure is never touched: running, waiting, UNKNOWN.

    Args:
        whole: remove run directories as such, logs and results included, rather than only their code; but
            never what a run that stays names.
        outputs: remove as well what the job wrote in the code folder of a run; a whole run that has such
            files is kept otherwise.
    """
    found: dict[tuple[str, str, str], list[RunView]] = defaultdict(list)
    for view in views(context, every(context, cluster)):
        record = view.record
        root = str(PurePosixPath(record.run_dir).parent)
        found[record.cluster, record.profile, root].append(view)
    limit = context.clock() - age_used(older_than)
    over = {
        root: [view for view in seen if _ended(view) is not None and (_ended(view) or limit) < limit]
        for root, seen in found.items()
    }
    keep = _keep(context, [view for some in over.values() for view in some] if whole else [])
    roots = []
    options = {"whole": whole, "outputs": outputs, "remove": remove}
    for key, seen in sorted(found.items()):
        name, _, root = key
        try:
            roots.append(_one_root(context, seen[0], root, over[key], keep, options))
        except DtslurmError as error:
            roots.append(CleanRoot(name, root, trouble=(error.message,)))
    return roots


def age_used(older_than: float) -> float:
    """Return how long ago a run must have ended to be looked at."""
    return max(older_than, LEAST_AGE_S)


@dataclass(frozen=True)
class _Keep:
    """What stays of runs that are over: tokens, each with whom it is named by, and what each names."""

    needed: Mapping[str, str]
    links: Mapping[str, set[str]]
    records: Mapping[str, JobRecord]

    def who(self, token: str) -> str:
        record = self.records[token]
        return record.job_id or record.name


def _keep(context: Context, over: Sequence[RunView]) -> _Keep:
    """Look at what all runs name, those of other clusters too: two may share a run root."""
    if not over:
        return _Keep({}, {}, {})
    records = {record.token: record for record in every(context)}
    records |= {view.record.token: view.record for view in over}
    links = find_direct_references(records.values())
    return _Keep(
        find_transitive_references(links, records.keys() - {view.record.token for view in over}),
        links,
        records,
    )


def _ended(view: RunView) -> int | None:
    """Return when a run's last task ended; None unless that is certain of all of them."""
    times = [status.end_time for status in view.statuses if status.terminal]
    if view.trouble or len(times) != len(view.statuses) or None in times:
        return None
    return max((time for time in times if time is not None), default=None)


def _one_root(
    context: Context,
    any_view: RunView,
    root: str,
    over: Sequence[RunView],
    keep: _Keep,
    options: Mapping[str, bool],
) -> CleanRoot:
    cluster = context.cluster_of(any_view.record)
    folders = {view.record.token: PurePosixPath(view.record.run_dir).name for view in over}
    needed = {folders[token]: keep.who(by) for token, by in keep.needed.items() if token in folders}
    by_folder = {folders[view.record.token]: view for view in over}
    going = {folder: view.record.token for folder, view in by_folder.items() if folder not in needed}
    request = {
        "root": root,
        "objects": objects_folder(root),
        "runs": sorted(going),
        "names": {
            folder: sorted(folders[other] for other in keep.links.get(token, ()) if other in folders)
            for folder, token in going.items()
        },
        "ends": {folder: _ended(by_folder[folder]) for folder in going},
        **options,
    }
    done = _reclaim(context, cluster, request)
    runs = []
    for folder, size in done["runs"].items():
        if folder in done["revived"]:
            continue
        view = by_folder[folder]
        runs.append(CleanRun(view.record.job_id, view.record.name, folder, _ended(view) or 0, size))
        if options["whole"] and options["remove"] and f"{root}/{folder}" not in done["trouble"]:
            _forget(context, view)
    if not options["whole"]:  # a run whose code is gone already has nothing to show
        runs = [run for run in runs if run.folder in done["with_code"]]
    return CleanRoot(
        cluster.name,
        root,
        tuple(sorted(runs, key=lambda run: run.ended)),
        done["objects"]["files"],
        done["objects"]["bytes"],
        tuple(
            CodeOutputs(
                record.job_id, record.name, folder, said["files"], said["bytes"], tuple(said["names"])
            )
            for folder, said in sorted(done["outputs"].items())
            for record in [by_folder[folder].record]
        ),
        tuple(done["unfinished"]),
        tuple(done["pinned"]),
        {**needed, **{folder: keep.who(going[by]) for folder, by in done["needed"].items()}},
        (
            *(f"could not be removed: {path}" for path in done["trouble"]),
            *(f"{by_folder[folder].record.job_id}: {_REVIVED}" for folder in done["revived"]),
        ),
    )


def _forget(context: Context, view: RunView) -> None:
    try:
        context.index.remove(view.record.token)
    except StoreError:  # a mere convenience; what is gone is passed over there
        return


def _reclaim(context: Context, cluster: ActiveCluster, request: dict[str, Any]) -> dict[str, Any]:
    """Do it where the runs lie."""
    if cluster.transport.local:
        try:
            return reclaim.reclaim(request)
        except WorkerError as outcome:
            raise RequestInvalid([str(outcome.value)]) from None
    data = zlib.compress(json.dumps(request).encode("ascii"))
    parts = [struct.pack(">I", len(data)), data]
    python = site_of(context, cluster).python or "python3"
    answer = ask_worker(
        cluster.transport,
        ("lib.disk", "delivery.objects", "delivery.code_files", "delivery.reclaim"),
        parts,
        python=python,
        timeout=_TIMEOUT_S,
    )
    if "done" not in answer:
        raise RequestInvalid([str(answer.get("refused", answer))])
    done: dict[str, Any] = answer["done"]
    return done
