"""The supervisor's time limit, and the nodes that it chooses for an attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.supervisor import slurm
from dtslurm.worker.supervisor.main import Supervisor
from tests.worker.test_supervisor_races import ASKED

NOW = 1_000_000.0


@pytest.fixture
def job(site: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the fields that Slurm shows of the job, at the time `NOW`."""
    del site
    fields = {"JobState": "RUNNING"}
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setattr(slurm, "now", lambda: NOW)
    monkeypatch.setattr(slurm, "show_job", lambda _patience=0.0: fields)
    monkeypatch.setattr(slurm, "seconds_of", lambda stamp: float(stamp) if stamp else None)
    return fields


def test_time_limit_is_that_of_slurm_else_the_requested_one(
    job: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*ASKED, "--time-limit=600"]
    assert (Supervisor(ASKED).limit_at, Supervisor(words).limit_at) == (None, NOW + 600)
    job["EndTime"] = "1000300"
    assert Supervisor(words).limit_at == NOW + 300
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000100")
    assert Supervisor(words).limit_at == NOW + 100
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    assert Supervisor(words).limit_at == NOW + 300


@pytest.mark.parametrize(
    ("left_s", "shown_s", "is_near", "limit_s"),
    [
        (30, 30, False, 30),
        (29, 29, True, 29),
        (-5, None, True, -5),  # Slurm does not tell
        (29, 900, False, 900),  # the site has raised it
        (900, 5, False, 900),  # Slurm is not asked while much time is left
    ],
)
def test_run_with_a_total_time_stops_before_the_limit_of_its_job(
    job: dict[str, str], left_s: int, shown_s: int | None, is_near: bool, limit_s: int
) -> None:
    keeper = Supervisor([*ASKED, "--total-time=9000"])
    keeper.limit_at = NOW + left_s
    job["EndTime"] = "" if shown_s is None else str(NOW + shown_s)
    assert keeper.limit_is_near() is is_near
    assert keeper.limit_at == NOW + limit_s


@pytest.mark.usefixtures("job")
def test_run_without_a_total_time_or_a_limit_goes_on_until_slurm_ends_it() -> None:
    keeper = Supervisor(ASKED)
    keeper.limit_at = NOW
    assert not keeper.limit_is_near()
    keeper = Supervisor([*ASKED, "--total-time=9000"])
    assert not keeper.limit_is_near()


@pytest.mark.parametrize(
    ("words", "is_due", "shown_s", "reported"),
    [
        ([], True, 60, ["the job reaches its time limit in 60 s, and training continues"]),
        ([], True, 90_000, []),  # the site has raised it
        ([], False, 60, []),
        (["--total-time=9000"], True, 60, []),  # the run continues after it
    ],
)
def test_time_limit_is_reported_unless_it_was_raised(
    job: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    is_due: bool,
    shown_s: int,
    reported: list[str],
) -> None:
    keeper = Supervisor([*ASKED, "--time-limit=600", *words])
    keeper.limit_at = NOW + 60
    job["EndTime"] = str(NOW + shown_s)
    reports: list[Any] = []
    looks: list[None] = []
    monkeypatch.setattr(keeper.notifications, "is_limit_check_due", lambda: is_due)
    monkeypatch.setattr(
        keeper.notifications, "report_limit", lambda number, summary: reports.append((number, summary))
    )
    monkeypatch.setattr(keeper.notifications, "look", lambda: looks.append(None))
    keeper.check_messages(3)
    assert reports == [(3, summary) for summary in reported]
    assert len(looks) == 1


@pytest.mark.parametrize(
    ("words", "excluded", "lost", "expected"),
    [
        ([], [], [], ["n1", "n2"]),
        ([], ["n1"], [], ["n2", "n3"]),
        ([], ["n1", "n2"], [], ["n1", "n3"]),  # an excluded node is better than too few
        ([], ["n3"], ["n1"], ["n2", "n3"]),  # and than a lost one
        ([], [], ["n1", "n2", "n3"], ["n1", "n2"]),
        (["--least-nodes=1"], ["n1"], ["n2"], ["n3"]),
    ],
)
@pytest.mark.usefixtures("job")
def test_healthy_nodes_are_chosen_first(
    words: list[str], excluded: list[str], lost: list[str], expected: list[str]
) -> None:
    keeper = Supervisor([*ASKED, *words])
    keeper.nodes = ["n1", "n2", "n3"]
    keeper.lost = lost
    for name in excluded:
        keeper.ledger.event("node_excluded", 0, node=name)
    assert keeper.choose() == expected
