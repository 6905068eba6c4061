"""Secrets given by mistake: shared pages must not show them, and a snapshot must not copy them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dtslurm.checks.secrets import hide_secrets
from dtslurm.store.ignore_rules import is_secret
from tests.warm import run_dtslurm

GOLD = 'gold\'en $key "ä"'


def test_no_page_shows_a_secret_of_the_environment(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print('trained')\n")
    env = {**os.environ, "DTSLURM_LOCAL_STATE": str(tmp_path / "local")}

    def run(*words: str) -> str:
        done = run_dtslurm(words, cwd=folder, env=env, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    jobs = []
    for more in ("1", "2"):
        secrets = (
            f"WANDB_API_KEY={GOLD}{more}",
            f"STORE=https://me:silver{more}@store.example/x",
            "MODE=shown-mode",
        )
        words = [word for secret in secrets for word in ("--env", secret)]
        jobs.append(
            run(
                "submit",
                "--parsable",
                "--wait",
                "--cluster",
                "local",
                "-l",
                "single",
                "-t",
                "1",
                *words,
                "train.py",
            )
        )
    run("report", jobs[0], "-o", "report.html")
    run("compare", *jobs, "-o", "compare.html")
    for text in (
        (folder / "report.html").read_text(),
        (folder / "compare.html").read_text(),
        run("compare", *jobs),
        run("status", jobs[0]),
    ):
        assert "gold" not in text
        assert "silver" not in text
    page = (folder / "report.html").read_text()
    assert "shown-mode" in page
    assert "(hidden)" in page


@pytest.mark.parametrize(
    ("text", "hidden_text"),
    [
        ("a gold-key b", "a (hidden) b"),
        ("TOKENS=2048 short x1", "TOKENS=2048 short x1"),
        ("https://me:pass@host/x", "https://me:(hidden)@host/x"),
        ("https://me@host:80/x", "https://me@host:80/x"),
        ("", ""),
    ],
)
def test_secrets_are_hidden_in_text(text: str, hidden_text: str) -> None:
    env = [["API_KEY", "gold-key"], ["TOKENS", "2048"], ["MAX_TOKEN", "x1"], ["SEED_TOKEN", None]]
    assert (
        hide_secrets(text, {"spec": {"env": env}, "request": {"env": ["HF_TOKEN=gold-key"]}}) == hidden_text
    )


@pytest.mark.parametrize(
    "document", [{}, {"spec": 1}, {"spec": {"env": 7}}, {"spec": {"env": [[1, 2, 3], 4]}}]
)
def test_malformed_record_is_not_changed_by_hiding_secrets(document: dict[str, object]) -> None:
    text = json.dumps(document)
    assert hide_secrets(text, document) == text


@pytest.mark.parametrize(
    "path",
    [
        "kaggle.json", ".kaggle/kaggle.json", ".huggingface/token", ".hf_token", ".config/gcloud/x.db",
        "application_default_credentials.json", "keys/service-account-prod.json", "client_secret_123.json",
        "kubeconfig", "prod.kubeconfig", ".kube/config", "infra/prod.tfvars", "terraform.tfstate",
        ".bash_history", ".zsh_history", ".python_history", "rclone.conf", ".streamlit/secrets.toml",
        "secrets.yaml", ".databrickscfg", "KAGGLE.JSON", "a/b/.Bash_History",
    ],
)  # fmt: skip
def test_credential_files_are_recognized(path: str) -> None:
    assert is_secret(path)


@pytest.mark.parametrize(
    "path",
    [
        "train.py", "tokenizer.json", "token.py", "history.py", "bash_history.md", "configs/model.yaml",
        "credentials.py", "kaggle.py", "data/kaggle.jsonl", "id_rsa.pub", ".env.example", "secrets.py",
    ],
)  # fmt: skip
def test_code_files_are_not_credential_files(path: str) -> None:
    assert not is_secret(path)
