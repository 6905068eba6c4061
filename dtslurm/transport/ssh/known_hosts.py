"""Whether a host's key is the one the user knows: the rules of OpenSSH's known_hosts. Pure.

Understood are names, patterns with ``*``, ``?`` and ``!``, ``[host]:port``, hashed names and ``@revoked``.
Lines of ``@cert-authority`` are passed over: certificates of hosts are not checked here.
"""

from __future__ import annotations

import base64
import binascii
import enum
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable, Iterator

from dtslurm.model.values import dataclass

_USUAL_PORT = 22


class KeyCheck(enum.Enum):
    """What known_hosts says of a key."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True)
class Line:
    """One line: where it stands, its marker (or nothing), the names, and the key's type and base64."""

    place: str
    marker: str
    names: str
    kind: str
    key: str


def read(text: str, source: str) -> Iterator[Line]:
    """Yield the lines of a file; comments and lines that are none are passed over."""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) >= 3 and not words[0].startswith("#"):
            yield Line(f"{source}:{number}", marker, words[0], words[1], words[2])


def name_of(host: str, port: int) -> str:
    """Return the name under which a host at a port is known."""
    return host if port == _USUAL_PORT else f"[{host}]:{port}"


def judge(lines: Iterable[Line], host: str, port: int, kind: str, key: str) -> tuple[KeyCheck, str]:
    """Return the verdict on a key of the base64 ``key``, and the line (``file:number``) it rests on.

    A host at an unusual port may also be known by its bare name; that name never makes a key a changed one.
    """
    name = name_of(host, port)
    known = list(lines)
    for line in known:
        if line.marker == "@revoked" and line.key == key and (_names(line, name) or _names(line, host)):
            return KeyCheck.REVOKED, line.place
    plain = [line for line in known if not line.marker and line.kind == kind]
    named = [line for line in plain if _names(line, name)]
    bare = [line for line in plain if _names(line, host)]
    for line in [*named, *bare]:
        if line.key == key:
            return KeyCheck.KNOWN, line.place
    return (KeyCheck.CHANGED, named[0].place) if named else (KeyCheck.UNKNOWN, "")


def kinds(lines: Iterable[Line], host: str, port: int) -> list[str]:
    """Return the types of the keys known for a host: a server with several is asked for one of these."""
    name = name_of(host, port)
    found = [line.kind for line in lines if not line.marker and (_names(line, name) or _names(line, host))]
    return list(dict.fromkeys(found))


def fingerprint(key: bytes) -> str:
    """Return a key's fingerprint as ssh shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def _names(line: Line, name: str) -> bool:
    found = False
    for pattern in line.names.split(","):
        if pattern.startswith("|1|"):
            found = found or _hashed(pattern, name)
        elif pattern.startswith("!"):
            if _matches(name, pattern[1:]):
                return False
        else:
            found = found or _matches(name, pattern)
    return found


def _matches(name: str, pattern: str) -> bool:
    # Brackets are part of a name here, not of the pattern's language.
    return fnmatch.fnmatchcase(name.lower(), pattern.lower().replace("[", "[[]"))


def _hashed(pattern: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in pattern[3:].split("|"))
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
