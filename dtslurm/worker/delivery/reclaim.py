"""Measure and remove the remains of ended runs; runs on the host that stores them.

Standard input: 4 bytes length, then JSON compressed by zlib: ``root`` (the run root), ``objects`` (objects
folder), ``runs`` (names of run directories in the run root), ``names`` (for each run, the runs that it
references; they are kept while it is kept), ``whole`` (remove whole run directories rather than ``code/`` and
``secrets``), ``outputs`` (also remove files that the job wrote in ``code/``), ``ends`` (the end time of each
run, in seconds since 1970), ``remove`` (remove rather than only measure).

The answer is one line: the mark (the program's second argument) and a JSON object: ``runs`` (bytes used by
each run alone, by name), ``with_code`` (runs with removable files in ``code/``), ``outputs`` (by run: how
many ``files`` the job wrote in ``code/``, their ``bytes``, the first ``names``), ``objects`` (number and
bytes of objects that no other run uses), ``unfinished`` (folders left by killed deliveries), ``trouble``
(paths that could not be removed), ``pinned`` (runs that ``whole`` keeps, or whose outputs are kept, because
they have pinned results), ``needed`` (runs that are kept because a pinned run, or a run whose outputs are
kept, references them; with the referencing run), ``revived`` (runs that are kept because they were started or
requeued after their known end).
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
from ..lib.json_records import finite_number, parse_object
from .code_files import CodeFile, CodeFiles
from .objects import SEALS, choose_objects_folder

YOUNG = 3600.0  # seconds; a running delivery may be about to link to a younger object
STALE = 86400.0  # seconds; no delivery takes longer
SECRET_FILES = (b"secrets", b"notify.json")
MOST_NAMES = 1000  # maximum number of reported names of files that a job wrote in code/
# Seconds. A job writes its last events within a minute of its end. A clean takes less than a quarter of an
# hour.
LATE = 240.0
RECENT = 900.0
# Content of the file `stop`, which every job checks when it starts.
CLEANED = b"dtslurm clean removed files of this run\n"

Inode = Tuple[int, int]


def files_below(folder: bytes) -> Iterator[os.stat_result]:
    """Yield the status of each file below a folder, without following links."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(parent, name))


def objects_in(folder: bytes) -> Iterator[Tuple[bytes, os.stat_result]]:
    """Yield the objects, including unfinished ones."""
    for parent, folders, names in os.walk(folder):
        if parent == folder and b"spare" in folders:
            folders.remove(b"spare")  # prebuilt trees contain links to objects: see `old_spares`
        for name in names:
            path = os.path.join(parent, name)
            if path == os.path.join(folder, SEALS):
                continue
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    yield path, status


def unreferenced(
    objects: bytes, links: Dict[Inode, int], now: float
) -> Iterator[Tuple[bytes, os.stat_result]]:
    """Yield the objects that are not young and have no links other than those counted in ``links``.

    An object's age is that of its change time: its modification time is constant.
    """
    for path, status in objects_in(objects):
        other_links = status.st_nlink - 1 - links.get((status.st_dev, status.st_ino), 0)
        if other_links <= 0 and now - status.st_ctime > YOUNG:
            yield path, status


def validate_request(request: Dict[str, Any]) -> Tuple[bytes, bytes, List[bytes]]:
    """Return the run root, the objects folder and the run directories of a request.

    Raises:
        WorkerError: a path would reach outside the run root.
    """
    root, objects = raw(request["root"]), choose_objects_folder(raw(request["objects"]))
    for path in (root, objects):
        if not path.startswith(b"/") or os.path.normpath(path) != path or path in (b"/", b"//"):
            raise WorkerError("refused", "{!r} is not an absolute, normalized path".format(text(path)))
    runs = []
    for name in request["runs"]:
        folder = os.path.join(root, raw(name))
        if "/" in name or name in ("", ".", "..") or "\0" in name:
            raise WorkerError("refused", "{!r} is not a folder of the run root".format(name))
        if is_run(folder):
            runs.append(folder)
    return root, objects, runs


def is_run(folder: bytes) -> bool:
    """Return whether a folder is a run directory of this user, and not a link to one."""
    try:
        status = os.lstat(folder)
        record = os.lstat(os.path.join(folder, b"job.json"))
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and stat.S_ISREG(record.st_mode)


def has_pins(run: bytes) -> bool:
    """Return whether a run has pinned results."""
    try:
        with open(os.path.join(run, b"pins.json"), "rb") as file:
            return bool(json.loads(file.read().decode("utf-8", "replace"))["pinned"])
    except OSError:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # a damaged file counts as pins, since deletion cannot be undone


