"""The part of staging that each node runs: check the local disk, then copy the node's share to it.

::

    DST                      the copy: complete, or absent
    DST.dtslurm.json         the manifest: the source state that the copy has
    .NAME.dtslurm-part       the draft, in progress or left by a job that died; never used as the copy
    .NAME.dtslurm-lock       held while a draft is made
"""

import contextlib
import errno
import os
import shutil
import socket
import stat
import time
from typing import Any, Dict, List, Sequence, Tuple

from ..artifacts import digest_of
from ..lib.json_records import read_object
from ..lib.locks import acquire_lock
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
    on_disk,
    put,
    total,
    tree,
)
from .request import Item, expand

HEADROOM = 1.01
THEIRS = "{} belongs to another user, or is a link; choose another path, such as a folder of your own"


def name() -> str:
    """Return this node's Slurm node name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def rank() -> int:
    """Return this node's index in the step."""
    return int(os.environ.get("SLURM_NODEID", "0"))


class ItemPaths:
    """The paths of one item on this node."""

    def __init__(self, item: Item, environ: Dict[str, str]) -> None:
        self.item = item
        self.to = expand(item.to, environ)
        folder, base = os.path.split(self.to)
        self.folder = folder
        self.manifest = self.to + ".dtslurm.json"
        self.draft = os.path.join(folder, "." + base + ".dtslurm-part")
        self.old = os.path.join(folder, "." + base + ".dtslurm-old")
        self.lock = os.path.join(folder, "." + base + ".dtslurm-lock")
        self.sent = os.path.join(folder, "." + base + ".dtslurm-sent")  # the file that sbcast sends

    def whole(self, files: Sequence[Listed]) -> bool:
        """Return whether the copy exists, is complete, and matches the current state of the files."""
        manifest = read_object(self.manifest)
        if manifest.get("fingerprint") != fingerprint(files) or not os.path.lexists(self.to):
            return False
        try:
            # Other users may have modified the copy.
            if not (is_closed(self.to) and is_closed(self.manifest)):
                return False
            if self.item.method == "unpack":
                own_files = tree(self.to)
                return [len(own_files), total(own_files)] == manifest.get("unpacked")
            return all(self._matches(listed) for listed in files)
        except OSError:
            return False

    def _matches(self, file: Listed) -> bool:
        status = os.stat(at(self.to, file[0]))
        return status.st_size == file[1] and int(status.st_mtime) == file[2]

    def foreign(self) -> bool:
        """Return whether the destination exists and was not staged."""
        return os.path.lexists(self.to) and not os.path.exists(self.manifest)

    def theirs(self) -> str:
        """Return the path of this item that belongs to another user or is a link, empty if none."""
        for path in (self.to, self.manifest, self.draft, self.old, self.lock, self.sent):
            with contextlib.suppress(FileNotFoundError):
                if not is_own(path):
                    return path
        return ""

    def kept(self, files: Sequence[Listed]) -> int:
        """Return the bytes that the draft has already, or that removing an outdated copy frees."""
        bytes_kept = 0
        for folder in (self.draft, self.to):
            if os.path.lexists(folder):
                try:
                    bytes_kept += on_disk(tree(folder))
                except OSError:
                    continue
        return bytes_kept


def needed(item: Item, files: Sequence[Listed], method: str) -> int:
    """Return the bytes of disk that an item needs on a node during the copy.

    Raises:
        Failed: the program that unpacks the item is missing.
    """
    size = on_disk(files)
    if method == "unpack":
        squashed = copying.squashed(item.source)
        # An estimate for compressed archives.
        return squashed or (size if item.source.endswith(".tar") else size * 2)
    return size * 2 if method == "sbcast" and (len(files) != 1 or files[0][0]) else size


