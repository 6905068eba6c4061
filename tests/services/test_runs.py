"""Which runs there are."""

from __future__ import annotations

import shutil
from pathlib import Path

from dtslurm.model.record import JobRecord
from dtslurm.services.context import Context
from dtslurm.services.runs import find, recent
from dtslurm.store import codec
from dtslurm.store.rundir import RunDir


def make(context: Context, folder: Path, number: int, cluster: str) -> JobRecord:
    record = JobRecord(
        token=str(number),
        cluster=cluster,
        name="train",
        run_dir=str(folder / f"run-{number}"),
        phase="submitted",
        created_at=float(number),
        job_id=str(100 + number),
    )
    run = RunDir(Path(record.run_dir))
    run.create(context.transport, {RunDir.RECORD: codec.encode({"schema": 1, **codec.plain(record)})})
    context.index.put(record)
    return record


def test_runs_of_other_clusters_and_removed_ones_hide_none(tmp_path: Path) -> None:
    context = Context(env={"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")})
    mine = make(context, tmp_path, 1, "mine")
    others = [make(context, tmp_path, number, "theirs") for number in (2, 3, 4)]
    assert recent(context, 1, "mine") == [mine]
    assert find(context, None, "mine") == mine
    assert recent(context, 2) == [others[2], others[1]]
    shutil.rmtree(others[2].run_dir)
    shutil.rmtree(others[1].run_dir)
    assert recent(context, 2) == [others[0], mine]
