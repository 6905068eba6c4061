"""``dtslurm top`` on a terminal of its own, open for as long as the soak lasts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import deque

import psutil

from dtslurm.logs.clean import safe
from tests.waiting import busyness

_QUIT_S = 30.0
_PAGE_S = 2.0


class OpenDashboard:
    """A dashboard that stays open; what it writes to its terminal is read and dropped, but for the end."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dtslurm", "top"],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        os.close(inner)
        self._output: deque[bytes] = deque(maxlen=64)
        threading.Thread(target=self._drain, name="soak-terminal", daemon=True).start()

    def close(self) -> None:
        """End the dashboard if it has not ended yet."""
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def visit_a_page(self) -> None:
        """Open the page of the selected run, each of its panes, and leave it again."""
        if self._process.poll() is not None:
            return
        for key in ("\r", "2", "3", "4", "5", "\x1b"):
            self._press(key)
            time.sleep(_PAGE_S / 5)

    def memory_mib(self) -> float:
        """Return its resident memory in MiB, 0 if it has ended."""
        try:
            return float(psutil.Process(self._process.pid).memory_info().rss) / 2**20
        except psutil.Error:
            return 0.0

    def problems(self) -> list[str]:
        """Leave the dashboard; return that it had ended before, or does not end, with its last words."""
        early = self._process.poll()
        if early is not None:
            return [
                f"top ended with {early} within {time.monotonic() - self._begin:.0f} s: {self._last_words()}"
            ]
        end = time.monotonic() + _QUIT_S * busyness()
        while self._process.poll() is None and time.monotonic() < end:
            self._press("\x03")
            time.sleep(0.5)
        code = self._process.poll()
        return [] if code == 0 else [f"top was left and ended with {code}: {self._last_words()}"]

    def _press(self, key: str) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            os.write(self._terminal, key.encode())

    def _drain(self) -> None:
        while True:
            try:
                chunk = os.read(self._terminal, 1 << 16)
            except OSError:  # the other side was closed
                return
            if not chunk:
                return
            self._output.append(chunk)

    def _last_words(self) -> str:
        return safe(b"".join(self._output).decode("utf-8", "replace"))[-500:]
