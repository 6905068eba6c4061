"""The ``#SBATCH`` lines of a batch script, read by sbatch's rules."""

from typing import Dict, List, Optional

from .options import Refused, parse, table

MAGIC = "#SBATCH"

_USED = table(
    """
    job-name J =
    nodes N =
    ntasks n =
    ntasks-per-node - =
    cpus-per-task c =
    gpus-per-node - =
    gpus G =
    gres - =
    mem - =
    mem-per-cpu - =
    time t =
    output o =
    error e =
    input i =
    open-mode - =
    signal - =
    array a =
    dependency d =
    kill-on-invalid-dep - =
    requeue - ?
    no-requeue
    export - =
    comment - =
    chdir D =
    hold H
    partition p =
    """,
    used=True,
)

# Without meaning on one machine that has one user.
_IGNORED = table(
    """
    nodelist w =
    exclude x =
    account A =
    qos q =
    constraint C =
    prefer - =
    exclusive - ?
    reservation - =
    hint - =
    mail-type - =
    mail-user - =
    nice - ?
    quiet Q
    verbose v
    wait W
    parsable
    wckey - =
    gpu-bind - =
    gpu-freq - =
    gres-flags - =
    tres-bind - =
    cpu-freq - =
    distribution m =
    threads-per-core - =
    ntasks-per-core - =
    ntasks-per-socket - =
    sockets-per-node - =
    cores-per-socket - =
    extra-node-info B =
    mincpus - =
    tmp - =
    licenses L =
    switches - =
    contiguous
    core-spec S =
    get-user-env - ?
    propagate - ?
    no-kill k ?
    oversubscribe s
    overcommit O
    profile - =
    acctg-freq - =
    priority - =
    spread-job
    use-min-nodes
    network - =
    segment - =
    """,
    used=False,
)

OPTIONS = dict(_IGNORED, **_USED)


class _Words(object):
    """Splits the rest of a directive line: quotes, backslashes, and ``#`` for a comment."""

    def __init__(self) -> None:
        self.words: List[str] = []
        self.word: Optional[str] = None

    def add(self, letter: str) -> None:
        self.word = (self.word or "") + letter

    def end(self) -> None:
        if self.word is not None:
            self.words.append(self.word)
        self.word = None


def split_directive(text: str) -> List[str]:
    """Return the words of what follows ``#SBATCH`` on a line."""
    state, quote, escaped = _Words(), "", False
    for letter in text:
        if escaped:
            state.add(letter)
            escaped = False
        elif letter == "\\":
            escaped = True
        elif quote:
            if letter == quote:
                quote = ""
            else:
                state.add(letter)
        elif letter in "\"'":
            quote = letter
            state.add("")
        elif letter.isspace():
            state.end()
        elif letter == "#":
            break
        else:
            state.add(letter)
    state.end()
    return state.words


def _check_form(text: str) -> None:
    if not text.strip():
        raise Refused(["the batch script is empty"])
    if not text.startswith("#!"):
        raise Refused(
            ["the batch script's first line must start with #! and name an interpreter, as #!/bin/bash"]
        )
    if "\r\n" in text:
        raise Refused(["the batch script contains DOS line breaks (\\r\\n) instead of UNIX ones (\\n)"])
    if "\0" in text:
        raise Refused(["the batch script contains NUL bytes; it is no text"])


def directive_words(text: str) -> Dict[int, List[str]]:
    """Return the words of each directive by line number; the first command ends the directives."""
    found = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith(MAGIC):
            found[number] = split_directive(line[len(MAGIC) :])
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


def read_options(text: str) -> Dict[str, Optional[str]]:
    """Return the script's options by long name; a later one replaces an earlier one.

    Raises:
        Refused: not a batch script, or directives that sbatch or the embedded scheduler does not take.
    """
    _check_form(text)
    options: Dict[str, Optional[str]] = {}
    problems = []
    for number, line in directive_words(text).items():
        words = line
        while words:
            try:
                found, words = parse(words, OPTIONS)
            except Refused as error:
                problems.append(_explain(number, error.problems[0]))
                break
            options.update(found)
            if words:
                problems.append("line {}: invalid directive in the batch script: {}".format(number, words[0]))
                break
    if problems:
        raise Refused(problems)
    return options


def _explain(number: int, problem: str) -> str:
    if " " in problem:
        return "line {}: {}".format(number, problem)
    return "line {}: the embedded scheduler does not offer the option {}".format(number, problem)