def look(items: Sequence[Tuple[Item, Sequence[Listed], str]], environ: Dict[str, str]) -> Dict[str, Any]:
    """Return the work to do on this node and the problems that prevent it, without writing anything."""
    places: Dict[str, Any] = {}
    problems: List[str] = []
    needs_by_disk: Dict[int, List[int]] = {}
    folder_by_disk = {}
    for item, files, method in items:
        try:
            item_paths = ItemPaths(item, environ)
        except ValueError as error:
            problems.append("{}: {}: {}".format(name(), item.to, error))
            continue
        folder = existing(item_paths.to)
        folder_status = os.stat(folder)
        disk = folder_status.st_dev
        is_whole = item_paths.whole(files)
        places[item.name] = {"to": item_paths.to, "whole": is_whole, "disk": [disk, folder_status.st_ino]}
        problem = "" if is_whole else _find_problem(item_paths, folder, method)
        if problem:
            problems.append("{}: {}".format(name(), problem))
        elif not is_whole:
            try:
                size = needed(item, files, method)
            except Failed as error:
                problems.append("{}: {}".format(name(), error))
                continue
            disk_needs = needs_by_disk.setdefault(disk, [0, 0, 0])
            disk_needs[0] += size
            disk_needs[1] += len(files)
            disk_needs[2] += item_paths.kept(files)
            folder_by_disk[disk] = folder
    for disk, (size, count, reusable) in needs_by_disk.items():
        disk_status = os.statvfs(folder_by_disk[disk])
        free = disk_status.f_bavail * disk_status.f_frsize + reusable
        if size * HEADROOM > free:
            text = "{}: {} do not fit on {}, where {} are free"
            problems.append(text.format(name(), human(size), folder_by_disk[disk], human(free)))
        elif disk_status.f_files and disk_status.f_favail < count:
            text = "{}: {} files do not fit on {}, which has room for {} more"
            problems.append(text.format(name(), count, folder_by_disk[disk], disk_status.f_favail))
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


def _find_problem(item_paths: ItemPaths, folder: str, method: str) -> str:
    """Return why an item cannot be copied to this node, empty if it can."""
    kind = file_system(folder)
    if is_shared(kind):
        return "{} is on {}, which all nodes share; choose a path on the node's local disk".format(
            item_paths.to, kind
        )
    if item_paths.theirs():
        return THEIRS.format(item_paths.theirs())
    if item_paths.foreign():
        return "{} already exists and was not staged; remove it, or choose another path".format(item_paths.to)
    if not os.access(folder, os.W_OK | os.X_OK):
        return "{} cannot be written to".format(folder)
    if method in ("copy", "rsync", "unpack") and not os.path.exists(item_paths.item.source):
        return "{} does not exist on this node; check that its file system is mounted there".format(
            item_paths.item.source
        )
    tool = {"rsync": "rsync", "unpack": "tar"}.get(method)
    if tool and shutil.which(tool) is None:
        return "{} is not installed on this node, but method={} needs it".format(tool, method)
    return ""


def bring(
    item: Item,
    files: Sequence[Listed],
    method: str,
    packed_file: Dict[str, str],
    nodes: int,
    environ: Dict[str, str],
) -> Dict[str, Any]:
    """Copy one item to this node, unless the copy exists; return a summary.

    Args:
        packed_file: for ``pack`` and ``sbcast``: the ``path`` of the archive, and its ``sha256``.
        nodes: number of nodes that copy the item.

    Raises:
        Failed: with the reason.
    """
    item_paths = ItemPaths(item, environ)
    os.makedirs(item_paths.folder, exist_ok=True)
    started_at = time.monotonic()
    progress = Progress(name(), item.source, total(files), nodes)
    if item_paths.theirs():
        raise Failed(THEIRS.format(item_paths.theirs()))
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(item_paths.lock, flags, 0o600), "w") as lock:
        acquire_lock(lock)  # another job or task on this node may be copying the same item
        if item_paths.whole(files):
            progress.add(progress.total)
            progress.tell(True)
            return {
                "to": item_paths.to,
                "kept": True,
                "bytes": 0,
                "sha256": read_object(item_paths.manifest).get("sha256", ""),
            }
        if item_paths.foreign():
            raise Failed("{} already exists and was not staged".format(item_paths.to))
        _make_room(item_paths, files, method)
        try:
            digest = _make_draft(item_paths, files, method, packed_file, progress)
            draft_files = tree(item_paths.draft)
            unpacked = method == "unpack"
            if not unpacked and [listed[:2] for listed in draft_files] != [listed[:2] for listed in files]:
                raise Failed("{} lacks files of {}".format(item_paths.draft, item.source))
        except OSError as error:
            _clean_up_draft(item_paths, error)
            raise Failed("{}: {}".format(error.filename or item_paths.to, error.strerror)) from None
        manifest = {"schema": 1, "source": item.source, "fingerprint": fingerprint(files), "sha256": digest}
        manifest.update(
            files=len(draft_files), bytes=total(draft_files), method=method, time=int(time.time())
        )
        if unpacked:
            manifest["unpacked"] = [len(draft_files), total(draft_files)]
        _publish_draft(item_paths, manifest)
    progress.bytes = progress.total
    progress.tell(True)
    return {
        "to": item_paths.to, "kept": False, "bytes": total(files), "sha256": digest,
        "seconds": round(time.monotonic() - started_at, 3),
    }  # fmt: skip


