"""Secrets by name: their values reach the job only in a file that only the user can read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtslurm.model.checked import Checked
from dtslurm.model.jobs.variables import own_variable
from dtslurm.model.shell import quote
from dtslurm.services.wiring.context import Context

KEYRING_SERVICE = "dtslurm"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)(?:_|$)"
)
_URL_WITH_PASSWORD = re.compile(r"://[^/?#@:\s]*:[^/?#@\s]+@")
_PASSWORD_IN_URL = re.compile(r"(://[^/?#@:\s]*:)[^/?#@\s]+@")
HIDDEN = "(hidden)"
_MIN_HIDDEN_LENGTH = 6  # characters; shorter values also occur inside ordinary words


def name_problems(names: Sequence[str], sources_by_name: Mapping[str, str]) -> list[str]:
    """Return the problems with the names of secrets; no problem contains a value.

    Args:
        names: the values of ``--secret``.
        sources_by_name: by variable name, the option or file that writes the value into the script.
    """
    problems = []
    for name in names:
        if "=" in name:
            problems.append(
                "--secret accepts only a name: put the value into an environment variable of that name first"
            )
        elif not _NAME.fullmatch(name):
            problems.append(f"--secret {name!r} is not a variable name")
        elif reason := own_variable(name):
            problems.append(f"--secret {name} {reason}")
        elif name in sources_by_name:
            problems.append(
                f"--secret {name}: {sources_by_name[name]} also sets {name}, and writes its value into the "
                "script; remove one of them"
            )
    return problems


def secrets_of(context: Context, names: Sequence[str]) -> Checked[dict[str, str]]:
    """Return the values of the secrets, from the environment, else from the user's keyring.

    No message contains a value. Invalid names are skipped; `name_problems` reports them.
    """
    values: dict[str, str] = {}
    problems = []
    for name in names:
        if not _NAME.fullmatch(name):
            continue
        value = context.env.get(name) or _read_keyring(name)
        if not value:
            problems.append(
                f"--secret {name}: neither your environment nor the keyring has a value of this name "
                f"(keyring set {KEYRING_SERVICE} {name})"
            )
        elif "\0" in value:
            problems.append(f"--secret {name}: the value contains a NUL byte")
        else:
            values[name] = value
    return Checked(values, tuple(problems))


def _read_keyring(name: str) -> str | None:
    """Return the value in the user's keyring; None if there is no keyring or no such entry."""
    try:
        import keyring

        value: str | None = keyring.get_password(KEYRING_SERVICE, name)
    except Exception:  # noqa: BLE001 - keyring backends raise errors of any type; all mean that there is no value
        return None
    return value


def shell_file(values: Mapping[str, str]) -> bytes:
    """Return the content of the shell file that exports the secrets in the job."""
    lines = [f"export {name}={quote(value)}\n" for name, value in values.items()]
    return "".join(lines).encode("utf-8", "surrogateescape")


def looks_secret(name: str) -> bool:
    """Return whether a variable's name suggests that its value is a secret."""
    return _SECRET_NAME.search(name) is not None


def holds_password(value: str) -> bool:
    """Return whether a value is a URL with a password in it, as ``https://user:password@host``."""
    return _URL_WITH_PASSWORD.search(value) is not None


def hide_secrets(text: str, document: Mapping[str, Any]) -> str:
    """Return a text without the secrets in a run's record, so that it can be shown to others.

    Hidden are the values of ``--env`` variables whose names suggest secrets, and passwords in URLs.
    """
    secret_values = {value for name, value in _recorded_variables(document) if looks_secret(name)}
    values = [value for value in secret_values if len(value) >= _MIN_HIDDEN_LENGTH]
    spellings = {spelling for value in values for spelling in _spellings(value)}
    for spelling in sorted(spellings, key=len, reverse=True):
        text = text.replace(spelling, HIDDEN)
    return _PASSWORD_IN_URL.sub(rf"\1{HIDDEN}@", text)


def _spellings(value: str) -> list[str]:
    """Return the spellings of a value in a script and in a JSON record."""
    return [
        value,
        quote(value),
        *(json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)),
    ]


def _recorded_variables(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) pairs that a run's record sets; malformed entries are skipped."""
    for section in ("spec", "request"):
        options = document.get(section)
        env = options.get("env") if isinstance(options, Mapping) else None
        for item in env if isinstance(env, Sequence) else ():
            pair = item.partition("=")[::2] if isinstance(item, str) else item
            if isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(text, str) for text in pair):
                yield pair[0], pair[1]
