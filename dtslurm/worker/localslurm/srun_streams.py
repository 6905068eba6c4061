"""The standard streams of a step's tasks: output files, labels, and input for all tasks."""

import contextlib
import os
import selectors
import stat
from typing import Dict, List, Optional, Set, Tuple

from . import process
from .environment import name_fields
from .options import Refused
from .srun_options import LocalStep, Task, working_folder
from .state import Record
from .values import expand_name


class Streams(object):
    """The standard streams of a step's tasks, including the forwarding of data between a task and a file."""

    def __init__(
        self, record: Record, step: LocalStep, number: int, selector: selectors.BaseSelector
    ) -> None:
        self.record, self.step, self.number, self.selector = record, step, number, selector
        self.files: Dict[str, int] = {}
        self.pumps: Dict[int, Tuple[int, bytes]] = {}
        self.partial: Dict[int, bytes] = {}
        self.inputs: Set[int] = set()
        self.pending_input: Dict[int, bytes] = {}

    def option(self, name: str) -> Optional[str]:
        """Return an option's value."""
        return self.step.options.get(name)

    def _expand_path(self, pattern: str, task: Task) -> str:
        fields = name_fields(self.record)
        fields.update(
            s=str(self.number),
            t=str(task.id),
            n=str(task.node_id),
            N=task.node_name,
            J="{}.{}".format(self.record["id"], self.number),
        )
        return os.path.join(working_folder(self.step), expand_name(pattern, fields))

    def _open_file(self, path: str, flags: int) -> int:
        if path not in self.files:
            try:
                self.files[path] = os.open(path, flags, 0o666)
            except OSError as error:
                raise Refused(["error: Could not open file {}: {}".format(path, error.strerror)]) from None
        return self.files[path]

    def _open_output(self, name: str, task: Task, default: int) -> int:
        pattern = self.option(name)
        if pattern is None or pattern == "all":
            return default
        if pattern == "none" or (pattern.isdecimal() and int(pattern) != task.id):
            return self._open_file(os.devnull, os.O_RDWR)
        if pattern.isdecimal():
            return default
        append = (self.option("open-mode") or "").startswith("a")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if append else os.O_TRUNC)
        return self._open_file(self._expand_path(pattern, task), flags)

    def _open_labelled(self, task: Task, target: int) -> int:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        width = len(str(self.step.ntasks - 1))
        self.pumps[read_end] = (target, "{:>{}}: ".format(task.id, width).encode())
        self.partial[read_end] = b""
        self.selector.register(read_end, selectors.EVENT_READ, self._pump_line)
        return write_end

    def _open_input(self, task: Task) -> int:
        pattern = self.option("input")
        if pattern == "none":
            return self._open_file(os.devnull, os.O_RDWR)
        if pattern is not None and pattern.isdecimal():
            return 0 if int(pattern) == task.id else self._open_file(os.devnull, os.O_RDWR)
        if pattern not in (None, "all"):
            return self._open_file(self._expand_path(str(pattern), task), os.O_RDONLY)
        if not _has_input():
            return self._open_file(os.devnull, os.O_RDWR)
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self.inputs.add(write_end)
        return read_end

    def files_for(self, task: Task) -> process.Files:
        """Return a task's standard streams."""
        stdout = self._open_output("output", task, 1)
        default = 2 if self.option("output") in (None, "all") else stdout
        stderr = self._open_output("error", task, default)
        if "label" in self.step.options:
            stdout, stderr = self._open_labelled(task, stdout), self._open_labelled(task, stderr)
        return process.Files(self._open_input(task), stdout, stderr)

    def _pump_line(self, fd: int) -> None:
        target, prefix = self.pumps[fd]
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            return
        lines = (self.partial[fd] + chunk).split(b"\n")
        self.partial[fd] = lines.pop()
        if not chunk:
            self.selector.unregister(fd)
            os.close(fd)
            last_line = self.partial.pop(fd)
            lines += [last_line] if last_line else []
        _write_all(target, b"".join(prefix + line + b"\n" for line in lines))

    def _pump_input(self, fd: int) -> None:
        # One slow reader delays the others, as in srun.
        if any(self.pending_input.values()):
            self.feed()
            return
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self.selector.unregister(fd)
            for target in self.inputs:
                os.close(target)
            self.inputs.clear()
            return
        self.pending_input = dict.fromkeys(self.inputs, chunk)
        self.feed()

    def feed(self) -> None:
        """Write the pending input that the tasks' pipes did not accept before."""
        for target, pending in list(self.pending_input.items()):
            try:
                self.pending_input[target] = pending[os.write(target, pending) :] if pending else pending
            except BlockingIOError:
                continue
            except OSError:  # the task has closed its standard input
                self.inputs.discard(target)
                del self.pending_input[target]
                os.close(target)

    def close_task_streams(self, descriptors: List[process.Files]) -> None:
        """Close this process's copies of the tasks' streams, and start to feed the input."""
        for fd in {fd for files in descriptors for fd in files if fd > 2}:
            os.close(fd)
        if self.inputs:
            self.selector.register(0, selectors.EVENT_READ, self._pump_input)

    def drain(self) -> None:
        """Forward the output that the tasks wrote before they exited."""
        for fd in list(self.partial):
            while fd in self.partial:
                self._pump_line(fd)
                if fd in self.partial and not self.selector.select(1.0):
                    break


def _has_input() -> bool:
    try:
        stdin_status = os.fstat(0)
        null_status = os.stat(os.devnull)
    except OSError:
        return False
    return not (stat.S_ISCHR(stdin_status.st_mode) and stdin_status.st_rdev == null_status.st_rdev)


def _write_all(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]
