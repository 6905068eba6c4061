"""What one node does: looks whether there is room, then brings its share to its own disk.

::

    DST                      the copy: whole, or not there
    DST.dtslurm.json         what it is a copy of
    .NAME.dtslurm-part       one that is under way, or was when its job died; never taken for the copy
    .NAME.dtslurm-lock       held while one is made
"""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import time
from typing import Any, Dict, List, Sequence, Tuple

from ..artifacts import digest_of
from . import copying
from .files import (
    Failed,
    Listed,
    Progress,
    at,
    existing,
    file_system,
    fingerprint,
    human,
    is_closed,
    is_own,
    is_shared,
    load,
    on_disk,
    put,
    total,
    tree,
)
from .request import Item, expand

HEADROOM = 1.01
THEIRS = "{} belongs to another user, or is a link; name another place, such as a folder of your own"


def name() -> str:
    """Return this node's name as Slurm has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def rank() -> int:
    """Return this node's number in the step."""
    return int(os.environ.get("SLURM_NODEID", "0"))


class ItemPaths:
    """One item's place on this node."""

    def __init__(self, item: Item, environ: Dict[str, str]) -> None:
        self.item = item
        self.to = expand(item.to, environ)
        folder, base = os.path.split(self.to)
        self.folder = folder
        self.manifest = self.to + ".dtslurm.json"
        self.draft = os.path.join(folder, "." + base + ".dtslurm-part")
        self.old = os.path.join(folder, "." + base + ".dtslurm-old")
        self.lock = os.path.join(folder, "." + base + ".dtslurm-lock")
        self.sent = os.path.join(folder, "." + base + ".dtslurm-sent")  # by sbcast

    def whole(self, files: Sequence[Listed]) -> bool:
        """Tell whether the copy is there and is of these files as they are now."""
        told = load(self.manifest)
        if told.get("fingerprint") != fingerprint(files) or not os.path.lexists(self.to):
            return False
        try:
            if not (is_closed(self.to) and is_closed(self.manifest)):  # others may have put something into it
                return False
            if self.item.method == "unpack":
                own = tree(self.to)
                return [len(own), total(own)] == told.get("unpacked")
            return all(self._same(one) for one in files)
        except OSError:
            return False

    def _same(self, one: Listed) -> bool:
        found = os.stat(at(self.to, one[0]))
        return found.st_size == one[1] and int(found.st_mtime) == one[2]

    def foreign(self) -> bool:
        """Tell whether there is something that was not staged."""
        return os.path.lexists(self.to) and not os.path.exists(self.manifest)

    def theirs(self) -> str:
        """Return what of this place another user or a link holds, empty if nothing."""
        for path in (self.to, self.manifest, self.draft, self.old, self.lock, self.sent):
            with contextlib.suppress(FileNotFoundError):
                if not is_own(path):
                    return path
        return ""

    def kept(self, files: Sequence[Listed]) -> int:
        """Return the bytes that a draft has already, or that an outdated copy gives back."""
        found = 0
        for folder in (self.draft, self.to):
            if os.path.lexists(folder):
                try:
                    found += on_disk(tree(folder))
                except OSError:
                    continue
        return found


def needed(item: Item, files: Sequence[Listed], method: str) -> int:
    """Return the bytes of disk that an item takes on a node while it is brought.

    Raises:
        Failed: what unpacks it is not here.
    """
    size = on_disk(files)
    if method == "unpack":
        squashed = copying.squashed(item.source)
        return squashed or (size if item.source.endswith(".tar") else size * 2)  # at least that, most likely
    return size * 2 if method == "sbcast" and (len(files) != 1 or files[0][0]) else size


def look(items: Sequence[Tuple[Item, Sequence[Listed], str]], environ: Dict[str, str]) -> Dict[str, Any]:
    """Return what is to be done here and what speaks against it; nothing is written."""
    places: Dict[str, Any] = {}
    problems: List[str] = []
    disks: Dict[int, List[int]] = {}
    where = {}
    for item, files, method in items:
        try:
            place = ItemPaths(item, environ)
        except ValueError as error:
            problems.append("{}: {}: {}".format(name(), item.to, error))
            continue
        folder = existing(place.to)
        found = os.stat(folder)
        disk = found.st_dev
        whole = place.whole(files)
        places[item.name] = {"to": place.to, "whole": whole, "disk": [disk, found.st_ino]}
        problem = "" if whole else _against(place, folder, method)
        if problem:
            problems.append("{}: {}".format(name(), problem))
        elif not whole:
            try:
                size = needed(item, files, method)
            except Failed as error:
                problems.append("{}: {}".format(name(), error))
                continue
            want = disks.setdefault(disk, [0, 0, 0])
            want[0] += size
            want[1] += len(files)
            want[2] += place.kept(files)
            where[disk] = folder
    for disk, (size, count, kept) in disks.items():
        room = os.statvfs(where[disk])
        free = room.f_bavail * room.f_frsize + kept
        if size * HEADROOM > free:
            text = "{}: {} do not fit on {}, where {} are free"
            problems.append(text.format(name(), human(size), where[disk], human(free)))
        elif room.f_files and room.f_favail < count:
            text = "{}: {} files do not fit on {}, which takes {} more"
            problems.append(text.format(name(), count, where[disk], room.f_favail))
    return {
        "node": name(),
        "node_rank": rank(),
        "machine": _machine(),
        "places": places,
        "problems": problems,
    }


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _against(place: ItemPaths, folder: str, method: str) -> str:
    """Return why an item cannot be brought here, empty if it can."""
    kind = file_system(folder)
    if is_shared(kind):
        return "{} is on {}, which all nodes share; name a place on the node's own disk".format(
            place.to, kind
        )
    if place.theirs():
        return THEIRS.format(place.theirs())
    if place.foreign():
        return "{} is there already and was not staged; remove it, or name another place".format(place.to)
    if not os.access(folder, os.W_OK | os.X_OK):
        return "{} cannot be written to".format(folder)
    if method in ("copy", "rsync", "unpack") and not os.path.exists(place.item.source):
        return "there is no {} on this node; is its file system mounted there?".format(place.item.source)
    tool = {"rsync": "rsync", "unpack": "tar"}.get(method)
    if tool and shutil.which(tool) is None:
        return "there is no {} on this node for method={}".format(tool, method)
    return ""


