"""This machine: commands as child processes, files written so that no reader ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dtslurm.errors import CommandNotFound, CommandTimeout, TransportError
from dtslurm.model.own_files import make_folders
from dtslurm.transport.base import (
    KEPT,
    QUERY_ENVIRONMENT,
    SCRUBBED,
    SCRUBBED_PREFIXES,
    Completed,
    Stream,
    tail,
    text,
)
from dtslurm.transport.channel import Feeder, TimeIsUp, exit_code, outputs
from dtslurm.transport.deletion import remove
from dtslurm.transport.disk import store_error
from dtslurm.transport.process import PopenChannel
from dtslurm.transport.streams import ChannelStream

_STDERR_KEPT = 1 << 16


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without what would bend Slurm's commands or leak into a job."""
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT or not (name in SCRUBBED or name.startswith(SCRUBBED_PREFIXES))
    }


class LocalTransport:
    """Runs commands and keeps files on this machine."""

    name = "local"
    host = "this machine"
    local = True

    def open(self) -> None:
        """Nothing is needed."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a command to its end; see `Transport.run`."""
        deadline = time.monotonic() + timeout
        channel = _start(argv, stdin=stdin != b"", env=env)
        feeder = Feeder(channel, stdin, close=True) if stdin != b"" else None
        out: list[bytes] = []
        err: list[bytes] = []
        try:
            if feeder is not None:
                feeder.start()
            for more, words in outputs(channel, deadline, feeder):
                out.append(more)
                err.append(words)
            code = exit_code(channel, deadline)
        except TimeIsUp:
            err.append(channel.kill()[1])
            raise CommandTimeout(
                f"{argv[0]} did not end within {timeout:g} s and was killed",
                evidence=[" ".join(argv), *tail(b"".join(err))],
            ) from None
        finally:
            if feeder is not None:
                feeder.stop()
            channel.end()
        raw = b"".join(out)
        return Completed(tuple(argv), code, text(raw), text(b"".join(err)), raw)

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Stream]:
        """Run a command and yield its output as it comes; see `Transport.stream`."""
        channel = _start(argv, stdin=True)
        stream = _LocalStream(channel, argv, stdin)
        try:
            yield stream
        finally:
            stream.stop()
            channel.end()

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        """Write a file atomically; see `Transport.put`."""
        target = Path(path)
        try:
            make_folders(target.parent)
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


class _LocalStream(ChannelStream):
    """A child process; nothing stands between its outputs and the reader."""

    def __init__(self, channel: PopenChannel, argv: Sequence[str], stdin: bytes) -> None:
        super().__init__(channel, argv[0], stdin)
        self._errors = b""

    def _payload(self, out: bytes, err: bytes) -> bytes:
        self._errors = (self._errors + err)[-_STDERR_KEPT:]
        return out

    def _at_end(self) -> None:
        code = None
        while code is None:  # outputs closed, but it may still work
            code = self._channel.code(60.0)
        if code:
            raise TransportError(f"{self._program} ended with exit code {code}", evidence=tail(self._errors))


def _start(argv: Sequence[str], *, stdin: bool, env: Mapping[str, str] | None = None) -> PopenChannel:
    environment = {**scrubbed(os.environ), **QUERY_ENVIRONMENT, **(env or {})}
    try:
        return PopenChannel(argv, env=environment, stdin=stdin)
    except (FileNotFoundError, NotADirectoryError):
        raise CommandNotFound(
            f"there is no program {argv[0]} on this machine", evidence=[f"PATH={environment.get('PATH', '')}"]
        ) from None
    except PermissionError as error:
        raise CommandNotFound(f"{argv[0]} cannot be executed", evidence=[str(error)]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in an argument
        raise TransportError(f"{argv[0]} could not be started", evidence=[str(error)]) from error


def _write(data: bytes, target: Path, mode: int) -> None:
    # Not named after the target: its name may have no room left for a suffix.
    temp = target.parent / f".dtslurm-{os.urandom(8).hex()}"
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
            remove(temp, within=target.parent)
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
