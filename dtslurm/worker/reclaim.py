"""Measures and removes what ended runs leave behind, on the machine where it lies.

Standard input: 4 bytes length, then JSON compressed by zlib: ``root`` (the run root), ``objects``, ``runs``
(names of folders in the run root), ``names`` (the folders that each of them names, which stay where it
stays), ``whole`` (folders as such rather than their ``code/`` and ``secrets``), ``remove``.
The answer is one line: the mark (our second argument) and a JSON object: ``runs`` (bytes that are each run's
own, by name), ``with_code`` (runs that have any), ``objects`` (files and bytes that no other run uses),
``unfinished`` (left by killed deliveries), ``trouble`` (what could not be removed), ``pinned`` (runs that
``whole`` leaves alone, as they have pinned results), ``needed`` (runs left alone as such a run names them,
with which names them).
"""

import contextlib
import json
import os
import stat
import struct
import sys
import time
import zlib
from typing import Any, Dict, Iterator, List, Tuple

from .disk import Outcome, raw, remove_tree, text

YOUNG = 3600.0  # a delivery may be about to link to an object this young
STALE = 86400.0  # no delivery takes that long

Inode = Tuple[int, int]


def files_below(folder: bytes) -> Iterator[os.stat_result]:
    """Yield what is known of each file below a folder, links not followed."""
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(place, name))


def objects_in(folder: bytes) -> Iterator[Tuple[bytes, os.stat_result]]:
    """Yield the objects and unfinished ones."""
    for place, folders, names in os.walk(folder):
        if place == folder and b"spare" in folders:
            folders.remove(b"spare")  # links to objects: see `old_spares`
        for name in names:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if stat.S_ISREG(found.st_mode):
                    yield path, found


def unreferenced(
    objects: bytes, links: Dict[Inode, int], now: float
) -> Iterator[Tuple[bytes, os.stat_result]]:
    """Yield the objects that no run links to but those that ``links`` counts, and that are not young.

    The change time tells the age: an object's modification time is a constant.
    """
    for path, found in objects_in(objects):
        others = found.st_nlink - 1 - links.get((found.st_dev, found.st_ino), 0)
        if others <= 0 and now - found.st_ctime > YOUNG:
            yield path, found


def checked(request: Dict[str, Any]) -> Tuple[bytes, bytes, List[bytes]]:
    """Return run root, objects and run folders; refuse what would reach outside the run root."""
    root, objects = raw(request["root"]), raw(request["objects"])
    for path in (root, objects):
        if not path.startswith(b"/") or os.path.normpath(path) != path or path in (b"/", b"//"):
            raise Outcome("refused", "{!r} is not a full, plain path".format(text(path)))
    runs = []
    for name in request["runs"]:
        folder = os.path.join(root, raw(name))
        if "/" in name or name in ("", ".", "..") or "\0" in name:
            raise Outcome("refused", "{!r} is not a folder of the run root".format(name))
        if is_run(folder):
            runs.append(folder)
    return root, objects, runs


def is_run(folder: bytes) -> bool:
    """Whether a folder is a run directory of ours, and no link to one."""
    try:
        found = os.lstat(folder)
        record = os.lstat(os.path.join(folder, b"job.json"))
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_ISREG(record.st_mode)


def has_pins(run: bytes) -> bool:
    """Whether a run has results that its user wants kept."""
    try:
        with open(os.path.join(run, b"pins.json"), "rb") as file:
            return bool(json.loads(file.read().decode("utf-8", "replace"))["pinned"])
    except OSError:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # whatever it says: deleting cannot be undone


def pinned(runs: List[bytes], names: Dict[str, List[str]]) -> Tuple[List[str], Dict[str, str]]:
    """Return the runs with pinned results, and those that such a run names, or one that is named so."""
    there = [text(os.path.basename(run)) for run in runs]
    kept = [name for name, run in zip(there, runs) if has_pins(run)]  # noqa: B905  Python 3.6
    needed: Dict[str, str] = {}
    waiting = list(kept)
    while waiting:
        one = waiting.pop()
        for other in names.get(one, []):
            if other in there and other not in kept and other not in needed:
                needed[other] = one
                waiting.append(other)
    return kept, needed


