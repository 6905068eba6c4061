"""Parse the ``#SBATCH`` lines of a batch script by sbatch's rules."""

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
    is_supported=True,
)

# Accepted without effect: meaningless on one machine with one user.
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
    is_supported=False,
)

OPTIONS = dict(_IGNORED, **_USED)


class _WordSplitter(object):
    """A splitter for the rest of a directive line: quotes, backslashes, and ``#`` for a comment."""

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
    """Split the text that follows ``#SBATCH`` on a line into words."""
    splitter, quote, escaped = _WordSplitter(), "", False
    for letter in text:
        if escaped:
            splitter.add(letter)
            escaped = False
        elif letter == "\\":
            escaped = True
        elif quote:
            if letter == quote:
                quote = ""
            else:
                splitter.add(letter)
        elif letter in "\"'":
            quote = letter
            splitter.add("")
        elif letter.isspace():
            splitter.end()
        elif letter == "#":
            break
        else:
            splitter.add(letter)
    splitter.end()
    return splitter.words


def _check_script(text: str) -> None:
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
    words_by_line = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith(MAGIC):
            words_by_line[number] = split_directive(line[len(MAGIC) :])
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return words_by_line


def read_options(text: str) -> Dict[str, Optional[str]]:
    """Return the script's options by long name; a later option replaces an earlier one.

    Raises:
        Refused: the text is no batch script, or sbatch or the embedded scheduler does not accept a directive.
    """
    _check_script(text)
    options: Dict[str, Optional[str]] = {}
    problems = []
    for number, directive in directive_words(text).items():
        remaining_words = directive
        while remaining_words:
            try:
                parsed, remaining_words = parse(remaining_words, OPTIONS)
            except Refused as error:
                problems.append(_format_problem(number, error.problems[0]))
                break
            options.update(parsed)
            if remaining_words:
                problems.append(
                    "line {}: invalid directive in the batch script: {}".format(number, remaining_words[0])
                )
                break
    if problems:
        raise Refused(problems)
    return options


def _format_problem(number: int, problem: str) -> str:
    if " " in problem:
        return "line {}: {}".format(number, problem)
    return "line {}: the embedded scheduler does not offer the option {}".format(number, problem)
