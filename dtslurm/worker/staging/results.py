"""Results from the nodes' local disks to the shared file system: on the early signal, and at the end.

::

    TO/node-0/...       what node 0 had, each file whole: copied under another name, then renamed
    TO/node-0.json      its files with sizes and checksums; "final" once training has ended

A pass brings only what is new, so one that was cut off is gone on with by the next.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Sequence

from . import copying
from .files import CHUNK, Failed, Listed, at, event, human, load, put, tree
from .node import name, rank
from .request import Item, expand

PART = ".dtslurm-part"


def target_of(item: Item) -> str:
    """Return the shared folder of an item: below the run directory unless it is a full path."""
    return os.path.join(os.environ["DTSLURM_RUN_DIR"], item.to)


def bring_back(item: Item, final: bool) -> Dict[str, Any]:
    """Copy what is new of this node's results; return what its record says.

    Raises:
        Failed, OSError: something could not be copied; what was is kept.
    """
    try:
        source = expand(item.source, dict(os.environ))
    except ValueError as error:
        raise Failed("{}: {}".format(item.source, error)) from None
    target = os.path.join(target_of(item), "node-{}".format(rank()))
    try:
        files = [one for one in tree(source) if not one[0].endswith(PART)]
    except FileNotFoundError:
        return {"node": name(), "absent": True}
    os.makedirs(target, exist_ok=True)
    with alone(target):
        return _bring_back(source, target, files, final)


@contextlib.contextmanager
def alone(target: str) -> Iterator[None]:
    """Keep the pass of the early signal and the last one apart, where the file system knows locks."""
    lock = os.path.join(os.path.dirname(target), ".{}.lock".format(os.path.basename(target)))
    with open(lock, "a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _bring_back(source: str, target: str, files: Sequence[Listed], final: bool) -> Dict[str, Any]:
    record, attempt = target + ".json", os.environ.get("DTSLURM_ATTEMPT")
    before_this = load(record)
    known = before_this.get("files", {})
    if before_this.get("final") and before_this.get("attempt") == attempt and not final:
        return {"node": name(), "files": len(known), "bytes": 0, "absent": False}  # the last pass was quicker
    kept: Dict[str, Any] = {}
    moving: List[str] = []
    copied = 0
    for listed, size, mtime in files:
        relative = listed or os.path.basename(source)
        own = source if os.path.isfile(source) else at(source, relative)
        there = at(target, relative)
        before = known.get(relative)
        if before and before["bytes"] == size and before["mtime"] == mtime and _is(there, size):
            kept[relative] = before
            continue
        try:
            digest = _copy(own, there, size, mtime)
        except FileNotFoundError:
            if os.path.lexists(own):
                raise
            continue  # removed since: programs write under one name, and rename
        if digest is None:
            moving.append(relative)  # it is being written: what is there of it is no result yet
            continue
        kept[relative] = {"bytes": size, "mtime": mtime, "sha256": digest}
        copied += size
    told = {"schema": 1, "node": name(), "attempt": attempt, "final": final}
    told.update(complete=not moving, moving=moving, time=int(time.time()), files=kept)
    put(record, told)
    event(
        "staging", node=name(), source=source, bytes=sum(one["bytes"] for one in kept.values()),
        total=sum(one[1] for one in files), done=not moving, out=True, final=final,
    )  # fmt: skip
    if moving and final:
        raise Failed("{} changed while it was copied: {}".format(source, ", ".join(moving[:5])))
    return {"node": name(), "files": len(kept), "bytes": copied, "absent": False}


def _is(path: str, size: int) -> bool:
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


def _copy(origin: str, target: str, size: int, mtime: int) -> Any:
    """Copy one file whole; return its SHA-256, None if it changes meanwhile."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    draft = os.path.join(os.path.dirname(target), "." + os.path.basename(target) + PART)
    digest, seen = hashlib.sha256(), 0
    with open(origin, "rb", buffering=0) as reader, open(draft, "wb", buffering=0) as writer:
        for chunk in iter(lambda: reader.read(CHUNK), b""):
            copying.write_all(writer, chunk)
            digest.update(chunk)
            seen += len(chunk)
        os.fsync(writer.fileno())
        now = os.fstat(reader.fileno())
    if (seen, now.st_size, int(now.st_mtime)) != (size, size, mtime):
        os.unlink(draft)
        return None
    shutil.copymode(origin, draft)
    os.utime(draft, (mtime, mtime))
    os.replace(draft, target)
    return digest.hexdigest()


def gather(
    srun: List[str], items: List[Item], ask: Callable[..., List[Dict[str, Any]]], say: Callable[[str], None]
) -> None:
    """Bring all nodes' results back after training, and register them.

    Raises:
        Failed: some could not be.
    """
    from .. import artifacts

    run_dir = os.environ["DTSLURM_RUN_DIR"]
    folder = os.path.join(run_dir, "staged", os.environ.get("DTSLURM_ATTEMPT", "0") + "-out")
    os.makedirs(folder, exist_ok=True)
    put(os.path.join(folder, "items.json"), {"schema": 1, "items": [one.text for one in items]})
    nodes = next((int(one[8:]) for one in srun if one.startswith("--nodes=")), 1)
    answers = ask(srun, "out", folder, nodes)
    failed = [line for one in answers for line in one.get("failed", [])]
    for item in items:
        told = [one["items"][item.name] for one in answers if item.name in one.get("items", {})]
        size = sum(one.get("bytes", 0) for one in told)
        found = [one for one in told if not one["absent"]]
        if told and not found:
            say("no node has {}".format(item.source))
        elif found:
            text = "brought {} from {} of {} nodes to {}"
            say(text.format(human(size), len(found), nodes, target_of(item)))
            artifacts.register_results(run_dir, target_of(item))
    if failed:
        raise Failed(*failed[:20])


def on_node(folder: str, answer: Dict[str, Any], final: bool) -> None:
    """Bring back what `gather` asks for."""
    from .request import parse

    for text in load(os.path.join(folder, "items.json"))["items"]:
        item = parse(text, out=True)
        answer["items"][item.name] = bring_back(item, final)


def watch(pid: int, signal_name: str, items: List[Item]) -> None:
    """Wait beside a node's ranks for the early signal, then bring back what there is; end with the ranks."""
    heard: List[int] = []
    signal.signal(getattr(signal, "SIG" + signal_name), lambda number, _frame: heard.append(number))
    if signal_name != "TERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it goes on to copy while ranks end
    while os.path.exists("/proc/{}".format(pid)):
        time.sleep(0.5)
        if not heard:
            continue
        del heard[:]
        for item in items:
            try:
                bring_back(item, final=False)
            except (Failed, OSError) as error:
                sys.stderr.write("dtslurm: {}: {}\n".format(item.source, error))
