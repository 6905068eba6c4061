"""File trees for snapshots, and a remote transport to this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dtslurm.store.snapshot import Snapshot, take
from dtslurm.transport.base import Completed
from dtslurm.transport.local import LocalTransport

HERE = LocalTransport()
PYTHON = sys.executable


class FarSide(LocalTransport):
    """Runs commands here, but is not known to be here: what is sent goes through a command's stdin."""

    name = "far"
    local = False

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        self.sent.append(0)
        return super().run(argv, stdin=self._counted(stdin), timeout=timeout, env=env)

    def _counted(self, stdin: bytes | Iterable[bytes]) -> Iterator[bytes]:
        for part in [stdin] if isinstance(stdin, bytes) else stdin:
            self.sent[-1] += len(part)
            yield part


def git(folder: Path, *words: str) -> str:
    """Run git, and return what it prints."""
    identity = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "protocol.file.allow=always"]
    return subprocess.run(
        ["git", *identity, "-C", folder, *words], check=True, capture_output=True, text=True
    ).stdout


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def repository(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Make a git work tree with these files committed."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    write(folder, files)
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "first", "--allow-empty")
    return folder


def snap(
    folder: Path, cache: Path | None = None, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Snapshot:
    cache = cache or folder.parent / "cache"
    return take(HERE, folder, include=include, exclude=exclude, hash_cache=cache)


def names(snapshot: Snapshot) -> set[str]:
    return {file.path for file in snapshot.files}
