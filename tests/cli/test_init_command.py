"""``dtslurm init``: questions, answers in advance, and the files that it writes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.services.wiring.context import ActiveCluster, Context
from tests.cli.conftest import Run
from tests.cli.slurm_programs import Programs

ANSWERED = ("init", "--yes", "--no-demo")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's own profiles."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "dtslurm" / "cluster_profiles"


def type_answers(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Answer the questions on a terminal; return the questions."""
    questions: list[str] = []
    remaining = iter(answers)

    def answer(text: str = "") -> str:
        questions.append(text)
        return next(remaining)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", answer)
    return questions


def as_login_node(connect: Callable[..., ActiveCluster]) -> Callable[..., ActiveCluster]:
    """Let the Slurm of this machine be the one behind a login node, without SSH."""

    def connect_here(context: Context, host: str | None, transport: str | None = None) -> ActiveCluster:
        cluster = connect(context, None, transport)
        link: Any = SimpleNamespace(host=host, local=False, run=cluster.transport.run)
        return replace(cluster, transport=link)

    return connect_here


def test_machine_without_slurm_gets_a_project_for_itself(invoke: Run, folder: Path, config: Path) -> None:
    done = invoke(*ANSWERED, code=0)
    assert "jobs run on this machine, which has no Slurm" in done.stderr
    assert (folder / "dtslurm.yaml").read_text() == "cluster: local\n"
    assert not config.exists()
    again = invoke(*ANSWERED, code=2)
    assert "dtslurm.yaml exists already" in again.stderr


def test_detected_answers_are_written(invoke: Run, slurm: Programs, folder: Path, config: Path) -> None:
    done = invoke(*ANSWERED, code=0)
    assert (folder / "dtslurm.yaml").read_text() == "cluster: lab\ndefaults:\n  partition: main\n"
    text = (config / "lab.yaml").read_text()
    assert "partition: main" in text
    assert "run_root" not in text  # the default
    assert f"wrote {config / 'lab.yaml'}" in done.stderr
    assert not any(line.startswith("sbatch --parsable") for line in slurm.asked)
    shown = invoke("cluster", "list", code=0).stdout
    assert "lab *" in shown


def test_answers_in_advance_are_checked(invoke: Run, slurm: Programs, folder: Path, config: Path) -> None:
    del slurm
    for words, message in (
        (("--partition", "nowhere"), "--partition: there is no partition nowhere; available: main"),
        (
            ("--run-root", "runs"),
            "--run-root: 'runs' is relative; write /FOLDER, ~/FOLDER or $VARIABLE/FOLDER",
        ),
    ):
        assert message in invoke(*ANSWERED, *words, code=2).stderr
    assert not (folder / "dtslurm.yaml").exists()
    assert not config.exists()
    invoke(*ANSWERED, "--run-root", "$HOME/runs", "-p", "main", "-A", "ours", code=0)
    assert "  account: ours\n" in (folder / "dtslurm.yaml").read_text()
    profile = (config / "lab.yaml").read_text()
    assert re.search(r"^  run_root: \$HOME/runs +# stated in dtslurm init; sure$", profile, re.MULTILINE)


def test_questions_are_repeated_until_the_answers_are_valid(
    invoke: Run, slurm: Programs, folder: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del slurm
    questions = type_answers(monkeypatch, "", "runs", "/scratch/runs", "nowhere", "", "ours", "n")
    done = invoke("init", "--no-demo", code=0)
    assert [text.split()[0] for text in questions] == [
        "Login", "Folder", "Folder", "Partition", "Partition", "Account",
    ]  # fmt: skip
    assert "Error: there is no partition nowhere; available: main" in done.stdout + done.stderr
    assert [text for text in questions if "empty: Slurm chooses" in text] == questions[-1:]  # no default
    assert "run_root: /scratch/runs" in (config / "lab.yaml").read_text()
    assert (folder / "dtslurm.yaml").read_text() == (
        "cluster: lab\ndefaults:\n  account: ours\n  partition: main\n"
    )


def test_profile_of_another_cluster_with_the_same_name_is_kept(
    invoke: Run, slurm: Programs, folder: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del slurm
    config.mkdir(parents=True)
    own = "login: {host: login.first.example}\n"
    (config / "lab.yaml").write_text(own)
    monkeypatch.setattr(Context, "cluster_without_profile", as_login_node(Context.cluster_without_profile))
    refused = invoke(*ANSWERED, "login.second.example", code=2).stderr
    assert f"{config / 'lab.yaml'} describes the cluster of the login node login.first.example" in refused
    assert "dtslurm cluster discover login.second.example -o " in refused
    assert (config / "lab.yaml").read_text() == own
    assert not (folder / "dtslurm.yaml").exists()


def test_no_terminal_means_no_question(invoke: Run, slurm: Programs, folder: Path) -> None:
    del slurm
    done = invoke("init", code=2)
    assert "there is no terminal for the question 'Login node" in done.stderr
    assert "hint: answer with HOST, or accept the detected answers with --yes" in done.stderr
    assert not (folder / "dtslurm.yaml").exists()


def test_profile_that_exists_keeps_its_edits(
    invoke: Run, slurm: Programs, folder: Path, config: Path
) -> None:
    del slurm
    config.mkdir(parents=True)
    own = "# mine\npaths:\n  run_root: /ours\nslurm:\n  partition: main\n  account: theirs\n"
    (config / "lab.yaml").write_text(own)
    refused = invoke(*ANSWERED, "--run-root", "/other", code=2).stderr
    assert f"{config / 'lab.yaml'} has another run root, /ours" in refused
    assert (config / "lab.yaml").read_text() == own
    invoke(*ANSWERED, code=0)
    text = (config / "lab.yaml").read_text()
    assert text.startswith(own)
    assert "node_types:" in text
    assert "account: theirs" in (folder / "dtslurm.yaml").read_text()
