"""Ctrl-C while Python imports modules: the program ends at once, because there is nothing to clean up.

An ordinary KeyboardInterrupt would print a traceback there, or be lost in a callback of the import system.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # like typing's, without the time of its import
if TYPE_CHECKING:
    import signal
    from types import FrameType, TracebackType
else:
    import _signal as signal  # `signal` imports enum: Ctrl-C during that prints a traceback

EXIT_CODE = 130  # as in shells for a program that SIGINT ended


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End the process at once; no buffer has unprinted output yet."""
    del number, frame
    os._exit(EXIT_CODE)


class ExitAtInterrupt:
    """A context in which Ctrl-C ends the process at once; an ignored SIGINT stays ignored."""

    def __enter__(self) -> None:
        """Replace Python's default handler of SIGINT, if it is installed."""
        self._replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            if self._replaced:
                signal.signal(signal.SIGINT, exit_at_once)
        except ValueError:  # this is not the main thread
            self._replaced = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore Python's default handler."""
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)
