"""Runs `dtslurm.worker` on the far side: for one request, or kept running for those that follow."""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dtslurm.errors import CommandNotFound, CommandTimeout, DtslurmError, TransportError
from dtslurm.remote import answers
from dtslurm.remote.worker_program import BOOT, worker_source
from dtslurm.transport.base import Stream, Transport

# What a kept worker may be sent: more would lie in memory here until it is taken.
MOST_KEPT = 1 << 22
_FRESH_S = 5.0  # one that was silent for longer is asked whether it lives before it is sent anything
_PING_S = 10.0
_PING = struct.pack(">I", 0)
_GOODBYE_S = 2.0
_SENDER = "the program on the login node"


def ask_worker(
    transport: Transport,
    modules: Sequence[str],
    parts: Iterable[bytes],
    *,
    python: str = "python3",
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run modules of `dtslurm.worker` on the far side, with ``parts`` as their input; return the answer.

    Nothing of them stays there. What a login shell prints around the answer is passed over.

    Raises:
        CommandNotFound: there is no such ``python``.
        TransportError: no answer came; what happened is unknown.
    """
    source, mark = worker_source(*modules), _mark()
    argv = [python, "-I", "-S", "-c", BOOT, str(len(source)), mark]
    done = transport.run(argv, stdin=itertools.chain([source], parts), timeout=timeout, env=env)
    answer = _answer(done.stdout, mark)
    if answer is not None:
        return answer
    if done.code == 127:
        raise _no_python(transport, python, done.stderr.splitlines()[-5:])
    raise TransportError(
        f"the far side ended with code {done.code} before it answered; what it did is unknown",
        evidence=done.stderr.splitlines()[-20:],
        hint=f"{python} there must be Python 3.6 or later",
    )


def _no_python(transport: Transport, python: str, evidence: Sequence[str]) -> CommandNotFound:
    return CommandNotFound(
        f"there is no {python} on {transport.name}",
        evidence=evidence,
        hint="Python 3.6 or later is needed there; login.python in the profile names it",
    )


def _mark() -> str:
    return f"dtslurm-{os.urandom(8).hex()}:"


def _answer(output: str, mark: str) -> dict[str, Any] | None:
    """Return the last whole line's answer, None if there is none."""
    if mark not in output:
        return None
    for line in reversed(output.split("\n")[:-1]):
        if line.startswith(mark):
            return answers.parse_object(line[len(mark) :], _SENDER)
    return None


class RemoteWorker:
    """One far side's worker for many requests, one at a time.

    The first has a process of its own over there, as one command has, unless one was started ahead for it
    (`begin`). When that was served, one is kept for those that follow: a channel that stays open, and ends
    with this process, when it is closed, after minutes without a request, or when the host has no room for
    another session.
    """

    def __init__(self, transport: Transport, modules: Sequence[str], python: str) -> None:
        self._transport = transport
        self._modules = tuple(modules)
        self._python = python
        self._served = False
        self._turn = threading.Lock()
        self._running: _RunningWorker | None = None
        self._beginning: threading.Thread | None = None
        spare = getattr(transport, "spare", None)
        if spare is not None:
            mine = weakref.WeakMethod(self.release_if_idle)
            spare.append(lambda: (method := mine()) is not None and method())

    def begin(self) -> None:
        """Start a worker for a request that comes soon, if there is a login already; return at once."""
        logged_in = getattr(self._transport, "logged_in", None)
        if self._running is None and self._beginning is None and logged_in is not None:
            self._beginning = threading.Thread(target=self._begin, args=(logged_in,), daemon=True)
            self._beginning.start()

    def _begin(self, logged_in: Callable[[], bool]) -> None:
        # Without one, the request itself tells why it cannot be sent.
        with self._turn:
            try:
                if logged_in():
                    self._living().ask([_PING], _PING_S)
            except DtslurmError:
                self._end()

    def _begun(self) -> bool:
        """Wait for a worker that was to start; whether there is one."""
        if self._beginning is not None:
            self._beginning.join()
            self._beginning = None
        return self._running is not None

    def ask(
        self,
        parts: Iterable[bytes],
        *,
        size: int,
        timeout: float,
        env: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Send a request, return its answer; raises what `ask_worker` raises.

        Args:
            size: about how many bytes the parts have.
            env: variables of a process of its own.
        """
        ready = self._begun() or self._served
        if not ready or env or size > MOST_KEPT or not self._turn.acquire(blocking=False):
            python = self._python
            answer = ask_worker(
                self._transport, self._modules, parts, python=python, timeout=timeout, env=env
            )
            self._served = self._served or "done" in answer
            return answer
        try:
            kept = self._living()
            try:
                answer = kept.ask(parts, timeout)
            except BaseException:
                self._end()  # killed: a request that came in part is not acted upon
                raise
            if not kept.is_reusable(answer):
                self._end()
            return answer
        finally:
            self._turn.release()

    def _living(self) -> _RunningWorker:
        """Return a worker that takes requests."""
        if self._running is not None and not self._running.is_alive():
            self._end()
        if self._running is None:
            self._running = _RunningWorker(self._transport, self._modules, self._python)
        return self._running

    def _end(self) -> None:
        kept, self._running = self._running, None
        if kept is not None:
            kept.close()

    def release_if_idle(self) -> bool:
        """End the kept worker unless it is at work; whether there was one."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            there = self._running is not None
            self._end()
            return there
        finally:
            self._turn.release()

    close = release_if_idle


class _RunningWorker:
    """A worker that runs."""

    def __init__(self, transport: Transport, modules: Sequence[str], python: str) -> None:
        source, self._mark = worker_source(*modules), _mark()
        argv = [python, "-I", "-S", "-c", BOOT, str(len(source)), self._mark, "keep"]
        stack = contextlib.ExitStack()
        self._stream = stack.enter_context(transport.stream(argv, stdin=source))
        self._spoke = time.monotonic()
        self._finish = weakref.finalize(self, _finish, self._stream, stack)

    def is_alive(self) -> bool:
        """Whether it surely takes another request; nothing was sent to one that does not."""
        try:
            self._stream.read(0.0)
            if self._stream.ended:
                return False
            if time.monotonic() - self._spoke > _FRESH_S:
                self.ask([_PING], _PING_S)
        except TransportError:
            return False
        return True

    def ask(self, parts: Iterable[bytes], timeout: float) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            CommandTimeout: none came in time. What was done is unknown.
            TransportError: none came. What was done is unknown.
        """
        try:
            for part in parts:
                self._stream.send(part)
            return self._heard(time.monotonic() + timeout, timeout)
        except (CommandTimeout, answers.InvalidAnswer):
            raise
        except TransportError as error:
            raise TransportError(
                "the far side ended before it answered; what it did is unknown",
                evidence=[error.message, *error.evidence],
            ) from error

    def _heard(self, deadline: float, timeout: float) -> dict[str, Any]:
        size, parts = 0, [b""]
        while not self._stream.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommandTimeout(
                    f"the far side gave no answer within {timeout:g} s; what it did is unknown"
                )
            chunk = self._stream.read(left)
            size += len(chunk)
            if size > answers.LARGEST:
                raise answers.invalid(_SENDER, f"an answer of more than {answers.LARGEST >> 20} MiB")
            parts.append(chunk)
            if b"\n" in chunk:
                lines, _, rest = b"".join(parts).rpartition(b"\n")
                parts = [rest]
                answer = _answer(lines.decode("utf-8", "surrogateescape") + "\n", self._mark)
                if answer is not None:
                    self._spoke = time.monotonic()
                    return answer
        raise TransportError("it reads no more")

    def is_reusable(self, answer: Mapping[str, Any]) -> bool:
        """Whether it takes another request after such an answer: one it did not understand was its last."""
        return not {"refused", "cut"} & answer.keys()

    def close(self) -> None:
        """Let it end."""
        self._finish()


def _finish(stream: Stream, stack: contextlib.ExitStack) -> None:
    """Tell a worker that nothing more will come, and wait for its end a moment."""
    with contextlib.suppress(TransportError), stack:
        stream.close_stdin()
        deadline = time.monotonic() + _GOODBYE_S
        while not stream.ended and time.monotonic() < deadline:
            stream.read(max(0.0, deadline - time.monotonic()))
