"""Secrets: the sources of their values, and messages without values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtslurm.checks import job_checks
from dtslurm.checks.secrets import holds_password, looks_secret
from dtslurm.services.request.spec import secrets_of, shell_file
from dtslurm.services.wiring.context import Context


def replace_keyring(monkeypatch: pytest.MonkeyPatch, values: dict[tuple[str, str], str]) -> None:
    kept = SimpleNamespace(get_password=lambda service, name: values.get((service, name)))
    monkeypatch.setitem(sys.modules, "keyring", kept)


def test_the_environment_takes_precedence_over_the_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_keyring(monkeypatch, {("dtslurm", "HF_TOKEN"): "kept", ("dtslurm", "WANDB_API_KEY"): "also kept"})
    checked = secrets_of(Context(env={"HF_TOKEN": "here"}), ["HF_TOKEN", "WANDB_API_KEY"])
    assert checked.value == {"HF_TOKEN": "here", "WANDB_API_KEY": "also kept"}
    assert checked.problems == []


def test_missing_secrets_are_reported_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_keyring(monkeypatch, {})
    absent = "--secret {name}: neither your environment nor the keyring has a value of this name "
    absent += "(keyring set dtslurm {name})"
    env = {"NUL": "a\0hush", "EMPTY": ""}
    checked = secrets_of(Context(env=env), ["TOKEN=hush", "A-B", "NOWHERE", "NUL", "EMPTY"])
    assert checked.value == {}
    assert list(checked.problems) == [
        absent.format(name="NOWHERE"),
        "--secret NUL: the value contains a NUL byte",
        absent.format(name="EMPTY"),
    ]
    assert "hush" not in "".join(checked.problems)


def test_invalid_secret_names_are_reported_without_values() -> None:
    shown = {"TOKEN": "--env"}
    assert job_checks.check_secret_names(
        ["FINE", "TOKEN=hush", "A-B", "A B;$(id)", "", "A\n", "TOKEN", "SLURM_PROCID"], shown
    ) == [
        "--secret accepts only a name: put the value into an environment variable of that name first",
        "--secret 'A-B' is not a variable name",
        "--secret 'A B;$(id)' is not a variable name",
        "--secret '' is not a variable name",
        "--secret 'A\\n' is not a variable name",
        "--secret TOKEN: --env also sets TOKEN, and writes its value into the script; remove one of them",
        "--secret SLURM_PROCID is set by Slurm, and the ranks read it; remove it",
    ]


def test_a_locked_keyring_is_treated_as_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: str) -> str:
        raise RuntimeError("no backend")

    monkeypatch.setitem(sys.modules, "keyring", SimpleNamespace(get_password=locked))
    checked = secrets_of(Context(env={}), ["TOKEN"])
    assert checked.value == {}
    assert len(checked.problems) == 1


def test_the_secrets_file_preserves_all_bytes_of_a_value(tmp_path: Path) -> None:
    value = "a'b\"$(false)\n\udcff`x`"
    (tmp_path / "secrets").write_bytes(shell_file({"TOKEN": value}))
    result = subprocess.run(
        ["sh", "-c", '. ./secrets; printf %s "$TOKEN"'], cwd=tmp_path, capture_output=True, check=True
    )
    assert result.stdout == value.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("name", "like_one"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("MyPassword", False),
        ("DB_PASSWORD", True),
        ("TOKENIZER", False),
        ("RAY_AUTH_TOKEN_PATH", False),
    ],
)
def test_names_of_secrets_are_recognised(name: str, like_one: bool) -> None:
    assert looks_secret(name) is like_one


@pytest.mark.parametrize(
    ("value", "holds_one"),
    [
        ("https://me:hush@host:5000/x", True),
        ("postgresql://me:a:b/c@db", False),  # a slash ends the host's part
        ("http://:hush@proxy", True),
        ("https://me@host:5000", False),
        ("https://host:5000/a@b", False),
        ("a:b@c", False),
    ],
)
def test_addresses_with_a_password_are_recognised(value: str, holds_one: bool) -> None:
    assert holds_password(value) is holds_one
