"""The checks of words and sentences find what they should, and leave good sentences alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.prose import (
    HERE,
    KINDS,
    Passage,
    Rule,
    check_length,
    check_rules,
    check_spelling,
    load_dictionary,
    load_rules,
    read_passages,
)

RULES = list(load_rules())
PYTHON = '''"""First."""
# A comment
# of two lines.
name = "word"


def function():
    """Second.

    Args:
        beat: ``pulse``
    """
    raise ValueError(f"the run {name!r} has ended", "a" "b c d")  # third
'''
EXAMPLES = yaml.safe_load((HERE / "rules.yaml").read_text("utf-8"))


def problems(text: str, rule: str) -> list[str]:
    rules = [item for item in RULES if item.name == rule]
    return list(check_rules(Passage(rules[0].kinds[0], "page.md", 1, text), rules))


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_finds_its_bad_examples_and_leaves_the_good_ones_alone(rule: str) -> None:
    assert [text for text in EXAMPLES[rule]["bad"] if not problems(text, rule)] == []
    assert [problems(text, rule) for text in EXAMPLES[rule]["good"] if problems(text, rule)] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern.pattern)
def test_every_pattern_has_a_bad_example(rule: Rule) -> None:
    assert any(rule.pattern.search(text) for text in EXAMPLES[rule.name]["bad"])
    assert set(rule.kinds) <= set(KINDS)


def test_a_problem_has_its_line_its_words_and_a_replacement() -> None:
    text = "One.\n\nThe agent gives no sign\nof life."
    [problem] = check_rules(Passage("docs", "docs/page.md", 1, text), RULES)
    assert problem == "docs/page.md:3: glossary: 'sign of life'; write: heartbeat"


def test_texts_of_python_are_docstrings_comments_and_messages(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(PYTHON)
    passages = read_passages(source, "dtslurm/module.py")
    assert [(item.kind, item.line, item.text.split("\n")[0]) for item in passages] == [
        ("comments", 2, "A comment"),
        ("comments", 13, "third"),
        ("docstrings", 1, "First."),
        ("docstrings", 8, "Second."),
        ("messages", 13, "the run {} has ended"),
        ("messages", 13, "ab c d"),
    ]
    assert list(check_rules(passages[3], RULES)) == []  # names of arguments, and words in backticks
    assert {item.kind for item in read_passages(source, "tests/module.py")} == {"docstrings", "comments"}


def test_code_in_a_page_and_comments_of_a_template_keep_their_lines(tmp_path: Path) -> None:
    page, template = tmp_path / "page.md", tmp_path / "base.sbatch.j2"
    page.write_text("# Title\n\n```sh\necho a beat\n```\n\nA `beat` of [a](beat.md), a beat\n")
    assert [item.split(": ")[0] for item in check_rules(read_passages(page, "page.md")[0], RULES)] == [
        "page.md:7"
    ]
    template.write_text("#SBATCH --x\n# one\necho '#no' # two\n{# three\nfour #}\n")
    assert [(item.line, item.text) for item in read_passages(template, "base.sbatch.j2")] == [
        (2, "one\ntwo"),
        (4, " three\nfour "),
    ]


def test_spelling_accepts_english_and_the_words_of_the_project() -> None:
    is_word = load_dictionary()
    text = "Slurm cancelled dtslurm's jobs, `seperate` H100s and NCCL-tests. It is seperate."
    passage = Passage("docs", "page.md", 1, text.replace("`seperate`", "·" * 10))
    assert [problem.split("'")[1] for problem in check_spelling(passage, is_word)] == ["seperate"]


def test_the_word_list_is_sorted() -> None:
    words = (HERE / "words.txt").read_text("utf-8").split()
    assert words == sorted(set(words), key=lambda word: (word.lower(), word))


def test_a_sentence_has_at_most_forty_words() -> None:
    words = "word " * 40
    assert (
        list(check_length(Passage("docs", "page.md", 1, f"{words}. {words}\n\n{words}\n- {words}| {words}")))
        == []
    )
    [problem] = check_length(Passage("docs", "page.md", 1, f"Short.\n\n{words} more."))
    assert problem == "page.md:3: length: 41 words; write several sentences, or a list"
