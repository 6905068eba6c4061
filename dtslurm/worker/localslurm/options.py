"""Parse command lines as GNU getopt_long does, like sbatch and srun."""

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

NONE, NEEDED, OPTIONAL = 0, 1, 2


class Refused(Exception):
    """A request that cannot be served; ``problems`` has one line per reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        super(Refused, self).__init__("; ".join(problems))
        self.problems = list(problems)


class Option(NamedTuple):
    """One option: its letter ("" if none), whether it takes a value, and whether it has an effect here."""

    letter: str
    value: int
    used: bool


Table = Dict[str, Option]
Parsed = List[Tuple[str, Optional[str]]]


def table(text: str, is_supported: bool) -> Table:
    """Parse rows such as ``nodes N =`` (value), ``exclusive - ?`` (optional value), ``hold H`` (no value)."""
    rows: Table = {}
    for line in text.strip().splitlines():
        columns = line.split()
        letter = "" if len(columns) < 2 or columns[1] == "-" else columns[1]
        kind = {"=": NEEDED, "?": OPTIONAL}[columns[2]] if len(columns) > 2 else NONE
        rows[columns[0]] = Option(letter, kind, is_supported)
    return rows


def _resolve_long_name(word: str, options: Table) -> str:
    if word in options:
        return word
    candidates = [name for name in options if name.startswith(word)]
    if len(candidates) != 1:
        raise Refused(["--" + word])
    return candidates[0]


def _take_value(name: str, value: Optional[str], remaining_words: List[str], kind: int) -> Optional[str]:
    if kind == NONE:
        if value is not None:
            raise Refused(["--{} takes no value".format(name)])
        return None
    if value is None and kind == NEEDED:
        if not remaining_words:
            raise Refused(["--{} needs a value".format(name)])
        return remaining_words.pop(0)
    return value


def _parse_letters(word: str, remaining_words: List[str], options: Table) -> Parsed:
    parsed: Parsed = []
    by_letter = {option.letter: name for name, option in options.items() if option.letter}
    while word:
        name = by_letter.get(word[0])
        if name is None:
            raise Refused(["-" + word[0]])
        kind = options[name].value
        if kind == NONE:
            parsed.append((name, None))
            word = word[1:]
            continue
        parsed.append((name, _take_value(name, word[1:] or None, remaining_words, kind)))
        break
    return parsed


def parse(words: Sequence[str], options: Table) -> Tuple[Parsed, List[str]]:
    """Return the options in order, and the remaining words, starting with the first that is no option.

    Raises:
        Refused: an unknown option (the problem is the option as written) or a missing value.
    """
    parsed: Parsed = []
    remaining = list(words)
    while remaining and remaining[0].startswith("-") and remaining[0] != "-":
        word = remaining.pop(0)
        if word == "--":
            break
        if not word.startswith("--"):
            parsed += _parse_letters(word[1:], remaining, options)
            continue
        key, equals, inline_value = word[2:].partition("=")
        name = _resolve_long_name(key, options)
        parsed.append(
            (name, _take_value(name, inline_value if equals else None, remaining, options[name].value))
        )
    return parsed, remaining
