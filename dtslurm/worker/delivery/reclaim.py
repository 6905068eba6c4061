"""Measures and removes what ended runs leave behind, on the machine where it lies.

Standard input: 4 bytes length, then JSON compressed by zlib: ``root`` (the run root), ``objects``, ``runs``
(names of folders in the run root), ``names`` (the folders that each of them names, which stay where it
stays), ``whole`` (folders as such rather than their ``code/`` and ``secrets``), ``outputs`` (files as well
that the job wrote in ``code/``), ``ends`` (when each run ended, in seconds since 1970), ``remove``.
The answer is one line: the mark (our second argument) and a JSON object: ``runs`` (bytes that are each run's
own, by name), ``with_code`` (runs of which something in ``code/`` goes), ``outputs`` (by run: how many
``files`` the job wrote in ``code/``, their ``bytes``, the first of their ``names``), ``objects`` (files and
bytes that no other run uses), ``unfinished`` (left by killed deliveries), ``trouble`` (what could not be
removed), ``pinned`` (runs that ``whole`` leaves alone, or whose outputs stay, as they have pinned results),
``needed`` (runs left alone as such a run, or one whose outputs stay, names them, with which names them),
``revived`` (runs left alone as they were started or requeued after that end).
"""

import contextlib
import json
import os
import stat
import struct
import sys
import time
import zlib
from typing import Any, Dict, Iterable, Iterator, List, Sequence, Tuple

from ..lib.disk import WorkerError, raw, remove_tree, text
from .code_files import CodeFile, CodeFiles
from .objects import SEALS, choose_objects_folder

YOUNG = 3600.0  # a delivery may be about to link to an object this young
STALE = 86400.0  # no delivery takes that long
MOST_NAMES = 1000  # of the files that a job wrote in its code/
# What a job writes of its own end comes within a minute of it. A clean takes less than a quarter of an hour.
LATE = 240.0
RECENT = 900.0
CLEANED = b"dtslurm clean removed files of this run\n"  # in the file `stop`, which no start of a job ignores

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
            if path == os.path.join(folder, SEALS):
                continue
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
    root, objects = raw(request["root"]), choose_objects_folder(raw(request["objects"]))
    for path in (root, objects):
        if not path.startswith(b"/") or os.path.normpath(path) != path or path in (b"/", b"//"):
            raise WorkerError("refused", "{!r} is not a full, plain path".format(text(path)))
    runs = []
    for name in request["runs"]:
        folder = os.path.join(root, raw(name))
        if "/" in name or name in ("", ".", "..") or "\0" in name:
            raise WorkerError("refused", "{!r} is not a folder of the run root".format(name))
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


def find_needed(kept: List[str], runs: List[str], names: Dict[str, List[str]]) -> Dict[str, str]:
    """Return the runs that a kept run names, or a run that is named so, each with the run that names it."""
    needed: Dict[str, str] = {}
    waiting = list(kept)
    while waiting:
        one = waiting.pop()
        for other in names.get(one, []):
            if other in runs and other not in kept and other not in needed:
                needed[other] = one
                waiting.append(other)
    return needed


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
    """Return the trees made ahead (`prebuilt_tree`) that no submission took for an hour."""
    folder, found = os.path.join(objects, b"spare"), []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if now - os.lstat(os.path.join(path, b"list")).st_mtime > YOUNG:
                    found.append(path)
    return found


def move_aside(path: bytes, root: bytes) -> bytes:
    """Rename a folder to one that nobody looks for; what is left of it counts as of a killed delivery."""
    taken = os.path.join(root, ".dtslurm-{}-{}".format(os.geteuid(), os.urandom(6).hex()).encode())
    os.rename(path, taken)
    return taken


def remove_spares(paths: List[bytes], root: bytes) -> None:
    """Remove trees made ahead, but what a delivery takes just now."""
    for path in paths:
        with contextlib.suppress(OSError):
            remove_tree(move_aside(path, root))


