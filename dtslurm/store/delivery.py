"""Installs a run atomically on the machine that queues it, and queues it there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

__all__ = ["MODULES", "Delivery", "Progress", "SubmitCommand", "deliver"]

# The modules of `dtslurm.worker` that receive a delivery.
MODULES = (
    "lib.disk", "lib.json_records", "delivery.objects", "delivery.code_files", "delivery.install_run",
    "delivery.prebuilt_tree", "delivery.server",
)  # fmt: skip

# Up to this many bytes are sent at once. For more, the worker is queried for the missing contents first,
# because an interrupted transfer may have delivered them.
UNASKED = 1 << 20
_MAX_ROUNDS = 4
_LINK_ALLOWANCE_S, _MIN_LINK_SPEED = 60.0, 64_000  # seconds, bytes/s

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SubmitCommand:
    """The command that runs as soon as a run directory is complete; its stdin is closed.

    If it exits with 0 and prints a job id as ``sbatch --parsable`` does, the run's events record the id.

    Attributes:
        event: additional fields of the ``submitted`` event.
        timeout: seconds; a transfer gets the time for its size on a slow link in addition.
    """

    argv: Sequence[str] = ()
    event: Mapping[str, object] = field(default_factory=dict)
    timeout: float = 150.0


def deliver(
    transport: Transport,
    delivery: Delivery,
    command: SubmitCommand | None = None,
    *,
    worker: RemoteWorker | None = None,
    progress: Progress | None = None,
    known_objects: KnownObjects | None = None,
) -> Completed | None:
    """Install a run, then run ``command`` on the cluster; return its result, None if there is no command.

    The run directory appears complete, as the last step before ``command``. A remote delivery is one command:
    one round trip, or two if contents are missing that were expected to exist.

    Args:
        worker: the worker on the login node; by default one for this run only.
        progress: called with (bytes sent, total bytes) of file contents during the transfer.
        known_objects: the contents assumed to exist on the cluster; updated.

    Raises:
        StoreError: an error of a file system, or a file changed during the delivery. Nothing was installed.
        RunExists: the run directory exists already. Nothing was installed.
        CommandNotFound: ``command``, or the worker's Python, does not exist. Nothing was installed.
        CommandTimeout: ``command`` did not end in time; its effect is unknown.
        TransportError: the connection failed; the effect is unknown.
    """
    command = command or SubmitCommand()
    known_objects = known_objects or KnownObjects(None)
    run_request = request(delivery, command.argv, command.timeout, command.event)
    if transport.local:
        return _deliver_locally(transport, delivery, run_request, command, progress)
    worker = worker or RemoteWorker(transport, MODULES, "python3")
    contents = delivery.contents()
    missing_keys: Collection[str] = contents.keys() - known_objects.load()
    if sum(contents[key].size for key in missing_keys) > UNASKED:
        missing_keys = ()
    for _ in range(_MAX_ROUNDS):
        files_to_send = [contents[key] for key in sorted(missing_keys)]
        parts, size = _pack_request(run_request, delivery, files_to_send, progress)
        timeout_s = command.timeout + _LINK_ALLOWANCE_S + size / _MIN_LINK_SPEED
        answer = worker.ask(parts, size=size, timeout=timeout_s)
        if "missing" not in answer:
            result = _parse_answer(answer, command.argv)
            known_objects.save(frozenset(contents))
            return result
        missing_keys = [key for key in answer["missing"] if key in contents]
    raise StoreError(
        f"files that were sent to {delivery.objects} are missing there",
        evidence=[f"still missing after {_MAX_ROUNDS} rounds: {len(missing_keys)} files"],
        hint="check whether a clean-up program deletes or changes files of that folder",
    )


def _pack_request(
    run_request: Mapping[str, Any],
    delivery: Delivery,
    files: Sequence[SnapshotFile],
    progress: Progress | None,
) -> tuple[Iterator[bytes], int]:
    """Return a request with the contents of these files in parts, and its approximate size in bytes."""
    head, total = packed_request(run_request), sum(file.size for file in files)
    return _iterate_request(head, delivery, files, total, progress), len(head) + total


def _iterate_request(
    head: bytes, delivery: Delivery, files: Sequence[SnapshotFile], total: int, progress: Progress | None
) -> Iterator[bytes]:
    yield head
    if not delivery.snapshot:
        yield b"."
        return
    sent_bytes = 0
    for chunk, content_bytes in blobs(delivery.snapshot.root, files):
        yield chunk
        sent_bytes += content_bytes
        if progress and content_bytes:
            progress(sent_bytes, total)


def _parse_answer(answer: Mapping[str, Any], command: Sequence[str]) -> Completed | None:
    """Return the result of ``command``, or raise the error in the answer."""
    if "done" not in answer:
        raise _failure(answer)
    outcome = answer["done"]
    if "absent" in outcome:
        raise CommandNotFound(f"the cluster has no program {outcome['absent']}; no job was queued")
    if not outcome:
        return None
    if outcome["late"]:
        evidence = [" ".join(command), *outcome["stderr"].splitlines()[-20:]]
        raise CommandTimeout(f"{command[0]} did not end in time and was killed", evidence=evidence)
    return Completed(tuple(command), outcome["code"], outcome["stdout"], outcome["stderr"])


def _failure(answer: Mapping[str, Any]) -> DtslurmError:
    if "exists" in answer:
        return RunExists(
            f"run directory {answer['exists']} already exists",
            hint="it was not changed, and no job was queued",
        )
    if "disk" in answer:
        failure = answer["disk"]
        error = OSError(failure["errno"], os.strerror(failure["errno"] or 0), failure["path"])
        return store_error(error, failure["path"], failure["verb"], failure.get("room"))
    if "cut" in answer:
        return TransportError(f"{answer['cut']}; no run directory was created")
    if "refused" in answer:
        return RequestInvalid([f"cannot create the run directory: {answer['refused']}"])
    if "unsafe" in answer:
        return RequestInvalid([answer["unsafe"]], hint="set another run root with --run-root")
    return TransportError(
        "the worker program sent an answer that this version of dtslurm does not know", evidence=[str(answer)]
    )


def _deliver_locally(
    transport: Transport,
    delivery: Delivery,
    run_request: dict[str, Any],
    command: SubmitCommand,
    progress: Progress | None,
) -> Completed | None:
    """Install a run on this machine with the worker's code, in this process."""
    if command.argv and shutil.which(command.argv[0]) is None:
        raise CommandNotFound(f"this machine has no program {command.argv[0]}; no job was queued")
    try:
        _install_locally(delivery, run_request, progress)
    except WorkerError as worker_error:
        raise _failure({worker_error.key: worker_error.value}) from worker_error.__cause__
    if not command.argv:
        return None
    result = transport.run(command.argv, timeout=command.timeout)
    if result.ok:
        note_event(raw(delivery.run_dir), result.stdout, dict(command.event))
    return result


def _install_locally(delivery: Delivery, run_request: dict[str, Any], progress: Progress | None) -> None:
    check(run_request)
    objects = Objects(choose_objects_folder(raw(delivery.objects)))
    if delivery.snapshot:
        objects.prepare()
        root, contents = delivery.snapshot.root, delivery.contents()
        missing = [file for key, file in sorted(contents.items()) if not objects.has(key, file.size)]
        stored_bytes, total = 0, sum(file.size for file in missing)
        try:
            for file in missing:
                objects.add(file.key, content(root, file))
                stored_bytes += file.size
                if progress:
                    progress(stored_bytes, total)
        finally:
            objects.settle()
    place(run_request, objects)
