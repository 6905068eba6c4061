"""What is wrong on the cluster is told before anything is queued, all of it at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.services.context import Context
from dtslurm.services.prepare import Prepared, prepare
from dtslurm.services.request import JobRequest
from tests.lab.cluster import SlurmLab


@pytest.fixture
def context(tmp_path: Path) -> Context:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return Context(cwd=tmp_path)


def made(context: Context, cluster: str, **asked: object) -> Prepared:
    request = JobRequest(script="train.py", time="10", cluster=cluster, **asked)  # type: ignore[arg-type]
    return prepare(context, request, standalone=False)


def test_everything_missing_is_told_at_once(context: Context) -> None:
    with pytest.raises(RequestInvalid) as caught:
        made(context, "local", python="/no/python", chdir="/no/folder")
    assert list(caught.value.problems) == [
        "there is no folder /no/folder here to run in",
        "there is no interpreter /no/python here",
    ]
    assert "--no-check" in caught.value.hint


def test_nothing_is_asked_without_checks(context: Context) -> None:
    assert made(context, "local", python="/no/python", no_check=True).submission.spec.python == "/no/python"


def test_an_environment_that_is_gone(context: Context) -> None:
    context.env = {**context.env, "VIRTUAL_ENV": "/no/venv"}
    with pytest.raises(RequestInvalid, match="no environment /no/venv"):
        made(context, "local")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"nodelist": "n9"}, "Invalid node name"),
        ({"partition": "main", "sbatch": ("--licenses=none",)}, "[Ll]icense"),
    ],
)
def test_slurm_itself_judges(
    context: Context, slurm_env: SlurmLab, asked: dict[str, object], said: str
) -> None:
    context.env = {**context.env, **slurm_env.env}
    with pytest.raises(RequestInvalid, match=said):
        made(context, "slurm", **asked)


def test_drained_nodes_are_no_reason_to_refuse(context: Context, slurm_env: SlurmLab) -> None:
    """Slurm's dry run says no to what it would queue and start later."""
    slurm_env.run(["scontrol", "update", "nodename=n4", "state=drain", "reason=test"])
    try:
        notices = made(context, "slurm", nodes=4).submission.notices
    finally:
        slurm_env.run(["scontrol", "update", "nodename=n4", "state=resume"])
    assert any("sbatch --test-only: " in line for line in notices)
