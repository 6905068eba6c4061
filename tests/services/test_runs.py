"""What names a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.model.job import JobRecord
from dtslurm.services.context import Context
from dtslurm.services.records import save
from dtslurm.services.runs import find, words_for
from dtslurm.store import codec


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(cwd=tmp_path, env={"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")})


def kept(context: Context, cluster: str, job: str) -> JobRecord:
    folder = context.cwd / f"{cluster}-{job}"
    folder.mkdir()
    record = JobRecord(
        token=f"{cluster}{job}", script_hash="", cluster=cluster, name="train", run_dir=str(folder),
        phase="submitted", created_at=1.0, job_id=job,
    )  # fmt: skip
    (folder / "job.json").write_bytes(codec.encode({"schema": 1}))
    save(context, record)
    return record


def test_a_command_that_is_offered_names_one_run(context: Context) -> None:
    here, there = kept(context, "local", "7"), kept(context, "big", "7")
    other = kept(context, "big", "8")
    with pytest.raises(RequestInvalid, match="several clusters: big, local"):
        find(context, "7")
    assert words_for(context, here) == "7 --cluster local"
    assert words_for(context, there) == "7 --cluster big"
    assert words_for(context, other) == "8"
    assert words_for(context, replace(other, job_id=None)) == "big8"
