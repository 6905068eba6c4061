"""The printed diagnosis of finished and of active runs."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from dtslurm.cli.commands import diagnose
from dtslurm.cli.commands.top import _format_verdict
from dtslurm.cli.printing import live, output
from dtslurm.cli.printing import verdict as verdict_lines
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.activity import Activity
from dtslurm.model.runs.diagnosis import Aftermath, EvidenceLine, Verdict
from dtslurm.model.runs.live import LiveVerdict, RankLook, StackFrame, StackGroup
from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.services.observe.diagnose import Diagnosis
from dtslurm.services.observe.live import GpuUse, Live

RECORD = JobRecord(
    token="t", cluster="hpc", name="llama", run_dir="/r", phase="submitted", created_at=0.0, job_id="17"
)
FAILED = JobStatus(job_id="17", state=JobState.FAILED)
RUNNING = JobStatus(job_id="17", state=JobState.RUNNING)


def diagnosis_text(
    verdict: Verdict,
    status: JobStatus = FAILED,
    attempts: tuple[int, ...] = (0,),
    width: int = 80,
    activity: Activity | None = None,
) -> str:
    diagnosis = Diagnosis(
        record=RECORD, status=status, verdict=verdict, attempt=attempts[-1], attempts=attempts, task=None,
        logs="/r/logs/0", activity=activity,
    )  # fmt: skip
    return "\n".join(diagnose.format_diagnosis(diagnosis, width))


def field_text(text: str, label: str) -> str:
    """Return the text after a label, joined over its lines."""
    lines = text.splitlines()
    [number] = [number for number, line in enumerate(lines) if line[:14].rstrip() == label]
    more = [line[14:] for line in lines[number + 1 :]]
    rest = [line[:14].isspace() for line in lines[number + 1 :]]
    return " ".join([lines[number][14:], *more[: [*rest, False].index(False)]])


@pytest.mark.parametrize(
    ("values", "who"),
    [
        ({}, "no single rank"),
        ({"rank": 3, "local_rank": 1, "node": "n2"}, "rank 3 (local rank 1) on n2"),
        ({"rank": 3, "exit_code": 7}, "rank 3 with exit code 7"),
        ({"rank": 3, "exit_code": 137, "signal": 9}, "rank 3 by signal 9"),
        ({"node": "n2"}, "on n2"),
    ],
)
def test_the_first_failed_rank_is_described(values: dict[str, Any], who: str) -> None:
    assert (
        field_text(diagnosis_text(Verdict(cause="unknown", summary="It ended.", **values)), "failed first")
        == who
    )


def test_a_run_without_a_first_failed_rank_shows_only_its_end() -> None:
    now = int(time.time())
    text = diagnosis_text(Verdict(cause="cancelled", summary="It was cancelled.", time=now, exit_code=143))
    assert "failed first" not in text
    assert field_text(text, "ended") == time.strftime("at %H:%M:%S with exit code 143", time.localtime(now))


def test_the_date_is_shown_if_the_failure_was_not_today() -> None:
    now = int(time.time())
    today = diagnosis_text(Verdict(cause="hang", summary="x", rank=0, time=now))
    assert field_text(today, "failed first") == time.strftime("rank 0 at %H:%M:%S", time.localtime(now))
    then = now - 40 * 86400
    before = diagnosis_text(Verdict(cause="hang", summary="x", rank=0, time=then))
    assert field_text(before, "failed first") == time.strftime(
        "rank 0 at %Y-%m-%d %H:%M:%S", time.localtime(then)
    )


def test_a_cause_of_low_confidence_is_marked_as_probable() -> None:
    assert field_text(
        diagnosis_text(Verdict(cause="hang", summary="All wait.", confidence=0.6)), "cause"
    ).startswith("probably: hang (60%) All wait.")
    assert field_text(diagnosis_text(Verdict(cause="hang", summary="All wait.")), "cause").startswith(
        "hang (100%)"
    )


def test_evidence_lines_are_grouped_by_file() -> None:
    rank, launcher = "logs/0/rank-3.log", "logs/batch.log"
    evidence = (
        EvidenceLine(rank=3, file=rank, line=12, text="  RuntimeError: \x1b[2Jbad  "),
        EvidenceLine(rank=3, file=rank, line=12, text="on cuda:0"),
        EvidenceLine(rank=None, file=launcher, line=None, text="srun: error"),
    )
    shown = diagnosis_text(
        Verdict(cause="code-error", summary="x", blame="code", evidence=evidence)
    ).splitlines()
    begin = shown.index(f"  {rank}:12")
    assert shown[begin : begin + 5] == [
        f"  {rank}:12", "  | RuntimeError: bad", "  | on cuda:0", f"  {launcher}", "  | srun: error",
    ]  # fmt: skip
    assert "\x1b" not in "\n".join(shown)


def test_a_long_evidence_line_is_cut_after_four_lines() -> None:
    line = EvidenceLine(rank=0, file="", line=None, text="x" * 1000)
    shown = diagnosis_text(Verdict(cause="unknown", summary="x", evidence=(line,)), width=44).splitlines()
    assert [part for part in shown if part.startswith("  | ")] == ["  | " + "x" * 4 * 44]
    line = EvidenceLine(rank=0, file="", line=None, text="x" * 39 + " " + "y-" * 20 + " z" * 200)
    shown = diagnosis_text(Verdict(cause="unknown", summary="x", evidence=(line,)), width=44).splitlines()
    parts = [part[4:] for part in shown if part.startswith("  | ")]
    assert parts == ["x" * 39, "y-" * 20, *["z" + " z" * 19] * 2]


def test_follow_on_errors_and_advice_are_shown() -> None:
    after = (
        Aftermath(what="lost their peer", ranks="0-6", count=7),
        Aftermath(what="was killed", ranks="9", count=1),
        Aftermath(what="the job ended with 1"),
    )
    shown = diagnosis_text(
        Verdict(cause="gpu-fault", summary="x", blame="node", advice="Leave it out.", followed_by=after)
    )
    assert field_text(shown, "then") == (
        "7 ranks (0-6) lost their peer 1 rank (9) was killed the job ended with 1"
    )
    assert field_text(shown, "responsible") == "the node, not the code"
    assert field_text(shown, "what to do") == "Leave it out."
    assert "what to do" not in diagnosis_text(Verdict(cause="gpu-fault", summary="x", blame="node"))


def test_an_active_job_gets_a_hint_to_diagnose_live() -> None:
    nothing = Verdict(cause="none", summary="Nothing failed.")
    shown = diagnosis_text(nothing, RUNNING)
    assert field_text(shown, "verdict") == "Nothing failed."
    assert field_text(shown, "more") == "dtslurm diagnose --live 17 shows whether the job makes progress"
    assert "--live" not in diagnosis_text(nothing, JobStatus(job_id="17", state=JobState.COMPLETED))


def test_earlier_attempts_are_mentioned() -> None:
    shown = diagnosis_text(Verdict(cause="hang", summary="x"), attempts=(0, 2))
    assert shown.startswith("job 17 (llama, attempt 2): FAILED\n")
    assert field_text(shown, "before") == "the run had earlier attempts; --attempt 0 shows the last of them"
    assert "before" not in diagnosis_text(Verdict(cause="hang", summary="x"))


def test_the_dashboard_shows_the_same_diagnosis_text() -> None:
    verdict = Verdict(cause="hang", summary="All wait.")
    diagnosis = Diagnosis(
        record=RECORD, status=FAILED, verdict=verdict, attempt=0, attempts=(0,), task=None, logs="/r/logs/0"
    )
    assert _format_verdict(diagnosis) == diagnose.format_diagnosis(diagnosis, 78)


def test_a_stalled_job_is_not_described_as_healthy() -> None:
    verdict = Verdict(cause="stalled", summary="No work of any rank.", advice="Look at every rank.")
    activity = Activity(stalled=True, since=0.0, quiet_s=220.0)
    shown = diagnosis_text(verdict, status=RUNNING, activity=activity)
    assert shown.splitlines() == [
        "job 17 (llama): STALLED 3m40s",
        "verdict       No work of any rank.",
        "what to do    Look at every rank.",
    ]


# ---- Of a job that runs ----

STACK = (StackFrame("all_reduce", "/v/lib/python3.11/site-packages/torch/distributed/c.py", 9),)


def test_the_dashboard_shows_the_same_live_diagnosis_text() -> None:
    result = Live(
        record=RECORD, status=RUNNING, attempt=0, task=None, looks=(), gpus=None, by={}, missing=(),
        verdict=LiveVerdict(cause="none", summary="It goes on.", confidence=0.9),
    )  # fmt: skip
    assert _format_verdict(result) == live.format_live_diagnosis(result, 78)


def live_text(*looks: RankLook, verdict: LiveVerdict | None = None, **values: Any) -> str:
    known: dict[str, Any] = {
        "record": RECORD,
        "status": RUNNING,
        "attempt": 0,
        "task": None,
        "looks": looks,
        "gpus": None,
        "by": {},
        "missing": (),
        "verdict": verdict or LiveVerdict(cause="none", summary="It goes on.", confidence=0.9),
        **values,
    }
    return "\n".join(live.format_live_diagnosis(Live(**known), 80))


def test_the_blocking_rank_is_shown_in_full() -> None:
    look = RankLook(
        rank=3, local_rank=1, host="n2", pid=77, cpu=1.0, frames=STACK, workers=("process 80: sleeping",),
        silent_s=61.0,
    )  # fmt: skip
    verdict = LiveVerdict(
        cause="hang", summary="Rank 3 is missing.", confidence=0.9, rank=3, advice="Look at n2."
    )
    shown = live_text(RankLook(rank=0, silent_s=2.0), look, verdict=verdict, by={"py-spy": 1, "proc": 1})
    lines = shown.splitlines()
    begin = lines.index("  rank 3 (local rank 1) on n2, process 77, 1.0 cores busy")
    assert lines[begin + 1 : begin + 3] == [
        "  | all_reduce (torch/distributed/c.py:9)", "  | process 80: sleeping",
    ]  # fmt: skip
    assert field_text(shown, "verdict") == "the job hangs (90%) Rank 3 is missing."
    assert field_text(shown, "last output") == "2s ago (the quietest: 1m01s); rank 3: 1m01s ago"
    assert field_text(shown, "seen") == "1 by py-spy, 1 by /proc only, of 2 ranks"
    assert field_text(shown, "what to do") == "Look at n2."


def test_a_rank_without_a_stack_shows_its_kernel_state() -> None:
    look = RankLook(rank=0, pid=7, state="D", waits="nfs_wait", silent_s=None)
    verdict = LiveVerdict(cause="unknown", summary="x", confidence=0.3, rank=0, advice="Wait.")
    shown = live_text(look, verdict=verdict)
    assert "  rank 0 on ?, process 7\n  | nfs_wait\n" in shown
    assert field_text(shown, "verdict").startswith("probably: unknown (30%)")
    assert field_text(shown, "last output") == "no rank has written output"
    assert field_text(shown, "seen") == "no rank, of 1 ranks"
    assert "what to do" not in shown  # nothing is known to be wrong


def test_ranks_without_output_are_counted() -> None:
    looks = (RankLook(rank=0, silent_s=5.0), RankLook(rank=1), RankLook(rank=2))
    slow = LiveVerdict(cause="slow", summary="x", confidence=0.9, rank=2)
    assert (
        field_text(live_text(*looks, verdict=slow), "last output")
        == "5s ago; rank 2: none; 2 never wrote output"
    )


def test_many_stack_groups_are_shortened() -> None:
    ranks = ",".join(map(str, range(0, 60, 2)))
    first = StackGroup(kind="waits", what="in all_reduce", ranks=ranks, count=30, example=0)
    stack_groups = tuple(
        StackGroup(kind="computes", what=f"at {number}", ranks=str(number), count=1, example=number)
        for number in range(61, 75, 2)
    )
    shown = field_text(
        live_text(
            verdict=LiveVerdict(cause="none", summary="", confidence=1.0, places=(first, *stack_groups))
        ),
        "ranks",
    )
    assert shown.startswith(
        "30 ranks (0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,…) waiting in all_reduce rank 61 at 61"
    )
    assert shown.endswith("and 2 ranks at 2 more places (--json shows all)")


def test_a_note_explains_that_waiting_gpus_count_as_busy() -> None:
    busy, idle = GpuUse(8, 0, 99.0, 3.0), GpuUse(8, 8, 0.0, 3.0)
    hang = LiveVerdict(cause="hang", summary="x", confidence=0.9)
    assert field_text(live_text(gpus=busy, verdict=hang), "GPUs") == (
        "0 of 8 idle, mean use 99 % (3 s ago); a GPU that waits in a collective counts as busy"
    )
    assert "collective" not in live_text(gpus=idle, verdict=hang)
    assert "collective" not in live_text(gpus=busy)


def test_unexamined_ranks_are_listed_with_the_reason() -> None:
    shown = live_text(missing=("n7 could not be looked at", "no stacks of 2 ranks: no py-spy"))
    assert field_text(shown, "not examined") == "n7 could not be looked at no stacks of 2 ranks: no py-spy"


def test_a_path_is_never_broken_and_a_pipe_gets_unbroken_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"/scratch/{'a-long-name/' * 9}train.py"
    words = f"The file {path} is not there, and without it {'no rank can start, ' * 5}as it seems."
    evidence = (EvidenceLine(rank=0, file="", line=None, text=f"cannot open {path} for reading"),)
    verdict = Verdict(cause="no-file", summary=words, evidence=evidence)
    for width in (80, sys.maxsize):
        shown = diagnosis_text(verdict, width=width)
        assert shown.count(path) == 2
        assert (words in shown) == (width > 80)
    assert verdict_lines.width() == sys.maxsize
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "72")
    assert verdict_lines.width() == 72