def remove_files(folder: bytes, files: Sequence[CodeFile]) -> bool:
    """Remove files and then the folders that are empty; return whether all of the files are gone."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, file.path))
    for place, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(place)
    return not any(os.path.lexists(os.path.join(folder, file.path)) for file in files)


def describe_outputs(files: Sequence[CodeFile]) -> Dict[str, Any]:
    """Return the number of files, their bytes on the disk, and the names of the first."""
    return {
        "files": len(files),
        "bytes": sum(file.state.st_blocks * 512 for file in files),
        "names": [text(file.path) for file in files[:MOST_NAMES]],
    }


def count_links(files: Iterable[os.stat_result], links: Dict[Inode, int]) -> int:
    """Count the links to each file that has several; return the bytes on the disk of the others."""
    own = 0
    for found in files:
        if found.st_nlink > 1 and stat.S_ISREG(found.st_mode):
            inode = (found.st_dev, found.st_ino)
            links[inode] = links.get(inode, 0) + 1
        else:
            own += found.st_blocks * 512
    return own


def forbid_start(run: bytes) -> bytes:
    """Let no job of this run start any more; return what said so before."""
    mark, before = os.path.join(run, b"stop"), b""
    with contextlib.suppress(OSError), open(mark, "rb") as file:
        before = file.read()
    with contextlib.suppress(OSError), open(mark, "wb") as file:  # a full disk has room for it afterwards
        file.write(CLEANED)
    return before


def allow_start(run: bytes, before: bytes) -> None:
    """Undo `forbid_start`."""
    mark = os.path.join(run, b"stop")
    if before:
        with open(mark, "wb") as file:
            file.write(before)
    else:
        os.unlink(mark)


def has_revived(run: bytes, ended: float) -> bool:
    """Tell whether a job of this run was requeued, or has started, since its known end.

    A requeue touches the events before it looks for `CLEANED`, and a job that starts writes one. We look at
    them when `CLEANED` is there. So one side at least sees the other, whatever comes first.
    """
    try:
        now = os.lstat(os.path.join(run, b"stop")).st_mtime  # by the clock of the file server
    except OSError:
        now = time.time()
    for folder in (run, *tasks_of(run)):
        with contextlib.suppress(OSError), open(os.path.join(folder, b"events.jsonl"), "rb") as file:
            written = os.fstat(file.fileno()).st_mtime
            if written > max(ended + LATE, now - RECENT) or last_start(file) > ended + LATE:
                return True
    return False


def last_start(events: Iterable[bytes]) -> float:
    """Return when a job of a run started last, by its events; 0 if none did."""
    last = 0.0
    for line in events:
        if b'"started"' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                event = json.loads(line.decode("utf-8", "replace"))
                last = max(last, float(event["time"])) if event["event"] == "started" else last
    return last


def tasks_of(run: bytes) -> List[bytes]:
    """Return the folders of an array's tasks."""
    folder = os.path.join(run, b"tasks")
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    except OSError:
        return []


