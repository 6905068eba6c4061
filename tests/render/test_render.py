"""Rules that hold in every script, whatever the golden ones say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.errors import RenderError, RequestInvalid
from dtslurm.launch import registry
from dtslurm.model.shell import Sh, join
from dtslurm.render.directives import quoted, split_option
from dtslurm.render.engine import Engine
from tests.render.conftest import Render


def test_a_missing_value_is_an_error_and_not_a_gap(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("--mem={{ memm }}")
    with pytest.raises(RenderError, match="memm"):
        Engine([tmp_path]).render("t.j2", {"mem": 1})


def test_none_is_not_printed(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("{{ value }}")
    with pytest.raises(RenderError):
        Engine([tmp_path]).render("t.j2", {"value": None})


def test_a_template_with_a_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("one\n{% if %}\n")
    with pytest.raises(RenderError, match=r"t\.j2:2"):
        Engine([tmp_path]).render("t.j2", {})


def test_templates_cannot_reach_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(RenderError):
        Engine([tmp_path]).render("t.j2", {})


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_value_reaches_the_shell_byte_for_byte(value: str) -> None:
    printed = subprocess.run(["bash", "-c", f"printf %s {join([value])}"], capture_output=True, check=True)
    assert printed.stdout == value.encode()


def test_bytes_that_are_no_utf8_survive(render_job: Render) -> None:
    argument = os.fsdecode(b"\xff\xfe")
    script = render_job("local", "single", account=None, args=(argument,)).script
    assert b"\xff\xfe" in script.encode("utf-8", "surrogateescape")


def test_shell_words_are_left_to_the_shell() -> None:
    assert join(["a b", Sh('"$X"')]) == "'a b' \"$X\""


@pytest.mark.parametrize(
    ("value", "written"), [("gpu", "gpu"), ("gpu&hbm80g", '"gpu&hbm80g"'), ('a"b\\c', '"a\\"b\\\\c"')]
)
def test_directive_quoting(value: str, written: str) -> None:
    assert quoted(value) == written


def test_a_line_break_in_a_directive_is_refused(render_job: Render) -> None:
    with pytest.raises(RequestInvalid, match="--job-name"):
        render_job("local", "single", account=None, name="a\n#SBATCH --account=other")


def test_options_passed_on_replace_ours(render_job: Render) -> None:
    script = render_job("local", "single", account=None, sbatch_options=("--open-mode=truncate",)).script
    assert script.count("--open-mode") == 1


@pytest.mark.parametrize("text", ["-N2", "exclusive", "--Upper=1", "--"])
def test_only_long_options_are_passed_on(text: str) -> None:
    with pytest.raises(ValueError, match="long sbatch option"):
        split_option(text)


def test_launchers_are_found_by_their_entry_points() -> None:
    assert {"single", "srun", "torchrun"} <= set(registry.names())
    with pytest.raises(RequestInvalid, match="did you mean 'torchrun'"):
        registry.load("torchrum")


def test_the_early_signal_appears_only_when_asked(render_job: Render) -> None:
    assert "USR2" not in render_job("local", "torchrun", account=None).script
    asked = render_job("local", "torchrun", account=None, signal_before=60).script
    assert "#SBATCH --signal=USR2@60" in asked
    assert asked.count("trap '' USR2") == 2
