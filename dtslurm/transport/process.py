"""A child process as a channel. Every process that dtslurm starts is started here."""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

_CHUNK = 1 << 18
_GRACE_S = 2.0


class PopenChannel:
    """A child process in a session of its own; its outputs are read together, so neither fills a pipe.

    Raises:
        OSError, ValueError: it could not be started, as `subprocess.Popen` raises them.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], stdin: bool) -> None:
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            start_new_session=True,  # a group of its own: a time-out ends its children too
        )
        self._selector = selectors.DefaultSelector()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                self._selector.register(pipe, selectors.EVENT_READ)
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self._over = False

    @property
    def ended(self) -> bool:
        """Whether both outputs are at their end."""
        return not self._selector.get_map()

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        """Return what came; see `Channel.read`."""
        out = err = b""
        for key, _ in self._selector.select(timeout):
            data = os.read(key.fd, _CHUNK)
            if not data:
                self._selector.unregister(key.fileobj)
            elif key.fileobj is self._process.stdout:
                out = data
            else:
                err = data
        return out, err

    def write(self, data: bytes) -> None:
        """Write to stdin; see `Channel.write`."""
        pipe = self._process.stdin
        view = memoryview(data)
        while view:
            if self._over or pipe is None or pipe.closed:
                raise BrokenPipeError
            try:
                _, ready, _ = select.select([], [pipe], [], 0.25)
                if ready:
                    view = view[os.write(pipe.fileno(), view) :]
            except BlockingIOError:
                continue
            except ValueError:  # closed by another thread
                raise BrokenPipeError from None

    def close_stdin(self) -> None:
        """End the input."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def code(self, timeout: float) -> int | None:
        """Return the exit code, None if it does not end in time."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> tuple[bytes, bytes]:
        """Kill the whole group; return what it had printed. A stray holding a pipe is not waited for."""
        self._kill()
        out, err = [], []
        deadline = time.monotonic() + _GRACE_S
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            more = self.read(left)
            out.append(more[0])
            err.append(more[1])
        return b"".join(out), b"".join(err)

    def _kill(self) -> None:
        # The group outlives its leader when a child stays behind; poll() decides nothing here.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill what still runs, release the pipes."""
        if not self._over:
            self._kill()
            self.release()

    def release(self) -> None:
        """Release the pipes of a process that has ended, and let what it left behind live."""
        self._over = True
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class CarrierProcess:
    """A shell command that carries a connection on its stdin and stdout; ``socket`` is our end of it."""

    def __init__(self, command: str, env: Mapping[str, str]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=env,
                start_new_session=True,
            )

    def close(self) -> None:
        """End it."""
        self.socket.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def has_terminal() -> bool:
    """Whether a person sits at a terminal where this process may ask: its own, and in the foreground."""
    if threading.current_thread() is not threading.main_thread():  # it could not hand the terminal over
        return False
    try:
        handle = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(handle) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(handle)


def run_in_terminal(
    argv: Sequence[str], env: Mapping[str, str], *, hidden: re.Pattern[str]
) -> tuple[int, str]:
    """Run a program that may ask questions at the terminal; return its exit code and what it said.

    What it says on stderr is returned, and shown as it comes but for lines that match ``hidden``. It has the
    terminal's foreground for itself, as a shell's job has: what it leaves behind is not reached by a later
    Ctrl-C.

    Raises:
        KeyboardInterrupt: the person pressed Ctrl-C.
    """
    terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or taking the terminal back would stop us
    try:
        with _foreground(argv, env, terminal) as process:
            said = _shown(process, hidden)
            code = process.wait()
    finally:
        os.tcsetpgrp(terminal, os.getpgrp())
        signal.signal(signal.SIGTTOU, before)
        os.close(terminal)
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    return code, said.decode("utf-8", "replace")


@contextlib.contextmanager
def _foreground(
    argv: Sequence[str], env: Mapping[str, str], terminal: int
) -> Iterator[subprocess.Popen[bytes]]:
    def step_forward() -> None:
        os.setpgid(0, 0)
        os.tcsetpgrp(terminal, os.getpgrp())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)

    process = subprocess.Popen(
        list(argv),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=step_forward,  # noqa: PLW1509 (one thread: the login comes before all else)
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _shown(process: subprocess.Popen[bytes], hidden: re.Pattern[str]) -> bytes:
    said = rest = b""
    while process.stderr is not None:
        ready, _, _ = select.select([process.stderr], [], [], 0.1)
        data = os.read(process.stderr.fileno(), _CHUNK) if ready else b""
        if data:
            said += data
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not hidden.match(line.decode("utf-8", "replace")):
                    os.write(2, line + b"\n")
        elif ready or process.poll() is not None:  # one gone to the background may hold the pipe
            break
    return said