class ReclaimPlan:
    """What goes of the runs.

    Attributes:
        pinned, needed: as in the answer.
        outputs: by run, the files that its job wrote in ``code/``.
        going: the files in ``code/`` that go, by run: with ``whole``, the run goes with all else in it.
        revived: runs that are left alone after all, as a job of theirs has started again.
    """

    def __init__(self, runs: List[bytes], request: Dict[str, Any]) -> None:
        whole, outputs_too = bool(request["whole"]), bool(request.get("outputs"))
        by_name = {text(os.path.basename(run)): run for run in runs}
        code = {name: CodeFiles(run) for name, run in by_name.items()}
        with_outputs = [name for name in by_name if code[name].outputs]
        at_stake = by_name if whole else with_outputs if outputs_too else ()
        self.pinned = [name for name in at_stake if has_pins(by_name[name])]
        kept = self.pinned if outputs_too else [*self.pinned, *with_outputs]
        self.needed = find_needed(kept, list(by_name), request.get("names", {})) if whole else {}
        stays = {*self.pinned, *self.needed}
        self.outputs = {name: code[name].outputs for name in with_outputs if name not in stays}
        self.going: Dict[str, List[CodeFile]] = {}
        for name, found in code.items():
            if not whole or name not in {*kept, *self.needed}:
                more = found.outputs if outputs_too and name not in stays else []
                self.going[name] = [*found.delivered, *found.byte_code, *more]
        self.with_code = [
            name
            for name, files in self.going.items()
            if files or (code[name].is_there and not code[name].outputs)
        ]
        self.revived: List[str] = []
        self._runs, self._whole = by_name, whole

    def measure(self, links: Dict[Inode, int]) -> Dict[str, int]:
        """Return the bytes that are each run's own, and count the links to objects."""
        sizes = {}
        for name, files in self.going.items():
            states = files_below(self._runs[name]) if self._whole else (file.state for file in files)
            sizes[name] = count_links(states, links)
        return sizes

    def remove(self, root: bytes, ends: Dict[str, float]) -> List[str]:
        """Remove all of it; return the paths that could not be removed."""
        trouble: List[bytes] = []
        for name in self.going:
            run = self._runs[name]
            has_secrets = os.path.lexists(os.path.join(run, b"secrets"))
            if not self._whole and name not in self.with_code and not has_secrets:
                continue
            try:
                before = forbid_start(run)
                if has_revived(run, ends.get(name, 0.0)):
                    allow_start(run, before)
                    self.revived.append(name)
                elif self._whole:
                    run = move_aside(run, root)
                    remove_tree(run)
                    trouble += [run] if os.path.lexists(run) else []
                elif not self._remove_files(name, run):
                    trouble.append(os.path.join(run, b"code"))
            except OSError:
                trouble.append(run)
        return [text(path) for path in trouble]

    def _remove_files(self, name: str, run: bytes) -> bool:
        """Remove secrets and what goes of the code; return whether all of the code is gone."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(run, b"secrets"))
        all_gone = remove_files(os.path.join(run, b"code"), self.going[name])
        forbid_start(run)  # again, in case the disk was full
        return all_gone


def reclaim(request: Dict[str, Any]) -> Dict[str, Any]:
    """Measure, and remove if asked to."""
    now = time.time()
    root, objects, runs = checked(request)
    plan = ReclaimPlan(runs, request)
    unfinished, spares = stale(root, now), old_spares(objects, now)
    links: Dict[Inode, int] = {}
    for spare in spares:
        count_links(files_below(os.path.join(spare, b"tree")), links)
    sizes = plan.measure(links)
    trouble: List[str] = []
    if request["remove"]:
        trouble = plan.remove(root, request.get("ends", {}))
        for folder in unfinished:
            remove_tree(folder)
        remove_spares(spares, root)
        links = {}
    garbage = list(unreferenced(objects, links, now))
    if request["remove"]:
        for path, _ in garbage:
            with contextlib.suppress(OSError):
                # Linked to meanwhile: it stays. Between this look and the next line a delivery may still link
                # to it; the content then lives on in that run, and the next delivery sends it again.
                if os.lstat(path).st_nlink <= 1:
                    os.unlink(path)
    return {
        "runs": sizes,
        "with_code": plan.with_code,
        "outputs": {name: describe_outputs(files) for name, files in plan.outputs.items()},
        "objects": {"files": len(garbage), "bytes": sum(found.st_blocks * 512 for _, found in garbage)},
        "unfinished": [text(path) for path in unfinished],
        "trouble": trouble,
        "pinned": plan.pinned,
        "needed": plan.needed,
        "revived": plan.revived,
    }


def main() -> int:
    """Serve one request."""
    try:
        source = sys.stdin.buffer
        length = struct.unpack(">I", source.read(4))[0]
        request = json.loads(zlib.decompress(source.read(length)).decode("ascii"))
        answer: Dict[str, Any] = {"done": reclaim(request)}
    except WorkerError as outcome:
        answer = {outcome.key: outcome.value}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, zlib.error) as error:
        answer = {"refused": "the request cannot be understood: {!r}".format(error)}
    sys.stdout.write("\n{}{}\n".format(sys.argv[2], json.dumps(answer)))
    return 0 if "done" in answer else 76
