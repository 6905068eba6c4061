"""Verification of host keys by the rules of OpenSSH's known_hosts. Pure.

It supports names, patterns with ``*``, ``?`` and ``!``, ``[host]:port``, hashed names and ``@revoked``.
Lines with ``@cert-authority`` are skipped: host certificates are not verified here.
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

_DEFAULT_PORT = 22


class KeyCheck(enum.Enum):
    """The result of looking up a host key in known_hosts."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True)
class Line:
    """One line of known_hosts.

    Attributes:
        place: where the line is, as ``file:number``.
        marker: ``@revoked``, ``@cert-authority`` or nothing.
        names: the comma-separated host patterns.
        kind: the type of the key.
        key: the key in base64.
    """

    place: str
    marker: str
    names: str
    kind: str
    key: str


def read(text: str, source: str) -> Iterator[Line]:
    """Yield the entries of a known_hosts file; skip comments and malformed lines."""
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) >= 3 and not fields[0].startswith("#"):
            yield Line(f"{source}:{number}", marker, fields[0], fields[1], fields[2])


def name_of(host: str, port: int) -> str:
    """Return the known_hosts name of a host at a port."""
    return host if port == _DEFAULT_PORT else f"[{host}]:{port}"


def judge(lines: Iterable[Line], host: str, port: int, kind: str, key: str) -> tuple[KeyCheck, str]:
    """Look up the base64 ``key``; return the result and the line (``file:number``) that determines it.

    A host at a non-default port may also be listed by its bare name, but that name never makes a key
    `CHANGED`.
    """
    name = name_of(host, port)
    entries = list(lines)
    for line in entries:
        if (
            line.marker == "@revoked"
            and line.key == key
            and (_names_host(line, name) or _names_host(line, host))
        ):
            return KeyCheck.REVOKED, line.place
    same_type = [line for line in entries if not line.marker and line.kind == kind]
    name_matches = [line for line in same_type if _names_host(line, name)]
    bare_name_matches = [line for line in same_type if _names_host(line, host)]
    for line in [*name_matches, *bare_name_matches]:
        if line.key == key:
            return KeyCheck.KNOWN, line.place
    return (KeyCheck.CHANGED, name_matches[0].place) if name_matches else (KeyCheck.UNKNOWN, "")


def kinds(lines: Iterable[Line], host: str, port: int) -> list[str]:
    """Return the key types listed for a host, of which one is requested from the server."""
    name = name_of(host, port)
    key_types = [
        line.kind
        for line in lines
        if not line.marker and (_names_host(line, name) or _names_host(line, host))
    ]
    return list(dict.fromkeys(key_types))


def fingerprint(key: bytes) -> str:
    """Return a key's fingerprint in ssh's format."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def _names_host(line: Line, name: str) -> bool:
    is_match = False
    for pattern in line.names.split(","):
        if pattern.startswith("|1|"):
            is_match = is_match or _matches_hashed(pattern, name)
        elif pattern.startswith("!"):
            if _matches(name, pattern[1:]):
                return False
        else:
            is_match = is_match or _matches(name, pattern)
    return is_match


def _matches(name: str, pattern: str) -> bool:
    # Brackets are literal in known_hosts, but special in fnmatch.
    return fnmatch.fnmatchcase(name.lower(), pattern.lower().replace("[", "[[]"))


def _matches_hashed(pattern: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in pattern[3:].split("|"))
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