def stale(root: bytes, now: float) -> List[bytes]:
    """Return the folders that killed deliveries of ours left in the run root."""
    mark = ".dtslurm-{}-".format(os.geteuid()).encode()
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            path = os.path.join(root, name)
            with contextlib.suppress(OSError):
                if name.startswith(mark) and now - os.lstat(path).st_mtime > STALE:
                    found.append(path)
    return found


def old_spares(objects: bytes, now: float) -> List[bytes]:
    """Return the trees made ahead (`dtslurm.worker.spare`) that no submission took for an hour."""
    folder, found = os.path.join(objects, b"spare"), []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if now - os.lstat(os.path.join(path, b"list")).st_mtime > YOUNG:
                    found.append(path)
    return found


def remove_spares(paths: List[bytes], root: bytes) -> None:
    """Remove trees made ahead, but what a delivery takes just now."""
    for path in paths:
        taken = os.path.join(root, ".dtslurm-{}-{}".format(os.geteuid(), os.urandom(6).hex()).encode())
        with contextlib.suppress(OSError):
            os.rename(path, taken)
            remove_tree(taken)


def remove_secrets(runs: List[bytes]) -> None:
    """Remove the values of secrets: what is over has no start left that reads them."""
    for run in runs:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(run, b"secrets"))


def reclaim(request: Dict[str, Any]) -> Dict[str, Any]:
    """Measure, and remove if asked to."""
    now = time.time()
    root, objects, runs = checked(request)
    kept, needed = pinned(runs, request.get("names", {})) if request["whole"] else ([], {})
    runs = [run for run in runs if text(os.path.basename(run)) not in {*kept, *needed}]
    removed = runs if request["whole"] else [os.path.join(run, b"code") for run in runs]
    unfinished = stale(root, now)
    with_code = [text(os.path.basename(run)) for run in runs if os.path.isdir(os.path.join(run, b"code"))]
    spares = old_spares(objects, now)
    links: Dict[Inode, int] = {}
    for found in (found for spare in spares for found in files_below(os.path.join(spare, b"tree"))):
        links[found.st_dev, found.st_ino] = links.get((found.st_dev, found.st_ino), 0) + 1
    sizes: Dict[str, int] = {}
    for run, folder in zip(runs, removed):  # noqa: B905  Python 3.6
        own = 0
        for found in files_below(folder):
            if found.st_nlink > 1 and stat.S_ISREG(found.st_mode):
                inode = (found.st_dev, found.st_ino)
                links[inode] = links.get(inode, 0) + 1
            else:
                own += found.st_blocks * 512
        sizes[text(os.path.basename(run))] = own
    if request["remove"]:
        remove_secrets(runs)
        for folder in removed + unfinished:
            remove_tree(folder)
        remove_spares(spares, root)
        links = {}
    garbage = list(unreferenced(objects, links, now))
    trouble = []
    if request["remove"]:
        trouble = [text(folder) for folder in removed if os.path.lexists(folder)]
        for path, _ in garbage:
            with contextlib.suppress(OSError):
                # Linked to meanwhile: it stays. Between this look and the next line a delivery may still link
                # to it; the content then lives on in that run, and the next delivery sends it again.
                if os.lstat(path).st_nlink <= 1:
                    os.unlink(path)
    return {
        "runs": sizes,
        "with_code": with_code,
        "objects": {"files": len(garbage), "bytes": sum(found.st_blocks * 512 for _, found in garbage)},
        "unfinished": [text(path) for path in unfinished],
        "trouble": trouble,
        "pinned": kept,
        "needed": needed,
    }


def main() -> int:
    """Serve one request."""
    try:
        source = sys.stdin.buffer
        length = struct.unpack(">I", source.read(4))[0]
        request = json.loads(zlib.decompress(source.read(length)).decode("ascii"))
        answer: Dict[str, Any] = {"done": reclaim(request)}
    except Outcome as outcome:
        answer = {outcome.key: outcome.value}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, zlib.error) as error:
        answer = {"refused": "the request cannot be understood: {!r}".format(error)}
    sys.stdout.write("\n{}{}\n".format(sys.argv[2], json.dumps(answer)))
    return 0 if "done" in answer else 76
