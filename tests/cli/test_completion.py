"""Shell completion, and the manual page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dtslurm
from dtslurm.cli.main import COMMANDS, cli
from dtslurm.cli.setup.manual import render_manual
from tests.cli.conftest import Run
from tests.conftest import skip_or_fail
from tests.release.trial import COMPLETIONS


def completions(run: Run, *words: str) -> list[str]:
    asked = {"COMP_WORDS": " ".join(["dtslurm", *words]), "COMP_CWORD": str(len(words))}
    stdout = run(_DTSLURM_COMPLETE="bash_complete", **asked).stdout
    return [line.partition(",")[2] for line in stdout.splitlines() if line]


def test_completion_offers_commands_options_clusters_and_runs(run: Run, folder: Path) -> None:
    assert completions(run, "st") == ["status"]
    assert "--ntasks-per-node" in completions(run, "submit", "--nt")
    assert "perlmutter" in completions(run, "submit", "--cluster", "perl")
    job = run("submit", "--cluster", "local", "-t", "2", "--parsable", "train.py", code=0).stdout.strip()
    assert completions(run, "logs", "") == [job]
    assert completions(run, "cancel", f"{job}9") == []


# What a user's shell does with the file, and what it then offers for a word that was begun.
ASKED = {
    "bash": """
source {file}
COMP_WORDS=({words}) COMP_CWORD={last}
_dtslurm_completion dtslurm
printf '%s\\n' "${{COMPREPLY[@]}}"
""",
    "fish": """
source {file}
complete --do-complete "{words}"
""",
    # Its completion works at a prompt alone, so there is one, in a terminal of its own.
    "zsh": """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1=; autoload -U compinit; compinit -u -D; source {file}; print loa''ded"
zpty -r shell answer '*loaded*'
zpty -w -n shell "{words}"$'\\t'
zpty -r -m shell answer '*{wanted}*'
print -r -- "$answer"
zpty -d shell
""",
}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "completion"), [("dtslurm diagn", "diagnose"), ("dtslurm submit --nta", "--ntasks-per-node")]
)
def test_the_completion_script_works_in_each_shell(
    shell: str, words: str, completion: str, run: Run, tmp_path: Path
) -> None:
    program = shutil.which(shell)
    if program is None:
        skip_or_fail(shell, "tests/dashboard/install.sh")
    script = run("completion", shell, code=0).stdout
    subprocess.run([program, "-n"], input=script, text=True, check=True, capture_output=True)
    file = tmp_path / "completion"
    file.write_text(script)
    shell_script = ASKED[shell].format(file=file, words=words, last=words.count(" "), wanted=completion)
    done = subprocess.run(
        [program, *({"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]), "-c", shell_script],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert completion in done.stdout, done.stdout + done.stderr


# What a wheel installs below its prefix, and the command that prints it. UPDATE_GOLDEN=1 writes the files.
SHARED_FILES = {
    "man/man1/dtslurm.1": ("manual",),
    **{file: ("completion", shell) for shell, file in COMPLETIONS.items()},
}


@pytest.mark.parametrize("path", SHARED_FILES)
def test_the_packaged_manual_page_and_completions_are_current(path: str, run: Run) -> None:
    text = run(*SHARED_FILES[path], code=0).stdout
    file = Path(__file__).parents[2] / "share" / path
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert file.read_text() == text, "UPDATE_GOLDEN=1 pytest tests/cli/test_completion.py writes the file"


def test_man_displays_the_packaged_manual_page_without_warnings() -> None:
    man = shutil.which("man")
    if man is None:
        skip_or_fail("man", "tests/dashboard/install.sh")
    page = Path(__file__).parents[2] / "share" / "man" / "man1" / "dtslurm.1"
    done = subprocess.run(
        [man, "--warnings", "--local-file", str(page)],
        env={**os.environ, "LC_ALL": "C.UTF-8", "MANPAGER": "cat"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "dtslurm submit" in done.stdout


def test_the_manual_page_has_every_command_and_valid_groff() -> None:
    text = render_manual(cli)
    for name in COMMANDS:
        assert re.search(rf"^\.SS dtslurm {name}\b", text, re.MULTILINE)
    macros = {line.split()[0] for line in text.splitlines() if line.startswith((".", "'"))}
    assert macros <= {".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".nf", ".fi"}
    assert re.search(r"\\(?![e\-&]|\[u)", text) is None
    assert f'"dtslurm {dtslurm.__version__}"' in text
    if groff := shutil.which("groff"):
        done = subprocess.run([groff, "-man", "-Tutf8", "-ww"], input=text, text=True, capture_output=True)  # noqa: PLW1510
        assert (done.returncode, done.stderr) == (0, "")
    if mandoc := shutil.which("mandoc"):
        done = subprocess.run(  # noqa: PLW1510
            [mandoc, "-man", "-T", "lint", "-W", "warning"], input=text, text=True, capture_output=True
        )
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "missing date" not in line]
        assert lines == []


def test_version_contains_the_commit_of_a_checkout(run: Run) -> None:
    root = Path(dtslurm.__file__).parents[1]
    stdout = run("--version", code=0).stdout
    assert stdout.startswith(f"dtslurm {dtslurm.__version__}")
    if (root / ".git").exists() and shutil.which("git"):
        assert re.fullmatch(r"dtslurm \S+ \(commit [0-9a-f]{10}(, changed since)?\)\n", stdout)
