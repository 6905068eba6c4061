"""Attacks by text of other users on a terminal, a spreadsheet or a browser."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from dtslurm.logs.clean import is_plain, safe
from tests.cli.conftest import Run, folder, invoke, runs, slurm
from tests.cli.sample_runs import ENDED, Runs, ended_job, rank_record
from tests.cli.slurm_programs import Programs
from tests.cli.test_usage_command import USAGE, sacct_output

__all__ = ["folder", "invoke", "runs", "slurm"]  # fixtures

NAMES = {
    "clears the screen": "a\x1b[2J\x1b[Hb",
    "sets the title": "a\x1b]0;mine\x07b",
    "writes the clipboard": "a\x1b]52;c;Y3VybA==\x1b\\b",
    "C1": "a\x9b2Jb",
    "overwrites the line": "a\rb\x08\x08",
    "turns the text around": "a\u202eb\u2066c\u2069",
    "marks": "a\u200eb\u200fc\u061cd\u200be\ufefff",
    "separates lines": "a\u2028b\u2029c\x85d",
    "a link": "a\x1b]8;;https://thief.example\x1b\\b\x1b]8;;\x1b\\",
    "unfinished": "a\x1b[38;5",
    "markup": "[red]a[/red][@click=app.bell]b[/]",
    "HTML": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "template": "{{ 7*7 }}{% raw %}",
}
# What a terminal acts on; colours are dtslurm's own.
ACTS = re.compile(
    r"\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)
COMMANDS = (
    ("status",),
    ("status", "41"),
    ("logs", "41"),
    ("diagnose", "41"),
    ("diagnose",),
    ("compare", "41", "42"),
    ("top", "--once"),
    ("top", "--once", "41"),
    ("artifacts", "list", "41"),
    ("clean",),
    ("fetch", "41", "-o", "results"),
    ("resubmit", "41"),
    ("requeue", "41"),
    ("cancel", "41"),
    ("cluster", "nodes"),
)


def make_runs(runs: Runs, text: str) -> None:
    """Make runs of whose records, logs and metrics all that can hold text holds this one."""
    for number in ("41", "42"):
        record = runs.add(
            f"run{number}",
            number,
            ended_job(number, reason=text, exit_code=1),
            script=text,
            files={
                "logs/0/rank-0.log": f"{text}\nTraceback (most recent call last):\nValueError: {text}\n",
                "logs/batch.log": f"slurmstepd: error: {text}\n",
                "metrics/0/train.jsonl": [{"time": ENDED - 50, "step": 1, f"loss {text}": 1.5}],
                "ranks/0/0.json": rank_record(0, text, 1),
                "ranks/0/first-failure": "0 1\n",
                "ranks/0/first-failure-error": f"ValueError: {text}\n",
                "events.jsonl": [{"event": "started", "time": ENDED - 90, "attempt": 0, "node": text}],
            },
        )
        runs.change(record, name=text)


@pytest.mark.parametrize("kind", NAMES)
def test_no_command_prints_control_sequences(invoke: Run, runs: Runs, folder: Path, kind: str) -> None:
    make_runs(runs, NAMES[kind])
    for words in COMMANDS:
        done = invoke(*words)
        assert "Traceback" not in done.stderr.replace("Traceback (most recent call last)", ""), done.stderr
        for said in (done.stdout, done.stderr):
            acts = ACTS.search(said)
            assert acts is None, (words, said[max(0, acts.start() - 60) : acts.end() + 20])


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("page", ["report", "compare"])
def test_html_pages_contain_no_active_content(
    invoke: Run, runs: Runs, folder: Path, kind: str, page: str
) -> None:
    make_runs(runs, NAMES[kind])
    words = ("41",) if page == "report" else ("41", "42")
    invoke(page, *words, "-o", "page.html", code=0)
    text = (folder / "page.html").read_text("utf-8")
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert "onerror=alert(1)>" not in text
    assert ACTS.search(text) is None


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("form", [(), ("--csv",), ("--by", "name", "-a")])
def test_accounting_output_contains_no_control_sequences(
    invoke: Run, slurm: Programs, kind: str, form: tuple[str, ...]
) -> None:
    slurm.say("sacct", sacct_output(NAMES[kind].replace("\n", " "), "vision"))
    done = invoke(*USAGE, *form)
    assert ACTS.search(done.stdout + done.stderr) is None


@pytest.mark.parametrize(
    ("account", "cell"),
    [
        ("=1+2", "'=1+2"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3+cmd", "'-2+3+cmd"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\x1b[0m=1+2", "'=1+2"),
        ("-12.5e3", "-12.5e3"),
        ("vision", "vision"),
    ],
)
def test_csv_cells_contain_no_formulas(invoke: Run, slurm: Programs, account: str, cell: str) -> None:
    slurm.say("sacct", sacct_output(account))
    [row] = csv.DictReader(io.StringIO(invoke(*USAGE, "--csv", code=0).stdout))
    assert row["account"] == cell


@pytest.mark.parametrize("kind", NAMES)
def test_safe_text_is_plain_and_keeps_its_start(kind: str) -> None:
    clean = safe(NAMES[kind])
    assert ACTS.search(clean) is None
    assert is_plain(clean.encode(), clean)
    assert clean.startswith(("a", "[", "<", "{"))


def test_safe_keeps_words_of_other_scripts() -> None:
    for word in ("модель", "模型", "می\u200cخواهم", "क्\u200dष", "👩\u200d🔬", "naïve"):
        assert safe(word) == word
