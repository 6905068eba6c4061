"""Probes and checks leave no folder and no job behind."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import TransportError
from dtslurm.services.clusters import probing, verify_profile
from dtslurm.services.clusters.probing import Target
from dtslurm.services.runs import control
from dtslurm.services.submit import stages
from dtslurm.services.wiring.context import Context
from dtslurm.transport.base import Completed


class Site:
    """A login node that refuses every job."""

    def __init__(self) -> None:
        self.ran: list[Sequence[str]] = []

    def run(self, argv: Sequence[str], **_: Any) -> Completed:
        self.ran.append(argv)
        return Completed(tuple(argv), 0, "\x1egpu\nsbatch: error: no such partition\n", "")


def test_refused_probes_leave_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "run_root", lambda *_: "/runs")
    site = Site()
    cluster: Any = SimpleNamespace(transport=site)
    (probe,) = probing.probe(Context(), cluster, [Target(name="gpu", options=())], wait_s=1.0)
    assert "no such partition" in probe.problem
    folder = site.ran[0][4]
    assert site.ran[-1] == ["rm", "-rf", folder]


def test_an_interrupted_profile_verification_cancels_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[object] = []
    status = SimpleNamespace(start_time=None)
    monkeypatch.setattr(
        verify_profile, "views", lambda *_: [SimpleNamespace(terminal=False, statuses=[status])]
    )
    monkeypatch.setattr(control, "change_jobs", lambda *words: cancelled.append(words[1:]))

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    record: Any = SimpleNamespace(token="t", cluster="c", job_id="7")
    with pytest.raises(KeyboardInterrupt):
        verify_profile._ended(Context(sleep=interrupted), record, 60.0)
    assert cancelled == [("cancel", ["t"], "c")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TransportError("the link is gone")])
def test_an_interrupted_submission_of_stages_cancels_the_queued_stages(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    cancelled: list[object] = []
    answers = iter([SimpleNamespace(job_id="7", token="first"), error])

    def submit(*_: object) -> Any:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(stages, "submit", submit)
    monkeypatch.setattr(stages, "add_dependency", lambda prepared, _: prepared)
    monkeypatch.setattr(control, "change_jobs", lambda *words: cancelled.append(words[1:]))
    planned: Any = [
        SimpleNamespace(step=SimpleNamespace(stage=name, needs=()), sweeping=None, prepared=None)
        for name in ("one", "two")
    ]
    with pytest.raises(type(error)):
        stages.queue(Context(), planned)
    assert cancelled == [("cancel", ["first"])]
