"""The methods that copy one source into a draft next to its destination.

Each method either produces complete files or raises an exception.
"""

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
_TAR_OPTION_BY_MAGIC = (
    (b"\x1f\x8b", "--gzip"), (b"BZh", "--bzip2"), (b"\xfd7zXZ", "--xz"), (b"\x28\xb5\x2f\xfd", "--zstd"),
)  # fmt: skip


def copy(source: str, draft: str, files: Sequence[Listed], progress: Progress) -> str:
    """Copy the files in parallel; complete files of an interrupted draft are reused.

    Returns:
        A checksum over the checksums of all files as they were read.
    """
    for folder in sorted({os.path.dirname(at(draft, listed[0])) for listed in files}):
        os.makedirs(folder, exist_ok=True)
    if files and files[0][0]:
        os.makedirs(draft, exist_ok=True)
    workers = min(8, (os.cpu_count() or 1) * 2, max(1, len(files)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        digests = list(pool.map(lambda file: _copy_file(source, draft, file, progress), files))
    combined = hashlib.sha256()
    for (relative, size, _), digest in zip(files, digests):  # noqa: B905  Python 3.6
        combined.update("{}\0{}\0{}\n".format(relative, size, digest).encode("utf-8", "surrogateescape"))
    return combined.hexdigest()


def _copy_file(source: str, draft: str, file_entry: Listed, progress: Progress) -> str:
    relative, size, mtime = file_entry
    origin, target = at(source, relative), at(draft, relative)
    try:
        status = os.stat(target)
        # The modification time is set last.
        is_finished = status.st_size == size and int(status.st_mtime) == mtime
    except OSError:
        is_finished = False
    if is_finished:
        progress.add(size)
        return digest_of(target)
    digest, copied_bytes = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    target_fd = os.open(target, flags, 0o600)
    with os.fdopen(target_fd, "wb", 0) as writer, open(origin, "rb", buffering=0) as reader:
        while True:
            chunk = reader.read(min(CHUNK, max(size, 1 << 16)))
            if not chunk:
                break
            write_all(writer, chunk)
            digest.update(chunk)
            copied_bytes += len(chunk)
            progress.add(len(chunk))
        final_status = os.fstat(reader.fileno())
    if copied_bytes != size or int(final_status.st_mtime) != mtime:
        raise Failed(
            "{} changed while it was copied: submit again when the data no longer changes".format(origin)
        )
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
    """Write all files into one tar file; return its SHA-256. After a failure the file does not exist."""
    try:
        return _write_tar(source, files, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(target)
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(target + ".names")


def _write_tar(source: str, files: Sequence[Listed], target: str) -> str:
    argv = ["tar", "--create", "--file=-", "--format=gnu", "--dereference", "--directory=" + source]
    argv += ["--hard-dereference", "--no-recursion", "--null", "--files-from=-"]
    name_list = b"".join(listed_file[0].encode("utf-8", "surrogateescape") + b"\0" for listed_file in files)
    digest = hashlib.sha256()
    with open(target + ".names", "wb") as out:
        out.write(name_list)
    with tempfile.TemporaryFile() as stderr_file:  # a pipe that is not read would fill up and block tar
        with open(target + ".names", "rb") as names_file, open(target, "wb", buffering=0) as writer:
            process = subprocess.Popen(argv, stdin=names_file, stdout=subprocess.PIPE, stderr=stderr_file)
            with process:
                for chunk in iter(lambda: process.stdout.read(CHUNK), b""):  # type: ignore[union-attr]
                    write_all(writer, chunk)
                    digest.update(chunk)
        error_text = _read_last_text(stderr_file)
    if process.returncode != 0:
        raise Failed("tar could not pack {}: {}".format(source, error_text))
    return digest.hexdigest()


def unpack(archive: str, draft: str, progress: Progress, checksum: str = "") -> str:
    """Unpack a tar or squashfs file; return the SHA-256 of the archive, empty for squashfs.

    Args:
        checksum: the expected checksum, if known.
    """
    shutil.rmtree(draft, ignore_errors=True)
    os.makedirs(draft)
    with open(archive, "rb") as file:
        magic_bytes = file.read(8)
    if magic_bytes[:4] == SQUASHFS:
        _run_program(["unsquashfs", "-no-progress", "-force", "-dest", draft, archive])
        progress.add(os.stat(archive).st_size)
        return ""
    digest = hashlib.sha256()
    # The archive must not set owners or write to absolute paths.
    argv = ["tar", "--extract", "--file=-", "--no-same-owner", "--directory=" + draft]
    argv += [option for magic, option in _TAR_OPTION_BY_MAGIC if magic_bytes.startswith(magic)]
    pipe_closed = False
    with tempfile.TemporaryFile() as stderr_file, open(archive, "rb", buffering=0) as reader:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr_file, bufsize=0
        )
        with process:
            for chunk in iter(lambda: reader.read(CHUNK), b""):
                digest.update(chunk)
                progress.add(len(chunk))
                if not pipe_closed:
                    try:
                        write_all(process.stdin, chunk)
                    # tar has read the end mark, or has failed: its exit code is checked below.
                    except BrokenPipeError:
                        pipe_closed = True
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        error_text = _read_last_text(stderr_file)
    if process.returncode != 0:
        raise Failed("tar could not unpack {}: {}".format(archive, error_text))
    if checksum and digest.hexdigest() != checksum:
        raise Failed("the SHA-256 of {} differs from that of the packed data".format(archive))
    return digest.hexdigest()


def squashed(archive: str) -> int:
    """Return the unpacked size of a squashfs file in bytes on disk, 0 for any other file.

    Raises:
        Failed: unsquashfs is missing, or cannot read the file.
    """
    with open(archive, "rb") as file:
        if file.read(4) != SQUASHFS:
            return 0
    try:
        listing = subprocess.run(
            ["unsquashfs", "-lln", archive], stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False
        )
    except OSError:
        raise Failed(
            "unsquashfs (squashfs-tools), which unpacks {}, is not installed on this node".format(archive)
        ) from None
    if listing.returncode != 0:
        error_text = listing.stderr.decode("utf-8", "replace").strip()
        raise Failed("{} cannot be read: {}".format(archive, error_text[-300:]))
    size = 0
    for line in listing.stdout.splitlines():  # -rw-r--r-- 0/0   5000 2025-01-31 12:00 squashfs-root/one
        fields = line.split(None, 3)
        if line.startswith(b"-") and len(fields) == 4 and fields[2].isdigit():
            size += -(-int(fields[2]) // BLOCK) * BLOCK
    return size


def _read_last_text(output_file: IO[bytes]) -> str:
    output_file.seek(0)
    return output_file.read().decode("utf-8", "replace").strip()[-300:]


def rsync(source: str, draft: str, files: Sequence[Listed], progress: Progress) -> str:
    """Copy with rsync, which can resume in the middle of a file."""
    argv = ["rsync", "--times", "--perms", "--copy-links", "--partial", "--chmod=u+rw,go-w"]
    if files and not files[0][0]:
        _run_program([*argv, source, draft])
    else:
        os.makedirs(draft, exist_ok=True)
        name_list = "\0".join(listed[0] for listed in files).encode("utf-8", "surrogateescape")
        _run_program([*argv, "--from0", "--files-from=-", source + "/", draft + "/"], name_list)
    progress.add(sum(listed[1] for listed in files))
    return ""


def _run_program(argv: List[str], text: bytes = b"") -> None:
    try:
        process = subprocess.run(
            argv, input=text, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
        )
    except OSError as error:
        raise Failed("{} cannot be run: {}".format(argv[0], error.strerror)) from None
    if process.returncode != 0:
        error_text = process.stderr.decode("utf-8", "replace").strip()
        raise Failed("{} ended with {}: {}".format(argv[0], process.returncode, error_text[-300:]))


WAYS: Dict[str, Callable[..., str]] = {"copy": copy, "rsync": rsync}
