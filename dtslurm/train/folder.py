"""A folder of checkpoints: each is complete or does not exist, and has checksums to verify that it is intact.

::

    step-00000200-a1/      a checkpoint: saved at step 200 by attempt 1
        __0_0.distcp ...   what torch.distributed.checkpoint wrote, a file per rank
        .metadata          its index
        manifest.json      step, attempt, world size; size and SHA-256 of every other file; written last
    .writing-…/            an unfinished checkpoint, in progress or left by a job that died; never read
    .deleting-…/           a checkpoint that is being removed
    step-…-a0.corrupt/     a checkpoint whose files differ from its manifest; kept for inspection
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
_CHECKPOINT_NAME = re.compile(r"step-(\d+)-a(\d+)")
_UNFINISHED_NAME = re.compile(r"\.writing-step-\d+-a(\d+)-[0-9a-f]+")
_CHUNK = 1 << 22


class LaterVersion(Exception):
    """A later version of dtslurm wrote the checkpoint."""


@dataclass(frozen=True)
class CheckpointFile:
    """One file of a checkpoint."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint: step, attempt, world size, and files with sizes and checksums."""

    step: int
    attempt: int
    world_size: int
    files: tuple[CheckpointFile, ...]
    time: float = 0.0

    def text(self) -> str:
        """Return the manifest as JSON."""
        files = {file.name: {"bytes": file.size, "sha256": file.sha256} for file in self.files}
        values = {**vars(self), "files": files}
        return json.dumps({"schema": 1, **values}, indent=1) + "\n"

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Return a checkpoint's manifest.

        Raises:
            OSError: the manifest is missing or cannot be read now.
            ValueError: the manifest is damaged.
            LaterVersion: a later version of dtslurm wrote it.
        """
        try:
            values = json.loads((checkpoint / MANIFEST).read_bytes())
            if (schema := values.pop("schema")) != 1:
                raise LaterVersion(
                    f"{checkpoint / MANIFEST} has schema {schema}, and this version reads schema 1"
                )
            files = values.pop("files")
            checkpoint_files = tuple(
                CheckpointFile(name, int(entry["bytes"]), str(entry["sha256"]))
                for name, entry in files.items()
            )
            return cls(files=checkpoint_files, **values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{MANIFEST} is not a manifest: {error!r}") from error


def name_of(step: int, attempt: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"step-{step:08}-a{attempt}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, latest step first, and within a step the latest attempt first.

    Raises:
        OSError: the folder cannot be read.
    """
    names = [(_CHECKPOINT_NAME.fullmatch(name), name) for name in _folders_in(folder)]
    checkpoints = [(int(match[1]), int(match[2]), folder / name) for match, name in names if match]
    return [path for *_, path in sorted(checkpoints, reverse=True)]


