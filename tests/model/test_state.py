from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.model.runs.state import JobState, JobStatus, StateFlag, read_state


@pytest.mark.parametrize(
    ("words", "state", "flags"),
    [
        ("RUNNING", JobState.RUNNING, set()),
        ("R", JobState.RUNNING, set()),
        ("CANCELLED by 1000", JobState.CANCELLED, set()),
        ("CANCELLED", JobState.CANCELLED, set()),
        ("COMPLETING", JobState.UNKNOWN, {StateFlag.COMPLETING}),
        ("FAILED,COMPLETING", JobState.FAILED, {StateFlag.COMPLETING}),
        ("PENDING+REQUEUED", JobState.PENDING, {StateFlag.REQUEUED}),
        ("REQUEUE_HOLD", JobState.PENDING, {StateFlag.REQUEUE_HOLD}),
        ("CONFIGURING", JobState.RUNNING, {StateFlag.CONFIGURING}),
        ("OOM", JobState.OUT_OF_MEMORY, set()),
        ("SOMETHING_NEW", JobState.UNKNOWN, set()),
        ("", JobState.UNKNOWN, set()),
    ],
)
def test_states_and_flags_are_parsed(words: str, state: JobState, flags: set[StateFlag]) -> None:
    assert read_state(words) == (state, frozenset(flags))


@given(st.text())
def test_f65_arbitrary_state_words_cause_no_error(words: str) -> None:
    read_state(words)


def test_f31_an_ended_job_with_a_flag_is_not_terminal() -> None:
    failed = JobStatus(job_id="1", state=JobState.FAILED)
    assert failed.terminal
    assert not failed.ok
    for flag in (StateFlag.COMPLETING, StateFlag.REQUEUED, StateFlag.SPECIAL_EXIT):
        assert not JobStatus(job_id="1", state=JobState.FAILED, flags=frozenset({flag})).terminal


def test_f65_an_unknown_state_is_not_terminal() -> None:
    unknown = JobStatus(job_id="1", state=JobState.UNKNOWN)
    assert unknown.unknown
    assert not unknown.terminal
    assert not unknown.ok


def test_a_completing_job_has_a_known_state_and_has_not_ended() -> None:
    completing = JobStatus(job_id="1", state=JobState.UNKNOWN, flags=frozenset({StateFlag.COMPLETING}))
    assert not completing.unknown
    assert not completing.terminal
