"""Filename patterns of sbatch, expanded by a shell."""

from __future__ import annotations

import subprocess

import pytest

from dtslurm.render.output_paths import fill_in_pattern

JOB = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "a b", "SLURMD_NODENAME": "n1", "USER": "me"}
TASK = {**JOB, "SLURM_ARRAY_JOB_ID": "1230", "SLURM_ARRAY_TASK_ID": "17"}


@pytest.mark.parametrize(
    ("pattern", "env", "path"),
    [
        ("slurm-%j.out", JOB, "/w d/slurm-1234.out"),
        ("/logs/%x/%A_%a.log", TASK, "/logs/a b/1230_17.log"),
        ("%A", JOB, "/w d/1234"),
        ("%6j-%3a-%b", TASK, "/w d/001234-017-7"),
        ("%u.%N.%n.%t.%s.%J", JOB, "/w d/me.n1.0.0.batch.1234"),
        ("100%%-%q-$HOME-$(id)", JOB, "/w d/100%-%q-$HOME-$(id)"),
        ("it's\\%j", JOB, "/w d/it's%j"),
        ("%a", JOB, "/w d/4294967294"),
    ],
)
def test_output_patterns_are_expanded_like_slurm(pattern: str, env: dict[str, str], path: str) -> None:
    word = fill_in_pattern(pattern, "/w d")
    done = subprocess.run(["bash", "-c", f"echo {word}"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}\n"
