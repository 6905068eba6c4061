"""Brings a run to the machine that queues it, whole or not at all, and queues it there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from dtslurm.errors import (
    CommandNotFound,
    CommandTimeout,
    DtslurmError,
    RequestInvalid,
    RunExists,
    StoreError,
    TransportError,
)
from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.store.known_objects import KnownObjects
from dtslurm.store.snapshot import SnapshotFile
from dtslurm.store.wire_format import Delivery, blobs, content, packed_request, request
from dtslurm.transport.base import Completed, Transport
from dtslurm.transport.disk import store_error
from dtslurm.worker.delivery.install_run import check, place
from dtslurm.worker.delivery.objects import Objects, choose_objects_folder
from dtslurm.worker.delivery.server import note_event
from dtslurm.worker.lib.disk import WorkerError, raw

__all__ = ["MODULES", "Delivery", "Progress", "deliver"]

# Of `dtslurm.worker`: what takes a parcel in.
MODULES = (
    "lib.disk", "delivery.objects", "delivery.code_files", "delivery.install_run", "delivery.prebuilt_tree",
    "delivery.server",
)  # fmt: skip

# Up to this much is sent unasked; above it, asking first may spare it all: an earlier transfer was cut.
UNASKED = 1 << 20
_ROUNDS = 4
_LINK_ALLOWANCE_S, _SLOWEST_LINK = 60.0, 64_000  # seconds, bytes/s

Progress = Callable[[int, int], None]


def deliver(  # noqa: PLR0913  the brief facts of a submission, each optional
    transport: Transport,
    parcel: Delivery,
    *,
    then: Sequence[str] = (),
    event: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    python: str = "python3",
    worker: RemoteWorker | None = None,
    timeout: float = 150.0,
    progress: Progress | None = None,
    known: KnownObjects | None = None,
) -> Completed | None:
    """Place a run, then run ``then`` there; return what ``then`` answered, None without one.

    The run directory appears with everything in it, as the last act before ``then``. When ``then`` ends with
    0 and prints a job id as ``sbatch --parsable`` does, the run's events say so. Over a link all of it is one
    command: one round trip, two if contents must be sent that were not expected to be missing.

    Args:
        then: a command; what it runs in has a closed stdin.
        event: more to write into the ``submitted`` event.
        env: variables for ``then``.
        python: Python 3.6 or later on the far side.
        worker: who takes the run in on the far side; one for this run only by default.
        timeout: seconds for ``then``; a transfer gets what its size needs on a slow link besides.
        progress: called with (bytes sent, bytes in all) of file contents while they are sent.
        known: which contents are believed to be there; updated.

    Raises:
        StoreError: a disk refused, or a file changed meanwhile. Nothing was placed.
        RunExists: there is such a run directory. Nothing was placed.
        CommandNotFound: ``then``, or the worker's Python, is not there. Nothing was placed.
        CommandTimeout: ``then`` did not end in time; what it did is unknown.
        TransportError: the link failed; what happened is unknown.
    """
    known = known or KnownObjects(None)
    if transport.local:
        return _deliver_here(transport, parcel, then, event or {}, env, timeout, progress)
    worker = worker or RemoteWorker(transport, MODULES, python)
    asked = request(parcel, then, timeout, event or {})
    contents = parcel.contents()
    send: Collection[str] = contents.keys() - known.load()
    if sum(contents[key].size for key in send) > UNASKED:
        send = ()
    for _ in range(_ROUNDS):
        sent = [contents[key] for key in sorted(send)]
        answer = _exchange(worker, parcel, asked, sent, env, timeout, progress)
        if "missing" not in answer:
            done = _result(answer, then)
            known.save(frozenset(contents))
            return done
        send = [key for key in answer["missing"] if key in contents]
    raise StoreError(
        f"{parcel.objects} loses the files that are sent there",
        evidence=[f"still missing after {_ROUNDS} rounds: {len(send)} files"],
        hint="does something clean that folder up, or change its files?",
    )


def _exchange(
    worker: RemoteWorker,
    parcel: Delivery,
    asked: Mapping[str, Any],
    sent: Sequence[SnapshotFile],
    env: Mapping[str, str] | None,
    timeout: float,
    progress: Progress | None,
) -> dict[str, Any]:
    """Send a request with these files' contents and return the answer."""
    total = sum(one.size for one in sent)
    head = packed_request(asked)
    limit = timeout + _LINK_ALLOWANCE_S + total / _SLOWEST_LINK
    parts = _stream(head, parcel, sent, total, progress)
    return worker.ask(parts, size=len(head) + total, timeout=limit, env=env)


