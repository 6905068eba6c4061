"""The lines about roles on the page of a run."""

from __future__ import annotations

from typing import Any

from dtslurm.dashboard import words
from dtslurm.views import telemetry
from dtslurm.views.run_page import Page, page


def page_of(*states: str) -> Page:
    """Return the page from the answer of the telemetry program."""
    instances = [
        {"instance": index, "state": state, "node": f"n{index}", "restarts": index}
        for index, state in enumerate(states)
    ]
    answer: dict[str, Any] = {"now": 10.0, "roles": [{"name": "rollout", "instances": instances}]}
    return page(telemetry.read(answer), key="k", taken_at=10.0)


def test_each_role_has_a_line_in_the_colour_of_its_state() -> None:
    lines = [
        words.describe_roles(page_of("ready", "ready"), has_ended=False),
        words.describe_roles(page_of("ready", "starting"), has_ended=False),
        words.describe_roles(page_of("ready", "failed"), has_ended=True),
        words.describe_roles(page_of("ended", "ended"), has_ended=True),
    ]
    assert lines == [
        [("rollout: 2 of 2 ready on n[0-1], 1 restart", "good")],
        [("rollout: 1 of 2 ready (1 starting) on n[0-1], 1 restart", "warn")],
        [("rollout: 1 of 2 instances failed on n[0-1], 1 restart", "bad")],
        [("rollout: ended on n[0-1], 1 restart", "dim")],
    ]


def test_run_of_one_role_has_no_such_line() -> None:
    assert (
        words.describe_roles(page(telemetry.read({"now": 1.0}), key="k", taken_at=1.0), has_ended=False) == []
    )