def find_needed(retained_runs: List[str], runs: List[str], names: Dict[str, List[str]]) -> Dict[str, str]:
    """Return the runs that a kept run references, directly or indirectly, each with the referencing run."""
    needed: Dict[str, str] = {}
    pending = list(retained_runs)
    while pending:
        referencing = pending.pop()
        for referenced in names.get(referencing, []):
            if referenced in runs and referenced not in retained_runs and referenced not in needed:
                needed[referenced] = referencing
                pending.append(referenced)
    return needed


def stale(root: bytes, now: float) -> List[bytes]:
    """Return the folders that killed deliveries of this user left in the run root."""
    prefix = ".dtslurm-{}-".format(os.geteuid()).encode()
    paths = []
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            path = os.path.join(root, name)
            with contextlib.suppress(OSError):
                if name.startswith(prefix) and now - os.lstat(path).st_mtime > STALE:
                    paths.append(path)
    return paths


def old_spares(objects: bytes, now: float) -> List[bytes]:
    """Return the prebuilt trees (`prebuilt_tree`) that no submission has used for an hour."""
    folder, paths = os.path.join(objects, b"spare"), []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if now - os.lstat(os.path.join(path, b"list")).st_mtime > YOUNG:
                    paths.append(path)
    return paths


def move_aside(path: bytes, root: bytes) -> bytes:
    """Rename a folder to the name of an unfinished delivery, so that leftovers are removed with those."""
    renamed = os.path.join(root, ".dtslurm-{}-{}".format(os.geteuid(), os.urandom(6).hex()).encode())
    os.rename(path, renamed)
    return renamed


def remove_spares(paths: List[bytes], root: bytes) -> None:
    """Remove prebuilt trees, except those that a delivery is acquiring at this moment."""
    for path in paths:
        with contextlib.suppress(OSError):
            remove_tree(move_aside(path, root))


def remove_files(folder: bytes, files: Sequence[CodeFile]) -> bool:
    """Remove files and then the empty folders; return whether all of the files are gone."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, file.path))
    for parent, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(parent)
    return not any(os.path.lexists(os.path.join(folder, file.path)) for file in files)


def describe_outputs(files: Sequence[CodeFile]) -> Dict[str, Any]:
    """Return the number of files, their size on disk in bytes, and the first names."""
    return {
        "files": len(files),
        "bytes": sum(file.state.st_blocks * 512 for file in files),
        "names": [text(file.path) for file in files[:MOST_NAMES]],
    }


def count_links(files: Iterable[os.stat_result], links: Dict[Inode, int]) -> int:
    """Count the links to each hard-linked file; return the bytes on disk of the other files."""
    exclusive_bytes = 0
    for status in files:
        if status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
            inode = (status.st_dev, status.st_ino)
            links[inode] = links.get(inode, 0) + 1
        else:
            exclusive_bytes += status.st_blocks * 512
    return exclusive_bytes


def forbid_start(run: bytes) -> bytes:
    """Create the ``stop`` file, so that no job of this run can start; return its previous content."""
    stop_file, previous = os.path.join(run, b"stop"), b""
    with contextlib.suppress(OSError), open(stop_file, "rb") as file:
        previous = file.read()
    # A full disk has free space for this after the removal.
    with contextlib.suppress(OSError), open(stop_file, "wb") as file:
        file.write(CLEANED)
    return previous


def allow_start(run: bytes, stop_content: bytes) -> None:
    """Undo `forbid_start`."""
    stop_file = os.path.join(run, b"stop")
    if stop_content:
        with open(stop_file, "wb") as file:
            file.write(stop_content)
    else:
        os.unlink(stop_file)


def has_revived(run: bytes, known_end: float) -> bool:
    """Return whether a job of this run was requeued, or has started, since the run's known end.

    A requeue updates the events before it checks for `CLEANED`, and a job that starts writes an event. This
    function reads the events after `CLEANED` has been written. So at least one side sees the other, in any
    order of execution.
    """
    try:
        now = os.lstat(os.path.join(run, b"stop")).st_mtime  # time according to the file server's clock
    except OSError:
        now = time.time()
    for folder in (run, *tasks_of(run)):
        with contextlib.suppress(OSError), open(os.path.join(folder, b"events.jsonl"), "rb") as file:
            last_write = os.fstat(file.fileno()).st_mtime
            if last_write > max(known_end + LATE, now - RECENT) or last_start(file) > known_end + LATE:
                return True
    return False


def last_start(events: Iterable[bytes]) -> float:
    """Return the time of the latest start of a job of the run, according to its events.

    0 if none has started.
    """
    latest = 0.0
    for line in events:
        if b'"started"' in line:
            event = parse_object(line)
            if event.get("event") == "started":
                latest = max(latest, finite_number(event.get("time")) or 0.0)
    return latest


def tasks_of(run: bytes) -> List[bytes]:
    """Return the folders of an array's tasks."""
    folder = os.path.join(run, b"tasks")
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    except OSError:
        return []


