"""Variables in a text: ``${name}`` is replaced with a value, ``$${`` with a literal ``${``."""

import re
from typing import Mapping, Match

MENTION = re.compile(r"\$(\$)?\{([^{}]*)\}")


def substitute(text: str, values: Mapping[str, str], keep: bool = False) -> str:
    """Replace the variables in a text with their values; ``keep`` leaves ``$${`` for a later substitution."""

    def replacement(found: Match[str]) -> str:
        if found.group(1):
            return found.group(0) if keep else found.group(0)[1:]
        return values.get(found.group(2), found.group(0))

    return MENTION.sub(replacement, text)
