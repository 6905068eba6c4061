"""Run `dtslurm.worker` on the login node, once or as a persistent process for several requests."""

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

# The largest request for a persistent worker, because the request is buffered in memory here.
MOST_KEPT = 1 << 22
_FRESH_S = 5.0  # a worker without an answer for longer is pinged before it gets a request
_PING_S = 10.0  # time limit of a ping
_PING = struct.pack(">I", 0)
_GOODBYE_S = 2.0  # time for a worker to exit after its stdin was closed
_SENDER = "the worker program on the login node"


def ask_worker(
    transport: Transport,
    modules: Sequence[str],
    parts: Iterable[bytes],
    *,
    python: str = "python3",
    timeout: float,
) -> dict[str, Any]:
    """Run modules of `dtslurm.worker` on the login node, with ``parts`` as their input; return the answer.

    No file remains on the login node. Output of the login shell around the answer is ignored.

    Raises:
        CommandNotFound: there is no program ``python``.
        TransportError: there was no answer; the effect is unknown.
    """
    source, answer_mark = worker_source(*modules), _make_mark()
    argv = [python, "-I", "-S", "-c", BOOT, str(len(source)), answer_mark]
    result = transport.run(argv, stdin=itertools.chain([source], parts), timeout=timeout)
    answer = _answer(result.stdout, answer_mark)
    if answer is not None:
        return answer
    if result.code == 127:
        raise _no_python_error(transport, python, result.stderr.splitlines()[-5:])
    raise TransportError(
        f"the worker program ended with exit code {result.code} before it answered; its effects are unknown",
        evidence=result.stderr.splitlines()[-20:],
        hint=f"{python} on the login node must be Python 3.6 or later",
    )


def _no_python_error(transport: Transport, python: str, evidence: Sequence[str]) -> CommandNotFound:
    return CommandNotFound(
        f"{python} does not exist on {transport.name}",
        evidence=evidence,
        hint="the login node needs Python 3.6 or later; set its path with login.python in the profile",
    )


def _make_mark() -> str:
    """Return the prefix of the answer's line: a random text, which no other output contains."""
    return f"dtslurm-{os.urandom(8).hex()}:"


def _answer(output: str, answer_mark: str) -> dict[str, Any] | None:
    """Return the answer in the last complete line with the mark, None if there is none."""
    if answer_mark not in output:
        return None
    for line in reversed(output.split("\n")[:-1]):
        if line.startswith(answer_mark):
            return answers.parse_object(line[len(answer_mark) :], _SENDER)
    return None


class RemoteWorker:
    """A worker on the login node for several requests, processed one at a time.

    The first request starts a process of its own, like a single command, unless `begin` started a worker
    ahead of time. After the first request, a persistent worker serves the following ones over an open
    channel. It ends with this process, on `close`, after minutes without a request, or when the host has no
    session left.
    """

    def __init__(self, transport: Transport, modules: Sequence[str], python: str) -> None:
        self._transport = transport
        self._modules = tuple(modules)
        self._python = python
        self._has_served = False
        self._request_lock = threading.Lock()
        self._running: _RunningWorker | None = None
        self._beginning: threading.Thread | None = None
        release_callbacks = getattr(transport, "spare", None)
        if release_callbacks is not None:
            release_method = weakref.WeakMethod(self.release_if_idle)
            release_callbacks.append(lambda: (method := release_method()) is not None and method())

    def begin(self) -> None:
        """Start a worker for an imminent request in the background, if a login already exists."""
        logged_in = getattr(self._transport, "logged_in", None)
        if self._running is None and self._beginning is None and logged_in is not None:
            self._beginning = threading.Thread(target=self._start_worker, args=(logged_in,), daemon=True)
            self._beginning.start()

    def _start_worker(self, logged_in: Callable[[], bool]) -> None:
        # Without a login nothing is started: the request itself reports why it cannot be sent.
        with self._request_lock:
            try:
                if logged_in():
                    self._get_worker().ask([_PING], _PING_S)
            except DtslurmError:
                self._end_worker()

    def _join_start(self) -> bool:
        """Wait until `begin` has started its worker; return whether there is one."""
        if self._beginning is not None:
            self._beginning.join()
            self._beginning = None
        return self._running is not None

    def ask(self, parts: Iterable[bytes], *, size: int, timeout: float) -> dict[str, Any]:
        """Send a request and return its answer; raises the errors of `ask_worker`.

        Args:
            size: the approximate size of the parts, in bytes.
        """
        # A process of its own serves the first request, a large request, and a request that arrives while the
        # persistent worker is busy.
        can_reuse = self._join_start() or self._has_served
        if not can_reuse or size > MOST_KEPT or not self._request_lock.acquire(blocking=False):
            python = self._python
            answer = ask_worker(self._transport, self._modules, parts, python=python, timeout=timeout)
            self._has_served = self._has_served or "done" in answer
            return answer
        try:
            worker = self._get_worker()
            try:
                answer = worker.ask(parts, timeout)
            except BaseException:
                self._end_worker()  # kill the worker, so that it does not act on a partial request
                raise
            if not worker.is_reusable(answer):
                self._end_worker()
            return answer
        finally:
            self._request_lock.release()

    def _get_worker(self) -> _RunningWorker:
        """Return a worker that accepts requests."""
        if self._running is not None and not self._running.is_alive():
            self._end_worker()
        if self._running is None:
            self._running = _RunningWorker(self._transport, self._modules, self._python)
        return self._running

    def _end_worker(self) -> None:
        worker, self._running = self._running, None
        if worker is not None:
            worker.close()

    def release_if_idle(self) -> bool:
        """End the persistent worker unless it processes a request; return whether one was ended."""
        if not self._request_lock.acquire(blocking=False):
            return False
        try:
            was_running = self._running is not None
            self._end_worker()
            return was_running
        finally:
            self._request_lock.release()

    close = release_if_idle


