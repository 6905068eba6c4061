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
from types import FrameType

_CHUNK = 1 << 18
_GRACE_S = 2.0


class PopenChannel:
    """A child process in its own session; both outputs are read together, so that neither pipe fills up.

    Raises:
        OSError, ValueError: the process could not be started, as in `subprocess.Popen`.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], stdin: bool) -> None:
        self._released = True  # until there is a process to end
        self._selector = selectors.DefaultSelector()
        try:
            with _interrupt_delayed():  # Popen can raise after the fork, and the process would never be ended
                self._process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    env=env,
                    start_new_session=True,  # its own process group: a time-out also kills its children
                )
                self._released = False
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    self._selector.register(pipe, selectors.EVENT_READ)
            if self._process.stdin is not None:
                os.set_blocking(self._process.stdin.fileno(), False)
        except BaseException:
            self.end()
            raise

    @property
    def ended(self) -> bool:
        """Whether both outputs have reached their end."""
        return not self._selector.get_map()

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        """Return new bytes of both outputs; see `Channel.read`."""
        out = err = b""
        try:
            for key, _ in self._selector.select(timeout):
                data = os.read(key.fd, _CHUNK)
                if not data:
                    self._selector.unregister(key.fileobj)
                elif key.fileobj is self._process.stdout:
                    out = data
                else:
                    err = data
        except (OSError, ValueError, KeyError):
            if not self._released:  # another thread has closed the pipes
                raise
        return out, err

    def write(self, data: bytes) -> None:
        """Write to stdin; see `Channel.write`."""
        pipe = self._process.stdin
        view = memoryview(data)
        while view:
            if self._released or pipe is None or pipe.closed:
                raise BrokenPipeError
            try:
                _, writable_pipes, _ = select.select([], [pipe], [], 0.25)
                if writable_pipes:
                    view = view[os.write(pipe.fileno(), view) :]
            except BlockingIOError:
                continue
            except ValueError:  # another thread closed the pipe
                raise BrokenPipeError from None

    def close_stdin(self) -> None:
        """Close stdin."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def code(self, timeout: float) -> int | None:
        """Return the exit code, None if the process has not ended within ``timeout`` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> tuple[bytes, bytes]:
        """Kill the process group; return its remaining output.

        A process outside the group that still holds a pipe is waited for at most `_GRACE_S` seconds.
        """
        self._kill()
        out, err = [], []
        deadline = time.monotonic() + _GRACE_S
        while not self.ended and (remaining_s := deadline - time.monotonic()) > 0:
            chunks = self.read(remaining_s)
            out.append(chunks[0])
            err.append(chunks[1])
        return b"".join(out), b"".join(err)

    def _kill(self) -> None:
        # The group can outlive its leader (a child still runs), so poll() is not checked.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process group if it still runs, and close the pipes."""
        if not self._released:
            self._kill()
            self.release()

    def release(self) -> None:
        """Close the pipes of a process that has ended, without killing its children."""
        self._released = True
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def _interrupt_delayed() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended; an ignored SIGINT stays ignored, also in child processes."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # no handler of Python interrupts this thread
        return
    interrupts: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            handler(*interrupts[0])


class CarrierProcess:
    """A shell command (ProxyCommand) whose stdin and stdout carry a connection; dtslurm uses ``socket``."""

    def __init__(self, command: str, env: Mapping[str, str]) -> None:
        self.socket, peer = socket.socketpair()
        with peer:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=peer.fileno(),
                stdout=peer.fileno(),
                env=env,
                start_new_session=True,
            )

    def close(self) -> None:
        """Close the connection and kill the command."""
        self.socket.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def has_terminal() -> bool:
    """Whether this process may prompt: it runs in its terminal's foreground, in the main thread."""
    if threading.current_thread() is not threading.main_thread():  # it cannot hand over the terminal
        return False
    try:
        tty = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(tty) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(tty)


def run_in_terminal(
    argv: Sequence[str], env: Mapping[str, str], *, hidden_lines: re.Pattern[str]
) -> tuple[int, str]:
    """Run a program that may prompt at the terminal; return its exit code and its stderr.

    stderr is also shown as it arrives, except lines that match ``hidden_lines``. The program gets the
    terminal's foreground as its own process group, like a job of a shell, so that a later Ctrl-C does not
    reach the processes it leaves running.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    tty = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    previous_handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # tcsetpgrp below would stop dtslurm
    try:
        with _foreground_process(argv, env, tty) as process:
            stderr = _echo_stderr(process, hidden_lines)
            code = process.wait()
    finally:
        os.tcsetpgrp(tty, os.getpgrp())
        signal.signal(signal.SIGTTOU, previous_handler)
        os.close(tty)
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    return code, stderr.decode("utf-8", "replace")


@contextlib.contextmanager
def _foreground_process(
    argv: Sequence[str], env: Mapping[str, str], terminal: int
) -> Iterator[subprocess.Popen[bytes]]:
    def become_foreground() -> None:
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
        preexec_fn=become_foreground,  # noqa: PLW1509 (only one thread runs: the login comes first)
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _echo_stderr(process: subprocess.Popen[bytes], hidden_lines: re.Pattern[str]) -> bytes:
    stderr = partial_line = b""
    while process.stderr is not None:
        readable_pipes, _, _ = select.select([process.stderr], [], [], 0.1)
        data = os.read(process.stderr.fileno(), _CHUNK) if readable_pipes else b""
        if data:
            stderr += data
            *lines, partial_line = (partial_line + data).split(b"\n")
            for line in lines:
                if not hidden_lines.match(line.decode("utf-8", "replace")):
                    os.write(2, line + b"\n")
        elif readable_pipes or process.poll() is not None:  # a background process may still hold the pipe
            break
    return stderr
