"""How a job continues: what Slurm is requested to do, and what the user reads about it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker.supervisor import requeue


class Slurm:
    """The functions of the supervisor's Slurm client, with answers that a test sets."""

    def __init__(self) -> None:
        self.may_requeue = True
        self.requeue_answer: tuple[bool, str] = (True, "")
        self.exclude_answer: tuple[bool, str] = (True, "")
        self.call_answer: tuple[int, str] = (0, "")
        self.eligible_at: float | None = None
        self.start_answer: tuple[bool | None, str] = (None, "")
        self.job_fields = {"Comment": "dtslurm:abc"}
        self.exclusion_answer: tuple[list[str] | None, str] = (["n2"], "")
        self.successor_answer: tuple[str | None, str] = ("18", "")
        self.calls: list[Any] = []

    def can_requeue(self) -> bool:
        return self.may_requeue

    def now(self) -> float:
        return 1000.0

    def own_id(self) -> str:
        return "17"

    def requeue(self, until: float, limit_at: float | None) -> tuple[bool, str]:
        self.calls.append(("requeue", until, limit_at))
        return self.requeue_answer

    def exclude(self, nodes: list[str]) -> tuple[bool, str]:
        self.calls.append(("exclude", nodes))
        return self.exclude_answer

    def call(self, words: list[str]) -> tuple[int, str]:
        self.calls.append(words)
        return self.call_answer

    def show_job(self) -> dict[str, str]:
        return {"EligibleTime": "a stamp"}

    def seconds_of(self, _stamp: str) -> float | None:
        return self.eligible_at

    def new_start(self, deadline: float, limit_at: float | None) -> tuple[bool | None, str, dict[str, str]]:
        self.calls.append(("new_start", deadline, limit_at))
        return *self.start_answer, self.job_fields

    def exclusion(self, _job: object, _nodes: object) -> tuple[list[str] | None, str]:
        return self.exclusion_answer

    def successor(self, script: str, options: list[str], comment: str) -> tuple[str | None, str]:
        self.calls.append((script, *options, comment))
        return self.successor_answer


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    result = Slurm()
    monkeypatch.setattr(requeue, "slurm", result)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    return result


def continue_job(
    folder: Path, excluded: tuple[str, ...] = (), limit_at: float | None = None, **values: Any
) -> tuple[str, str]:
    settings = SimpleNamespace(**{"go_on_by": "requeue", "script": "", "start_now": False, **values})
    return requeue.continue_job(settings, str(folder), excluded, limit_at)


def test_run_in_an_allocation_is_not_requeued(tmp_path: Path, slurm: Slurm) -> None:
    slurm.may_requeue = False
    method, message = continue_job(tmp_path, ("n2",), script="script.sbatch", go_on_by="afterany")
    assert (method, slurm.calls) == ("", [])
    assert "not requeued" in message


@pytest.mark.parametrize(("limit_at", "until"), [(None, 1300.0), (1200.0, 1200.0), (9000.0, 1300.0)])
def test_requeue_is_tried_for_five_minutes_or_until_the_time_limit(
    tmp_path: Path, slurm: Slurm, limit_at: float | None, until: float
) -> None:
    assert continue_job(tmp_path, limit_at=limit_at) == ("requeue", "")
    assert slurm.calls == [("requeue", until, limit_at)]


@pytest.mark.parametrize(
    ("requeued", "excluded", "answer", "message"),
    [
        ("", ("n2", "n5"), (True, ""), ""),
        ("done", ("n2",), (True, "n1 is needed"), "done; n1 is needed"),
        ("", ("n2", "n5"), (False, "no answer"), "Slurm may allocate n2,n5 again: no answer"),
        ("done", (), (True, "unused"), "done"),
    ],
)
def test_requeue_message_reports_the_nodes_that_slurm_may_allocate_again(
    tmp_path: Path, slurm: Slurm, requeued: str, excluded: tuple[str, ...], answer: Any, message: str
) -> None:
    slurm.requeue_answer, slurm.exclude_answer = (True, requeued), answer
    assert continue_job(tmp_path, excluded) == ("requeue", message)
    assert slurm.calls[1:] == ([("exclude", excluded)] if excluded else [])


@pytest.mark.parametrize(
    ("answer", "message"),
    [((0, ""), "Slurm starts the job in 15 s"), ((1, "denied"), "the job cannot start at once: denied")],
)
def test_requeued_job_starts_soon_on_request(
    tmp_path: Path, slurm: Slurm, answer: tuple[int, str], message: str
) -> None:
    slurm.call_answer = answer
    assert continue_job(tmp_path, start_now=True) == ("requeue", message)
    assert slurm.calls[-1] == ["scontrol", "update", "JobId=17", "StartTime=now+15"]


