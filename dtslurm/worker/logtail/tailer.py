"""The far side of log following: sends what is added to a run's log files, over one pipe, as frames.

It is sent through standard input to a Python that reads it from there, so that no file is left behind. The
log files themselves are the buffer: what the reader has not given credit for is not read.
"""

import contextlib
import errno
import json
import os
import socket
import sys
import time
from typing import Any, Dict, List

from . import frames as wire
from .files import BLOCK, Finder, GrowingFile, Ranges, Request, moved, open_regular, resumes, within
from .frames import MAGIC, OFFSET, VERSION, ClientDisconnected, Pipe, write_all
from .summary import Summary

HOT_S = 5.0  # a file that grew within this time is looked at more often
RETIRED_S = 60.0  # an old attempt's file that has been still for so long is let go
PING_S = 10.0
ROUND = 1 << 24  # bytes in which every file has its turn, if there are not too many of them
LEAST = 1 << 14  # of one file, before it is the next one's turn
SUMMARY_S = 1.0
MOST_FILES = 65536


class Tailer:
    """Reads files in turn, as far as the reader's credit goes."""

    def __init__(self, pipe: Pipe, request: Request) -> None:
        self.pipe, self.request = pipe, request
        self.finder = Finder(request)
        self.credit = request.credit
        pipe.may_pack = request.pack
        self.hot: List[GrowingFile] = []
        self.cold: List[GrowingFile] = []
        self.more: List[GrowingFile] = []  # looked at already, but not to their end
        self.turn = 0  # whose it is among the cold ones
        self.room = file_limit() - 64  # files that may still be kept open
        self.draining = not (request.follow or request.in_turn)
        self.focus: Ranges = [] if request.summary else None
        self.summary = Summary(request.alarms)
        self.started = False
        self.several = False  # whether there are attempts that are over
        self.piece = BLOCK

    def run(self) -> None:
        """Work until everything asked for is sent."""
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
        """Return seconds between two looks at the files that grow."""
        if self.finder.network:
            return max(0.5, len(self.hot) / 500.0)  # each is opened anew: that asks the file server
        return max(0.1 if self.hot else 0.2, len(self.hot) * 3e-5)

    def patience(self) -> float:
        """Return seconds in which each of the files that are still is looked at once."""
        still = len(self.cold)
        if self.finder.network:
            return max(2.0, still / 300.0)
        return max(0.2, min(0.4, still * 4e-4), still * 6e-5)

    def admit(self, logs: List[GrowingFile]) -> None:
        """Take up new logs."""
        for log in logs:
            log.changed = time.monotonic()
            log.summed = self.request.summary and log.kind == "rank" and not within(self.focus, log.number)
            if log.kind == "metrics":
                log.lines = 1
            elif not self.started and log.kind != "events" and not log.summed:
                log.lines = self.request.lines
            log.hot = True
            self.hot.append(log)
        self.several = any(len(place.attempts) > 1 for place in self.finder.places.values())
        self.piece = max(LEAST, min(BLOCK, ROUND // (len(self.finder.logs) + 1)))

    def sweep(self, now: float) -> None:
        """Look at the files that grew lately, and at a part of the others."""
        hot, self.hot = self.hot, []
        for log in hot:
            if not unchanged(log):
                self.visit(log)
            log.hot = now - log.changed < HOT_S
            (self.hot if log.hot else self.cold).append(log)
        count = min(len(self.cold), int(len(self.cold) * self.pace() / self.patience()) + 1)
        gone = set()
        for _ in range(count):
            self.turn = self.turn + 1 if self.turn + 1 < len(self.cold) else 0
            log = self.cold[self.turn]
            if not unchanged(log) and self.visit(log):
                log.hot = True
                self.hot.append(log)
                gone.add(log)
            elif self.several and self.outdated(log, now):
                self.close(log)
                gone.add(log)
        if gone:
            self.cold = [log for log in self.cold if log not in gone]

    def outdated(self, log: GrowingFile, now: float) -> bool:
        """Return whether a log is of an attempt that is long over."""
        if log.kind not in ("rank", "node", "metrics") or now - log.changed < RETIRED_S:
            return False
        return log.attempt < max(self.finder.places[log.task].attempts, default=0)

    def catch_up(self) -> None:
        """Go on, in turn, with those that have more, until none has or the credit is used up."""
        while self.more and self.credit > 0 and not self.draining:
            turn, self.more = self.more, []
            for log in turn:
                log.waiting = False
                self.visit(log)
            self.pipe.flush()
            self.listen(0)
        if not self.more:
            self.caught_up()
            self.draining = self.draining or not self.request.follow

    def caught_up(self) -> None:
        """Say once that everything that was there at the start has been sent, and from which attempts on."""
        if not self.started:
            self.started = True
            first = {place.task or "": place.first for place in self.finder.places.values()}
            self.pipe.send(wire.CAUGHT_UP, 0, json.dumps({"first": first}).encode())

    def drain(self) -> None:
        """Send the rest of every file, one after the other, and that it is the end."""
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
        """Send what was noted of the ranks that are only summed up."""
        for payload in self.summary.payloads():
            self.credit -= len(payload)
            self.pipe.send(wire.SUMMARY, 0, payload)

    def listen(self, wait: float) -> None:
        """Do what the reader says."""
        for kind, payload in self.pipe.listen(wait):
            if kind == wire.CREDIT:
                self.credit += OFFSET.unpack(payload)[0]
            elif kind == wire.DRAIN:
                self.draining = True
            elif kind == wire.FOCUS:
                self.refocus(json.loads(payload.decode()))

    def refocus(self, values: Dict[str, Any]) -> None:
        """Change which ranks are sent in full; those that were not begin with their last lines."""
        self.focus = values["ranks"]
        for log in self.finder.logs.values():
            summed = log.kind == "rank" and not within(self.focus, log.number)
            was, log.summed = log.summed, summed
            if was and not summed and log.inode and not log.replaced:
                fd = self.open(log)
                if fd >= 0:
                    log.lines = values.get("lines")
                    log.begin(fd, None)
                    self.pipe.send(wire.FILE, log.stream, log.describe("skipped"))
                    self.release(log, fd)

    # ---- One file ----

    def later(self, log: GrowingFile) -> None:
        """Come back to a log before the next pause."""
        if not log.waiting:
            log.waiting = True
            self.more.append(log)

    def visit(self, log: GrowingFile) -> bool:
        """Send the next piece of a file; return whether there was one."""
        if self.credit <= 0:
            self.later(log)
            return False
        fd, kept = -1, False
        try:
            fd = self.open(log)
            kept = fd == log.fd
            return fd >= 0 and self.advance(log, fd)
        except (
            OSError
        ) as error:  # ESTALE and the like: opened anew at the next look, and read from the same place
            self.close(log)
            if not log.failed and error.errno not in (errno.ENOENT, errno.ESTALE):
                log.failed = True
                message = "cannot read " + log.path + ": " + str(error.strerror)
                self.pipe.send(wire.TROUBLE, log.stream, json.dumps({"message": message}).encode())
            return False
        finally:
            if fd >= 0 and not kept:
                os.close(fd)

    def advance(self, log: GrowingFile, fd: int) -> bool:
        """Send the next piece of an open file."""
        data = log.fresh(fd, self.piece)
        if data is None:
            status = os.fstat(fd)
            why = "truncated" if status.st_size < log.offset else "replaced"
            log.restart(status.st_ino)
            self.pipe.send(wire.FILE, log.stream, log.describe(why))
            data = log.fresh(fd, self.piece) or b""
        if not data:
            return log.replaced and self.switch(log)
        log.changed = time.monotonic()
        if log.summed:
            self.summary.take(log, fd, data)
        else:
            self.credit -= len(data)
            self.pipe.send(wire.DATA, log.stream, OFFSET.pack(log.offset) + data)
            log.take(data)
        if len(data) == self.piece or log.replaced:
            self.later(log)
        return True

    def switch(self, log: GrowingFile) -> bool:
        """Leave a file that lost its name, and is read to its end, for the one that has the name now."""
        now = os.stat(log.path)
        if now.st_size == 0:
            return False  # the writer may still be at the old one
        fd = self.open(log)
        try:
            if log.replaced and log.fresh(fd, 1):  # written after our last look and before the new one was
                self.later(log)
                return True
        finally:
            self.release(log, fd)
        self.close(log)
        if log.replaced:
            log.restart(now.st_ino)
            self.pipe.send(wire.FILE, log.stream, log.describe("replaced"))
        self.later(log)
        return True

    def open(self, log: GrowingFile) -> int:
        """Return a descriptor of the log's file, -1 if there is none.

        Raises:
            OSError: it cannot be opened.
        """
        if log.fd >= 0:
            return log.fd
        if log.lost:
            return -1
        try:
            fd = open_regular(log.path)
        except FileNotFoundError:
            old = moved(log.path, log.inode) if log.inode else None
            log.lost = old is None  # until its name is seen again
            if old is None:
                return -1
            fd = open_regular(old)
        if not log.inode:
            fd = self.begin(log, fd)
        elif os.fstat(fd).st_ino != log.inode:
            fd = self.find_old(log, fd)
        if not self.finder.network and self.room > 0:
            log.fd = fd
            self.room -= 1
        return fd

    def begin(self, log: GrowingFile, fd: int) -> int:
        """Choose where to begin, and say so; return a descriptor of the file to begin with."""
        known = self.request.positions.pop(log.name, None)
        if known is not None and os.fstat(fd).st_ino != known[0]:
            old = moved(log.path, known[0])
            other = open_regular(old) if old else -1
            if other >= 0 and resumes(other, os.fstat(other).st_size, known):
                fd, other = other, fd
                log.replaced = True
            if other >= 0:
                os.close(other)
        why = log.begin(fd, known)
        self.pipe.send(wire.FILE, log.stream, log.describe(why))
        return fd

    def find_old(self, log: GrowingFile, fd: int) -> int:
        """Another file has the name: return the one we read, where it can be found, else the new one."""
        old = moved(log.path, log.inode)
        if old is None:
            log.restart(os.fstat(fd).st_ino)
            self.pipe.send(wire.FILE, log.stream, log.describe("replaced"))
            return fd
        log.replaced = True
        os.close(fd)
        return open_regular(old)

    def release(self, log: GrowingFile, fd: int) -> None:
        """Close what is not kept open."""
        if fd >= 0 and fd != log.fd:
            os.close(fd)

    def close(self, log: GrowingFile) -> None:
        """Let a log's descriptor go."""
        if log.fd >= 0:
            os.close(log.fd)
            log.fd = -1
            self.room += 1


def unchanged(log: GrowingFile) -> bool:
    """Return whether nothing was added to a file that is kept open; this is what idling costs."""
    if log.fd < 0 or log.replaced:
        return False
    back = len(log.tail)
    try:
        return os.pread(log.fd, back + 1, log.offset - back) == log.tail
    except OSError:
        return False


def file_limit() -> int:
    """Raise the number of files this process may hold, and return it."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (ImportError, OSError, ValueError):
        return 256
    return most


def first_request(pipe: Pipe) -> Request:
    """Wait for what is wanted."""
    while True:
        for kind, payload in pipe.listen(PING_S):
            if kind == wire.REQUEST:
                return Request(json.loads(payload.decode()))


def main() -> None:
    """Serve one reader until it is gone or has everything."""
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
