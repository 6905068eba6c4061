"""The parts that OpenSSH and paramiko share: framed commands, and files through the shell, without sftp."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from dtslurm.errors import (
    CommandTimeout,
    HostUnavailable,
    LoginRefused,
    StoreError,
    TransportError,
)
from dtslurm.transport import disk, exit_status, remote_command
from dtslurm.transport.base import CommandFailed, Completed, Stream, TcpConnection, tail, text
from dtslurm.transport.channel import Channel, Feeder, TimeIsUp, outputs
from dtslurm.transport.remote_stream import STUCK_S, RemoteStream

_Result = TypeVar("_Result")

MOST_CHANNELS = 3

_KILL_S = 15.0  # a busy login node takes seconds to start a shell
_LOGIN_RETRY_S = 60.0  # no retry of a refused login before: some sites lock accounts after three refusals
_MIN_BYTES_PER_S = 100_000  # bytes per second, assumed for a transfer's time limit
_RETRY_S = 0.2


class SessionRefused(Exception):
    """The host accepts no more sessions over this connection now; the command was not started."""


class LinkLost(Exception):
    """The connection was lost before the command was sent; the command may be sent over a new connection."""


class RemoteTransport:
    """A host reached over SSH. Subclasses connect and start sessions.

    Args:
        host: a name that SSH resolves: a host or an alias of ``~/.ssh/config``.
        user: the login name, if it differs from the SSH configuration.
        config: a configuration file to use instead of ``~/.ssh/config`` and the system's.
        env: the environment, with the locations of the control sockets and the SSH agent.
        prompt: asks the user (question, whether the answer is echoed) and returns the answer; only
            paramiko calls it, because ssh prompts at the terminal itself.
        interactive: whether the login may prompt; None: if there is a terminal.
        hint: another way for the user to proceed without a connection; appended to the errors' hint.
    """

    name = "ssh"
    local = False

    def __init__(
        self,
        host: str,
        *,
        user: str | None = None,
        config: str | None = None,
        env: Mapping[str, str] | None = None,
        prompt: Callable[[str, bool], str] | None = None,
        interactive: bool | None = None,
        hint: str = "",
    ) -> None:
        self.interactive = interactive
        self._hint = hint
        self._host = host
        self._user = user
        self._config = config
        self._env = dict(os.environ if env is None else env)
        self._prompt = prompt
        self._channel_slots = threading.BoundedSemaphore(MOST_CHANNELS)
        self._lock = threading.Lock()
        self._refused_login: tuple[float, LoginRefused] | None = None
        # Callbacks that end an idle session if the host accepts no more sessions; each returns whether it
        # ended one.
        self.spare: list[Callable[[], bool]] = []

    @property
    def host(self) -> str:
        """The host's name in the user's SSH configuration."""
        return self._host

    # ---- methods of the subclasses

    def _is_open(self) -> bool:
        """Whether there is a connection, checked without a message to the host."""
        raise NotImplementedError

    def _log_in(self) -> None:
        """Connect and log in.

        Raises:
            HostUnavailable, LoginRefused: the connection failed.
        """
        raise NotImplementedError

    def _start_session(self, line: str, *, stdin: bool, deadline: float) -> Channel:
        """Start a session that runs ``line``.

        Raises:
            SessionRefused: the server accepts no more sessions.
            LinkLost: the connection is lost.
            HostUnavailable: the host does not answer.
        """
        raise NotImplementedError

    def _unstarted_error(self, stderr: str) -> SessionRefused | LinkLost | None:
        """Return the error if ssh's stderr proves that the command did not start, else None."""
        raise NotImplementedError

    def _drop(self) -> None:
        """Close a connection that does not answer."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the transport's resources."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _shared_slot(self, _deadline: float) -> Iterator[None]:
        """Wait for a session slot, which all processes of the user share."""
        yield

    # ---- the methods of `Transport`

    def logged_in(self) -> bool:
        """Return whether a command could run now without a login."""
        return self._is_open()

    def open(self) -> None:
        """Log in unless a login exists; see `Transport.open`."""
        with self._lock:
            if self._is_open():
                return
            if self._refused_login is not None and time.monotonic() - self._refused_login[0] < _LOGIN_RETRY_S:
                raise self._refused_login[1]
            self._refused_login = None
            try:
                self._log_in()
            except HostUnavailable as error:
                error.hint = "; ".join(filter(None, [error.hint, self._hint]))
                if isinstance(error, LoginRefused):
                    self._refused_login = (time.monotonic(), error)
                raise

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a command until it ends; see `Transport.run`."""
        has_stdin = stdin != b""
        call = remote_command.call(
            argv, env=env or {}, limit=timeout + remote_command.FAR_GRACE_S, stdin=has_stdin
        )
        self.open()
        deadline = time.monotonic() + timeout
        with self._channel_slot(deadline), self._shared_slot(deadline):
            input_source = stdin if has_stdin else None
            return self._retry_session(
                deadline, lambda end: self._run(call, argv, input_source, timeout, end)
            )

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Stream]:
        """Run a command and yield its output as it arrives; see `Transport.stream`."""
        call = remote_command.call(argv, env={}, limit=None, stdin=True)
        self.open()
        deadline = time.monotonic() + STUCK_S
        with self._channel_slot(deadline):
            stream = self._retry_session(deadline, lambda end: self._open_stream(call, argv[0], stdin, end))
            try:
                yield stream
            finally:
                # Kill the command before its stdin ends, so that it does not take a part of its input for all
                # of it. A server that allows one session only accepts the kill after the stream stopped.
                is_killed = stream.answer.ended or self._kill(stream.answer.pid)
                stream.stop()
                if not is_killed:
                    self._kill(stream.answer.pid)

    def connect_tcp(self, address: str, port: int) -> TcpConnection:
        """Connect from the host to a port of another host; see `Transport.connect_tcp`."""
        raise NotImplementedError

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        """Write a file atomically; see `Transport.put`."""
        timeout_s = STUCK_S + len(data) / _MIN_BYTES_PER_S
        result = self.run(remote_command.put_argv(path, mode, len(data)), stdin=data, timeout=timeout_s)
        if not result.ok:
            raise self._file_error(result.stderr, path, "write")

    def get(self, path: str) -> bytes:
        """Return a file's content; see `Transport.get`."""
        chunks: list[bytes] = []
        size = 0
        with self.stream(["cat", "--", path]) as stream:
            stream.close_stdin()
            while not stream.ended:
                try:
                    chunk = stream.read(STUCK_S)
                except CommandFailed as error:
                    raise self._file_error("\n".join(error.evidence), path, "read") from None
                if not chunk and not stream.ended:
                    raise CommandTimeout(f"{self.host} sent no data of {path} for {STUCK_S:g} s")
                chunks.append(chunk)
                size += len(chunk)
                exit_status.check_size(self.host, "cat", size)
        return b"".join(chunks)

    # ---- implementation

    def _run(
        self,
        call: remote_command.Call,
        argv: Sequence[str],
        stdin: bytes | Iterable[bytes] | None,
        timeout: float,
        deadline: float,
    ) -> Completed:
        answer = remote_command.CallOutputs(call.nonce)
        channel = self._start_session(
            call.line, stdin=stdin is not None or bool(call.preamble), deadline=deadline
        )
        feeder = _make_feeder(channel, call.preamble, stdin)
        out_chunks: list[bytes] = []
        err: list[bytes] = []
        size = 0
        try:
            for chunks in outputs(channel, deadline, feeder):
                stdout, stderr = answer.feed(*chunks)
                out_chunks.append(stdout)
                err.append(stderr)
                size += len(stdout) + len(stderr)
                exit_status.check_size(self.host, argv[0], size)
                if answer.ended:
                    break
                if answer.begun and feeder is not None:
                    feeder.start()
        except TimeIsUp:
            raise self._timeout_error(answer, argv, timeout, b"".join(err)) from None
        except BaseException:  # kill before stdin ends: it is incomplete
            self._kill(answer.pid)
            raise
        finally:
            if feeder is not None:
                feeder.stop()
            channel.end()
        if not answer.ended:
            raise self._disconnect_error(answer, argv[0])
        return exit_status.completed(self.host, answer, argv, b"".join(out_chunks), b"".join(err))

    def _retry_session(self, deadline: float, attempt: Callable[[float], _Result]) -> _Result:
        """Return ``attempt(deadline)``, retried until the server accepts a session.

        A lost connection is reopened once only, because repeated logins could lock the account.
        """
        reconnected = False
        pause, attempt_deadline = _RETRY_S, deadline
        while True:
            try:
                return attempt(attempt_deadline)
            except SessionRefused as refused:
                if self._release_spare():
                    continue
                if time.monotonic() + pause > deadline:
                    raise self._busy_error(str(refused)) from None
                time.sleep(pause)
                pause = min(2 * pause, 5 * _RETRY_S)
                # Enough time for the server to refuse again.
                attempt_deadline = max(deadline, time.monotonic() + _KILL_S)
            except LinkLost as error:
                if reconnected:
                    raise HostUnavailable(
                        f"{self.host} closes every connection before a command starts; this command "
                        "was not started",
                        evidence=[str(error)],
                        hint=f"check that `ssh {self.host} true` works; the log of the host shows the cause",
                    ) from None
                reconnected = True
            self.open()

    def _open_stream(
        self, call: remote_command.Call, program: str, stdin: bytes, deadline: float
    ) -> RemoteStream:
        channel = self._start_session(call.line, stdin=True, deadline=deadline)
        stream = RemoteStream(self, channel, call, program, stdin)
        try:
            stream.begin(deadline)
        except BaseException:
            stream.stop()
            raise
        return stream

    @contextlib.contextmanager
    def _channel_slot(self, deadline: float) -> Iterator[None]:
        if not self._channel_slots.acquire(blocking=False):
            self._release_spare()
            if not self._channel_slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise self._busy_error(f"{MOST_CHANNELS} commands of this process are running on the host")
        try:
            yield
        finally:
            self._channel_slots.release()

    def _release_spare(self) -> bool:
        """End the sessions that are kept open only to save time; return whether there were any."""
        return sum(release() for release in self.spare) > 0

    def _busy_error(self, reason: str) -> HostUnavailable:
        return HostUnavailable(
            f"{self.host} accepts no more concurrent commands; this command was not started",
            evidence=[reason],
            hint="end other programs that use the same login (dtslurm logs -f, an open terminal), then "
            "try again",
        )

    def _timeout_error(
        self, answer: remote_command.CallOutputs, argv: Sequence[str], timeout: float, err: bytes
    ) -> CommandTimeout:
        """Return the error of a command that did not end in time, after killing it on the host."""
        if answer.begun:
            kill_note = (
                "and was killed"
                if self._kill(answer.pid)
                else "and could not be killed, because the connection does not respond"
            )
            return CommandTimeout(
                f"{argv[0]} on {self.host} did not end within {timeout:g} s {kill_note}; its effects "
                "are unknown",
                evidence=[" ".join(argv)[:500], *tail(err)],
            )
        self._drop()
        return CommandTimeout(
            f"{self.host} did not answer within {timeout:g} s; it is unknown whether {argv[0]} ran",
            evidence=tail(answer.noise()),
            hint="the host or the network does not respond; the next command opens a new connection",
        )

    def _disconnect_error(
        self, answer: remote_command.CallOutputs, program: str
    ) -> TransportError | SessionRefused | LinkLost:
        """Return the error of a session that ended without its closing frame."""
        stderr = text(answer.words())
        if not answer.begun:
            unstarted_error = self._unstarted_error(stderr)
            if unstarted_error is not None:
                return unstarted_error
        self._drop_if_dead()
        noise_lines = tail(answer.noise())
        if answer.begun or not noise_lines:
            return TransportError(
                f"the connection to {self.host} broke while {program} ran; its effects are unknown",
                evidence=noise_lines,
            )
        return TransportError(
            f"{self.host} ended the session without the start mark of {program}; it is unknown "
            f"whether {program} ran",
            evidence=noise_lines,
            hint=f"check that `ssh {self.host} true` works and prints no error",
        )

    def _drop_if_dead(self) -> None:
        """Close the connection if it is dead; does nothing by default."""

    def _kill(self, pid: int | None) -> bool:
        """Kill a remote command and its children; return False if the host did not answer."""
        if pid is None:
            return False
        deadline = time.monotonic() + _KILL_S
        try:
            channel = self._start_session(remote_command.kill_line(pid), stdin=False, deadline=deadline)
        except (SessionRefused, LinkLost, TransportError):
            return False
        try:
            for _ in outputs(channel, deadline, None):
                pass
            return channel.code(_KILL_S) is not None
        except TimeIsUp:
            self._drop()
            return False
        finally:
            channel.end()

    def _file_error(self, stderr: str, path: str, verb: str) -> StoreError:
        lines = [
            line for line in stderr.splitlines() if "records in" not in line and "records out" not in line
        ]
        message = "\n".join(lines)
        number = disk.number_of(message)
        free_space = ""
        if disk.is_full(number):
            df = self.run(remote_command.room_argv(path), timeout=20)
            free_space = disk.room_of(*df.stdout.partition("\n\n")[::2])
        return disk.refusal(number, message, path, verb, free_space=free_space, host=self.host)


def _make_feeder(channel: Channel, preamble: bytes, stdin: bytes | Iterable[bytes] | None) -> Feeder | None:
    """Return the feeder of a call's stdin, None if there is none.

    Bytes, which could be sent again, are sent at once; an iterable is read only after the command has begun.
    """
    if stdin is None and not preamble:
        return None
    if stdin is None or isinstance(stdin, bytes):
        feeder = Feeder(channel, preamble + (stdin or b""), close=True)
        feeder.start()
        return feeder
    if preamble:
        channel.write(preamble)
    return Feeder(channel, itertools.chain(stdin), close=True)
