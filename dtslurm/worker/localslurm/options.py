"""Command-line words read the way GNU getopt_long reads them, as sbatch and srun do."""

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

NONE, NEEDED, OPTIONAL = 0, 1, 2


class Refused(Exception):
    """A request that cannot be served; ``problems`` says why, a line each."""

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


def table(text: str, used: bool) -> Table:
    """Read rows like ``nodes N =`` (value), ``exclusive - ?`` (optional value), ``hold H`` (no value)."""
    rows: Table = {}
    for line in text.strip().splitlines():
        words = line.split()
        letter = "" if len(words) < 2 or words[1] == "-" else words[1]
        kind = {"=": NEEDED, "?": OPTIONAL}[words[2]] if len(words) > 2 else NONE
        rows[words[0]] = Option(letter, kind, used)
    return rows


def _long_name(word: str, options: Table) -> str:
    if word in options:
        return word
    close = [name for name in options if name.startswith(word)]
    if len(close) != 1:
        raise Refused(["--" + word])
    return close[0]


def _value(name: str, given: Optional[str], rest: List[str], kind: int) -> Optional[str]:
    if kind == NONE:
        if given is not None:
            raise Refused(["--{} takes no value".format(name)])
        return None
    if given is None and kind == NEEDED:
        if not rest:
            raise Refused(["--{} needs a value".format(name)])
        return rest.pop(0)
    return given


def _letters(word: str, rest: List[str], options: Table) -> Parsed:
    found: Parsed = []
    by_letter = {option.letter: name for name, option in options.items() if option.letter}
    while word:
        name = by_letter.get(word[0])
        if name is None:
            raise Refused(["-" + word[0]])
        kind = options[name].value
        if kind == NONE:
            found.append((name, None))
            word = word[1:]
            continue
        found.append((name, _value(name, word[1:] or None, rest, kind)))
        break
    return found


def parse(words: Sequence[str], options: Table) -> Tuple[Parsed, List[str]]:
    """Return the options, in order, and the words from the first that is none.

    Raises:
        Refused: an unknown option (the problem is the option as written) or a missing value.
    """
    found: Parsed = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if not word.startswith("--"):
            found += _letters(word[1:], rest, options)
            continue
        key, equals, given = word[2:].partition("=")
        name = _long_name(key, options)
        found.append((name, _value(name, given if equals else None, rest, options[name].value)))
    return found, rest
