from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtslurm.config import strict_yaml
from dtslurm.config.tree import Items, Scalar, Table
from dtslurm.errors import ProfileInvalid


@pytest.fixture(params=["libyaml", "python"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both of PyYAML's parsers, which say different words."""
    chosen = "CBaseLoader" if request.param == "libyaml" else "BaseLoader"
    if not hasattr(yaml, chosen):
        pytest.skip("PyYAML was built without libyaml")
    monkeypatch.setattr(strict_yaml, "_LOADER", getattr(yaml, chosen))
    return str(request.param)


def parse_problem(text: str | bytes) -> str:
    data = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(ProfileInvalid) as caught:
        strict_yaml.parse(data, "f.yaml")
    (problem,) = caught.value.problems
    return problem


def parse_problems(data: bytes) -> tuple[str, ...]:
    try:
        strict_yaml.parse(data, "f.yaml")
    except ProfileInvalid as error:
        return error.problems
    return ()


@pytest.mark.usefixtures("loader")
def test_every_value_stays_text_with_its_line() -> None:
    root, problems = strict_yaml.parse(
        b"time: 2:30:00\naccount: 012345\nqos: no\nnodes: 010\n\nlist:\n- 1\n- yes\nmap: {a: 1.0}\n", "f.yaml"
    )
    assert not problems
    values = {key: (entry.line, entry.value) for key, entry in root.entries.items()}
    assert values["time"] == (1, Scalar("f.yaml", 1, "2:30:00"))
    assert values["account"] == (2, Scalar("f.yaml", 2, "012345"))
    assert values["qos"] == (3, Scalar("f.yaml", 3, "no"))
    assert values["nodes"] == (4, Scalar("f.yaml", 4, "010"))
    assert values["list"] == (
        6,
        Items("f.yaml", 7, (Scalar("f.yaml", 7, "1"), Scalar("f.yaml", 8, "yes"))),
    )
    inner = values["map"][1]
    assert isinstance(inner, Table)
    assert inner.entries["a"].value == Scalar("f.yaml", 9, "1.0")


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize(
    ("written", "text"),
    [("", None), ("~", None), ("null", None), ('""', ""), ("''", ""), ('"null"', "null"), ("'~'", "~")],
)
def test_null_differs_from_an_empty_string(written: str, text: str | None) -> None:
    root, _ = strict_yaml.parse(f"a: {written}\n".encode(), "f.yaml")
    value = root.entries["a"].value
    assert isinstance(value, Scalar)
    assert value.text == text
    assert value.written == (written != "")


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "~\n", "\ufeff"])
def test_an_empty_file_is_an_empty_mapping(text: str) -> None:
    root, problems = strict_yaml.parse(text.encode(), "f.yaml")
    assert (dict(root.entries), problems) == ({}, [])


@pytest.mark.usefixtures("loader")
def test_all_duplicate_keys_are_reported() -> None:
    root, problems = strict_yaml.parse(b"a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", "f.yaml")
    assert [str(problem) for problem in problems] == [
        "f.yaml:4: b.c: given twice; the first is on line 3",
        "f.yaml:5: a: given twice; the first is on line 1",
    ]
    assert root.entries["a"].value == Scalar("f.yaml", 1, "1")


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\n\tb: 2\n", "f.yaml:2: a tab; YAML needs spaces"),
        ("a:\n\tb: 2\n", "f.yaml:2: a tab; YAML needs spaces"),
        ("a: 1\n  b: 2\n", "f.yaml:2: a second ': ' in one line; put quotes around the text, or indent it"),
        (
            "a:\n    b: 1\n  c: 2\n",
            "f.yaml:3: the indentation does not match the lines above, or a quote ends too early",
        ),
        ("a: 'x\nb: 2\n", "f.yaml:1: the quote that opens here is never closed"),
        ("a: [1, 2\nb: 2\n", "f.yaml:2: a ',' or the closing bracket is missing"),
        ("a: @x\n", "f.yaml:1: text that starts with '@' needs quotes"),
        ("a\nb: 1\n", "f.yaml:2: a second ': ' in one line; put quotes around the text, or indent it"),
        ("- a\n- b\n", "f.yaml:1: the file should contain keys and values, as in 'key: value'"),
        ("hello\n", "f.yaml:1: the file should contain keys and values, as in 'key: value'"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: a second document; a file may contain only one document"),
        (b"a: 1\nb: \xff\n", "f.yaml:2: not UTF-8 text"),
        ("a: 1\nb: \x07\n", "f.yaml:2: a character that YAML does not allow: '\\x07'"),
        (b"#" * 1_000_001, "f.yaml:1: larger than 1 MB, which is too large for a configuration file"),
        ("a: " + "[" * 17, "f.yaml:1: a" + "[0]" * 15 + ": nested more than 16 deep"),
    ],
)
def test_invalid_yaml_is_reported_in_one_line(text: str | bytes, problem: str) -> None:
    assert parse_problem(text) == problem


@pytest.mark.usefixtures("loader")
def test_endless_nesting_is_refused() -> None:
    problem = parse_problem("a: " + "[" * 100_000)

    assert re.fullmatch(r"f\.yaml:1: .*nested more than 16 deep", problem)


@pytest.mark.usefixtures("loader")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: *gpu\n", "f.yaml:1: a: aliases are not allowed; if this is text, put '*gpu' in quotes"),
        ("a: &gpu x\n", "f.yaml:1: a: anchors are not allowed; if this is text, put '&gpu' in quotes"),
        (
            "a: !!int 3\n",
            "f.yaml:1: a: tags are not allowed; if this is text, put the text that starts with '!' in quotes",
        ),
        ("? [1]\n: 2\n", "f.yaml:1: a key should be a word before ':'"),
        ('"": 2\n', "f.yaml:1: a key should be a word before ':'"),
    ],
)
def test_anchors_aliases_tags_and_complex_keys_are_refused(text: str, message: str) -> None:
    _, problems = strict_yaml.parse(text.encode(), "f.yaml")
    assert message in [str(problem) for problem in problems]


def test_c23_an_alias_bomb_is_not_expanded() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    _, problems = strict_yaml.parse("\n".join(lines).encode(), "f.yaml")
    assert len(problems) == 30 + 29 * 9


@settings(deadline=None)
@given(st.text() | st.text(alphabet="ab:-{}[],\n\t '\"&*!?|>#%@`~1"))
@example("a: \ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"))
@example('a: "\\uD800"')
@example("%YAML 9.9\n---\na: 1")
def test_random_text_raises_only_profile_invalid(text: str) -> None:
    problems = parse_problems(text.encode())
    assert len(problems) <= 1
    assert not any("\n" in problem for problem in problems)


@settings(deadline=None)
@given(st.binary())
def test_random_bytes_raise_only_profile_invalid(data: bytes) -> None:
    assert all(problem.startswith("f.yaml:") for problem in parse_problems(data))
