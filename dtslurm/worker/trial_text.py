"""Variables in a text: ``${name}`` stands for a value, ``$${`` for ``${`` itself."""

import re
from typing import Mapping, Match

MENTION = re.compile(r"\$(\$)?\{([^{}]*)\}")


def substitute(text: str, values: Mapping[str, str], keep: bool = False) -> str:
    """Return a text with the values of its variables; ``keep`` leaves ``$${`` for another time."""

    def value(found: Match[str]) -> str:
        if found.group(1):
            return found.group(0) if keep else found.group(0)[1:]
        return values.get(found.group(2), found.group(0))

    return MENTION.sub(value, text)
