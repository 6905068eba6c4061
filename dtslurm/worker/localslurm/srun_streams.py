"""The standard streams of a step's tasks: files, labels, and input for all."""

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
    """Opens what tasks read and write, and moves bytes where srun stands between."""

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

    def _path(self, pattern: str, task: Task) -> str:
        fields = name_fields(self.record)
        fields.update(
            s=str(self.number),
            t=str(task.id),
            n=str(task.node_id),
            N=task.node_name,
            J="{}.{}".format(self.record["id"], self.number),
        )
        return os.path.join(working_folder(self.step), expand_name(pattern, fields))

    def _open(self, path: str, flags: int) -> int:
        if path not in self.files:
            try:
                self.files[path] = os.open(path, flags, 0o666)
            except OSError as error:
                raise Refused(["error: Could not open file {}: {}".format(path, error.strerror)]) from None
        return self.files[path]

    def _output(self, name: str, task: Task, default: int) -> int:
        pattern = self.option(name)
        if pattern is None or pattern == "all":
            return default
        if pattern == "none" or (pattern.isdecimal() and int(pattern) != task.id):
            return self._open(os.devnull, os.O_RDWR)
        if pattern.isdecimal():
            return default
        append = (self.option("open-mode") or "").startswith("a")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if append else os.O_TRUNC)
        return self._open(self._path(pattern, task), flags)

    def _label(self, task: Task, target: int) -> int:
        read, write = os.pipe()
        os.set_blocking(read, False)
        width = len(str(self.step.ntasks - 1))
        self.pumps[read] = (target, "{:>{}}: ".format(task.id, width).encode())
        self.partial[read] = b""
        self.selector.register(read, selectors.EVENT_READ, self._pump_line)
        return write

    def _input(self, task: Task) -> int:
        pattern = self.option("input")
        if pattern == "none":
            return self._open(os.devnull, os.O_RDWR)
        if pattern is not None and pattern.isdecimal():
            return 0 if int(pattern) == task.id else self._open(os.devnull, os.O_RDWR)
        if pattern not in (None, "all"):
            return self._open(self._path(str(pattern), task), os.O_RDONLY)
        if not _has_input():
            return self._open(os.devnull, os.O_RDWR)
        read, write = os.pipe()
        os.set_blocking(write, False)
        self.inputs.add(write)
        return read

    def files_for(self, task: Task) -> process.Files:
        """Return a task's standard streams."""
        stdout = self._output("output", task, 1)
        default = 2 if self.option("output") in (None, "all") else stdout
        stderr = self._output("error", task, default)
        if "label" in self.step.options:
            stdout, stderr = self._label(task, stdout), self._label(task, stderr)
        return process.Files(self._input(task), stdout, stderr)

    def _pump_line(self, fd: int) -> None:
        target, prefix = self.pumps[fd]
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        lines = (self.partial[fd] + data).split(b"\n")
        self.partial[fd] = lines.pop()
        if not data:
            self.selector.unregister(fd)
            os.close(fd)
            rest = self.partial.pop(fd)
            lines += [rest] if rest else []
        _write_all(target, b"".join(prefix + line + b"\n" for line in lines))

    def _pump_input(self, fd: int) -> None:
        # One slow reader holds the others up, as it does in srun.
        if any(self.pending_input.values()):
            self.feed()
            return
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(fd)
            for target in self.inputs:
                os.close(target)
            self.inputs.clear()
            return
        self.pending_input = dict.fromkeys(self.inputs, data)
        self.feed()

    def feed(self) -> None:
        """Write what the tasks' pipes would not take yet."""
        for target, data in list(self.pending_input.items()):
            try:
                self.pending_input[target] = data[os.write(target, data) :] if data else data
            except BlockingIOError:
                continue
            except OSError:  # that task reads no more
                self.inputs.discard(target)
                del self.pending_input[target]
                os.close(target)

    def close_given(self, given: List[process.Files]) -> None:
        """Close this process's copies of what the tasks got, and begin to feed them."""
        for fd in {fd for files in given for fd in files if fd > 2}:
            os.close(fd)
        if self.inputs:
            self.selector.register(0, selectors.EVENT_READ, self._pump_input)

    def drain(self) -> None:
        """Move on what the tasks wrote before they ended."""
        for fd in list(self.partial):
            while fd in self.partial:
                self._pump_line(fd)
                if fd in self.partial and not self.selector.select(1.0):
                    break


def _has_input() -> bool:
    try:
        now = os.fstat(0)
        null = os.stat(os.devnull)
    except OSError:
        return False
    return not (stat.S_ISCHR(now.st_mode) and now.st_rdev == null.st_rdev)


def _write_all(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]