def _make_room(item_paths: ItemPaths, files: Sequence[Listed], method: str) -> None:
    """Remove what is in the way: a draft of another kind, and an outdated copy if both do not fit."""
    is_single_file = bool(files) and not files[0][0] and method != "unpack"
    if os.path.lexists(item_paths.draft) and os.path.isdir(item_paths.draft) == is_single_file:
        remove(item_paths.draft)
    if os.path.lexists(item_paths.to):
        disk_status = os.statvfs(item_paths.folder)
        if disk_status.f_bavail * disk_status.f_frsize < needed(item_paths.item, files, method) * HEADROOM:
            remove(item_paths.to)


def remove(path: str) -> None:
    """Remove a file or a folder, if it exists."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def _make_draft(
    item_paths: ItemPaths,
    files: Sequence[Listed],
    method: str,
    packed_file: Dict[str, str],
    progress: Progress,
) -> str:
    if method in ("pack", "sbcast"):
        archive = item_paths.sent if method == "sbcast" else packed_file["path"]
        if files and not files[0][0]:  # a single file, sent without packing
            os.replace(archive, item_paths.draft)
            os.utime(item_paths.draft, (files[0][2], files[0][2]))
            digest: str = digest_of(item_paths.draft)
            if digest != packed_file["sha256"]:
                raise Failed("the SHA-256 of {} differs from that of the sent data".format(item_paths.draft))
            return digest
        digest = copying.unpack(archive, item_paths.draft, progress, packed_file["sha256"])
        if method == "sbcast":
            os.unlink(archive)
        return digest
    if method == "unpack":
        return copying.unpack(item_paths.item.source, item_paths.draft, progress)
    # Files in the draft from an older state of the source must not become part of the copy.
    source_paths = {listed[0] for listed in files}
    if os.path.isdir(item_paths.draft):
        for relative, _, _ in tree(item_paths.draft):
            if relative not in source_paths:
                os.unlink(at(item_paths.draft, relative))
    combined_digest: str = copying.WAYS[method](item_paths.item.source, item_paths.draft, files, progress)
    return combined_digest


def _clean_up_draft(item_paths: ItemPaths, error: OSError) -> None:
    """Remove the draft if the disk is full; otherwise keep the draft, so that the next staging can resume."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remove(item_paths.draft)
    remove(item_paths.sent)


def _publish_draft(item_paths: ItemPaths, digest: Dict[str, Any]) -> None:
    """Turn the draft into the copy.

    The manifest is written first: a manifest whose files do not exist is ignored.
    """
    if item_paths.theirs():  # another user may have created a path meanwhile
        raise Failed(THEIRS.format(item_paths.theirs()))
    # Archives set their own permissions.
    os.chmod(item_paths.draft, stat.S_IMODE(os.stat(item_paths.draft).st_mode) & ~0o022)
    remove(item_paths.old)
    put(item_paths.manifest, digest)
    if os.path.lexists(item_paths.to):
        os.rename(item_paths.to, item_paths.old)
    os.rename(item_paths.draft, item_paths.to)
    remove(item_paths.old)
