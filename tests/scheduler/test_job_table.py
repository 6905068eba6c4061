"""The table of many jobs gives the same answers as a search, with fewer comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.scheduler import job_table
from dtslurm.scheduler.job_table import JobTable, select_unlisted_tasks
from dtslurm.slurm.arrays import matches_job_id

IDS = st.one_of(
    st.sampled_from(["17", "17_[1-9:2%4]", "17_[2,4]", "18_[0-3]", "17_", "x", ""]),
    st.builds("{}_{}".format, st.integers(16, 18), st.integers(0, 11)),
    st.builds("{}+{}".format, st.integers(16, 18), st.integers(0, 2)),
)


def jobs(ids: Sequence[str]) -> list[JobStatus]:
    return [JobStatus(job_id=item, raw_id="1", state=JobState.RUNNING) for item in ids]


@given(st.lists(IDS, max_size=12), IDS)
def test_job_table_finds_the_same_jobs_as_matching_each_job(listed: list[str], requested_id: str) -> None:
    result = JobTable(jobs(listed)).covering(requested_id)
    assert [job.job_id for job in result] == [item for item in listed if matches_job_id(item, requested_id)]


@given(st.lists(IDS.filter(lambda item: "_" in item), max_size=8), st.lists(IDS, max_size=8))
def test_unlisted_returns_jobs_that_no_listed_job_covers(missing_ids: list[str], listed: list[str]) -> None:
    ours = [missing_id for missing_id in missing_ids if missing_id.startswith("17_")]
    present = [item for item in listed if item.startswith("17_")]
    job_ids = [job.job_id for job in select_unlisted_tasks(jobs(ours), jobs(present))]
    assert job_ids == [item for item in ours if not any(matches_job_id(other, item) for other in present)]


def test_job_table_examines_each_job_once_for_many_lookups() -> None:
    table = JobTable(jobs([str(number) for number in range(1000)]))
    with mock.patch.object(job_table, "matches_job_id", side_effect=matches_job_id) as looked:
        assert all(table.covering(str(number)) for number in range(1000))
    assert looked.call_count == 1000
