"""The cache of compiled templates."""

from __future__ import annotations

import os
from pathlib import Path

from jinja2 import DictLoader, Environment

from dtslurm.render.compiled import Compiled
from dtslurm.render.engine import Engine


class Memory:
    """Keeps bytes and counts how often."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.puts = 0

    def get(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def put(self, name: str, data: bytes) -> None:
        self.kept[name] = data
        self.puts += 1


def test_a_template_is_compiled_again_only_after_a_change(tmp_path: Path) -> None:
    memory = Memory()
    template = tmp_path / "t.j2"
    template.write_text("one {{ word }}")
    for _ in range(2):
        assert Engine([tmp_path], memory).render("t.j2", {"word": "a b"}) == "one 'a b'"
        assert memory.puts == 1
    template.write_text("two {{ word }}")
    assert Engine([tmp_path], memory).render("t.j2", {"word": 1}) == "two 1"
    assert memory.puts == 2


def test_templates_of_the_same_name_in_two_folders_are_cached_separately(tmp_path: Path) -> None:
    memory = Memory()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.j2").write_text(name)
    folders = [tmp_path / "a", tmp_path / "b"]
    assert [Engine([folder], memory).render("t.j2", {}) for folder in folders * 2] == ["a", "b"] * 2
    (tmp_path / "a" / "t.j2").unlink()
    assert Engine(folders, memory).render("t.j2", {}) == "b"


def test_code_compiled_with_other_settings_is_not_used(tmp_path: Path) -> None:
    memory, settings = Memory(), tmp_path / "settings.py"
    loader = DictLoader({"t": "{{ 'constant' }}"})

    def render() -> str:
        settings_now = settings.read_text()
        environment = Environment(
            loader=loader,
            finalize=lambda value: f"{settings_now} {value}",
            bytecode_cache=Compiled(memory, [str(settings)]),
            autoescape=True,
        )
        return environment.get_template("t").render()

    settings.write_text("old")
    assert [render(), render(), memory.puts] == ["old constant", "old constant", 1]
    settings.write_text("new")
    os.utime(settings, (1, 1))  # as after another installation, whatever the clock's step
    assert [render(), render(), memory.puts] == ["new constant", "new constant", 2]