@pytest.mark.parametrize(
    ("eligible_at", "delay"), [(None, ""), (1009.0, ""), (1010.0, "10"), (1121.0, "121")]
)
def test_requeue_message_reports_the_delay_of_slurm(
    tmp_path: Path, slurm: Slurm, eligible_at: float | None, delay: str
) -> None:
    slurm.eligible_at = eligible_at
    message = (
        f"Slurm delays the job for {delay} s; its owner can shorten the delay with: "
        "scontrol update JobId=17 StartTime=now"
    )
    assert continue_job(tmp_path) == ("requeue", message if delay else "")


@pytest.mark.parametrize(
    ("message", "script", "result"),
    [
        ("the job was cancelled", "/run/x", ("", "the job was cancelled")),
        ("disabled", "", ("", "disabled")),
        ("disabled", "/run/x", ("afterany", "job 18 continues after the end of this job")),
    ],
)
def test_refused_requeue_leads_to_a_successor_job_if_there_is_a_script(
    tmp_path: Path, slurm: Slurm, message: str, script: str, result: tuple[str, str]
) -> None:
    slurm.requeue_answer = (False, message)
    assert continue_job(tmp_path, script=script, limit_at=1200.0) == result
    assert slurm.calls[1:2] == ([("new_start", 1200.0, 1200.0)] if result[0] else [])


@pytest.mark.parametrize(
    ("go_on_by", "dependency"), [("afterany", "afterany:17"), ("singleton", "singleton")]
)
@pytest.mark.parametrize(
    ("comment", "kept"), [("dtslurm:abc", "dtslurm:abc"), ("of the user", ""), (None, "")]
)
def test_successor_job_has_a_dependency_and_the_comment_of_the_run(
    tmp_path: Path, slurm: Slurm, go_on_by: str, dependency: str, comment: str | None, kept: str
) -> None:
    slurm.job_fields = {} if comment is None else {"Comment": comment}
    by, message = continue_job(tmp_path, go_on_by=go_on_by, script="/run/x")
    assert (by, message) == (go_on_by, "job 18 continues after the end of this job")
    options = [f"--dependency={dependency}", *([f"--comment={kept}"] if kept else [])]
    assert slurm.calls == [("new_start", 1300.0, None), ("/run/x", *options, kept)]
    assert (tmp_path / "claim").readlink() == Path("job-18")
    assert not (tmp_path / ".claim.18").is_symlink()


@pytest.mark.parametrize(
    ("excluded", "answer", "option", "note"),
    [
        (("n2", "n3"), (["n2", "n3"], ""), ["--exclude=n2,n3"], ""),
        (("n2",), ([], "n2 is needed"), [], "; n2 is needed"),
        (("n2",), (None, "no list"), [], "; no list"),
        ((), (["n2"], "unused"), [], ""),
    ],
)
def test_successor_job_excludes_bad_nodes(
    tmp_path: Path, slurm: Slurm, excluded: tuple[str, ...], answer: Any, option: list[str], note: str
) -> None:
    slurm.exclusion_answer, slurm.job_fields = answer, {}
    _, message = continue_job(tmp_path, excluded, go_on_by="afterany", script="/run/x")
    assert message == "job 18 continues after the end of this job" + note
    assert slurm.calls[-1] == ("/run/x", "--dependency=afterany:17", *option, "")


@pytest.mark.parametrize(
    ("answer", "result"), [((True, "starts"), ("requeue", "starts")), ((False, "over"), ("", "over"))]
)
def test_job_that_slurm_starts_again_or_cancels_needs_no_successor(
    tmp_path: Path, slurm: Slurm, answer: tuple[bool, str], result: tuple[str, str]
) -> None:
    slurm.start_answer = answer
    assert continue_job(tmp_path, go_on_by="afterany", script="/run/x") == result
    assert len(slurm.calls) == 1


def test_refused_successor_job_leaves_the_claim(tmp_path: Path, slurm: Slurm) -> None:
    slurm.successor_answer = (None, "invalid partition")
    assert continue_job(tmp_path, go_on_by="singleton", script="/run/x") == ("", "invalid partition")
    assert not (tmp_path / "claim").is_symlink()


def test_array_task_has_no_successor_job(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert continue_job(tmp_path, go_on_by="afterany", script="/run/x") == (
        "",
        "an array task cannot have a successor job; submit the task again",
    )
    assert slurm.calls == []
