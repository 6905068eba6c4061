"""This machine: commands as child processes, files written so that no reader ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from dtslurm.errors import CommandNotFound, CommandTimeout, TransportError
from dtslurm.transport.base import KEPT, QUERY_ENVIRONMENT, SCRUBBED_PREFIXES, Completed
from dtslurm.transport.disk_errors import store_error

# What a launcher or a shell left behind: inside a job, or under torchrun, these would leak into ours.
_SCRUBBED_PREFIXES = (*SCRUBBED_PREFIXES, "PET_", "BASH_FUNC_")
_SCRUBBED = frozenset(
    {
        "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK",
        "LD_PRELOAD", "BASH_ENV", "CUDA_VISIBLE_DEVICES",
    }
)  # fmt: skip

_CHUNK = 65536
_TAIL_LINES = 20
_GRACE_S = 2.0


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without what would bend Slurm's commands or leak into a job."""
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT or not (name in _SCRUBBED or name.startswith(_SCRUBBED_PREFIXES))
    }


class LocalTransport:
    """Runs commands and keeps files on this machine."""

    name = "local"

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a command to its end; see `Transport.run`."""
        process = _start(argv, stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, env=env)
        try:
            out, err = process.communicate(stdin or None, timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            out, err = _rest(process)
            raise CommandTimeout(
                f"{argv[0]} did not end within {timeout:g} s and was killed",
                evidence=[" ".join(argv), *_tail(err)],
            ) from None
        except BaseException:
            _kill(process)
            _rest(process)
            raise
        return Completed(tuple(argv), process.returncode, _text(out), _text(err))

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str]) -> Iterator[Iterator[bytes]]:
        """Run a command and yield its output as it comes; see `Transport.stream`.

        A command that ends by itself with another code than 0 raises ``TransportError`` after its last chunk.
        """
        # stderr goes to a file: a pipe nobody reads would fill and stop the command.
        with tempfile.TemporaryFile() as errors:
            process = _start(argv, stdin=subprocess.DEVNULL, stderr=errors)
            try:
                yield _chunks(process, argv, errors)
            finally:
                _kill(process)
                if process.stdout is not None:
                    process.stdout.close()
                process.wait()

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        """Write a file atomically; see `Transport.put`."""
        target = Path(path)
        try:
            _make_folders(target.parent)
            _write(data, target, mode)
        except OSError as error:
            raise store_error(error, target, "write") from error

    def get(self, path: str) -> bytes:
        """Return a file's content; see `Transport.get`."""
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise store_error(error, Path(path), "read") from error

    def close(self) -> None:
        """Nothing is held."""


def _start(
    argv: Sequence[str],
    *,
    stdin: int,
    stderr: int | IO[bytes] = subprocess.PIPE,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    environment = {**scrubbed(os.environ), **QUERY_ENVIRONMENT, **(env or {})}
    try:
        return subprocess.Popen(
            list(argv),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=True,  # a group of its own: a time-out ends its children too
        )
    except (FileNotFoundError, NotADirectoryError):
        raise CommandNotFound(
            f"there is no program {argv[0]} on this machine", evidence=[f"PATH={environment.get('PATH', '')}"]
        ) from None
    except PermissionError as error:
        raise CommandNotFound(f"{argv[0]} cannot be executed", evidence=[str(error)]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in an argument
        raise TransportError(f"{argv[0]} could not be started", evidence=[str(error)]) from error


def _kill(process: subprocess.Popen[bytes]) -> None:
    # The group outlives its leader when a child stays behind; poll() decides nothing here.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _rest(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Collect what a killed command had printed; a stray holding the pipe is not waited for."""
    try:
        return process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired as expired:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
        return expired.stdout or b"", expired.stderr or b""


def _chunks(process: subprocess.Popen[bytes], argv: Sequence[str], errors: IO[bytes]) -> Iterator[bytes]:
    if process.stdout is None:  # never: it was asked for
        return
    while chunk := os.read(process.stdout.fileno(), _CHUNK):
        yield chunk
    code = process.wait()
    if code:
        errors.seek(0)
        raise TransportError(f"{argv[0]} ended with exit code {code}", evidence=_tail(errors.read()))


def _make_folders(folder: Path) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            made.mkdir(mode=0o700)


def _write(data: bytes, target: Path, mode: int) -> None:
    # Not named after the target: its name may have no room left for a suffix.
    temp = target.parent / f".dtslurm-{secrets.token_hex(8)}"
    handle = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(handle, mode)
            os.fsync(handle)
        temp.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    # Some network file systems cannot sync a folder; the file itself is safe by then.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _tail(data: bytes) -> list[str]:
    return _text(data).splitlines()[-_TAIL_LINES:]
