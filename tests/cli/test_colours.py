"""Colours of printed output: on a terminal only, and readable on a dark and on a light background."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.style import Style
from rich.text import Text

from dtslurm.model.runs.state import JobState
from tests.cli.conftest import Run
from tests.cli.sample_runs import Runs, ended_job
from tests.cli.test_diagnose_command import FAILED

ERROR = "ZeroDivisionError: division by zero"
TELLS_MORE = {**FAILED, "ranks/1/first-failure-error": f"{ERROR}\n"}
COMMANDS = [
    ("diagnose", "train"),
    ("status", "train"),
    ("plan", "llama-3-8b", "--gpu", "H100-80GB", "-N", "2", "--gbs", "256"),
]
Shown = Callable[..., str]


@pytest.fixture
def run_on_terminal(folder: Path, tmp_path: Path, runs: Runs) -> Shown:
    """Run ``dtslurm`` on a terminal of 80 columns, with a run that failed; return all that it wrote there."""
    runs.add("train", "7", ended_job("7", JobState.FAILED), files=TELLS_MORE)

    def call(*words: str, **extra: str) -> str:
        known = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR"}}
        local = {"DTSLURM_LOCAL_STATE": str(tmp_path / "local"), "TERM": "xterm", "COLUMNS": "80"}
        here, there = os.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "dtslurm", *words],
            cwd=folder,
            env={**known, **local, **extra},
            stdin=subprocess.DEVNULL,
            stdout=there,
        )
        os.close(there)
        said = b""
        while True:
            try:
                part = os.read(here, 65536)
            except OSError:  # the end of a terminal that nothing has open any more
                break
            said += part
        os.close(here)
        assert process.wait(timeout=600) == 0
        return said.decode().replace("\r\n", "\n")

    return call


def colour_numbers(style: Style) -> tuple[int | None, int | None]:
    """Return the numbers of the colours of text and background: 1 is red, 2 green, 5 magenta, 7 white."""
    return style.color and style.color.number, style.bgcolor and style.bgcolor.number


def styles_of(text: Text, part: str) -> list[Style]:
    """Return the style at each place where a part of a text stands."""
    result, start = [], text.plain.find(part)
    while start >= 0:
        styles = [span.style for span in text.spans if span.start <= start < span.end]
        result.append(Style.combine([Style(), *(style for style in styles if isinstance(style, Style))]))
        start = text.plain.find(part, start + 1)
    return result


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_terminal_gets_the_plain_text_in_readable_colours(
    words: tuple[str, ...], run_on_terminal: Shown
) -> None:
    coloured = run_on_terminal(*words)
    text = Text.from_ansi(coloured)
    plain = run_on_terminal(*words, NO_COLOR="1", TERM="dumb")
    assert "\x1b[" in coloured
    assert "\x1b" not in plain
    assert [line.rstrip() for line in text.plain.splitlines()] == [
        line.rstrip() for line in plain.splitlines()
    ]
    styles = {span.style for span in text.spans if isinstance(span.style, Style)}
    assert {colour_numbers(style) for style in styles} <= {
        (None, None),
        (1, None),
        (2, None),
        (5, None),
        (7, 1),
    }


@pytest.mark.parametrize("command", ["diagnose", "status"])
def test_the_exception_is_highlighted(command: str, run_on_terminal: Shown) -> None:
    text = Text.from_ansi(run_on_terminal(command, "train"))
    on_red = [
        text.plain[span.start : span.end]
        for span in text.spans
        if isinstance(span.style, Style) and span.style.bgcolor is not None
    ]
    assert " ".join(on_red).removesuffix(" (rank 0)") == ERROR
    state = styles_of(text, "FAILED")[0]
    assert (state.bold, colour_numbers(state)) == (True, (1, None))


def test_labels_and_locations_are_dimmed(run_on_terminal: Shown) -> None:
    text = Text.from_ansi(run_on_terminal("diagnose", "train"))
    [first, *_] = styles_of(text, "logs   ")
    assert first.dim
    text = Text.from_ansi(run_on_terminal("status", "train"))
    for label in ("queried", "run  "):
        assert styles_of(text, label)[0].dim
    assert not styles_of(text, "torchrun")[0].dim


def test_plan_highlights_the_best_layout(run_on_terminal: Shown) -> None:
    text = Text.from_ansi(run_on_terminal(*COMMANDS[2]))
    first = next(line for line in text.plain.splitlines() if line.startswith("1  "))
    [style, *_] = styles_of(text, first.split()[1])
    assert (style.bold, colour_numbers(style)) == (True, (2, None))
    second = next(line for line in text.plain.splitlines() if line.startswith("2  "))
    assert styles_of(text, second.split()[1])[0].color is None


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_json_and_pipes_contain_no_colours(words: tuple[str, ...], run_on_terminal: Shown, run: Run) -> None:
    assert "\x1b" not in run_on_terminal(*words, "--json")
    assert "\x1b" not in run(*words, code=0, TERM="xterm").stdout
