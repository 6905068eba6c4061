"""Requests with ``--notify`` that are refused before anything is queued, without showing an address."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

WORDS = ("submit", "--cluster", "local", "-t", "5")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("slck://c4n4ry/b/c", "--notify slck://***: Apprise knows no scheme 'slck'; did you mean 'slack'?"),
        ("json://", "--notify json://***: no host or token follows json://"),
        ("ntfy://?c4n4ry", "--notify ntfy://***: no host or token follows ntfy://"),
        ("mailto://c4n4ry", "--notify mailto://***: Apprise does not accept the URL: "),
        ("json://c4n4ry/a b", "--notify json://***: the URL contains a space or a control character"),
        ("c4n4ry/token", "--notify takes the name of a secret, or a URL of Apprise such as ntfys://TOPIC"),
        ("NO_SUCH_HOOK", "--notify NO_SUCH_HOOK: neither your environment nor the keyring has a value"),
        ("TOKEN_ALONE", "--notify TOKEN_ALONE: its value is not a URL such as ntfys://TOPIC"),
    ],
)
def test_invalid_address_is_refused_without_being_shown(
    invoke: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, problem: str
) -> None:
    monkeypatch.setenv("TOKEN_ALONE", "c4n4ry")
    done = invoke(*WORDS, "--notify", address, "train.py", code=2)
    assert problem in done.stderr
    assert "c4n4ry" not in done.stderr + done.stdout
    assert not list(tmp_path.rglob("job.json"))


def test_job_arrays_are_refused(invoke: Run) -> None:
    done = invoke(*WORDS, "-a", "0-3", "--notify", "json://127.0.0.1:9/x", "train.py", code=2)
    assert "--notify sends the messages of a single job, not those of a job array or a sweep" in done.stderr


def test_missing_library_is_reported_with_the_command_that_installs_it(
    invoke: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "python3").symlink_to(bare)
    done = invoke(*WORDS, "--notify", "json://127.0.0.1:9/x", "--python", str(bare), "train.py", code=2)
    assert "--notify needs the Python library Apprise, which none of" in done.stderr
    assert f"install it there: {bare} -m pip install 'dtslurm[notify]'" in done.stderr


def test_modules_of_the_project_are_not_imported_to_check_an_address(invoke: Run, folder: Path) -> None:
    (folder / "apprise.py").write_text("open('imported', 'w')")
    invoke(*WORDS, "--dry-run", "--notify", "json://127.0.0.1:9/x", "train.py", code=0)
    assert not (folder / "imported").exists()


def test_files_may_contain_names_only_and_must_be_trusted(
    invoke: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "json://127.0.0.1:9/c4n4ry")
    monkeypatch.delenv("DTSLURM_TRUSTED_FOLDERS", raising=False)
    problem = "should be the name of a secret with the URL; the URL itself contains a token"
    (folder / "dtslurm.yaml").write_text("defaults:\n  notify: [json://127.0.0.1:9/c4n4ry]\n")
    done = invoke(*WORDS, "--dry-run", "train.py", code=2)
    assert problem in done.stderr
    assert "c4n4ry" not in done.stderr
    (folder / "dtslurm.yaml").write_text("defaults:\n  notify: [HOOK]\n")
    assert "dtslurm.yaml:2: defaults.notify" in invoke(*WORDS, "train.py", code=2).stderr
    (folder / "dtslurm.yaml").unlink()
    (folder / "job.yaml").write_text("script: train.py\ntime: 5\ncluster: local\nnotify: [HOOK]\n")
    assert (
        "you have not trusted job.yaml, which sets notify HOOK" in invoke("submit", "job.yaml", code=2).stderr
    )
    stdout = invoke("submit", "--dry-run", "--json", "job.yaml", code=0).stdout
    assert json.loads(stdout)["origins"]["notify"] == "job.yaml:4"
    assert "c4n4ry" not in stdout


def test_resubmitted_run_has_the_addresses_of_the_first(invoke: Run, tmp_path: Path) -> None:
    job = invoke(*WORDS, "--notify", "json://127.0.0.1:9/c4n4ry", "--parsable", "train.py", code=0).stdout
    invoke("resubmit", job.strip(), code=0)
    documents = sorted(tmp_path.rglob("notify.json"))
    assert len(documents) == 2
    for path in documents:
        assert json.loads(path.read_text())["addresses"] == [
            {"label": "json://***", "name": "", "url": "json://127.0.0.1:9/c4n4ry"}
        ]
        assert "c4n4ry" not in (path.parent / "job.json").read_text()


def test_profile_names_addresses_for_every_run_but_arrays(
    invoke: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "json://127.0.0.1:9/c4n4ry")
    profile = folder / "cluster_profiles" / "team.yaml"
    profile.parent.mkdir()
    profile.write_text("extends: local\nnotify: [HOOK, NO_SUCH_HOOK]\n")
    words = ("submit", "--cluster", "team", "-t", "5", "--dry-run")
    done = invoke(*words, "train.py", code=2)
    assert "--notify NO_SUCH_HOOK: neither your environment nor the keyring has a value" in done.stderr
    profile.write_text("extends: local\nnotify: [HOOK]\n")
    assert "messages to HOOK are sent by the job" in invoke(*words, "train.py", code=0).stderr
    note = "job arrays send no messages: notify of profile team has no effect"
    assert note in invoke(*words, "-a", "0-3", "train.py", code=0).stderr
    profile.write_text("extends: local\nnotify: [json://127.0.0.1:9/c4n4ry]\n")
    done = invoke(*words, "train.py", code=2)
    assert "should be the name of a secret with the URL; the URL itself contains a token" in done.stderr
    assert "c4n4ry" not in done.stderr
