"""What OpenSSH and paramiko share: commands framed, files through the shell, no sftp needed."""

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
from dtslurm.transport.base import Completed, Stream, tail, text
from dtslurm.transport.channel import Channel, Feeder, TimeIsUp, outputs
from dtslurm.transport.remote_stream import STUCK_S, CommandFailed, RemoteStream

_Result = TypeVar("_Result")

MOST_CHANNELS = 3

_KILL_S = 15.0  # a busy login node takes seconds to start a shell
_PATIENCE_S = 60.0  # a refused login is not tried again: three of them lock people out at some sites
_SLOWEST = 100_000  # bytes per second that a transfer may count on
_AGAIN_S = 0.2


class SessionRefused(Exception):
    """The host takes no more sessions over this link now; the command was not started."""


class LinkLost(Exception):
    """The link was gone before the command was sent; with a new one it may be sent."""


class RemoteTransport:
    """A host reached over SSH. Those who inherit make the link and start sessions on it.

    Args:
        host: a name that SSH knows: a host or an alias of ``~/.ssh/config``.
        user: the login name, if not the configuration's.
        config: another configuration file than ``~/.ssh/config`` and the system's.
        env: the environment; says where control sockets and the agent are.
        prompt: asks a person (question, whether the answer may be seen) and returns the answer; only
            paramiko calls it, ssh asks at the terminal itself.
        interactive: whether anything may be asked at the login; None: where there is somebody to ask.
        hint: what else a person may do where there is no link; errors say it last.
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
        self._turns = threading.BoundedSemaphore(MOST_CHANNELS)
        self._lock = threading.Lock()
        self._refused: tuple[float, LoginRefused] | None = None
        # What may be ended when there is no room for another session; each tells whether it ended something.
        self.spare: list[Callable[[], bool]] = []

    @property
    def host(self) -> str:
        """The name under which the user's SSH knows the host."""
        return self._host

    # ---- what a kind of SSH provides

    def _is_open(self) -> bool:
        """Whether there is a link, as far as can be told without the host."""
        raise NotImplementedError

    def _log_in(self) -> None:
        """Make the link.

        Raises:
            HostUnavailable, LoginRefused: there is none.
        """
        raise NotImplementedError

    def _start(self, line: str, *, stdin: bool, deadline: float) -> Channel:
        """Start a session that runs ``line``.

        Raises:
            SessionRefused: the server takes no more sessions.
            LinkLost: the link is gone.
            HostUnavailable: the host does not answer.
        """
        raise NotImplementedError

    def _not_run(self, words: str) -> SessionRefused | LinkLost | None:
        """Return why a session ended without its command, if ``words`` prove that; else None."""
        raise NotImplementedError

    def _drop(self) -> None:
        """Give up a link that does not answer."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what is held."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _shared_turn(self, _deadline: float) -> Iterator[None]:
        """Wait for a turn among all processes of the user."""
        yield

    # ---- the verbs

    def logged_in(self) -> bool:
        """Return whether a command could run now without logging in."""
        return self._is_open()

    def open(self) -> None:
        """Log in unless a login is at hand; see `Transport.open`."""
        with self._lock:
            if self._is_open():
                return
            if self._refused is not None and time.monotonic() - self._refused[0] < _PATIENCE_S:
                raise self._refused[1]
            self._refused = None
            try:
                self._log_in()
            except HostUnavailable as error:
                error.hint = "; ".join(filter(None, [error.hint, self._hint]))
                if isinstance(error, LoginRefused):
                    self._refused = (time.monotonic(), error)
                raise

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a command to its end; see `Transport.run`."""
        given = stdin != b""
        call = remote_command.call(
            argv, env=env or {}, limit=timeout + remote_command.FAR_GRACE_S, stdin=given
        )
        self.open()
        deadline = time.monotonic() + timeout
        with self._turn(deadline), self._shared_turn(deadline):
            source = stdin if given else None
            return self._until(deadline, lambda end: self._run(call, argv, source, timeout, end))

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Stream]:
        """Run a command and yield its output as it comes; see `Transport.stream`."""
        call = remote_command.call(argv, env={}, limit=None, stdin=True)
        self.open()
        deadline = time.monotonic() + STUCK_S
        with self._turn(deadline):
            stream = self._until(deadline, lambda end: self._stream(call, argv[0], stdin, end))
            try:
                yield stream
            finally:
                # Killed before its input ends; where there is room for one session only, after it.
                killed = stream.answer.ended or self._kill(stream.answer.pid)
                stream.stop()
                if not killed:
                    self._kill(stream.answer.pid)

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        """Write a file atomically; see `Transport.put`."""
        limit = STUCK_S + len(data) / _SLOWEST
        done = self.run(remote_command.put_argv(path, mode, len(data)), stdin=data, timeout=limit)
        if not done.ok:
            raise self._refusal(done.stderr, path, "write")

    def get(self, path: str) -> bytes:
        """Return a file's content; see `Transport.get`."""
        parts: list[bytes] = []
        size = 0
        with self.stream(["cat", "--", path]) as stream:
            stream.close_stdin()
            while not stream.ended:
                try:
                    part = stream.read(STUCK_S)
                except CommandFailed as error:
                    raise self._refusal("\n".join(error.evidence), path, "read") from None
                if not part and not stream.ended:
                    raise CommandTimeout(f"{self.host} sent nothing of {path} for {STUCK_S:g} s")
                parts.append(part)
                size += len(part)
                exit_status.check_size(self.host, "cat", size)
        return b"".join(parts)

    # ---- how

    def _run(
        self,
        call: remote_command.Call,
        argv: Sequence[str],
        stdin: bytes | Iterable[bytes] | None,
        timeout: float,
        deadline: float,
    ) -> Completed:
        answer = remote_command.CallOutputs(call.nonce)
        channel = self._start(call.line, stdin=stdin is not None or bool(call.preamble), deadline=deadline)
        feeder = _feeder(channel, call.preamble, stdin)
        out: list[bytes] = []
        err: list[bytes] = []
        size = 0
        try:
            for more in outputs(channel, deadline, feeder):
                mine, words = answer.feed(*more)
                out.append(mine)
                err.append(words)
                size += len(mine) + len(words)
                exit_status.check_size(self.host, argv[0], size)
                if answer.ended:
                    break
                if answer.begun and feeder is not None:
                    feeder.start()
        except TimeIsUp:
            raise self._late(answer, argv, timeout, b"".join(err)) from None
        except BaseException:  # killed before its stdin ends: it must not take a part for the whole
            self._kill(answer.pid)
            raise
        finally:
            if feeder is not None:
                feeder.stop()
            channel.end()
        if not answer.ended:
            raise self._cut(answer, argv[0])
        return exit_status.completed(self.host, answer, argv, b"".join(out), b"".join(err))

    def _until(self, deadline: float, attempt: Callable[[float], _Result]) -> _Result:
        """Return what ``attempt(deadline)`` returns, tried until the server has a session for it.

        A link that is gone is made anew once: one that is lost again and again must not become many logins.
        """
        lost = False
        pause, end = _AGAIN_S, deadline
        while True:
            try:
                return attempt(end)
            except SessionRefused as refused:
                if self._made_room():
                    continue
                if time.monotonic() + pause > deadline:
                    raise self._busy(str(refused)) from None
                time.sleep(pause)
                pause = min(2 * pause, 5 * _AGAIN_S)
                end = max(deadline, time.monotonic() + _KILL_S)  # time to hear that it is refused again
            except LinkLost as error:
                if lost:
                    raise HostUnavailable(
                        f"{self.host} ends every link before a command; this one was not started",
                        evidence=[str(error)],
                        hint=f"see that `ssh {self.host} true` works; the host's own log tells why",
                    ) from None
                lost = True
            self.open()

    def _stream(self, call: remote_command.Call, program: str, stdin: bytes, deadline: float) -> RemoteStream:
        channel = self._start(call.line, stdin=True, deadline=deadline)
        stream = RemoteStream(self, channel, call, program, stdin)
        try:
            stream.begin(deadline)
        except BaseException:
            stream.stop()
            raise
        return stream

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        if not self._turns.acquire(blocking=False):
            self._made_room()
            if not self._turns.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise self._busy(f"{MOST_CHANNELS} commands of this process are running there")
        try:
            yield
        finally:
            self._turns.release()

    def _made_room(self) -> bool:
        """End what is kept open only to save time; whether there was any."""
        return sum(give_way() for give_way in self.spare) > 0

    def _busy(self, why: str) -> HostUnavailable:
        return HostUnavailable(
            f"{self.host} takes no more commands at once; this one was not started",
            evidence=[why],
            hint="end what else runs over the same login (dtslurm logs -f, an open terminal), then try again",
        )

    def _late(
        self, answer: remote_command.CallOutputs, argv: Sequence[str], timeout: float, err: bytes
    ) -> CommandTimeout:
        """Return the error of a command that did not end in time, after killing it over there."""
        if answer.begun:
            killed = (
                "and was killed" if self._kill(answer.pid) else "and could not be killed: the link is stuck"
            )
            return CommandTimeout(
                f"{argv[0]} on {self.host} did not end within {timeout:g} s {killed}; what it did is unknown",
                evidence=[" ".join(argv)[:500], *tail(err)],
            )
        self._drop()
        return CommandTimeout(
            f"{self.host} did not answer within {timeout:g} s; whether {argv[0]} ran there is unknown",
            evidence=tail(answer.noise()),
            hint="the host or the network is stuck; the next command makes a new link",
        )

    def _cut(
        self, answer: remote_command.CallOutputs, program: str
    ) -> TransportError | SessionRefused | LinkLost:
        """Return the error of a session that ended without its closing frame."""
        words = text(answer.words())
        if not answer.begun:
            known = self._not_run(words)
            if known is not None:
                return known
        self._drop_if_dead()
        noise = tail(answer.noise())
        if answer.begun or not noise:
            return TransportError(
                f"the link to {self.host} was cut while {program} ran; what it did is unknown", evidence=noise
            )
        return TransportError(
            f"{self.host} ended the session without the mark of {program}; whether it ran is unknown",
            evidence=noise,
            hint=f"see that `ssh {self.host} true` works and prints no error",
        )

    def _drop_if_dead(self) -> None:
        """Look whether the link still lives; nothing by default."""

    def _kill(self, pid: int | None) -> bool:
        """End a command over there with its children; False if that got no answer."""
        if pid is None:
            return False
        deadline = time.monotonic() + _KILL_S
        try:
            channel = self._start(remote_command.kill_line(pid), stdin=False, deadline=deadline)
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

    def _refusal(self, said: str, path: str, verb: str) -> StoreError:
        lines = [line for line in said.splitlines() if "records in" not in line and "records out" not in line]
        words = "\n".join(lines)
        number = disk.number_of(words)
        room = ""
        if disk.is_full(number):
            left = self.run(remote_command.room_argv(path), timeout=20)
            room = disk.room_of(*left.stdout.partition("\n\n")[::2])
        return disk.refusal(number, words, path, verb, room=room, where=self.host)


def _feeder(channel: Channel, preamble: bytes, stdin: bytes | Iterable[bytes] | None) -> Feeder | None:
    """Return the feeder of a call; what can be sent again starts at once, other sources when it has begun."""
    if stdin is None and not preamble:
        return None
    if stdin is None or isinstance(stdin, bytes):
        feeder = Feeder(channel, preamble + (stdin or b""), close=True)
        feeder.start()
        return feeder
    if preamble:
        channel.write(preamble)
    return Feeder(channel, itertools.chain(stdin), close=True)
