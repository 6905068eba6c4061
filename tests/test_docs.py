"""The examples in docs/ work."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mkdocs.exceptions import BuildError

from dtslurm.launch import registry
from tests.render.conftest import Render, render_job

__all__ = ["render_job"]

ROOT = Path(__file__).parents[1]


def code_block(document: str, language: str) -> str:
    match = re.search(
        rf"^```{language}\n(.*?)^```$", (ROOT / "docs" / document).read_text(), re.MULTILINE | re.DOTALL
    )
    assert match
    return match[1]


def test_the_table_of_launchers_is_complete() -> None:
    text = (ROOT / "docs" / "launchers.md").read_text()
    for name in registry.names():
        launcher = registry.load(name)
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert launcher.summary in row
        assert re.findall(r"`(\w+)=", row) == list(launcher.options)


def test_the_documented_custom_launcher_works(tmp_path: Path) -> None:
    package = tmp_path / "site"
    package.mkdir()
    code = code_block("launchers.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    (package / "mypackage.py").write_text(code)
    entry = re.search(
        r'^\[project\.entry-points\."(.+)"\]\n(.+)$', code_block("launchers.md", "toml"), re.MULTILINE
    )
    assert entry
    info = package / "mypackage-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{entry[1]}]\n{entry[2].replace(chr(34), '')}\n")
    (tmp_path / "train.py").write_text("")
    words = ["render", "--cluster", "a100x8-ib", "-A", "x", "-t", "60", "-N2", "-l", "numa", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "dtslurm", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r'exec numactl --cpunodebind="\$SLURM_LOCALID" --localalloc .*train\.py </dev/null >&"\$log" 2>&1 ',
        done.stdout,
        re.MULTILINE,
    )


def test_the_documented_custom_template_works_and_all_blocks_are_listed(
    render_job: Render, tmp_path: Path
) -> None:
    (tmp_path / "core.sbatch.j2").write_text(code_block("templates.md", "jinja"))
    script = render_job("local", "single", account=None, template="core.sbatch.j2", folders=[tmp_path]).script
    assert "\nulimit -c 0\n" in script
    names = re.findall(r"{% block (\w+) %}", (ROOT / "templates" / "base.sbatch.j2").read_text())
    text = (ROOT / "docs" / "templates.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == names


@pytest.mark.parametrize("number", [0, 1])
def test_the_documented_python_examples_work(number: int, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[number]
    (tmp_path / "train.py").write_text(
        "import sys, time\nprint(sys.argv[1:])\ntime.sleep(2)\nsys.exit('no data')\n"
    )
    (tmp_path / "main.py").write_text(code)
    folders = {
        "DTSLURM_RUN_ROOT": tmp_path / "runs",
        "DTSLURM_LOCAL_STATE": tmp_path / "local",
        "XDG_STATE_HOME": tmp_path / "state",
    }
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env={**os.environ, **{name: str(path) for name, path in folders.items()}},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    shown = [
        {"1 ['--lr', '0.0003']"},
        {"[(0.0006, 0), (0.0006, 1)]", "[[(0.0002, 0), (0.0002, 1)], [(0.0004, 0), (0.0004, 1)]]"},
    ]
    assert shown[number] <= set(done.stdout.splitlines())


def test_the_site_is_not_built_if_a_generated_page_is_out_of_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = importlib.import_module("docs.generate")
    page = tmp_path / "commands.md"
    monkeypatch.setattr(generate, "REFERENCE", tmp_path)
    monkeypatch.setattr(generate, "reference_pages", lambda: {page: "new\n"})
    monkeypatch.setattr(generate.benchmarks, "write_page", lambda: None)
    page.write_text("old\n")
    with pytest.raises(BuildError, match=r"docs/reference/commands\.md\. Run `make docs`"):
        generate.on_pre_build(None)
    generate.write_reference()
    generate.on_pre_build(None)
    assert page.read_text() == "new\n"