class ReclaimPlan:
    """The files and runs to remove.

    Attributes:
        pinned, needed: as in the answer.
        outputs: by run, the files that its job wrote in ``code/``.
        going: by run, the files in ``code/`` to remove; with ``whole``, the rest of the run is removed, too.
        revived: runs that are kept after all, because a job of theirs has started again.
    """

    def __init__(self, runs: List[bytes], request: Dict[str, Any]) -> None:
        remove_whole, remove_outputs = bool(request["whole"]), bool(request.get("outputs"))
        by_name = {text(os.path.basename(run)): run for run in runs}
        code_files = {name: CodeFiles(run) for name, run in by_name.items()}
        with_outputs = [name for name in by_name if code_files[name].outputs]
        pin_candidates = by_name if remove_whole else with_outputs if remove_outputs else ()
        self.pinned = [name for name in pin_candidates if has_pins(by_name[name])]
        kept_runs = self.pinned if remove_outputs else [*self.pinned, *with_outputs]
        self.needed = find_needed(kept_runs, list(by_name), request.get("names", {})) if remove_whole else {}
        retained_runs = {*self.pinned, *self.needed}
        self.outputs = {name: code_files[name].outputs for name in with_outputs if name not in retained_runs}
        self.going: Dict[str, List[CodeFile]] = {}
        for name, run_files in code_files.items():
            if not remove_whole or name not in {*kept_runs, *self.needed}:
                removable_outputs = run_files.outputs if remove_outputs and name not in retained_runs else []
                self.going[name] = [*run_files.delivered, *run_files.byte_code, *removable_outputs]
        self.with_code = [
            name
            for name, files in self.going.items()
            if files or (code_files[name].is_there and not code_files[name].outputs)
        ]
        self.revived: List[str] = []
        self._runs, self._whole = by_name, remove_whole

    def measure(self, links: Dict[Inode, int]) -> Dict[str, int]:
        """Return the bytes that each run uses alone, and count the links to objects in ``links``."""
        sizes = {}
        for name, files in self.going.items():
            states = files_below(self._runs[name]) if self._whole else (file.state for file in files)
            sizes[name] = count_links(states, links)
        return sizes

    def remove(self, root: bytes, end_times: Dict[str, float]) -> List[str]:
        """Remove everything in the plan; return the paths that could not be removed."""
        trouble: List[bytes] = []
        for name in self.going:
            run = self._runs[name]
            has_secrets = any(os.path.lexists(os.path.join(run, file)) for file in SECRET_FILES)
            if not self._whole and name not in self.with_code and not has_secrets:
                continue
            try:
                previous_stop = forbid_start(run)
                if has_revived(run, end_times.get(name, 0.0)):
                    allow_start(run, previous_stop)
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
        """Remove the secrets and the planned code files; return whether all of the files are gone."""
        for file in SECRET_FILES:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(run, file))
        all_gone = remove_files(os.path.join(run, b"code"), self.going[name])
        forbid_start(run)  # again, in case the disk was full
        return all_gone


def reclaim(request: Dict[str, Any]) -> Dict[str, Any]:
    """Measure, and remove if requested."""
    now = time.time()
    root, objects, runs = validate_request(request)
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
                # Keep an object that was linked to meanwhile. A delivery may still link to it between this
                # check and the next line; that run then keeps the content, and the next delivery sends it
                # again.
                if os.lstat(path).st_nlink <= 1:
                    os.unlink(path)
    return {
        "runs": sizes,
        "with_code": plan.with_code,
        "outputs": {name: describe_outputs(files) for name, files in plan.outputs.items()},
        "objects": {"files": len(garbage), "bytes": sum(status.st_blocks * 512 for _, status in garbage)},
        "unfinished": [text(path) for path in unfinished],
        "trouble": trouble,
        "pinned": plan.pinned,
        "needed": plan.needed,
        "revived": plan.revived,
    }


def main() -> int:
    """Handle one request."""
    try:
        source = sys.stdin.buffer
        length = struct.unpack(">I", source.read(4))[0]
        request = json.loads(zlib.decompress(source.read(length)).decode("ascii"))
        answer: Dict[str, Any] = {"done": reclaim(request)}
    except WorkerError as outcome:
        answer = {outcome.key: outcome.value}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, zlib.error) as error:
        answer = {"refused": "the request is invalid: {!r}".format(error)}
    sys.stdout.write("\n{}{}\n".format(sys.argv[2], json.dumps(answer)))
    return 0 if "done" in answer else 76
