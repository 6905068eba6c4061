"""A folder of checkpoints: each is complete or does not exist, and says by checksums that it is whole.

::

    step-00000200-a1/      a checkpoint: saved at step 200 by attempt 1
        __0_0.distcp ...   what torch.distributed.checkpoint wrote, a file per rank
        .metadata          its index
        manifest.json      step, attempt, world size; size and SHA-256 of every other file; written last
    .writing-…/            one that is being written, or was when its job died; never read
    .deleting-…/           one that is being removed
    step-…-a0.corrupt/     one whose files are not what its manifest says; kept to be looked at
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
_NAME = re.compile(r"step-(\d+)-a(\d+)")
_WRITING = re.compile(r"\.writing-step-\d+-a(\d+)-[0-9a-f]+")
_CHUNK = 1 << 22


class LaterVersion(Exception):
    """A later version of dtslurm wrote a checkpoint."""


@dataclass(frozen=True)
class Saved:
    """One file of a checkpoint."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    attempt: int
    world_size: int
    files: tuple[Saved, ...]
    time: float = 0.0

    def text(self) -> str:
        """Return it as JSON."""
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
                    f"{checkpoint / MANIFEST} has schema {schema}, and this version knows schema 1"
                )
            files = values.pop("files")
            saved = tuple(Saved(name, int(v["bytes"]), str(v["sha256"])) for name, v in files.items())
            return cls(files=saved, **values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{MANIFEST} is not one: {error!r}") from error


def name_of(step: int, attempt: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"step-{step:08}-a{attempt}"


def candidates(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, latest step first (of one step, the latest attempt).

    Raises:
        OSError: the folder cannot be read.
    """
    names = [(_NAME.fullmatch(name), name) for name in _folders_in(folder)]
    found = [(int(match[1]), int(match[2]), folder / name) for match, name in names if match]
    return [path for *_, path in sorted(found, reverse=True)]


def find_damaged(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that were set aside because they are damaged.

    Raises:
        OSError: the folder cannot be read.
    """
    return sorted(folder / name for name in _folders_in(folder) if _NAME.match(name) and ".corrupt" in name)


def _folders_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:  # Path.is_dir() would call a folder that cannot be read none
            return [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def checksum(path: Path, *, sync: bool = False) -> Saved:
    """Return a file's size and SHA-256; ``sync`` sees to it first that the disk has it."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return Saved(path.name, size, digest.hexdigest())


def close_to_others(path: Path) -> None:
    """Let nobody but the user write to what was written, whatever the umask: a checkpoint is a pickle."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o022:
        with contextlib.suppress(OSError):  # a file system without modes must not cost the checkpoint
            path.chmod(mode & ~0o022)


def find_damage(checkpoint: Path, files: Iterable[Saved], patience: float = 0.0) -> str:
    """Return which file of a checkpoint is missing or changed, in words; empty if none is.

    Args:
        patience: seconds in which a file may still appear, as on NFS when another node wrote it.

    Raises:
        OSError: a file cannot be read now, which says nothing about its content.
    """
    end = time.monotonic() + patience
    for file in files:
        path = checkpoint / file.name
        try:
            while not path.exists() and time.monotonic() < end:
                time.sleep(0.2)
            if (size := path.stat().st_size) != file.size:
                return f"{file.name} has {size} bytes of {file.size}"
            if checksum(path).sha256 != file.sha256:
                return f"{file.name} is not what was written: its SHA-256 differs"
        except FileNotFoundError:
            return f"{file.name} is missing"
    return ""


def commit(writing: Path, manifest: Manifest) -> Path:
    """Make the checkpoint in ``writing`` one that counts; return its path. The last step of a save.

    Raises:
        OSError: a file is missing or the disk refuses; nothing has been made to count then.
    """
    for file in manifest.files:
        appear(writing / file.name, file.size)
    with (writing / MANIFEST).open("x", encoding="utf-8") as out:
        out.write(manifest.text())
        out.flush()
        os.fsync(out.fileno())
    close_to_others(writing / MANIFEST)
    sync_folder(writing)
    checkpoint = writing.parent / name_of(manifest.step, manifest.attempt)
    replaced = set_aside(checkpoint, "replaced") if checkpoint.exists() else None  # by an earlier start
    writing.rename(checkpoint)
    sync_folder(checkpoint.parent)
    if replaced is not None:
        remove(replaced)
    return checkpoint


def appear(path: Path, size: int, patience: float = 60.0) -> None:
    """Wait until a file that another node wrote is seen here whole.

    Raises:
        OSError: it is not, in that time.
    """
    end = time.monotonic() + patience
    while True:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == size:
                return
        if time.monotonic() > end:
            raise FileNotFoundError(
                errno.ENOENT,
                "another rank wrote it, but rank 0 does not see it; is the folder shared by all nodes?",
                str(path),
            )
        time.sleep(0.1)


def sync_folder(folder: Path) -> None:
    """See to it that the disk has a folder's entries."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(checkpoint: Path, word: str) -> Path:
    """Rename a checkpoint so that it no longer counts; return its new path."""
    for number in range(1000):
        target = checkpoint.with_name(f"{checkpoint.name}.{word}{'-' + str(number) if number else ''}")
        if not target.exists():
            with contextlib.suppress(FileNotFoundError):
                checkpoint.rename(target)
            return target
    raise FileExistsError(errno.EEXIST, "too many of that name", str(checkpoint))


def remove(path: Path) -> None:
    """Delete a checkpoint: at once it no longer counts, whatever happens while its files go."""
    doomed = path.with_name(f".deleting-{path.name.lstrip('.')}")
    with contextlib.suppress(OSError):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def prune(folder: Path, keep: int | None, pinned: frozenset[Path] = frozenset()) -> None:
    """Delete all but the latest checkpoints and those that are pinned; None keeps all."""
    if keep is not None:
        for path in candidates(folder)[keep:]:
            if path not in pinned:
                remove(path)


def registered(checkpoint: Path, step: int) -> dict[str, object]:
    """Return what the register of artifacts has of a checkpoint; its SHA-256 is over those of its files."""
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
    """Delete what earlier attempts, which may not write any more, and earlier processes left unfinished."""
    with contextlib.suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            found = _WRITING.fullmatch(path.name)
            if path.name.startswith(".deleting-") or (found and int(found[1]) <= attempt):
                shutil.rmtree(path, ignore_errors=True)
