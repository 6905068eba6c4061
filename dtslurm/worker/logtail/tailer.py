"""The remote program of log following: sends new output of a run's log files as frames over one pipe.

The program is piped through standard input into a Python interpreter, so that it leaves no file behind. The
log files themselves are the buffer: the program does not read beyond the reader's credit.
"""

import contextlib
import errno
import json
import os
import socket
import sys
import time
from typing import Any, Dict, List, Optional

from ..lib.rank_files import OpenLog, PlainLog
from . import frames as wire
from .files import BLOCK, Finder, GrowingFile, Ranges, Request, can_resume, find_renamed, within
from .frames import MAGIC, OFFSET, VERSION, ClientDisconnected, Pipe, write_all
from .summary import Summary

HOT_S = 5.0  # a file that grew within this time is checked more often
RETIRED_S = 60.0  # an unchanged file of an earlier attempt is closed after this time
PING_S = 10.0
ROUND = 1 << 24  # bytes per round over all files, unless there are too many files
LEAST = 1 << 14  # minimum chunk of one file per round, in bytes
SUMMARY_S = 1.0
MOST_FILES = 65536


class Tailer:
    """A program that reads files in turn, within the reader's credit."""

    def __init__(self, pipe: Pipe, request: Request) -> None:
        self.pipe, self.request = pipe, request
        self.finder = Finder(request)
        self.credit = request.credit
        pipe.may_pack = request.pack
        self.hot: List[GrowingFile] = []
        self.cold: List[GrowingFile] = []
        self.more: List[GrowingFile] = []  # checked, but not read to the end
        self.turn = 0  # index of the cold file that was checked last
        self.room = file_limit() - 64  # number of further files that may be kept open
        self.draining = not (request.follow or request.in_turn)
        self.focus: Ranges = [] if request.summary else None
        self.summary = Summary(request.alarms)
        self.started = False
        self.several = False  # whether there are earlier attempts
        self.piece = BLOCK

    def run(self) -> None:
        """Send all requested data."""
        next_scan = next_ping = next_summary = 0.0
        while not self.draining:
            now = time.monotonic()
            if now >= next_scan:
                self.admit(self.finder.scan(now))
                next_scan = now + self.finder.pause()
            if self.credit > 0:
                self.sweep(now)
                self.catch_up()
            if self.summary.rows and now >= next_summary:
                self.send_summary()
                next_summary = now + SUMMARY_S
            if now >= next_ping:
                next_ping = now + (PING_S if self.pipe.trips > 2 else 1.0)
                self.pipe.ping()
            self.pipe.flush()
            self.listen(now + self.pace() - time.monotonic() if self.credit > 0 else 1.0)
        self.drain()

    def pace(self) -> float:
        """Return the seconds between two checks of the growing files."""
        if self.finder.network:
            # Each check reopens the file, which costs a request to the file server.
            return max(0.5, len(self.hot) / 500.0)
        return max(0.1 if self.hot else 0.2, len(self.hot) * 3e-5)

    def patience(self) -> float:
        """Return the seconds within which each unchanged file is checked once."""
        cold_count = len(self.cold)
        if self.finder.network:
            return max(2.0, cold_count / 300.0)
        return max(0.2, min(0.4, cold_count * 4e-4), cold_count * 6e-5)

    def admit(self, logs: List[GrowingFile]) -> None:
        """Start following new logs."""
        for log in logs:
            log.changed = time.monotonic()
            log.summed = self.request.summary and log.kind == "rank" and not within(self.focus, log.number)
            if log.kind == "metrics":
                log.lines = 1
            elif not self.started and log.kind != "events" and not log.summed:
                log.lines = self.request.lines
            log.hot = True
            self.hot.append(log)
        self.several = any(
            len(attempts_folder.attempts) > 1 for attempts_folder in self.finder.places.values()
        )
        self.piece = max(LEAST, min(BLOCK, ROUND // (len(self.finder.logs) + 1)))

    def sweep(self, now: float) -> None:
        """Check the files that grew recently, and a part of the others."""
        hot, self.hot = self.hot, []
        for log in hot:
            if not unchanged(log):
                self.visit(log)
            log.hot = now - log.changed < HOT_S
            (self.hot if log.hot else self.cold).append(log)
        count = min(len(self.cold), int(len(self.cold) * self.pace() / self.patience()) + 1)
        removed = set()
        for _ in range(count):
            self.turn = self.turn + 1 if self.turn + 1 < len(self.cold) else 0
            log = self.cold[self.turn]
            if not unchanged(log) and self.visit(log):
                log.hot = True
                self.hot.append(log)
                removed.add(log)
            elif self.several and self.outdated(log, now):
                self.close(log)
                removed.add(log)
        if removed:
            self.cold = [log for log in self.cold if log not in removed]

    def outdated(self, log: GrowingFile, now: float) -> bool:
        """Return whether a log belongs to an attempt that ended long ago."""
        if log.kind not in ("rank", "node", "metrics") or now - log.changed < RETIRED_S:
            return False
        return log.attempt < max(self.finder.places[log.task].attempts, default=0)

    def catch_up(self) -> None:
        """Continue in turn with files that have unread data, until all are read or the credit is used up."""
        while self.more and self.credit > 0 and not self.draining:
            unfinished, self.more = self.more, []
            for log in unfinished:
                log.waiting = False
                self.visit(log)
            self.pipe.flush()
            self.listen(0)
        if not self.more:
            self.caught_up()
            self.draining = self.draining or not self.request.follow

    def caught_up(self) -> None:
        """Report once that all data that existed at the start has been sent, and the first attempts."""
        if not self.started:
            self.started = True
            first_attempts = {
                attempts_folder.task or "": attempts_folder.first
                for attempts_folder in self.finder.places.values()
            }
            self.pipe.send(wire.CAUGHT_UP, 0, json.dumps({"first": first_attempts}).encode())

    def drain(self) -> None:
        """Send the rest of every file, one file after the other, and the end frame."""
        self.finder.look_again()
        self.admit(self.finder.scan(time.monotonic()))
        self.piece = BLOCK
        for log in list(self.finder.logs.values()):
            log.waiting = True
            while log.waiting:
                while self.credit <= 0:
                    self.pipe.ping()
                    self.listen(PING_S)
                log.waiting = False
                self.visit(log)
            self.more.clear()
        self.send_summary()
        self.caught_up()
        self.pipe.send(wire.END, 0)
        self.pipe.flush()

    def send_summary(self) -> None:
        """Send the summaries of the summarized ranks."""
        for payload in self.summary.payloads():
            self.credit -= len(payload)
            self.pipe.send(wire.SUMMARY, 0, payload)

    def listen(self, wait: float) -> None:
        """Handle the reader's frames."""
        for kind, payload in self.pipe.listen(wait):
            if kind == wire.CREDIT:
                self.credit += OFFSET.unpack(payload)[0]
            elif kind == wire.DRAIN:
                self.draining = True
            elif kind == wire.FOCUS:
                self.refocus(json.loads(payload.decode()))

    def refocus(self, values: Dict[str, Any]) -> None:
        """Change the ranks that are sent in full; newly selected ranks start with their last lines."""
        self.focus = values["ranks"]
        for log in self.finder.logs.values():
            is_summed = log.kind == "rank" and not within(self.focus, log.number)
            was_summed, log.summed = log.summed, is_summed
            if was_summed and not is_summed and log.inode and not log.replaced:
                file = self.open(log)
                if file is not None:
                    log.lines = values.get("lines")
                    log.begin(file, None)
                    self.pipe.send(wire.FILE, log.stream, log.describe("skipped"))
                    self.release(log, file)

    # ---- One file ----

    def later(self, log: GrowingFile) -> None:
        """Visit a log again before the next pause."""
        if not log.waiting:
            log.waiting = True
            self.more.append(log)

    def visit(self, log: GrowingFile) -> bool:
        """Send the next chunk of a file; return whether there was one."""
        if self.credit <= 0:
            self.later(log)
            return False
        file, is_kept_open = None, False
        try:
            file = self.open(log)
            is_kept_open = file is log.file
            return file is not None and self.advance(log, file)
        except (
            OSError
        ) as error:  # for example ESTALE: reopen the file at the next visit, and read on from the same offset
            self.close(log)
            if not log.failed and error.errno not in (errno.ENOENT, errno.ESTALE):
                log.failed = True
                message = "cannot read " + log.path + ": " + str(error.strerror)
                self.pipe.send(wire.TROUBLE, log.stream, json.dumps({"message": message}).encode())
            return False
        finally:
            if file is not None and not is_kept_open:
                file.close()

    def advance(self, log: GrowingFile, file: OpenLog) -> bool:
        """Send the next chunk of an open file."""
        chunk = log.fresh(file, self.piece)
        if chunk is None:
            reason = "truncated" if file.size() < log.offset else "replaced"
            log.restart(file.inode)
            self.pipe.send(wire.FILE, log.stream, log.describe(reason))
            chunk = log.fresh(file, self.piece) or b""
        if not chunk:
            return log.replaced and self.switch(log)
        log.changed = time.monotonic()
        if log.summed:
            self.summary.take(log, file, chunk)
        else:
            self.credit -= len(chunk)
            self.pipe.send(wire.DATA, log.stream, OFFSET.pack(log.offset) + chunk)
            log.take(chunk)
        if len(chunk) == self.piece or log.replaced:
            self.later(log)
        return True

    def switch(self, log: GrowingFile) -> bool:
        """Leave a renamed file that is read to its end for the file that has the name now."""
        new_status = os.stat(log.path)
        if new_status.st_size == 0:
            return False  # the writer may still write to the old file
        file = self.open(log)
        try:
            # Data was written after the last visit and before the new file was created.
            if log.replaced and file is not None and log.fresh(file, 1):
                self.later(log)
                return True
        finally:
            self.release(log, file)
        self.close(log)
        if log.replaced:
            log.restart(new_status.st_ino)
            self.pipe.send(wire.FILE, log.stream, log.describe("replaced"))
        self.later(log)
        return True

    def open(self, log: GrowingFile) -> Optional[OpenLog]:
        """Return the log's open file, None if there is none.

        Raises:
            OSError: the file cannot be opened.
        """
        if log.file is not None:
            return log.file
        if log.lost:
            return None
        try:
            file = log.open()
        except FileNotFoundError:
            old_path = find_renamed(log.path, log.inode) if log.inode else None
            log.lost = old_path is None  # until the name appears again
            if old_path is None:
                return None
            file = PlainLog(old_path)
        if not log.inode:
            file = self.begin(log, file)
        elif file.inode != log.inode:
            file = self.find_old(log, file)
        if not self.finder.network and self.room > 0:
            log.file = file
            self.room -= 1
        return file

    def begin(self, log: GrowingFile, file: OpenLog) -> OpenLog:
        """Choose the starting offset and send FILE; return the file to start with."""
        position = self.request.positions.pop(log.name, None)
        if position is not None and file.inode != position[0]:
            old_path = find_renamed(log.path, position[0])
            old_file: Optional[OpenLog] = PlainLog(old_path) if old_path else None
            if old_file is not None and can_resume(old_file, old_file.size(), position):
                file, old_file = old_file, file
                log.replaced = True
            if old_file is not None:
                old_file.close()
        reason = log.begin(file, position)
        self.pipe.send(wire.FILE, log.stream, log.describe(reason))
        return file

    def find_old(self, log: GrowingFile, file: OpenLog) -> OpenLog:
        """Return the renamed file that was being read, or the new file if the old one is gone."""
        old_path = find_renamed(log.path, log.inode)
        if old_path is None:
            log.restart(file.inode)
            self.pipe.send(wire.FILE, log.stream, log.describe("replaced"))
            return file
        log.replaced = True
        file.close()
        return PlainLog(old_path)

    def release(self, log: GrowingFile, file: Optional[OpenLog]) -> None:
        """Close a file, unless it is kept open."""
        if file is not None and file is not log.file:
            file.close()

    def close(self, log: GrowingFile) -> None:
        """Close a log's kept file."""
        if log.file is not None:
            log.file.close()
            log.file = None
            self.room += 1


def unchanged(log: GrowingFile) -> bool:
    """Return whether a file that is kept open has no new data. Idle logs cost only this call."""
    if log.file is None or log.replaced:
        return False
    try:
        return log.file.is_unchanged(log.offset, log.tail)
    except OSError:
        return False


def file_limit() -> int:
    """Raise the limit of open files of this process, and return it."""
    try:
        import resource

        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = MOST_FILES if hard_limit == resource.RLIM_INFINITY else min(hard_limit, MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))
    except (ImportError, OSError, ValueError):
        return 256
    return limit


def first_request(pipe: Pipe) -> Request:
    """Wait for the reader's request."""
    while True:
        for kind, payload in pipe.listen(PING_S):
            if kind == wire.REQUEST:
                return Request(json.loads(payload.decode()))


def main() -> None:
    """Serve one reader until it disconnects or has received everything."""
    with contextlib.suppress(OSError):
        os.nice(19)
    pipe = Pipe()
    about = {
        "version": VERSION,
        "host": socket.gethostname(),
        "python": list(sys.version_info[:3]),
        "pid": os.getpid(),
        "utc_offset": time.localtime().tm_gmtoff,
    }
    try:
        write_all(MAGIC)
        pipe.send(wire.HELLO, 0, json.dumps(about).encode())
        pipe.flush()
        request = first_request(pipe)
        if not os.path.isdir(request.run):
            message = "there is no folder " + request.run
            pipe.send(wire.TROUBLE, 0, json.dumps({"message": message}).encode())
            pipe.send(wire.END, 0)
            pipe.flush()
            return
        Tailer(pipe, request).run()
    except ClientDisconnected:
        pass