def find_damaged(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that were set aside because they are damaged.

    Raises:
        OSError: the folder cannot be read.
    """
    return sorted(
        folder / name for name in _folders_in(folder) if _CHECKPOINT_NAME.match(name) and ".corrupt" in name
    )


def _folders_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:  # Path.is_dir() is False for an unreadable folder
            return [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def checksum(path: Path, *, sync: bool = False) -> CheckpointFile:
    """Return a file's size and SHA-256; ``sync`` first flushes the file to disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return CheckpointFile(path.name, size, digest.hexdigest())


def close_to_others(path: Path) -> None:
    """Remove write permission for group and others, because a checkpoint contains a pickle."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o022:
        with contextlib.suppress(OSError):  # on a file system without modes, keep the checkpoint
            path.chmod(mode & ~0o022)


def find_damage(checkpoint: Path, files: Iterable[CheckpointFile], timeout_s: float = 0.0) -> str:
    """Return a message about the first missing or changed file of a checkpoint; empty if there is none.

    Args:
        timeout_s: seconds to wait for a file to appear, needed on NFS if another node wrote the file.

    Raises:
        OSError: a file cannot be read now; its content may be intact.
    """
    deadline = time.monotonic() + timeout_s
    for file in files:
        path = checkpoint / file.name
        try:
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.2)
            if (size := path.stat().st_size) != file.size:
                return f"{file.name} has {size} of {file.size} bytes"
            if checksum(path).sha256 != file.sha256:
                return f"{file.name} has changed since it was written: its SHA-256 differs"
        except FileNotFoundError:
            return f"{file.name} is missing"
    return ""


def commit(unfinished_folder: Path, manifest: Manifest) -> Path:
    """Write the manifest and rename the folder to its final name, the last step of a save; return the path.

    Raises:
        OSError: a file is missing or a write failed; the checkpoint then does not exist.
    """
    for file in manifest.files:
        wait_for_file(unfinished_folder / file.name, file.size)
    with (unfinished_folder / MANIFEST).open("x", encoding="utf-8") as manifest_file:
        manifest_file.write(manifest.text())
        manifest_file.flush()
        os.fsync(manifest_file.fileno())
    close_to_others(unfinished_folder / MANIFEST)
    sync_folder(unfinished_folder)
    checkpoint = unfinished_folder.parent / name_of(manifest.step, manifest.attempt)
    # a checkpoint of the same step and attempt, by an earlier start of it
    replaced_folder = set_aside(checkpoint, "replaced") if checkpoint.exists() else None
    unfinished_folder.rename(checkpoint)
    sync_folder(checkpoint.parent)
    if replaced_folder is not None:
        remove(replaced_folder)
    return checkpoint


def wait_for_file(path: Path, size: int, timeout_s: float = 60.0) -> None:
    """Wait until a file that another node wrote is visible on this node with its full size.

    Raises:
        OSError: the file is not complete after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == size:
                return
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                errno.ENOENT,
                "another rank wrote this file, but rank 0 does not see it; all nodes must share the folder",
                str(path),
            )
        time.sleep(0.1)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(checkpoint: Path, word: str) -> Path:
    """Rename a checkpoint by appending ``.word``, so that it is ignored; return the new path."""
    for number in range(1000):
        new_path = checkpoint.with_name(f"{checkpoint.name}.{word}{'-' + str(number) if number else ''}")
        if not new_path.exists():
            with contextlib.suppress(FileNotFoundError):
                checkpoint.rename(new_path)
            return new_path
    raise FileExistsError(errno.EEXIST, "1000 checkpoints have this name", str(checkpoint))


def remove(path: Path) -> None:
    """Delete a checkpoint; rename it first, so that a partly deleted checkpoint is never read."""
    deleting = path.with_name(f".deleting-{path.name.lstrip('.')}")
    with contextlib.suppress(OSError):
        path.rename(deleting)
    shutil.rmtree(deleting, ignore_errors=True)


def prune(folder: Path, keep: int | None, pinned: frozenset[Path] = frozenset()) -> None:
    """Delete all checkpoints except the ``keep`` latest and the pinned ones; None keeps all."""
    if keep is not None:
        for path in list_checkpoints(folder)[keep:]:
            if path not in pinned:
                remove(path)


def describe_artifact(checkpoint: Path, step: int) -> dict[str, object]:
    """Return a checkpoint's entry for the artifact register; its SHA-256 covers the SHA-256 of each file."""
    files = (*Manifest.read(checkpoint).files, checksum(checkpoint / MANIFEST))
    text = "".join(f"{file.sha256}  {file.name}\n" for file in sorted(files, key=lambda file: file.name))
    return {
        "path": str(checkpoint),
        "kind": "checkpoint",
        "step": step,
        "bytes": sum(file.size for file in files),
        "files": len(files),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def sweep(folder: Path, attempt: int) -> None:
    """Delete unfinished checkpoints of this and earlier attempts, whose processes must no longer write."""
    with contextlib.suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            match = _UNFINISHED_NAME.fullmatch(path.name)
            if path.name.startswith(".deleting-") or (match and int(match[1]) <= attempt):
                shutil.rmtree(path, ignore_errors=True)
