"""Variables in a text: ``${name}`` is replaced with a value, ``$${`` with a literal ``${``."""

import re
from typing import Mapping, Match

MENTION = re.compile(r"\$(\$)?\{([^{}]*)\}")


def substitute(text: str, values: Mapping[str, str], keep: bool = False) -> str:
    """Replace the variables in a text with their values; ``keep`` leaves ``$${`` for a later substitution."""

    def replacement(match: Match[str]) -> str:
        if match.group(1):
            return match.group(0) if keep else match.group(0)[1:]
        return values.get(match.group(2), match.group(0))

    return MENTION.sub(replacement, text)
