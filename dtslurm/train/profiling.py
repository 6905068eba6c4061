"""Profiles of training steps, which ``dtslurm profile --with torch`` requests while training runs."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtslurm.train.run_files import RunFiles

MOST_STEPS = 1000
_LONGEST_NAME = 150  # of a run directory in the name of a request: file names have up to 255 bytes
_LONGEST_REQUEST = 4096
_BEGIN_INTERVAL_S = 2
_REQUEST = re.compile(r"(?P<steps>[0-9]{1,4})\n(?P<trace>/.*)\n(?P<memory>memory\n)?", re.ASCII)


@dataclass(frozen=True)
class StepProfileRequest:
    """What ``dtslurm profile`` asks of a rank.

    Attributes:
        steps: number of steps to record.
        trace: the file to write; a file with ``.error`` at its end gets the reason if that is not possible.
        with_memory: whether allocations are recorded.
        begin: when to begin, in seconds since 1970.
    """

    steps: int
    trace: Path
    with_memory: bool
    begin: float


class StepProfiler:
    """Records steps of this rank with torch.profiler when a request for it appears.

    A request is a file on the rank's node: its number of steps, the path of the trace, and perhaps "memory",
    a line each. The look for it costs some microseconds per step, and no other rank and no shared file
    system. All ranks begin at the same time, so that they record the same steps.
    """

    def __init__(self, run: RunFiles, rank: int, clock: Callable[[], float] = time.time) -> None:
        self._request = find_request_path(run, rank)
        self._clock = clock
        self._next: StepProfileRequest | None = None
        self._profiler: torch.profiler.profile | None = None
        self._steps_left = 0
        self._trace = Path()

    def end_step(self) -> None:
        """Count a finished step: begin to record if that is requested, and write the trace after the last."""
        if self._profiler is not None:
            self._count_step(self._profiler)
            return
        if self._next is None and self._request is not None and self._request.exists():
            self._take(self._request)
        if self._next is not None and self._clock() >= self._next.begin:
            request, self._next = self._next, None
            self._begin(request)

    def close(self) -> None:
        """Write the trace of the steps so far, or why there is none, if training ends during a request."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._write_trace(profiler)
        request, self._next = self._next, None
        if request is not None:
            report_error(request.trace, RuntimeError("the training ended before the first step to record"))

    def _take(self, path: Path) -> None:
        try:
            request = take_request(path)
        except (OSError, ValueError) as error:
            self._request = None  # another user's file, for example, which would be there at each step
            sys.stderr.write(f"dtslurm: steps cannot be profiled: {error}\n")
            return
        with errors_reported(request.trace):
            # The first start takes about 2 s, in which the other ranks would wait for this one.
            start_profiler().stop()
            self._next = request

    def _begin(self, request: StepProfileRequest) -> None:
        # The first recorded step is slow, because the profiler starts in it.
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=request.steps, repeat=1)
        with errors_reported(request.trace):
            self._profiler = start_profiler(schedule=schedule, profile_memory=request.with_memory)
            self._steps_left, self._trace = request.steps + 1, request.trace

    def _count_step(self, profiler: torch.profiler.profile) -> None:
        self._steps_left -= 1
        if self._steps_left > 0:
            profiler.step()
        else:
            self.close()

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        part = self._trace.with_suffix(".part")
        with errors_reported(self._trace):
            profiler.stop()
            profiler.export_chrome_trace(str(part))
            part.replace(self._trace)


def start_profiler(**options: Any) -> torch.profiler.profile:
    """Start torch's profiler with its options.

    Raises:
        RuntimeError: it cannot start, or the training code uses it now.
    """
    if torch.autograd._profiler_enabled():  # noqa: SLF001 (there is no public name; a second profiler would end it)
        raise RuntimeError("the training code uses torch.profiler itself now")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, **options)
    profiler.start()
    return profiler


def find_request_path(run: RunFiles, rank: int) -> Path | None:
    """Return where a request for a rank of this run appears on its node; None outside a job."""
    if run.folder is None:
        return None
    # The command that writes it cuts bytes, not characters.
    name = os.fsdecode(os.fsencode(run.folder).replace(b"/", b"_")[-_LONGEST_NAME:])
    return Path(os.environ.get("TMPDIR") or "/tmp", f"dtslurm-profile-{name}-{rank}")  # noqa: S108 (take_request checks its owner)


def take_request(path: Path) -> StepProfileRequest:
    """Read a request, and remove it.

    Raises:
        OSError: the file cannot be read, is a link, or could be another user's.
        ValueError: it is no request.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{path} belongs to another user, or others may write to it")
        text = file.read(_LONGEST_REQUEST).decode()
    path.unlink()
    match = _REQUEST.fullmatch(text)
    if match is None or not 1 <= int(match["steps"]) <= MOST_STEPS:
        raise ValueError(f"{path} is no request for a profile")
    return StepProfileRequest(
        steps=int(match["steps"]),
        trace=Path(match["trace"]),
        with_memory=match["memory"] is not None,
        begin=choose_begin(min(status.st_mtime, time.time())),  # the clock of a file server may be ahead
    )


def choose_begin(request_time: float) -> float:
    """Return when to begin a profile, two to four seconds after its request was written.

    The requests of all ranks are written within a moment, and nearly always have the same begin.
    """
    return (request_time // _BEGIN_INTERVAL_S + 2) * _BEGIN_INTERVAL_S


@contextmanager
def errors_reported(trace: Path) -> Iterator[None]:
    """Report an error to the program that waits for the trace, instead of ending the training."""
    try:
        yield
    except (OSError, RuntimeError, AssertionError) as error:  # AssertionError: no step was recorded
        report_error(trace, error)


def report_error(trace: Path, error: Exception) -> None:
    """Write why there is no trace."""
    try:
        trace.with_name(f"{trace.name}.error").write_text(
            f"{error or type(error).__name__}\n", encoding="utf-8"
        )
    except OSError:
        sys.stderr.write(f"dtslurm: steps cannot be profiled: {error}\n")
