"""Checks of documentation, messages, docstrings and comments: words, spelling, length of sentences."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from spellchecker import SpellChecker

HERE = Path(__file__).parent
KINDS = ("docs", "messages", "docstrings", "comments")
MOST_WORDS = 40  # of a sentence in the documentation
# Code in a text: blocks, words in backticks, targets of links, HTML, addresses, names of arguments.
CODE = re.compile(
    r"^(?P<fence>```|~~~).*?^(?P=fence)|(?P<ticks>`+).+?(?P=ticks)|(?<=\])\([^)\s]*\)"
    r"|<!--.*?-->|<[/\w][^>\n]*>|\w+://\S+|^ {4,}\w+(?=: )",
    re.MULTILINE | re.DOTALL,
)
# A list item, a row or cell of a table, a heading or an empty line ends a sentence, as a full stop does.
SENTENCE_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.)\s?)|\||(?<=[.!?:])\s+")
WORD = re.compile(r"(?<![\w./$%@\\·=<-])[A-Z]?[a-z]+(?:'[a-z]+)?(?![\w/(=·]|[.:]\w)")


@dataclass(frozen=True)
class Passage:
    """A text for people: its kind, its file and first line, and the text without code."""

    kind: str
    path: str
    line: int
    text: str

    def locate(self, offset: int) -> str:
        return f"{self.path}:{self.line + self.text.count(chr(10), 0, offset)}"


@dataclass(frozen=True)
class Rule:
    """A pattern in some kinds of text, and what to write instead."""

    name: str
    kinds: tuple[str, ...]
    pattern: re.Pattern[str]
    advice: str


def hide_code(text: str) -> str:
    """Replace code by dots, which no rule matches; lines keep their numbers."""
    return CODE.sub(lambda match: re.sub(r"[^\n]", "·", match[0]), text)


def read_passages(path: Path, name: str) -> list[Passage]:
    """Return the texts of a file that people read; ``name`` is its path in the repository."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        found: Iterable[tuple[str, int, str]] = [("docs", 1, text)]
    elif path.suffix == ".py":
        found = read_python(text, with_messages=name.startswith("dtslurm/"))
    else:
        found = read_comments(text)
    return [Passage(kind, name, line, hide_code(text)) for kind, line, text in found]


def read_comments(text: str) -> Iterator[tuple[str, int, str]]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1)]
    matches = [(number, re.search(r"(?:^|\s)#(?: (.*))?$", line)) for number, line in lines]
    yield from join_lines((number, match[1] or "") for number, match in matches if match)
    for match in re.finditer(r"\{#-?(.*?)-?#\}", text, re.DOTALL):
        yield "comments", text.count("\n", 0, match.start()) + 1, match[1]


def join_lines(comments: Iterable[tuple[int, str]]) -> Iterator[tuple[str, int, str]]:
    """Join comments of consecutive lines, where a sentence may continue."""
    first, lines = 0, list[str]()
    for number, text in comments:
        if number != first + len(lines):
            if lines:
                yield "comments", first, "\n".join(lines)
            first, lines = number, []
        lines.append(text)
    if lines:
        yield "comments", first, "\n".join(lines)


def read_python(text: str, *, with_messages: bool) -> Iterator[tuple[str, int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (token for token in tokens if token.type == tokenize.COMMENT)
    yield from join_lines((token.start[0], token.string.lstrip("#!: ")) for token in comments)
    yield from read_strings(ast.parse(text), with_messages=with_messages)


def read_strings(node: ast.AST, *, with_messages: bool) -> Iterator[tuple[str, int, str]]:
    """Yield docstrings, and the strings that contain several words."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        match node.body:
            case [ast.Expr(ast.Constant(str(docstring))) as statement, *_]:
                yield "docstrings", statement.lineno, docstring
                children.remove(statement)
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        children = [ast.copy_location(ast.Constant("".join(map(str, parts))), node)]
        children += [part for part in node.values if isinstance(part, ast.FormattedValue)]
    elif with_messages and isinstance(node, ast.Constant) and re.search(r"\w \S+ .*\w", str(node.value)):
        yield "messages", node.lineno, str(node.value)
    for child in children:
        yield from read_strings(child, with_messages=with_messages)


def load_rules() -> Iterator[Rule]:
    for name, rule in yaml.safe_load((HERE / "rules.yaml").read_text("utf-8")).items():
        for pattern, advice in rule["patterns"].items():
            text = rf"(?<![\w$-])(?:{pattern})(?![\w=])".replace(" ", r"\s+")
            yield Rule(name, tuple(rule.get("in", KINDS)), re.compile(text, re.IGNORECASE), advice)


def load_dictionary() -> Callable[[str], bool]:
    """Return whether a word is in pyspellchecker's dictionary of English, or in `words.txt`."""
    words = set((HERE / "words.txt").read_text("utf-8").split())
    dictionary = SpellChecker(language="en").word_frequency
    return lambda word: word in words or word.lower() in words or word in dictionary


def check_rules(passage: Passage, rules: Iterable[Rule]) -> Iterator[str]:
    for rule in rules:
        if passage.kind in rule.kinds:
            for match in rule.pattern.finditer(passage.text):
                words = " ".join(match[0].split())
                yield f"{passage.locate(match.start())}: {rule.name}: {words!r}; write: {rule.advice}"


def check_spelling(passage: Passage, is_word: Callable[[str], bool]) -> Iterator[str]:
    for match in WORD.finditer(passage.text):
        if not is_word(match[0].removesuffix("'s")):
            yield f"{passage.locate(match.start())}: spelling: {match[0]!r}; correct, or add to words.txt"


def check_length(passage: Passage) -> Iterator[str]:
    start = 0
    for end in [*SENTENCE_END.finditer(passage.text), None]:
        sentence = passage.text[start : end.start() if end else None]
        count = len(re.findall(r"(?<!\S)\S*[^\W\d_]", sentence))
        if count > MOST_WORDS:
            yield f"{passage.locate(start)}: length: {count} words; write several sentences, or a list"
        start = end.end() if end else start
