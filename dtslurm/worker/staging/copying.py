"""The ways to bring one source into a draft beside its place. Each leaves whole files or raises."""

import concurrent.futures
import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from typing import IO, Any, Callable, Dict, List, Sequence

from ..artifacts import digest_of
from .files import BLOCK, CHUNK, Failed, Listed, Progress, at

SQUASHFS = b"hsqs"
_MAGIC = (
    (b"\x1f\x8b", "--gzip"), (b"BZh", "--bzip2"), (b"\xfd7zXZ", "--xz"), (b"\x28\xb5\x2f\xfd", "--zstd"),
)  # fmt: skip


def copy(source: str, draft: str, files: Sequence[Listed], progress: Progress) -> str:
    """Copy the files, several at a time; files of a draft that was cut off are taken if they are whole.

    Returns:
        A checksum over the checksums of all files as they were read.
    """
    for folder in sorted({os.path.dirname(at(draft, one[0])) for one in files}):
        os.makedirs(folder, exist_ok=True)
    if files and files[0][0]:
        os.makedirs(draft, exist_ok=True)
    workers = min(8, (os.cpu_count() or 1) * 2, max(1, len(files)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        sums = list(pool.map(lambda one: _one(source, draft, one, progress), files))
    whole = hashlib.sha256()
    for (relative, size, _), digest in zip(files, sums):  # noqa: B905  Python 3.6
        whole.update("{}\0{}\0{}\n".format(relative, size, digest).encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _one(source: str, draft: str, listed: Listed, progress: Progress) -> str:
    relative, size, mtime = listed
    origin, target = at(source, relative), at(draft, relative)
    try:
        found = os.stat(target)
        finished = found.st_size == size and int(found.st_mtime) == mtime  # the time is set last
    except OSError:
        finished = False
    if finished:
        progress.add(size)
        return digest_of(target)
    digest, seen = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    made = os.open(target, flags, 0o600)
    with os.fdopen(made, "wb", 0) as writer, open(origin, "rb", buffering=0) as reader:
        while True:
            chunk = reader.read(min(CHUNK, max(size, 1 << 16)))
            if not chunk:
                break
            write_all(writer, chunk)
            digest.update(chunk)
            seen += len(chunk)
            progress.add(len(chunk))
        now = os.fstat(reader.fileno())
    if seen != size or int(now.st_mtime) != mtime:
        raise Failed("{} changed while it was copied: submit again when it is at rest".format(origin))
    shutil.copymode(origin, target)
    os.chmod(target, (os.stat(target).st_mode | 0o600) & ~0o022)
    os.utime(target, (mtime, mtime))
    return digest.hexdigest()


def write_all(writer: Any, chunk: bytes) -> None:
    """Write all of a chunk to an unbuffered file."""
    view = memoryview(chunk)
    while view:
        view = view[writer.write(view) :]


def pack(source: str, files: Sequence[Listed], target: str) -> str:
    """Write all files into one tar file; return its SHA-256. Where that fails there is none."""
    try:
        return _packed(source, files, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(target)
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(target + ".names")


def _packed(source: str, files: Sequence[Listed], target: str) -> str:
    argv = ["tar", "--create", "--file=-", "--format=gnu", "--dereference", "--directory=" + source]
    argv += ["--hard-dereference", "--no-recursion", "--null", "--files-from=-"]
    names = b"".join(one[0].encode("utf-8", "surrogateescape") + b"\0" for one in files)
    digest = hashlib.sha256()
    with open(target + ".names", "wb") as out:
        out.write(names)
    with tempfile.TemporaryFile() as said:  # a pipe that nobody reads would fill up
        with open(target + ".names", "rb") as listed, open(target, "wb", buffering=0) as writer:
            process = subprocess.Popen(argv, stdin=listed, stdout=subprocess.PIPE, stderr=said)
            with process:
                for chunk in iter(lambda: process.stdout.read(CHUNK), b""):  # type: ignore[union-attr]
                    write_all(writer, chunk)
                    digest.update(chunk)
        words = _last_words(said)
    if process.returncode != 0:
        raise Failed("tar could not pack {}: {}".format(source, words))
    return digest.hexdigest()


def unpack(archive: str, draft: str, progress: Progress, wanted: str = "") -> str:
    """Unpack a tar or squashfs file; return the SHA-256 of what was read.

    Args:
        wanted: the checksum that it must have, where one is known.
    """
    shutil.rmtree(draft, ignore_errors=True)
    os.makedirs(draft)
    with open(archive, "rb") as file:
        head = file.read(8)
    if head[:4] == SQUASHFS:
        _run(["unsquashfs", "-no-progress", "-force", "-dest", draft, archive])
        progress.add(os.stat(archive).st_size)
        return ""
    digest = hashlib.sha256()
    # Owners and leading slashes are not the archive's to choose.
    argv = ["tar", "--extract", "--file=-", "--no-same-owner", "--directory=" + draft]
    argv += [option for magic, option in _MAGIC if head.startswith(magic)]
    cut = False
    with tempfile.TemporaryFile() as said, open(archive, "rb", buffering=0) as reader:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, bufsize=0
        )
        with process:
            for chunk in iter(lambda: reader.read(CHUNK), b""):
                digest.update(chunk)
                progress.add(len(chunk))
                if not cut:
                    try:
                        write_all(process.stdin, chunk)
                    except BrokenPipeError:  # it has read the end mark, or says below what is wrong
                        cut = True
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        words = _last_words(said)
    if process.returncode != 0:
        raise Failed("tar could not unpack {}: {}".format(archive, words))
    if wanted and digest.hexdigest() != wanted:
        raise Failed("{} is not what was packed: its SHA-256 differs".format(archive))
    return digest.hexdigest()


def squashed(archive: str) -> int:
    """Return the bytes that a squashfs file takes when it is unpacked, 0 for any other file.

    Raises:
        Failed: nothing here can tell.
    """
    with open(archive, "rb") as file:
        if file.read(4) != SQUASHFS:
            return 0
    try:
        listed = subprocess.run(
            ["unsquashfs", "-lln", archive], stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False
        )
    except OSError:
        raise Failed(
            "unsquashfs (squashfs-tools), which unpacks {}, is not on this node".format(archive)
        ) from None
    if listed.returncode != 0:
        words = listed.stderr.decode("utf-8", "replace").strip()
        raise Failed("{} cannot be read: {}".format(archive, words[-300:]))
    size = 0
    for line in listed.stdout.splitlines():  # -rw-r--r-- 0/0   5000 2025-01-31 12:00 squashfs-root/one
        words_of = line.split(None, 3)
        if line.startswith(b"-") and len(words_of) == 4 and words_of[2].isdigit():
            size += -(-int(words_of[2]) // BLOCK) * BLOCK
    return size


def _last_words(said: IO[bytes]) -> str:
    said.seek(0)
    return said.read().decode("utf-8", "replace").strip()[-300:]


def rsync(source: str, draft: str, files: Sequence[Listed], progress: Progress) -> str:
    """Copy by rsync, which goes on in the middle of a file."""
    argv = ["rsync", "--times", "--perms", "--copy-links", "--partial", "--chmod=u+rw,go-w"]
    if files and not files[0][0]:
        _run([*argv, source, draft])
    else:
        os.makedirs(draft, exist_ok=True)
        names = "\0".join(one[0] for one in files).encode("utf-8", "surrogateescape")
        _run([*argv, "--from0", "--files-from=-", source + "/", draft + "/"], names)
    progress.add(sum(one[1] for one in files))
    return ""


def _run(argv: List[str], text: bytes = b"") -> None:
    try:
        done = subprocess.run(
            argv, input=text, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
        )
    except OSError as error:
        raise Failed("{} cannot be run: {}".format(argv[0], error.strerror)) from None
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip()
        raise Failed("{} ended with {}: {}".format(argv[0], done.returncode, words[-300:]))


WAYS: Dict[str, Callable[..., str]] = {"copy": copy, "rsync": rsync}
