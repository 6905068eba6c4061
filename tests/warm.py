"""Runs ``dtslurm`` commands in processes forked from one that has it imported, as shells start them.

Starting Python and importing dtslurm takes five times as long as what most commands do. A forked command has
the environment, the folder and the streams that it is given, and ends as a program does. A test of the start
itself starts a program.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
# Python reads these while it starts.
_OF_THE_START = ("PYTHON", "LC_", "LANG", "LD_")
_STARTING = threading.Lock()
_LEFT_OUT = ("worker", "train", "executor", "__main__")


def run_dtslurm(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``PREFIX python -m dtslurm WORDS`` without input and return what came of it.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was killed.
    """
    with _STARTING:
        warm = _warm_process()
    if not prefix and _of_the_start(env) == warm.env:
        return warm.run(words, cwd=cwd, env=env, timeout=timeout)
    return subprocess.run(
        [*prefix, sys.executable, "-m", "dtslurm", *words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@functools.cache
def _warm_process() -> WarmDtslurm:
    """Start the one of this process; it ends with it."""
    return WarmDtslurm()


def _of_the_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_OF_THE_START)}


class WarmDtslurm:
    """Runs commands of ``dtslurm`` as ``subprocess.run`` would, from a process that is warm."""

    def __init__(self) -> None:
        self.env = _of_the_start(os.environ)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
            )

    def run(
        self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As ``run_dtslurm``."""
        argv = [sys.executable, "-m", "dtslurm", *words]
        umask = os.umask(0)
        os.umask(umask)
        order = json.dumps({"words": list(words), "cwd": str(cwd), "env": dict(env), "umask": umask}).encode()
        with contextlib.ExitStack() as stack:
            answers, theirs = socket.socketpair()
            stack.enter_context(answers)
            pipes = [os.pipe(), os.pipe()]
            with theirs:
                socket.send_fds(self._socket, [b"."], [theirs.fileno(), *(write for _, write in pipes)])
                for _, write in pipes:
                    os.close(write)
            answers.sendall(len(order).to_bytes(8, "big") + order)
            reads = [stack.enter_context(os.fdopen(read, "rb", buffering=0)) for read, _ in pipes]
            pid = int.from_bytes(_exactly(answers, 8), "big")
            deadline = time.monotonic() + timeout
            try:
                out, err = _read_all(reads, deadline)
                answers.settimeout(max(0.1, deadline - time.monotonic()))
                code = int.from_bytes(_exactly(answers, 8), "big", signed=True)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(argv, timeout) from None
        return subprocess.CompletedProcess(argv, code, _text(out), _text(err))


def _read_all(files: Sequence[io.FileIO | io.RawIOBase], deadline: float) -> list[bytes]:
    """Return what comes from each file until its end."""
    result: dict[int, list[bytes]] = {number: [] for number in range(len(files))}
    with selectors.DefaultSelector() as selector:
        for number, file in enumerate(files):
            selector.register(file, selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                if chunk := os.read(key.fd, 65536):
                    result[key.data].append(chunk)
                else:
                    selector.unregister(key.fileobj)
    return [b"".join(chunks) for chunks in result.values()]


def _text(data: bytes) -> str:
    return io.TextIOWrapper(io.BytesIO(data)).read()  # newlines and encoding as subprocess has them


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = link.recv(count - len(data))
        if not chunk:
            raise EOFError("the warm process is gone")
        data += chunk
    return data


# ---- the warm process


def _import_everything() -> None:
    """Import all that commands may import: not torch, nor what runs in jobs."""
    for path in sorted((ROOT / "dtslurm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1] not in _LEFT_OUT:
            importlib.import_module(".".join(part for part in parts if part != "__init__"))


def _serve(orders: socket.socket) -> None:
    """Fork a process for each order until the other end is closed; tell each one's exit code."""
    running: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> process, who waits for it
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                pid, link = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError), link:
                    link.sendall(code.to_bytes(8, "big", signed=True))
                continue
            message, fds, _, _ = socket.recv_fds(orders, 1, 3)
            if not message:
                return
            link = socket.socket(fileno=fds[0])
            order = json.loads(_exactly(link, int.from_bytes(_exactly(link, 8), "big")))
            pid = os.fork()
            if pid == 0:
                selector.close()
                orders.close()
                link.close()
                for item in running:
                    os.close(item)
                _become(order, fds[1:])
            for item in fds[1:]:
                os.close(item)
            link.sendall(pid.to_bytes(8, "big"))
            pidfd = os.pidfd_open(pid)
            running[pidfd] = (pid, link)
            selector.register(pidfd, selectors.EVENT_READ)


def _become(order: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Be the program of an order, and end as it does."""
    for target, source in enumerate(streams, 1):
        os.dup2(source, target)
        os.close(source)
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    time.tzset()
    sys.argv = [str(Path(sys.modules["dtslurm"].__path__[0], "__main__.py")), *order["words"]]
    sys.path[0] = order["cwd"]
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w", errors=sys.stdout.errors)
    sys.stderr = os.fdopen(2, "w", errors=sys.stderr.errors, buffering=1)
    from dtslurm.__main__ import main

    code = 1
    try:
        main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 (as the interpreter would)
        traceback.print_exc()
    # As an interpreter ends, but without taking apart what is shared with the warm process.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    keep_coverage()
    os._exit(code)


def keep_coverage() -> None:
    """Write down what a measurement, if one is on, saw in this process: `os._exit` gives it no time to."""
    coverage = sys.modules.get("coverage")
    measurement = coverage.Coverage.current() if coverage is not None else None
    if measurement is not None:
        measurement.save()


if __name__ == "__main__":
    _import_everything()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