def _stream(
    head: bytes, parcel: Delivery, sent: Sequence[SnapshotFile], total: int, progress: Progress | None
) -> Iterator[bytes]:
    yield head
    if not parcel.snapshot:
        yield b"."
        return
    count = 0
    for part, stands_for in blobs(parcel.snapshot.root, sent):
        yield part
        count += stands_for
        if progress and stands_for:
            progress(count, total)


def _result(answer: Mapping[str, Any], then: Sequence[str]) -> Completed | None:
    """Return what ``then`` said, or raise what went wrong."""
    if "done" not in answer:
        raise _failure(answer)
    said = answer["done"]
    if "absent" in said:
        raise CommandNotFound(f"there is no program {said['absent']} on the cluster; nothing was queued")
    if not said:
        return None
    if said["late"]:
        evidence = [" ".join(then), *said["stderr"].splitlines()[-20:]]
        raise CommandTimeout(f"{then[0]} did not end in time and was killed", evidence=evidence)
    return Completed(tuple(then), said["code"], said["stdout"], said["stderr"])


def _failure(answer: Mapping[str, Any]) -> DtslurmError:
    if "exists" in answer:
        return RunExists(
            f"there is a run in {answer['exists']} already",
            hint="nothing of it was touched, nothing was queued",
        )
    if "disk" in answer:
        said = answer["disk"]
        error = OSError(said["errno"], os.strerror(said["errno"] or 0), said["path"])
        return store_error(error, said["path"], said["verb"], said.get("room"))
    if "cut" in answer:
        return TransportError(f"{answer['cut']}; nothing was placed")
    if "refused" in answer:
        return RequestInvalid([f"the run cannot be placed: {answer['refused']}"])
    if "unsafe" in answer:
        return RequestInvalid([answer["unsafe"]], hint="name another place by --run-root")
    return TransportError(
        "the far side gave an answer that this version does not know", evidence=[str(answer)]
    )


def _deliver_here(
    transport: Transport,
    parcel: Delivery,
    then: Sequence[str],
    event: Mapping[str, object],
    env: Mapping[str, str] | None,
    timeout: float,
    progress: Progress | None,
) -> Completed | None:
    """Place a run on this machine with the far side's own code, in this process."""
    if then and shutil.which(then[0], path=(env or os.environ).get("PATH")) is None:
        raise CommandNotFound(f"there is no program {then[0]} on this machine; nothing was queued")
    try:
        _place_here(parcel, request(parcel, then, timeout, event), progress)
    except WorkerError as outcome:
        raise _failure({outcome.key: outcome.value}) from outcome.__cause__
    if not then:
        return None
    done = transport.run(then, timeout=timeout, env=env)
    if done.ok:
        note_event(raw(parcel.run_dir), done.stdout, dict(event))
    return done


def _place_here(parcel: Delivery, asked: dict[str, Any], progress: Progress | None) -> None:
    check(asked)
    objects = Objects(choose_objects_folder(raw(parcel.objects)))
    if parcel.snapshot:
        objects.prepare()
        root, contents = parcel.snapshot.root, parcel.contents()
        missing = [one for key, one in sorted(contents.items()) if not objects.has(key, one.size)]
        count, total = 0, sum(one.size for one in missing)
        try:
            for one in missing:
                objects.add(one.key, content(root, one))
                count += one.size
                if progress:
                    progress(count, total)
        finally:
            objects.settle()
    place(asked, objects)
