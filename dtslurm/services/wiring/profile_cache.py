"""Remembers checked profiles, so that a command need not parse and check the same files again.

What is remembered counts as long as every file that was read, and every folder that was looked in, is as it
was. Only a profile without faults is kept; a broken or unwritable cache costs time and nothing else. Most
commands only want to know how the cluster is reached: the profile itself is made when somebody asks for it.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args, get_origin

import dtslurm
from dtslurm.model.access import Access
from dtslurm.model.own_files import make_own_folder, read_own_file
from dtslurm.store import codec
from dtslurm.store.hash_cache import write_beside

if TYPE_CHECKING:
    from dtslurm.config.profiles import LoadedProfile
    from dtslurm.model.cluster import ClusterProfile

_SCHEMA = 2
# A file changed twice within its clock's step can look unchanged; 2 s is the step of the coarsest (FAT).
_RACY_NS = 2_000_000_000


class KnownProfile(Protocol):
    """A profile as `LoadedProfile` has it, perhaps not made yet."""

    @property
    def access(self) -> Access:
        """How the cluster is reached and asked."""
        ...

    @property
    def profile(self) -> ClusterProfile:
        """All of it."""
        ...

    @property
    def path(self) -> Path:
        """The file it was read from."""
        ...

    @property
    def origins(self) -> Mapping[str, str]:
        """Where each value came from."""
        ...

    @property
    def foreign(self) -> tuple[Path, ...]:
        """The files of it that are neither packaged nor among the user's own settings."""
        ...


class RememberedProfile:
    """What is remembered of a profile; the profile itself is made when it is asked for."""

    def __init__(self, document: Mapping[str, Any], read: Callable[[], LoadedProfile]) -> None:
        """Take the document of a cache file; ``read`` reads the profile's own files again.

        Raises:
            LookupError, TypeError: it is none.
        """
        plain, login = document["profile"], document["profile"]["login"]
        self.access = Access(
            name=plain["name"],
            scheduler=plain["scheduler"],
            host=login["host"],
            user=login["user"],
            python=login["python"],
            transport=login["transport"],
            recognise=tuple(plain["recognise"]),
            min_poll_s=plain["slurm"]["min_poll_s"],
        )
        self.path = Path(document["path"])
        self.foreign = tuple(map(Path, document["foreign"]))
        self.origins: Mapping[str, str] = document["origins"]
        self._plain, self._read = plain, read

    @cached_property
    def profile(self) -> ClusterProfile:
        """All of it."""
        from dtslurm.model.cluster import ClusterProfile

        try:
            made: ClusterProfile = _built(ClusterProfile, self._plain)
        except (ValueError, LookupError, TypeError, AttributeError):  # of another version's making
            return self._read().profile
        return made


def load(name: str, *, cwd: Path, env: Mapping[str, str]) -> KnownProfile:
    """Return the profile of that name as `profiles.load` does, and raise what it raises."""
    asked = [name, str(cwd), env.get("HOME"), env.get("XDG_CONFIG_HOME"), dtslurm.__version__]
    path = folder(env) / f"{zlib.crc32(json.dumps(asked).encode()):08x}.json"

    def read() -> LoadedProfile:
        from dtslurm.config import profiles

        return profiles.load(name, cwd=cwd, env=env)

    known = _read(path, asked, read)
    if known is not None:
        return known
    loaded = read()
    _write(path, asked, loaded)
    return loaded


def folder(env: Mapping[str, str]) -> Path:
    """Return where checked profiles are kept."""
    caches = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "~")) / ".cache")
    return Path(caches).expanduser() / "dtslurm" / "profiles"


def _read(path: Path, asked: list[str | None], read: Callable[[], LoadedProfile]) -> RememberedProfile | None:
    try:
        found = json.loads(read_own_file(path))
        if found["schema"] != _SCHEMA or found["asked"] != asked:
            return None
        if any(_stamp(watched) != stamp for watched, stamp in found["watched"].items()):
            return None
        return RememberedProfile(found, read)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _write(path: Path, asked: list[str | None], loaded: LoadedProfile) -> None:
    watched = {str(place): _stamp(str(place)) for place in loaded.watched}
    newest = max((max(stamp[1], stamp[3]) for stamp in watched.values() if stamp), default=0)
    if newest + _RACY_NS > time.time_ns():
        return
    document = {
        "schema": _SCHEMA,
        "asked": asked,
        "watched": watched,
        "profile": codec.plain(loaded.profile),
        "origins": dict(loaded.origins),
        "path": str(loaded.path),
        "foreign": list(map(str, loaded.foreign)),
    }
    with contextlib.suppress(OSError):
        make_own_folder(path.parent)
        write_beside(path, json.dumps(document).encode("ascii"))


def _stamp(path: str) -> list[int] | None:
    """Return what changes when a file's content or rights, or a folder's entries do; None without it."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns, found.st_mode]


def _built(hint: Any, value: Any) -> Any:
    """Return the value that `codec.plain` made plain; it was checked before it was kept."""
    from dtslurm.config import decode

    hint, _ = decode.without_none(hint)
    if value is None:
        return None
    if hasattr(hint, "parse"):
        return hint.parse(value)
    if is_dataclass(hint) and isinstance(hint, type):
        kinds = decode.hints(hint)
        return hint(**{key: _built(kinds[key], below) for key, below in value.items()})
    if decode.is_mapping(hint):
        return {key: _built(get_args(hint)[1], below) for key, below in value.items()}
    if get_origin(hint) is tuple:
        return tuple(_built(get_args(hint)[0], below) for below in value)
    return value
