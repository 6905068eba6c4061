"""Ctrl-C while Python imports modules: the program ends at once, as there is nothing to clean up.

An ordinary KeyboardInterrupt would print a traceback there, or be lost in a callback of the import system.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as typing has it, without the time that its import takes
if TYPE_CHECKING:
    import signal
    from types import FrameType, TracebackType
else:
    import _signal as signal  # the module `signal` imports enum: an interrupt meanwhile prints a traceback

EXIT_CODE = 130  # as shells have it for a program that SIGINT ended


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """End the process; nothing was printed yet that is still in a buffer."""
    del number, frame
    os._exit(EXIT_CODE)


class ExitAtInterrupt:
    """A context in which Ctrl-C ends the process at once; a SIGINT that is ignored stays ignored."""

    def __enter__(self) -> None:
        """Replace Python's own handler of SIGINT, if it is the present one."""
        self._replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            if self._replaced:
                signal.signal(signal.SIGINT, exit_at_once)
        except ValueError:  # this is not the main thread
            self._replaced = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put Python's own handler back."""
        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)
