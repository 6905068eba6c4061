"""What a run has been through, in order."""

from __future__ import annotations

import pytest

from dtslurm.services.history import queued_first


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("started submitted ended", "submitted started ended"),  # the job was faster than sbatch's answer
        ("checked started attempt submitted ended", "checked submitted started attempt ended"),
        ("submitted started ended submitted started", "submitted started ended submitted started"),
        ("started ended", "started ended"),
        ("submitted", "submitted"),
        ("", ""),
    ],
)
def test_a_run_is_queued_before_it_starts(written: str, told: str) -> None:
    events = queued_first([{"event": word} for word in written.split()])
    assert [event["event"] for event in events] == told.split()
