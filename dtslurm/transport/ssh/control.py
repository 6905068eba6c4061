"""The control sockets of OpenSSH: their paths, whether a master answers, and locks between processes."""

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

# Some systems limit a socket's path to 104 bytes, and ssh appends 17 bytes while it creates the socket.
LONGEST = 104 - 17 - 1
_NAME_CHARACTERS = 16
TMP = "/tmp"  # noqa: S108 (owner and mode are checked)
_HELLO_S = 3.0
_HELLO = struct.pack(">II", 8, 1)  # a master's greeting: length 8, message type 1, version (PROTOCOL.mux)
_POLL_S = 0.02


def folder(env: Mapping[str, str]) -> Path:
    """Return the private folder for control sockets; create it if it is missing.

    The folder is ``$XDG_RUNTIME_DIR/dtslurm``, or ``/tmp/dtslurm-UID`` if that folder does not exist or its
    path is too long for a socket. If another user owns the latter (any user can create folders in /tmp), the
    folder is ``~/.cache/dtslurm/ssh-HOST``.

    Raises:
        TransportError: the user's folder is not private, or other users own all candidates.
    """
    candidates = []
    runtime_dir = env.get("XDG_RUNTIME_DIR")
    if runtime_dir and Path(runtime_dir).is_dir():
        candidates.append(Path(runtime_dir) / "dtslurm")
    candidates.append(Path(TMP) / f"dtslurm-{os.getuid()}")
    if env.get("HOME"):
        candidates.append(Path(env["HOME"], ".cache", "dtslurm", f"ssh-{socket.gethostname().split('.')[0]}"))
    rejected_folder: tuple[Path, os.stat_result] | None = None
    for candidate in candidates:
        if len(os.fsencode(candidate)) + 1 + _NAME_CHARACTERS > LONGEST:
            continue
        try:
            make_folders(candidate)
            status = candidate.lstat()
        except OSError as error:
            evidence = [str(error)]
            raise TransportError(
                f"cannot create a folder for SSH's control sockets: {candidate}", evidence=evidence
            ) from None
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return candidate
        rejected_folder = rejected_folder or (candidate, status)
        if status.st_uid == os.getuid():
            break
    if rejected_folder is None:
        raise TransportError("the path of every possible folder is too long for SSH's control sockets")
    candidate, status = rejected_folder
    raise TransportError(
        f"{candidate} is not a private folder of your user, so SSH's control sockets would not be safe in it",
        evidence=[f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}"],
        hint=f"delete it, or run chmod 700 {candidate}, or set XDG_RUNTIME_DIR to a private folder",
    )


def socket_path(env: Mapping[str, str], *login_parts: str | None) -> Path:
    """Return the path of the control socket for the login that the strings in ``login_parts`` identify."""
    name = hashlib.sha256("\0".join(item or "" for item in login_parts).encode()).hexdigest()
    return folder(env) / name[:_NAME_CHARACTERS]


def is_own_socket(path: Path) -> bool:
    """Return whether a path is a socket of the user that no other user can replace.

    The process behind a control socket reads every command and writes every response.
    """
    try:
        status, folder_status = path.lstat(), path.parent.stat()
    except OSError:
        return False
    not_replaceable = not folder_status.st_mode & 0o022 or bool(folder_status.st_mode & stat.S_ISVTX)
    is_owner = status.st_uid == os.getuid() and folder_status.st_uid in {0, os.getuid()}
    return stat.S_ISSOCK(status.st_mode) and is_owner and not_replaceable


def alive(path: Path) -> bool:
    """Whether a master answers at ``path``; a stopped master accepts connections, but sends no greeting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_HELLO_S)
        try:
            probe.connect(str(path))
            return probe.recv(len(_HELLO)) == _HELLO
        except OSError:
            return False


def clear(path: Path) -> None:
    """Remove a control socket whose master is dead or does not answer, and kill that master."""
    for pid in masters(path):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    remove(path, within=path.parent)


def masters(path: Path) -> list[int]:
    """Return the process ids of dtslurm's masters for a control socket, found by command line (on Linux)."""
    options = {b"ControlMaster=yes", os.fsencode(f"ControlPath={quoted(path)}")}
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.getuid() and options <= set(entry.read_bytes().split(b"\0")):
                pids.append(int(entry.parent.name))
    return pids


def quoted(path: Path) -> str:
    """Quote a path for an option of ssh: double quotes because of spaces, and ``%`` doubled."""
    return '"{}"'.format(str(path).replace("%", "%%"))


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the login lock of the socket ``path``.

    Other processes wait, and find the master running afterwards.
    """
    with _open_lock_file(path.with_suffix(".lock")) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def turn(path: Path, max_slots: int, deadline: float) -> Iterator[None]:
    """Hold one of ``max_slots`` session slots of the socket ``path``, shared by all processes of the user.

    Raises:
        TimeoutError: no slot became free until ``deadline`` (of ``time.monotonic``).
    """
    with contextlib.ExitStack() as stack:
        fds = [
            stack.enter_context(_open_lock_file(path.with_suffix(f".{slot}"))) for slot in range(max_slots)
        ]
        while not any(map(_try_lock, fds)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{max_slots} commands of other programs are running on the host")
            time.sleep(_POLL_S)
        yield


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _open_lock_file(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
