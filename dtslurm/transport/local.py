"""The transport for this machine: runs commands as child processes and writes files atomically."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dtslurm.errors import CommandNotFound, CommandTimeout, TransportError
from dtslurm.model.own_files import make_folders
from dtslurm.transport.base import (
    CONNECT_S,
    KEPT,
    QUERY_ENVIRONMENT,
    SCRUBBED,
    SCRUBBED_PREFIXES,
    CommandFailed,
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
from dtslurm.worker.lib.disk import sync_folder


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the variables that would change Slurm's commands or leak into a job."""
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT or not (name in SCRUBBED or name.startswith(SCRUBBED_PREFIXES))
    }


class LocalTransport:
    """Runs commands and reads and writes files on this machine."""

    name = "local"
    host = "this machine"
    local = True

    def open(self) -> None:
        """Do nothing: no connection is needed."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a command until it ends; see `Transport.run`."""
        deadline = time.monotonic() + timeout
        channel = _start_process(argv, stdin=stdin != b"", env=env)
        feeder = Feeder(channel, stdin, close=True) if stdin != b"" else None
        out_chunks: list[bytes] = []
        err: list[bytes] = []
        try:
            if feeder is not None:
                feeder.start()
            for out_chunk, err_chunk in outputs(channel, deadline, feeder):
                out_chunks.append(out_chunk)
                err.append(err_chunk)
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
        stdout = b"".join(out_chunks)
        return Completed(tuple(argv), code, text(stdout), text(b"".join(err)), stdout)

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Stream]:
        """Run a command and yield its output as it arrives; see `Transport.stream`."""
        channel = _start_process(argv, stdin=True)
        stream = _LocalStream(channel, argv[0], stdin)
        try:
            yield stream
        finally:
            stream.stop()
            channel.end()

    def connect_tcp(self, address: str, port: int) -> socket.socket:
        """Connect to a port; see `Transport.connect_tcp`."""
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
        except OSError as error:
            raise TransportError(f"no connection to {address}:{port}: {error.strerror or error}") from None
        connection.settimeout(None)
        return connection

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        """Write a file atomically; see `Transport.put`."""
        target = Path(path)
        try:
            make_folders(target.parent)
            _write_atomically(data, target, mode)
        except OSError as error:
            raise store_error(error, target, "write") from error

    def get(self, path: str) -> bytes:
        """Return a file's content; see `Transport.get`."""
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise store_error(error, Path(path), "read") from error

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class _LocalStream(ChannelStream):
    """The stream of a child process, whose output needs no decoding."""

    def _payload(self, stdout: bytes, stderr: bytes) -> bytes:
        self._note_errors(stderr)
        return stdout

    def _check_exit(self) -> None:
        code = None
        while code is None:  # the process may run on after it closed its outputs
            code = self._channel.code(60.0)
        if code:
            raise CommandFailed(self._program, code, tail(self._errors))


def _start_process(argv: Sequence[str], *, stdin: bool, env: Mapping[str, str] | None = None) -> PopenChannel:
    environment = {**scrubbed(os.environ), **QUERY_ENVIRONMENT, **(env or {})}
    try:
        return PopenChannel(argv, env=environment, stdin=stdin)
    except (FileNotFoundError, NotADirectoryError):
        raise CommandNotFound(
            f"this machine has no program {argv[0]}", evidence=[f"PATH={environment.get('PATH', '')}"]
        ) from None
    except PermissionError as error:
        raise CommandNotFound(f"{argv[0]} cannot be executed", evidence=[str(error)]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in an argument
        raise TransportError(f"{argv[0]} could not be started", evidence=[str(error)]) from error


def _write_atomically(data: bytes, target: Path, mode: int) -> None:
    # The name does not contain the target's: with a suffix it could exceed the limit of the file system.
    temp = target.parent / f".dtslurm-{os.urandom(8).hex()}"
    fd = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(fd, mode)
            os.fsync(fd)
        temp.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temp, within=target.parent)
        raise
    sync_folder(os.fsencode(target.parent))
