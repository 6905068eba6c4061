"""The control sockets of OpenSSH: where they lie, whether a master answers, and whose turn it is."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from dtslurm.errors import TransportError
from dtslurm.model.own_files import make_folders
from dtslurm.transport.deletion import remove

# A socket's path has room for 104 bytes on some systems, and ssh adds 17 of its own while it makes one.
LONGEST = 104 - 17 - 1
_NAME_CHARACTERS = 16
TMP = "/tmp"  # noqa: S108 (owner and mode are checked)
_HELLO_S = 3.0
_HELLO = struct.pack(">II", 8, 1)  # a master greets first: length 8, message 1, version (PROTOCOL.mux)
_POLL_S = 0.02


def folder(env: Mapping[str, str]) -> Path:
    """Return the private folder for control sockets, made if missing.

    It is ``$XDG_RUNTIME_DIR/dtslurm``, or ``dtslurm-UID`` in /tmp where there is no such folder or its
    name is too long for a socket. A folder of this host in the user's cache takes the place of one that
    another user holds: anybody can make folders in /tmp.

    Raises:
        TransportError: one of the user's is not private, or others hold all of them.
    """
    places = []
    runtime = env.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        places.append(Path(runtime) / "dtslurm")
    places.append(Path(TMP) / f"dtslurm-{os.getuid()}")
    if env.get("HOME"):
        places.append(Path(env["HOME"], ".cache", "dtslurm", f"ssh-{socket.gethostname().split('.')[0]}"))
    refused: tuple[Path, os.stat_result] | None = None
    for place in places:
        if len(os.fsencode(place)) + 1 + _NAME_CHARACTERS > LONGEST:
            continue
        try:
            make_folders(place)
            found = place.lstat()
        except OSError as error:
            said = [str(error)]
            raise TransportError(f"no folder for SSH's control sockets: {place}", evidence=said) from None
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return place
        refused = refused or (place, found)
        if found.st_uid == os.getuid():
            break
    if refused is None:
        raise TransportError("no folder has a name that is short enough for SSH's control sockets")
    place, found = refused
    raise TransportError(
        f"{place} is not a private folder of yours: SSH's control sockets are not safe there",
        evidence=[f"owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"],
        hint=f"remove it, or chmod 700 {place}, or set XDG_RUNTIME_DIR to a private folder",
    )


def socket_path(env: Mapping[str, str], *what: str | None) -> Path:
    """Return the control socket for a login, which ``what`` tells apart from others."""
    name = hashlib.sha256("\0".join(item or "" for item in what).encode()).hexdigest()
    return folder(env) / name[:_NAME_CHARACTERS]


def is_own_socket(path: Path) -> bool:
    """Return whether a path is a socket of the user that no other user can replace.

    The process behind a control socket reads every command and writes every response.
    """
    try:
        found, folder = path.lstat(), path.parent.stat()
    except OSError:
        return False
    closed = not folder.st_mode & 0o022 or bool(folder.st_mode & stat.S_ISVTX)
    mine = found.st_uid == os.getuid() and folder.st_uid in {0, os.getuid()}
    return stat.S_ISSOCK(found.st_mode) and mine and closed


def alive(path: Path) -> bool:
    """Whether a master answers at ``path``: one that is stopped takes the call and says nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_HELLO_S)
        try:
            probe.connect(str(path))
            return probe.recv(len(_HELLO)) == _HELLO
        except OSError:
            return False


def clear(path: Path) -> None:
    """Remove a control socket whose master is dead or does not answer; end that master."""
    for pid in masters(path):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    remove(path, within=path.parent)


def masters(path: Path) -> list[int]:
    """Return the masters that we started for a control socket, by their command lines (on Linux)."""
    wanted = {b"ControlMaster=yes", os.fsencode(f"ControlPath={quoted(path)}")}
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.getuid() and wanted <= set(entry.read_bytes().split(b"\0")):
                found.append(int(entry.parent.name))
    return found


def quoted(path: Path) -> str:
    """Return a path as ssh's options take it: in quotes for spaces, its own sign doubled."""
    return '"{}"'.format(str(path).replace("%", "%%"))


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the right to log in for the socket ``path``: others wait, and then find the master running."""
    with _opened(path.with_suffix(".lock")) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def turn(path: Path, most: int, deadline: float) -> Iterator[None]:
    """Hold one of ``most`` turns over the socket ``path``, among all processes of the user.

    Raises:
        TimeoutError: none became free until ``deadline`` (of ``time.monotonic``).
    """
    with contextlib.ExitStack() as stack:
        handles = [stack.enter_context(_opened(path.with_suffix(f".{place}"))) for place in range(most)]
        while not any(map(_taken, handles)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{most} commands of other programs are running there")
            time.sleep(_POLL_S)
        yield


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)