def bring(
    item: Item,
    files: Sequence[Listed],
    method: str,
    packed: Dict[str, str],
    nodes: int,
    environ: Dict[str, str],
) -> Dict[str, Any]:
    """Bring one item here, unless it is here; return what was done.

    Args:
        packed: of ``pack`` and ``sbcast``: the ``path`` of the one file, and its ``sha256``.
        nodes: how many bring it.

    Raises:
        Failed: with the reason.
    """
    place = ItemPaths(item, environ)
    os.makedirs(place.folder, exist_ok=True)
    began = time.monotonic()
    progress = Progress(name(), item.source, total(files), nodes)
    if place.theirs():
        raise Failed(THEIRS.format(place.theirs()))
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(place.lock, flags, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another job or task here may be bringing the same
        if place.whole(files):
            progress.add(progress.total)
            progress.tell(True)
            return {
                "to": place.to,
                "kept": True,
                "bytes": 0,
                "sha256": load(place.manifest).get("sha256", ""),
            }
        if place.foreign():
            raise Failed("{} is there already and was not staged".format(place.to))
        _make_room(place, files, method)
        try:
            digest = _draft(place, files, method, packed, progress)
            own = tree(place.draft)
            unpacked = method == "unpack"
            if not unpacked and [one[:2] for one in own] != [one[:2] for one in files]:
                raise Failed("{} has not all of {}'s files".format(place.draft, item.source))
        except OSError as error:
            _after(place, error)
            raise Failed("{}: {}".format(error.filename or place.to, error.strerror)) from None
        told = {"schema": 1, "source": item.source, "fingerprint": fingerprint(files), "sha256": digest}
        told.update(files=len(own), bytes=total(own), method=method, time=int(time.time()))
        if unpacked:
            told["unpacked"] = [len(own), total(own)]
        _finish(place, told)
    progress.bytes = progress.total
    progress.tell(True)
    return {
        "to": place.to, "kept": False, "bytes": total(files), "sha256": digest,
        "seconds": round(time.monotonic() - began, 3),
    }  # fmt: skip


def _make_room(place: ItemPaths, files: Sequence[Listed], method: str) -> None:
    """Remove what is in the way: a draft of another kind, and an outdated copy where both do not fit."""
    single = bool(files) and not files[0][0] and method != "unpack"
    if os.path.lexists(place.draft) and os.path.isdir(place.draft) == single:
        remove(place.draft)
    if os.path.lexists(place.to):
        found = os.statvfs(place.folder)
        if found.f_bavail * found.f_frsize < needed(place.item, files, method) * HEADROOM:
            remove(place.to)


def remove(path: str) -> None:
    """Remove a file or a folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def _draft(
    place: ItemPaths, files: Sequence[Listed], method: str, packed: Dict[str, str], progress: Progress
) -> str:
    if method in ("pack", "sbcast"):
        archive = place.sent if method == "sbcast" else packed["path"]
        if files and not files[0][0]:  # one file, sent as it is
            os.replace(archive, place.draft)
            os.utime(place.draft, (files[0][2], files[0][2]))
            digest: str = digest_of(place.draft)
            if digest != packed["sha256"]:
                raise Failed("{} is not what was sent: its SHA-256 differs".format(place.draft))
            return digest
        digest = copying.unpack(archive, place.draft, progress, packed["sha256"])
        if method == "sbcast":
            os.unlink(archive)
        return digest
    if method == "unpack":
        return copying.unpack(place.item.source, place.draft, progress)
    # What a draft holds of an older state of the source must not become part of the copy.
    wanted = {one[0] for one in files}
    if os.path.isdir(place.draft):
        for relative, _, _ in tree(place.draft):
            if relative not in wanted:
                os.unlink(at(place.draft, relative))
    brought: str = copying.WAYS[method](place.item.source, place.draft, files, progress)
    return brought


def _after(place: ItemPaths, error: OSError) -> None:
    """Give a full disk its room back; any other draft is kept, to go on from."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remove(place.draft)
    remove(place.sent)


def _finish(place: ItemPaths, told: Dict[str, Any]) -> None:
    """Make the draft the copy. The record comes first: one that tells of no such files counts for nothing."""
    if place.theirs():  # who was here meanwhile
        raise Failed(THEIRS.format(place.theirs()))
    os.chmod(place.draft, stat.S_IMODE(os.stat(place.draft).st_mode) & ~0o022)  # an archive sets its own
    remove(place.old)
    put(place.manifest, told)
    if os.path.lexists(place.to):
        os.rename(place.to, place.old)
    os.rename(place.draft, place.to)
    remove(place.old)
