"""Find secrets by the names of variables and in addresses, and hide them in texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtslurm.model.shell import quote

_SECRET_NAME = re.compile(
    r"(?i)^(?!.*_(?:PATH|FILE|DIR)$)"  # the value is only the location of a secret
    r".*(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)(?:_|$)"
)
_URL_WITH_PASSWORD = re.compile(r"://[^/?#@:\s]*:[^/?#@\s]+@")
_PASSWORD_IN_URL = re.compile(r"(://[^/?#@:\s]*:)[^/?#@\s]+@")
HIDDEN = "(hidden)"
_MIN_HIDDEN_LENGTH = 6  # characters; shorter values also occur inside ordinary words


def looks_secret(name: str) -> bool:
    """Return whether a variable's name suggests that its value is a secret."""
    return _SECRET_NAME.search(name) is not None


def holds_password(value: str) -> bool:
    """Return whether a value is a URL with a password in it, such as ``https://user:password@host``."""
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
