"""Copy results from the nodes' local disks to the shared file system: on the early signal, and at the end.

::

    TO/node-0/...       the results of node 0, each file complete: copied under another name, then renamed
    TO/node-0.json      the files with sizes and checksums; "final" once training has ended

A pass copies only new files, so the next pass continues an interrupted one.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Sequence

from ..lib.json_records import read_object
from ..lib.locks import acquire_lock
from . import copying
from .files import CHUNK, Failed, Listed, at, event, human, put, tree
from .node import name, rank
from .request import Item, expand

PART = ".dtslurm-part"


def target_of(item: Item) -> str:
    """Return the shared destination folder of an item; a relative path is below the run directory."""
    return os.path.join(os.environ["DTSLURM_RUN_DIR"], item.to)


def bring_back(item: Item, final: bool) -> Dict[str, Any]:
    """Copy this node's new results; return a summary.

    Raises:
        Failed, OSError: a file could not be copied; copied files are kept.
    """
    try:
        source = expand(item.source, dict(os.environ))
    except ValueError as error:
        raise Failed("{}: {}".format(item.source, error)) from None
    target = os.path.join(target_of(item), "node-{}".format(rank()))
    try:
        files = [listed for listed in tree(source) if not listed[0].endswith(PART)]
    except FileNotFoundError:
        return {"node": name(), "absent": True}
    os.makedirs(target, exist_ok=True)
    with serialize_passes(target):
        return _copy_new_results(source, target, files, final)


@contextlib.contextmanager
def serialize_passes(target: str) -> Iterator[None]:
    """Serialize the pass of the early signal and the final pass, if the file system supports locks."""
    lock = os.path.join(os.path.dirname(target), ".{}.lock".format(os.path.basename(target)))
    with open(lock, "a") as file:
        with contextlib.suppress(OSError):
            acquire_lock(file)
        yield


def _copy_new_results(source: str, target: str, files: Sequence[Listed], final: bool) -> Dict[str, Any]:
    record, attempt = target + ".json", os.environ.get("DTSLURM_ATTEMPT")
    previous_record = read_object(record)
    previous_files = previous_record.get("files", {})
    if previous_record.get("final") and previous_record.get("attempt") == attempt and not final:
        # The final pass has already run.
        return {"node": name(), "files": len(previous_files), "bytes": 0, "absent": False}
    entries: Dict[str, Any] = {}
    changing: List[str] = []
    copied = 0
    for listed_path, size, mtime in files:
        relative = listed_path or os.path.basename(source)
        source_path = source if os.path.isfile(source) else at(source, relative)
        target_path = at(target, relative)
        previous_entry = previous_files.get(relative)
        if (
            previous_entry
            and previous_entry["bytes"] == size
            and previous_entry["mtime"] == mtime
            and _has_size(target_path, size)
        ):
            entries[relative] = previous_entry
            continue
        try:
            digest = _copy_atomically(source_path, target_path, size, mtime)
        except FileNotFoundError:
            if os.path.lexists(source_path):
                raise
            continue  # removed since the listing: programs write under a temporary name, and rename
        if digest is None:
            changing.append(relative)  # the file is still being written, so it is no result yet
            continue
        entries[relative] = {"bytes": size, "mtime": mtime, "sha256": digest}
        copied += size
    new_record = {"schema": 1, "node": name(), "attempt": attempt, "final": final}
    new_record.update(complete=not changing, moving=changing, time=int(time.time()), files=entries)
    put(record, new_record)
    event(
        "staging", node=name(), source=source, bytes=sum(entry["bytes"] for entry in entries.values()),
        total=sum(listed[1] for listed in files), done=not changing, out=True, final=final,
    )  # fmt: skip
    if changing and final:
        raise Failed("{} changed while it was copied: {}".format(source, ", ".join(changing[:5])))
    return {"node": name(), "files": len(entries), "bytes": copied, "absent": False}


def _has_size(path: str, size: int) -> bool:
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


def _copy_atomically(origin: str, target: str, size: int, mtime: int) -> Any:
    """Copy one file atomically; return its SHA-256, None if the file changed during the copy."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    draft = os.path.join(os.path.dirname(target), "." + os.path.basename(target) + PART)
    digest, copied_bytes = hashlib.sha256(), 0
    with open(origin, "rb", buffering=0) as reader, open(draft, "wb", buffering=0) as writer:
        for chunk in iter(lambda: reader.read(CHUNK), b""):
            copying.write_all(writer, chunk)
            digest.update(chunk)
            copied_bytes += len(chunk)
        os.fsync(writer.fileno())
        final_status = os.fstat(reader.fileno())
    if (copied_bytes, final_status.st_size, int(final_status.st_mtime)) != (size, size, mtime):
        os.unlink(draft)
        return None
    shutil.copymode(origin, draft)
    os.utime(draft, (mtime, mtime))
    os.replace(draft, target)
    return digest.hexdigest()


def gather(
    srun: List[str], items: List[Item], ask: Callable[..., List[Dict[str, Any]]], say: Callable[[str], None]
) -> None:
    """Copy all nodes' results after training, and register them.

    Raises:
        Failed: some results could not be copied.
    """
    from .. import artifacts

    run_dir = os.environ["DTSLURM_RUN_DIR"]
    folder = os.path.join(run_dir, "staged", os.environ.get("DTSLURM_ATTEMPT", "0") + "-out")
    os.makedirs(folder, exist_ok=True)
    put(os.path.join(folder, "items.json"), {"schema": 1, "items": [item.text for item in items]})
    nodes = next((int(option[8:]) for option in srun if option.startswith("--nodes=")), 1)
    answers = ask(srun, "out", folder, nodes)
    failed = [line for answer in answers for line in answer.get("failed", [])]
    for item in items:
        summaries = [answer["items"][item.name] for answer in answers if item.name in answer.get("items", {})]
        size = sum(summary.get("bytes", 0) for summary in summaries)
        present = [summary for summary in summaries if not summary["absent"]]
        if summaries and not present:
            say("no node has {}".format(item.source))
        elif present:
            text = "copied {} from {} of {} nodes to {}"
            say(text.format(human(size), len(present), nodes, target_of(item)))
            artifacts.register_results(run_dir, target_of(item))
    if failed:
        raise Failed(*failed[:20])


def on_node(folder: str, answer: Dict[str, Any], final: bool) -> None:
    """Copy this node's results of the items that `gather` wrote."""
    from .request import parse

    for text in read_object(os.path.join(folder, "items.json"))["items"]:
        item = parse(text, is_stage_out=True)
        answer["items"][item.name] = bring_back(item, final)


def watch(pid: int, signal_name: str, items: List[Item]) -> None:
    """Wait next to a node's ranks for the early signal, then copy the results so far; exit with the ranks."""
    received: List[int] = []
    signal.signal(getattr(signal, "SIG" + signal_name), lambda number, _frame: received.append(number))
    if signal_name != "TERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # continue to copy while the ranks exit
    while os.path.exists("/proc/{}".format(pid)):
        time.sleep(0.5)
        if not received:
            continue
        del received[:]
        for item in items:
            try:
                bring_back(item, final=False)
            except (Failed, OSError) as error:
                sys.stderr.write("dtslurm: {}: {}\n".format(item.source, error))
