"""Parsers of squeue, sacct and sbatch output: recorded versions and arbitrary bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.slurm import fields, parse
from dtslurm.slurm.fields import FIELD_END, RECORD_END, SACCT, SQUEUE
from tests.slurm import recorded
from tests.slurm.recorded import VERSIONS

S = JobState
# One workload ran in every version; only the job numbers differ.
STATES = {
    "canc": S.CANCELLED, "ok": S.COMPLETED, "fail": S.FAILED, "segv": S.FAILED, "nodefail": S.NODE_FAIL,
    "dep": S.PENDING, "never": S.PENDING, "big": S.PENDING, "later": S.PENDING, "held": S.PENDING,
    "long": S.RUNNING, "requ": S.RUNNING, "limit": S.TIMEOUT,
}  # fmt: skip


def jobs_by_name(jobs: list[JobStatus]) -> dict[str, JobStatus]:
    return {job.name: job for job in jobs}


def recorded_jobs() -> dict[str, JobStatus]:
    return {
        job.job_id: job for job in parse.squeue(recorded.read("22.05.8", "squeue_records.txt"), uid=0).jobs
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_squeue_output_of_every_version_is_parsed(version: str) -> None:
    listing = parse.squeue(recorded.squeue(version), observed_at=5.0)
    assert not listing.skipped
    jobs = jobs_by_name(listing.jobs)
    assert {name: jobs[name].state for name in STATES} == STATES
    assert jobs["held"].reason == "JobHeldUser"
    assert jobs["never"].reason == "DependencyNeverSatisfied"
    assert jobs["big"].reason.startswith("Nodes required for job are DOWN")
    assert jobs["ok"].nodes == 2
    assert (jobs["ok"].source, jobs["ok"].observed_at, jobs["ok"].exit_code) == ("squeue", 5.0, 0)
    assert jobs["fail"].exit_code is None
    ids = [job.job_id for job in listing.jobs if job.name in {"arr", "het"}]
    assert sorted(ids[:-2]) == sorted(f"{ids[0].split('_')[0]}_{task}" for task in range(6)) or len(ids) == 8


@pytest.mark.parametrize("version", VERSIONS)
def test_sacct_output_of_every_version_is_parsed(version: str) -> None:
    listing = parse.sacct(recorded.sacct(version), observed_at=5.0)
    assert not listing.skipped
    jobs = jobs_by_name(parse.keep_latest(listing.jobs))
    assert (jobs["fail"].state, jobs["fail"].exit_code, jobs["fail"].signal) == (S.FAILED, 3, None)
    assert (jobs["segv"].state, jobs["segv"].exit_code, jobs["segv"].signal) == (S.FAILED, None, 11)
    assert (jobs["canc"].state, jobs["canc"].exit_code) == (S.CANCELLED, None)
    assert jobs["canc"].raw_state == "CANCELLED by 0"
    assert (jobs["ok"].exit_code, jobs["ok"].ok, jobs["ok"].source) == (0, True, "sacct")
    assert jobs["limit"].state is S.TIMEOUT
    assert jobs["big"].nodelist == ""
    # Requeued once: two records, one job.
    assert len([job for job in listing.jobs if job.name == "requ"]) == 2
    assert jobs["requ"].restarts == 1


def test_a_local_date_is_not_parsed_as_time() -> None:
    assert all(job.start_time is None for job in parse.squeue(recorded.squeue("22.05.8")).jobs)


def test_every_field_of_the_squeue_format_is_parsed() -> None:
    jobs = recorded_jobs()
    assert len(jobs) == 13
    assert jobs["12"] == JobStatus(
        job_id="12", raw_id="12", state=S.RUNNING, raw_state="RUNNING", name='line\nbreak|pipe=eq "q"',
        partition="main", nodelist="n1", nodes=1, submit_time=1795269424, start_time=1795269424,
        time_left=593, time_limit=600, comment="dtslurm:cafe0001", source="squeue",
    )  # fmt: skip
    assert (jobs["18"].state, jobs["18"].reason) == (S.PENDING, "BeginTime")
    assert (jobs["18"].start_time, jobs["18"].estimated_start) == (None, 1795269432)
    assert (jobs["22"].end_time, jobs["22"].time_left) == (1795269426, None)
    assert jobs["13_[6,9%1]"].raw_id == "13"
    assert jobs["13_0"].name == "bad\udcff"
    assert (jobs["14"].comment, jobs["14"].name) == ("c JobState=FAKE Reason=None", "x JobState=FAKE y")
    assert [jobs[name].raw_id for name in ("19+0", "19+1")] == ["19", "20"]


def test_rows_of_other_users_are_ignored() -> None:
    assert parse.squeue(recorded.read("22.05.8", "squeue_records.txt"), uid=1000).jobs == []


def test_every_field_of_the_sacct_format_is_parsed() -> None:
    columns = parse.select_supported_fields(SACCT, recorded.read("22.05.8", "sacct_helpformat.txt"))
    assert [item.name for item in SACCT if item not in columns] == ["restarts"]
    listing = parse.sacct(recorded.read("22.05.8", "sacct_records.txt"), columns, uid=0)
    assert not listing.skipped
    jobs = {job.job_id: job for job in parse.keep_latest(listing.jobs)}
    assert jobs["12"].name == "line\nbreak|pipe=eq `q`"
    assert (jobs["15"].exit_code, jobs["16"].signal, jobs["17"].signal) == (3, 53, 9)
    assert (jobs["18"].state, jobs["18"].restarts, jobs["18"].submit_time) == (S.RUNNING, 1, 1795269426)
    assert (jobs["13_3"].raw_id, jobs["13_3"].nodes) == ("24", 1)


def test_f61_a_malformed_row_does_not_affect_other_rows() -> None:
    good = recorded.read("22.05.8", "squeue_records.txt")
    listing = parse.squeue("slurm: some banner\x1e\n" + good + f"x{FIELD_END}y{RECORD_END}\n")
    assert len(listing.jobs) == 13
    assert listing.skipped == ["slurm: some banner", f"x{FIELD_END}y"]


@pytest.mark.parametrize(
    ("word", "state", "flags"),
    [("COMPLETING", S.UNKNOWN, {StateFlag.COMPLETING}), ("CONFIGURING", S.RUNNING, {StateFlag.CONFIGURING}),
     ("MOONSTRUCK", S.UNKNOWN, set()), ("", S.UNKNOWN, set())],
)  # fmt: skip
def test_f65_unknown_and_transitional_states_are_parsed(
    word: str, state: JobState, flags: set[StateFlag]
) -> None:
    job = parse.status({"job_id": "1", "raw_id": "1", "raw_state": word}, "squeue", 0.0)
    assert (job.state, set(job.flags), job.raw_state, job.terminal) == (state, flags, word, False)


def record_row(columns: tuple[fields.Field, ...], **values: str) -> str:
    return FIELD_END.join(values.get(column.name, "") for column in columns)


@pytest.mark.parametrize(
    ("limit", "printed", "left"), [(365 * 86400, "364-23:59:57", None), (3600, "59:57", 3597)]
)
def test_a_job_without_a_time_limit_has_no_time_left(limit: int, printed: str, left: int | None) -> None:
    """Slurm shows a limit of 365 days where neither the job nor its partition has one."""
    times = {"start_time": "1795501403", "end_time": str(1795501403 + limit), "time_left": printed}
    columns = {"raw_id": "7", "job_id": "7", "raw_state": "RUNNING", **times}
    [job] = parse.squeue(record_row(SQUEUE, **columns) + RECORD_END).jobs
    assert (job.start_time, job.time_left) == (1795501403, left)


odd_text = st.text(st.characters(codec="utf-8") | st.sampled_from("\n|=\"'\x1f\udcff \t")).filter(
    lambda text: RECORD_END not in text
)


@given(st.lists(odd_text, min_size=1, max_size=5), odd_text.filter(lambda text: FIELD_END not in text))
def test_f62_c3_any_name_and_comment_are_preserved_by_the_squeue_parser(
    names: list[str], comment: str
) -> None:
    records = [
        record_row(SQUEUE, job_id=str(i), raw_id=str(i), raw_state="RUNNING", comment=comment, name=name)
        + RECORD_END
        for i, name in enumerate(names, 1)
    ]
    listing = parse.squeue("\n".join(records) + "\n")
    assert [job.name for job in listing.jobs] == names
    assert all(job.state is S.RUNNING for job in listing.jobs)


@given(st.text("ab\n\n|=\"'\x1f\udcff é", max_size=20), st.text("cd\n7", max_size=20))
def test_c3_f62_any_name_is_preserved_by_the_sacct_parser(first: str, second: str) -> None:
    rows = [
        record_row(SACCT, job_id=str(i), raw_id=str(i), raw_state="FAILED", exit="3:0", name=name)
        for i, name in enumerate((first, second), 1)
    ]
    jobs = parse.sacct("\n".join(rows) + "\n").jobs
    assert [(job.name, job.exit_code) for job in jobs] == [(first, 3), (second, 3)]


@given(
    st.binary(max_size=300)
    | st.lists(st.sampled_from([b"1", b"\x1f", b"\x1e", b"\n", b"_[", b"\xff"])).map(b"".join)
)
def test_f61_arbitrary_bytes_do_not_break_the_parsers(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    parse.keep_latest(parse.sacct(text).jobs)
    parse.squeue(text)
    parse.parse_submitted_id(text)
    for item in fields.FIELDS:
        item.read(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:46", 106), ("10:00:00", 36000), ("1-02:03:04", 93784), ("UNLIMITED", None), ("INVALID", None),
     ("NOT_SET", None), ("N/A", None), ("", None), ("0:00", 0), ("-0:05", None)],
)  # fmt: skip
def test_durations_are_parsed(text: str, seconds: int | None) -> None:
    assert fields.seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "number"),
    [("4", 4), ("2K", 2048), ("1.50K", 1536), ("2-8", 2), ("", None), ("N/A", None), ("x", None)],
)
def test_counts_are_parsed(text: str, number: int | None) -> None:
    assert fields.count(text) == number


@pytest.mark.parametrize(
    "text", ["N/A", "Unknown", "None", "NONE", "", "2026-11-21T00:31:16", "0", "-1", "1" * 30]
)
def test_placeholders_are_not_parsed_as_times(text: str) -> None:
    assert fields.epoch(text) is None


@pytest.mark.parametrize(
    ("text", "code"),
    [("3:0", (3, None)), ("0:9", (None, 9)), ("0:53", (None, 53)), ("", (None, None)), ("x:y", (None, None))],
)  # fmt: skip
def test_exit_codes_are_parsed(text: str, code: tuple[int | None, int | None]) -> None:
    assert fields.exit_code(text) == code


def test_exit_codes_are_described_in_words() -> None:
    assert "output file" in parse.describe_exit(None, 53)
    assert parse.describe_exit(None, 9) == "ended by signal 9 (SIGKILL)"
    assert parse.describe_exit(137, None) == "exit code 137: ended by signal 9 (SIGKILL)"
    assert "not found" in parse.describe_exit(127, None)
    assert parse.describe_exit(3, None) == "exit code 3"
    assert parse.describe_exit(None, None) == ""


@pytest.mark.parametrize(
    ("output", "job_id"),
    [("123\n", "123"), ("123;cluster\n", "123"), ("This cluster closes on Friday\n17;c1\n", "17"),
     ("42 is the answer\n7\n", "7"), ("Submitted batch job 5\n", None), ("", None), ("0\n", None)],
)  # fmt: skip
def test_the_job_id_is_parsed_from_the_sbatch_answer(output: str, job_id: str | None) -> None:
    assert parse.parse_submitted_id(output) == job_id