class _RunningWorker:
    """A persistent worker process."""

    def __init__(self, transport: Transport, modules: Sequence[str], python: str) -> None:
        source, self._mark = worker_source(*modules), _make_mark()
        argv = [python, "-I", "-S", "-c", BOOT, str(len(source)), self._mark, "keep"]
        stack = contextlib.ExitStack()
        self._stream = stack.enter_context(transport.stream(argv, stdin=source))
        self._last_answer_s = time.monotonic()
        self._finish = weakref.finalize(self, _finish, self._stream, stack)

    def is_alive(self) -> bool:
        """Return whether the worker accepts another request; if not, nothing was sent to it."""
        try:
            self._stream.read(0.0)
            if self._stream.ended:
                return False
            if time.monotonic() - self._last_answer_s > _FRESH_S:
                self.ask([_PING], _PING_S)
        except TransportError:
            return False
        return True

    def ask(self, parts: Iterable[bytes], timeout: float) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            CommandTimeout: the answer did not arrive in time; the effect is unknown.
            TransportError: the worker ended without an answer; the effect is unknown.
        """
        try:
            for part in parts:
                self._stream.send(part)
            return self._read_answer(time.monotonic() + timeout, timeout)
        except (CommandTimeout, answers.InvalidAnswer):
            raise
        except TransportError as error:
            raise TransportError(
                "the worker program ended before it answered; its effects are unknown",
                evidence=[error.message, *error.evidence],
            ) from error

    def _read_answer(self, deadline: float, timeout: float) -> dict[str, Any]:
        size, chunks = 0, [b""]
        while not self._stream.ended:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise CommandTimeout(
                    f"the worker program did not answer within {timeout:g} s; its effects are unknown"
                )
            chunk = self._stream.read(remaining_s)
            size += len(chunk)
            if size > answers.LARGEST:
                raise answers.invalid(_SENDER, f"an answer of more than {answers.LARGEST >> 20} MiB")
            chunks.append(chunk)
            if b"\n" in chunk:
                lines, _, partial_line = b"".join(chunks).rpartition(b"\n")
                chunks = [partial_line]
                answer = _answer(lines.decode("utf-8", "surrogateescape") + "\n", self._mark)
                if answer is not None:
                    self._last_answer_s = time.monotonic()
                    return answer
        raise TransportError("the worker program no longer reads its input")

    def is_reusable(self, answer: Mapping[str, Any]) -> bool:
        """Return whether the worker accepts another request: it exits after it has rejected a request."""
        return not {"refused", "cut"} & answer.keys()

    def close(self) -> None:
        """End the worker."""
        self._finish()


def _finish(stream: Stream, stack: contextlib.ExitStack) -> None:
    """Close a worker's stdin, and wait up to `_GOODBYE_S` seconds for its end."""
    with contextlib.suppress(TransportError), stack:
        stream.close_stdin()
        deadline = time.monotonic() + _GOODBYE_S
        while not stream.ended and time.monotonic() < deadline:
            stream.read(max(0.0, deadline - time.monotonic()))
