"""A cache of validated profiles, so that a command need not parse and validate the same files again.

An entry is valid as long as every file that was read, and every folder that was searched, is unchanged. Only
valid profiles are cached; an unreadable or unwritable cache costs time and nothing else. Most commands only
need to know how the cluster is reached, so the full profile is built at its first use.
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

_CACHE_SCHEMA = 2
# A file that changes twice within the resolution of its time stamp can look unchanged; FAT has the coarsest
# resolution, 2 s.
_CLOCK_STEP_NS = 2_000_000_000


class KnownProfile(Protocol):
    """A profile with the attributes of `LoadedProfile`; the full profile may not be built yet."""

    @property
    def access(self) -> Access:
        """How dtslurm reaches the cluster and queries it."""
        ...

    @property
    def profile(self) -> ClusterProfile:
        """The full profile."""
        ...

    @property
    def path(self) -> Path:
        """The file that the profile was read from."""
        ...

    @property
    def origins(self) -> Mapping[str, str]:
        """The file and line that each value comes from, by dotted key."""
        ...

    @property
    def foreign(self) -> tuple[Path, ...]:
        """The profile's files that are neither packaged nor in the user's own settings folder."""
        ...


class RememberedProfile:
    """A profile from the cache; the full profile is built at its first use."""

    def __init__(self, document: Mapping[str, Any], read_profile: Callable[[], LoadedProfile]) -> None:
        """Read a cache entry's document; ``read_profile`` loads the profile from its own files again.

        Raises:
            LookupError, TypeError: the document is no cache entry.
        """
        values, login = document["profile"], document["profile"]["login"]
        self.access = Access(
            name=values["name"],
            scheduler=values["scheduler"],
            host=login["host"],
            user=login["user"],
            python=login["python"],
            transport=login["transport"],
            recognise=tuple(values["recognise"]),
            min_poll_s=values["slurm"]["min_poll_s"],
        )
        self.path = Path(document["path"])
        self.foreign = tuple(map(Path, document["foreign"]))
        self.origins: Mapping[str, str] = document["origins"]
        self._values, self._read = values, read_profile

    @cached_property
    def profile(self) -> ClusterProfile:
        """The full profile."""
        from dtslurm.model.cluster import ClusterProfile

        try:
            profile: ClusterProfile = _rebuild(ClusterProfile, self._values)
        except (ValueError, LookupError, TypeError, AttributeError):  # another version of dtslurm wrote it
            return self._read().profile
        return profile


def load(name: str, *, cwd: Path, env: Mapping[str, str]) -> KnownProfile:
    """Return the profile of that name, from the cache if possible; raise as `profiles.load` does."""
    key = [name, str(cwd), env.get("HOME"), env.get("XDG_CONFIG_HOME"), dtslurm.__version__]
    path = folder(env) / f"{zlib.crc32(json.dumps(key).encode()):08x}.json"

    def read() -> LoadedProfile:
        from dtslurm.config import profiles

        return profiles.load(name, cwd=cwd, env=env)

    cached = _read(path, key, read)
    if cached is not None:
        return cached
    loaded = read()
    _write_entry(path, key, loaded)
    return loaded


def folder(env: Mapping[str, str]) -> Path:
    """Return the folder of the profile cache."""
    caches = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "~")) / ".cache")
    return Path(caches).expanduser() / "dtslurm" / "profiles"


def _read(
    path: Path, request: list[str | None], read_profile: Callable[[], LoadedProfile]
) -> RememberedProfile | None:
    try:
        document = json.loads(read_own_file(path))
        if document["schema"] != _CACHE_SCHEMA or document["asked"] != request:
            return None
        if any(_fingerprint(path_text) != stamp for path_text, stamp in document["watched"].items()):
            return None
        return RememberedProfile(document, read_profile)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _write_entry(path: Path, request: list[str | None], loaded_profile: LoadedProfile) -> None:
    watched = {str(watched_path): _fingerprint(str(watched_path)) for watched_path in loaded_profile.watched}
    newest = max((max(stamp[1], stamp[3]) for stamp in watched.values() if stamp), default=0)
    if newest + _CLOCK_STEP_NS > time.time_ns():
        return
    document = {
        "schema": _CACHE_SCHEMA,
        "asked": request,
        "watched": watched,
        "profile": codec.plain(loaded_profile.profile),
        "origins": dict(loaded_profile.origins),
        "path": str(loaded_profile.path),
        "foreign": list(map(str, loaded_profile.foreign)),
    }
    with contextlib.suppress(OSError):
        make_own_folder(path.parent)
        write_beside(path, json.dumps(document).encode("ascii"))


def _fingerprint(path: str) -> list[int] | None:
    """Return numbers that change with a file's content or mode, or a folder's entries; None if missing."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns, status.st_mode]


def _rebuild(hint: Any, value: Any) -> Any:
    """Rebuild a value from the form that `codec.plain` gave it; it was validated before it was cached."""
    from dtslurm.config import decode

    hint, _ = decode.remove_none(hint)
    if value is None:
        return None
    if hasattr(hint, "parse"):
        return hint.parse(value)
    if is_dataclass(hint) and isinstance(hint, type):
        types = decode.get_field_types(hint)
        return hint(**{key: _rebuild(types[key], item) for key, item in value.items()})
    if decode.is_mapping(hint):
        return {key: _rebuild(get_args(hint)[1], item) for key, item in value.items()}
    if get_origin(hint) is tuple:
        return tuple(_rebuild(get_args(hint)[0], item) for item in value)
    return value
