"""Secrets by name: their values reach the job in a file that only the user can read, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtslurm.model.jobs.variables import own_variable
from dtslurm.model.shell import quote
from dtslurm.services.wiring.context import Context

KEYRING_SERVICE = "dtslurm"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LIKE_A_SECRET = re.compile(
    r"(?i)(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)(?:_|$)"
)
_ADDRESS_WITH_PASSWORD = re.compile(r"://[^/?#@:\s]*:[^/?#@\s]+@")
_PASSWORD_IN_ADDRESS = re.compile(r"(://[^/?#@:\s]*:)[^/?#@\s]+@")
HIDDEN = "(hidden)"
_HIDEABLE = 6  # characters; what is shorter stands in many other words, too


def name_problems(names: Sequence[str], shown: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the names of secrets; a value is never part of it.

    Args:
        shown: what writes a variable's value into the script, by the variable's name.
    """
    problems = []
    for name in names:
        if "=" in name:
            problems.append("--secret takes a name alone: put the value into a variable of that name first")
        elif not _NAME.fullmatch(name):
            problems.append(f"--secret {name!r} is not a variable name")
        elif why := own_variable(name):
            problems.append(f"--secret {name} {why}")
        elif name in shown:
            problems.append(
                f"--secret {name}: {shown[name]} sets {name} too, with a value that is in the script; "
                "leave one of them out"
            )
    return problems


def secrets_of(context: Context, names: Sequence[str], problems: list[str]) -> dict[str, str]:
    """Return the values of the secrets asked for, from the environment, else from the user's keyring.

    What is wrong with a value is added to ``problems``, without the value. Names that are none are passed
    over: `name_problems` tells of them.
    """
    values: dict[str, str] = {}
    for name in names:
        if not _NAME.fullmatch(name):
            continue
        value = context.env.get(name) or _kept(name)
        if not value:
            problems.append(
                f"--secret {name}: no such variable here, and nothing of that name in the keyring "
                f"(keyring set {KEYRING_SERVICE} {name})"
            )
        elif "\0" in value:
            problems.append(f"--secret {name}: its value holds a NUL byte")
        else:
            values[name] = value
    return values


def _kept(name: str) -> str | None:
    """Return the keyring's value; None without a keyring."""
    try:
        import keyring

        value: str | None = keyring.get_password(KEYRING_SERVICE, name)
    except Exception:  # noqa: BLE001 - backends raise what they like; none of it matters here
        return None
    return value


def shell_file(values: Mapping[str, str]) -> bytes:
    """Return the file that the job reads its secrets from."""
    lines = [f"export {name}={quote(value)}\n" for name, value in values.items()]
    return "".join(lines).encode("utf-8", "surrogateescape")


def looks_secret(name: str) -> bool:
    """Whether a variable's name says that its value should not be seen by others."""
    return _LIKE_A_SECRET.search(name) is not None


def holds_password(value: str) -> bool:
    """Whether a value is an address with a password in it, as ``https://user:password@host``."""
    return _ADDRESS_WITH_PASSWORD.search(value) is not None


def hide_secrets(text: str, document: Mapping[str, Any]) -> str:
    """Return a text for others' eyes, without the secrets that stand in a run's record.

    Hidden are the values of ``--env`` whose names say that they are secrets, and passwords in addresses.
    """
    named = {value for name, value in _variables(document) if looks_secret(name)}
    values = [value for value in named if len(value) >= _HIDEABLE]
    forms = {form for value in values for form in _forms(value)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return _PASSWORD_IN_ADDRESS.sub(rf"\1{HIDDEN}@", text)


def _forms(value: str) -> list[str]:
    """Return how a value stands in a script and in a record."""
    return [value, quote(value), *(json.dumps(value, ensure_ascii=plain)[1:-1] for plain in (True, False))]


def _variables(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the variables that a run's record gives values of, as far as it is in order."""
    for section in ("spec", "request"):
        part = document.get(section)
        told = part.get("env") if isinstance(part, Mapping) else None
        for item in told if isinstance(told, Sequence) else ():
            pair = item.partition("=")[::2] if isinstance(item, str) else item
            if isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(one, str) for one in pair):
                yield pair[0], pair[1]
