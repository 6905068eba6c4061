"""Jobs that were ended from outside, and failures without evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtslurm.worker.evidence import evidence
from tests.diagnose.failures import START, Left, collective_timeout, diagnose_run, lost_connection
from tests.diagnose.judge import SIGNATURES

TOLD = Left("step 9", code=143, signal=15, told_to_end=True)
LIMIT = "slurmstepd: error: *** STEP 17.0 ON n1 CANCELLED AT 2026-11-21T16:30:23 DUE TO TIME LIMIT ***"


# ---- Slurm's word ----


@pytest.mark.parametrize(("limit", "text"), [(7260, " of 2 h 01 min"), (660, " of 11 min"), (None, "")])
def test_a_time_limit_is_reported_with_its_length(tmp_path: Path, limit: int | None, text: str) -> None:
    result = diagnose_run(tmp_path, TOLD, TOLD, state="TIMEOUT", time_limit=limit)
    assert (result.cause, result.blame, result.rank) == ("time-limit", "user", None)
    assert result.summary == f"the time limit{text} was reached"
    assert [line.text for line in result.evidence] == ["the job's state is TIMEOUT"]


def test_the_advice_after_a_time_limit_names_the_option_that_continues_the_run(tmp_path: Path) -> None:
    advice = [diagnose_run(tmp_path, TOLD, state="TIMEOUT").advice]
    advice += [item.advice for item in SIGNATURES if item.cause == "time-limit"]
    assert len(advice) > 1
    for text in advice:
        assert "--total-time DURATION" in text
        assert "--signal-before" in text


def test_a_job_that_hung_before_its_time_limit_is_reported_as_hung(tmp_path: Path) -> None:
    ranks = [Left(code=143, signal=15, wrote=wrote) for wrote in (60, 40)]
    result = diagnose_run(tmp_path, *ranks, state="TIMEOUT", end=START + 1240)
    assert result.summary.endswith(
        "; no rank wrote output in the last 19 min, so the job hung; the output of rank 1 stopped first"
    )


def test_a_job_without_output_at_its_time_limit_is_not_reported_as_hung(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, Left(None), state="TIMEOUT", time_limit=60)
    assert result.summary == "the time limit of 1 min was reached"


@pytest.mark.parametrize("where", ["batch", "rank"])
def test_a_time_limit_line_of_slurm_counts_if_the_state_is_unknown(tmp_path: Path, where: str) -> None:
    ranks = [Left(LIMIT, code=143, signal=15) if where == "rank" else TOLD, TOLD]
    result = diagnose_run(tmp_path, *ranks, batch=LIMIT if where == "batch" else "", state="UNKNOWN")
    assert result.cause == "time-limit"
    assert [line.text for line in result.evidence] == [LIMIT]


def test_a_preemption_is_reported(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, TOLD, state="PREEMPTED", reason="Preempted")
    assert (result.cause, result.blame) == ("preempted", "site")
    assert result.evidence[0].text == "the job's state is PREEMPTED, reason Preempted"
    assert result.time == START + 700


@pytest.mark.parametrize("told_to_end", [True, False])
def test_a_preemption_that_slurm_ended_as_failed_is_reported(tmp_path: Path, told_to_end: bool) -> None:
    ranks = [Left("step 9", code=143, signal=15, told_to_end=told_to_end)] * 2
    result = diagnose_run(tmp_path, *ranks, preempted_at=START + 595)
    assert (result.cause, result.blame, result.rank) == ("preempted", "site", None)
    assert result.evidence[0].text == "the job's state is FAILED, and scontrol show job shows its PreemptTime"
    assert "--max-restarts is requeued" in result.advice


def test_a_failure_before_a_preemption_is_the_cause(tmp_path: Path) -> None:
    stack = 'Traceback (most recent call last):\n  File "/home/me/t.py", line 3, in f\n    g()\n'
    failed = Left(stack + "ValueError: no such shard", code=1, ended=100)
    early = diagnose_run(tmp_path / "a", failed, TOLD, preempted_at=START + 595)
    assert (early.cause, early.rank) == ("python-exception", 0)
    in_grace = Left(stack + "ValueError: no such shard", code=1, ended=599)
    assert diagnose_run(tmp_path / "b", in_grace, TOLD, preempted_at=START + 595).cause == "preempted"
    assert diagnose_run(tmp_path / "c", TOLD, state="TIMEOUT", preempted_at=START + 595).cause == "time-limit"
    completed = diagnose_run(tmp_path / "d", Left(code=0), state="COMPLETED", preempted_at=START + 595)
    assert completed.cause == "none"


@pytest.mark.parametrize(
    ("by", "is_recorded", "who"),
    [("alice", False, " by alice"), ("", True, " by dtslurm cancel"), ("", False, "")],
)
def test_the_user_who_cancelled_is_reported(tmp_path: Path, by: str, is_recorded: bool, who: str) -> None:
    events = [{"event": "cancel", "time": START + 650}] if is_recorded else []
    result = diagnose_run(tmp_path, TOLD, state="CANCELLED", cancelled_by=by, events=events, end=None)
    assert (result.cause, result.summary) == ("cancelled", f"the job was cancelled{who}")
    assert result.time == (START + 650 if is_recorded else None)


def test_a_recorded_cancel_explains_an_unknown_state(tmp_path: Path) -> None:
    events = [{"event": "cancel", "time": START + 590}]
    assert diagnose_run(tmp_path / "a", TOLD, state="UNKNOWN", events=events).cause == "cancelled"
    failed = Left("RuntimeError: CUDA error: out of memory", code=1, ended=100)
    assert diagnose_run(tmp_path / "b", failed, state="UNKNOWN", events=events).cause == "gpu-out-of-memory"


def test_a_rank_failure_long_before_the_end_of_the_job_is_the_cause(tmp_path: Path) -> None:
    stack = 'Traceback (most recent call last):\n  File "/home/me/t.py", line 3, in f\n    g()\n'
    failed = Left(stack + "ValueError: no such shard", code=1, ended=100)
    early = diagnose_run(tmp_path / "a", failed, TOLD, state="TIMEOUT")
    assert (early.cause, early.rank) == ("python-exception", 0)
    at_the_end = Left(stack + "ValueError: no such shard", code=1, ended=699)
    assert diagnose_run(tmp_path / "b", at_the_end, TOLD, state="TIMEOUT").cause == "time-limit"
    # One that is sure, and alone, failed by itself even then; what all say came of the signal.
    sure = Left("RuntimeError: CUDA error: out of memory", code=1, ended=699)
    assert diagnose_run(tmp_path / "c", sure, TOLD, TOLD, TOLD, state="TIMEOUT").cause == "gpu-out-of-memory"
    assert diagnose_run(tmp_path / "d", sure, sure, sure, TOLD, state="TIMEOUT").cause == "time-limit"


# ---- A node, its memory ----


def test_a_failed_node_is_identified_by_slurm_or_by_missing_end_records(tmp_path: Path) -> None:
    named = "srun: error: Node failure on n2"
    result = diagnose_run(tmp_path / "a", lost_connection(), Left(host="n2"), batch=named, state="NODE_FAIL")
    assert (result.cause, result.node, result.rank) == ("node-failure", "n2", 1)
    assert result.evidence[0].text == named
    result = diagnose_run(tmp_path / "b", lost_connection(), Left(host="n3"), state="NODE_FAIL")
    assert (result.node, result.rank, result.summary) == ("n3", 1, "node n3 failed")
    result = diagnose_run(tmp_path / "c", lost_connection(), lost_connection(), state="BOOT_FAIL")
    assert (result.node, result.rank, result.summary) == (None, None, "a node failed")
    assert result.advice.startswith("submit the run again; ")
    result = diagnose_run(
        tmp_path / "d", lost_connection(), lost_connection(host="n2"), batch=named, state="NODE_FAIL"
    )
    assert (result.node, result.rank) == ("n2", 1)  # its rank had still recorded its end


def test_only_a_confident_cause_takes_precedence_over_a_node_failure(tmp_path: Path) -> None:
    guess = Left("Loss is nan, stopping training", code=1, ended=60)
    assert diagnose_run(tmp_path / "a", guess, Left(host="n2"), state="NODE_FAIL").cause == "node-failure"
    link = Left("NCCL WARN NET/IB : mlx5_2:1 Got async event : port error", code=1, ended=60)
    assert diagnose_run(tmp_path / "b", link, Left(host="n2"), state="NODE_FAIL").cause == "link-down"


@pytest.mark.parametrize("told_by", ["state", "batch", "launcher"])
def test_a_killed_rank_is_named_if_memory_ran_out(tmp_path: Path, told_by: str) -> None:
    line = "slurmstepd: error: Detected 1 oom_kill event in StepId=17.0. Some of the step tasks have been OOM"
    result = diagnose_run(
        tmp_path,
        lost_connection(host="n1"),
        Left(code=137, signal=9, ended=300, host="n2"),
        batch=line if told_by == "batch" else "",
        launchers=["", line] if told_by == "launcher" else [],
        state="OUT_OF_MEMORY" if told_by == "state" else "FAILED",
    )
    assert (result.cause, result.rank, result.node) == ("host-out-of-memory", 1, "n2")
    assert "--mem" in result.advice


def test_a_killed_rank_on_another_node_is_not_blamed_for_out_of_memory(tmp_path: Path) -> None:
    line = "slurmstepd: error: Detected 1 oom_kill event in StepId=17.0. Some of the step tasks have been OOM"
    result = diagnose_run(
        tmp_path, Left(code=137, signal=9), Left(code=143, signal=15, host="n2"), launchers=["", line]
    )
    assert (result.cause, result.rank) == ("host-out-of-memory", 1)


def test_out_of_memory_names_a_rank_only_if_one_rank_has_no_end(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path / "a", lost_connection(), Left(), state="OUT_OF_MEMORY")
    assert (result.cause, result.rank, result.confidence) == ("host-out-of-memory", 1, 0.8)
    assert diagnose_run(tmp_path / "b", lost_connection(), Left(), Left(), state="OUT_OF_MEMORY").rank is None


# ---- What launchers say ----


def test_a_launcher_message_is_attributed_to_the_matching_rank_on_its_node(tmp_path: Path) -> None:
    line = "srun: error: n2: task 1: Segmentation fault (core dumped)"
    ranks = [lost_connection(), Left(code=3, host="n2"), Left(code=139, signal=11, host="n2")]
    result = diagnose_run(tmp_path / "a", *ranks, launchers=["", line])
    assert (result.cause, result.rank, result.node) == ("segfault", 2, "n2")
    result = diagnose_run(tmp_path / "b", lost_connection(), Left(host="n2"), launchers=["", line])
    assert (result.cause, result.rank, result.confidence) == ("segfault", 1, 0.9)  # it is alone there
    result = diagnose_run(
        tmp_path / "c", lost_connection(), Left(host="n2"), Left(host="n2"), launchers=["", line]
    )
    assert (result.cause, result.rank, result.node) == ("segfault", None, "n2")


def test_a_node_failure_reported_by_the_launcher_is_the_cause(tmp_path: Path) -> None:
    result = diagnose_run(
        tmp_path, lost_connection(), Left(host="n2"), batch="srun: error: Node failure on n2"
    )
    assert (result.cause, result.node, result.confidence) == ("node-failure", "n2", 0.9)


def test_srun_with_its_wait_limit_is_reported_with_the_option(tmp_path: Path) -> None:
    said = [
        "srun: First task exited 60s ago",
        "srun: StepId=17.0 task 0: running",
        "srun: StepId=17.0 task 1: exited",
        "srun: launch/slurm: _step_signal: Terminating StepId=17.0",
        "slurmstepd-n1: error: *** STEP 17.0 ON n1 CANCELLED AT 2026-11-23T13:17:36 ***",
        "srun: error: n1: task 0: Killed",
    ]
    result = diagnose_run(tmp_path, Left(), Left(code=0), batch="\n".join(said))
    assert (result.cause, result.blame) == ("killed", "user")
    assert result.summary == "srun ended the remaining tasks 60 s after the first task of its step had ended"
    assert "--wait=0" in result.advice
    assert result.evidence[0].text == said[0]


SPEAKS = (
    "slurmstepd-n1: error: *** STEP 128.0 ON n1 CANCELLED AT 2026-11-23T12:00:01 DUE TO NODE FAILURE, SEE S"
)


def test_the_node_that_reports_a_node_failure_is_not_blamed(tmp_path: Path) -> None:
    named = "srun: error: Node failure on n2"
    ranks = [Left(code=143, signal=15), Left(host="n2")]
    result = diagnose_run(tmp_path / "a", *ranks, batch=f"{named}\n{SPEAKS}", launchers=[SPEAKS])
    assert (result.cause, result.node, result.rank) == ("node-failure", "n2", 1)
    assert result.evidence[0].text == named
    assert "--exclude n2" in result.advice
    result = diagnose_run(tmp_path / "b", *ranks, batch=SPEAKS, launchers=[SPEAKS])
    assert (result.cause, result.node, result.rank) == ("node-failure", "n2", 1)  # it left no last word
    result = diagnose_run(tmp_path / "c", Left(SPEAKS, code=143, signal=15), Left(host="n2"), batch=named)
    assert (result.cause, result.node, result.rank) == ("node-failure", "n2", 1)


def test_without_evidence_of_the_failed_node_no_node_is_named(tmp_path: Path) -> None:
    lost_both = [Left(), Left(host="n2")]
    result = diagnose_run(tmp_path / "a", *lost_both, batch=SPEAKS, state="NODE_FAIL")
    assert (result.cause, result.node, result.rank, result.summary) == (
        "node-failure",
        None,
        None,
        "a node failed",
    )
    ended = [Left(code=143, signal=15), Left(), Left(code=143, signal=15, host="n2")]
    result = diagnose_run(tmp_path / "b", *ended, batch=SPEAKS, state="NODE_FAIL")
    assert (result.cause, result.node) == ("node-failure", None)


@pytest.mark.parametrize(
    ("line", "summary", "blame"),
    [
        (
            "DistError: server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)",
            "another process uses the port 29500 on which rank 0 listens",
            "unknown",
        ),
        (
            "OSError: [Errno 98] Address already in use",
            "another process uses the port on which the program listens",
            "code",
        ),
        (
            "OSError: Port 6006 is already in use",
            "another process uses the port on which the program listens: 6006",
            "code",
        ),
    ],
)
def test_a_port_in_use_is_reported_without_blaming_the_node(
    tmp_path: Path, line: str, summary: str, blame: str
) -> None:
    result = diagnose_run(tmp_path, Left(code=143, signal=15), Left(line, code=1, host="n2"))
    assert (result.cause, result.rank, result.summary, result.blame) == ("port-in-use", 1, summary, blame)


@pytest.mark.parametrize(
    ("line", "blame"),
    [
        ("n5: /local/data already exists and was not staged; remove it, or choose another path", "user"),
        (
            "on all 2 nodes, for example n5: /h/d is on /h, which all nodes share; choose a local disk",
            "user",
        ),
        ("n5: 40.0 MiB do not fit on /local, where 64.0 KiB are free", "node"),
    ],
)
def test_a_staging_failure_blames_the_node_only_for_a_full_disk(
    tmp_path: Path, line: str, blame: str
) -> None:
    never = Left(None, started=False)
    result = diagnose_run(tmp_path, never, never, batch=f"dtslurm: staging failed: {line}", exit_code=88)
    assert (result.cause, result.blame) == ("staging", blame)
    assert ("--exclude" in result.advice) is (blame == "node")


SETUP = "/var/spool/slurmd/job00017/slurm_script: line 52: module: command not found"


def test_a_failed_setup_line_is_mentioned_with_its_possible_consequence(tmp_path: Path) -> None:
    lacks = Left("ModuleNotFoundError: No module named 'torch'", code=1)
    result = diagnose_run(tmp_path / "a", lacks, batch=SETUP)
    assert (result.cause, result.rank) == ("import-error", 0)
    assert result.summary.endswith(
        "; before that a line of the job's setup failed: module: command not found"
    )
    assert result.evidence[-1].text == SETUP
    assert "install the module in the Python environment" in result.advice
    broken = diagnose_run(
        tmp_path / "b", Left("RuntimeError: CUDA error: out of memory", code=1), batch=SETUP
    )
    assert (broken.cause, "setup" in broken.summary) == ("gpu-out-of-memory", False)
    never = diagnose_run(tmp_path / "c", Left(None, started=False), batch=SETUP)
    assert (never.cause, never.confidence) == ("setup", 0.4)
    assert diagnose_run(tmp_path / "d", Left(code=0), batch=SETUP, state="COMPLETED").cause == "none"


# ---- Where nothing says why ----


def test_a_script_that_slurm_could_not_start_is_reported(tmp_path: Path) -> None:
    never = Left(None, started=False)
    result = diagnose_run(tmp_path / "a", never, reason="JobLaunchFailure", nodelist="n7")
    assert (result.cause, result.node, result.blame) == ("unknown", "n7", "site")
    assert result.summary.startswith(
        "Slurm could not start the script on n7: the usual cause is that the folder"
    )
    result = diagnose_run(tmp_path / "b", never, exit_code=0, signal=53)
    assert result.summary.startswith("Slurm could not start the script: ")


@pytest.mark.parametrize(
    ("events", "left", "batch", "is_reported"),
    [
        (["submitted"], None, None, True),
        (["submitted"], None, "", False),  # it could write, and did not
        (["submitted"], "Killed", None, False),
        (["submitted", "started"], None, None, False),  # somebody took the logs away
        ([], None, None, False),  # or all of the run
    ],
)
def test_a_job_without_any_output_is_reported_as_not_started_by_slurm(
    tmp_path: Path, events: list[str], left: str | None, batch: str | None, is_reported: bool
) -> None:
    written = [{"event": event, "time": START} for event in events]
    verdict = diagnose_run(tmp_path, Left(left, started=False), events=written, batch=batch)
    assert verdict.summary.startswith("Slurm could not start the script: ") is is_reported


def test_a_running_job_has_no_failure(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, Left(), Left(), state="RUNNING", over=False)
    assert (result.cause, result.summary) == ("none", "nothing has failed so far; the job is RUNNING")


def test_a_stalled_job_is_not_reported_as_healthy(tmp_path: Path) -> None:
    result = diagnose_run(
        tmp_path, Left(), Left(), state="RUNNING", over=False, stall="no work for 4m00s", job_id="17"
    )
    assert (result.cause, result.summary) == ("stalled", "no work for 4m00s")
    assert "dtslurm diagnose --live 17" in result.advice


def test_ranks_terminated_by_an_unknown_sender_are_reported_with_low_confidence(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, TOLD, Left(code=0))
    assert (result.cause, result.rank, result.confidence) == ("killed", 0, 0.4)
    assert result.summary == "its processes received a request to end, and the sender is not recorded"
    assert [(item.what, item.ranks) for item in result.followed_by] == [
        ("ended with exit code 0", "1"),
        ("the job ended: FAILED, exit code 1", ""),
    ]


def test_a_weak_launcher_message_is_used_if_there_is_no_other_evidence(tmp_path: Path) -> None:
    line = "WARNING: DistStoreError: Timed out after 601 seconds waiting for clients. 6/8 clients joined."
    result = diagnose_run(tmp_path, Left(code=0), batch=f"{line} retrying")
    assert (result.cause, result.rank, result.confidence) == ("rendezvous", None, 0.4)


def test_without_evidence_the_last_output_lines_are_shown(tmp_path: Path) -> None:
    never = Left(None, started=False)
    result = diagnose_run(tmp_path, Left(code=0), never, never, batch="one\ntwo\nthree\nfour", exit_code=7)
    assert (result.cause, result.exit_code) == ("unknown", 7)
    assert result.summary == (
        "the job ended FAILED with exit code 7, and its logs and records show no cause; ranks 1-2 "
        "never started"
    )
    assert [line.text for line in result.evidence] == ["two", "three", "four"]


@pytest.mark.parametrize(
    ("rank", "cause", "words"),
    [
        (Left(code=3), "disk-full", "the file system of the run directory is full, and the logs end"),
        (Left("Loss is nan, stopping training", code=1), "nan-loss", "the training diverged"),
        (
            Left(code=0),
            "none",
            "the job did not fail; but the file system of the run directory is full: 100 bytes",
        ),
    ],
)
def test_a_full_disk_is_reported_only_if_nothing_else_explains_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: Left, cause: str, words: str
) -> None:
    monkeypatch.setattr(evidence, "free_bytes", lambda _folder: 100)
    result = diagnose_run(tmp_path, rank, state="COMPLETED" if rank.code == 0 else "FAILED")
    assert result.cause == cause
    assert result.summary.startswith(words)
    assert result.evidence[0].text == "the file system of the run directory is full: 100 bytes are free"


# ---- What came of it ----


def test_consequences_on_other_ranks_are_listed(tmp_path: Path) -> None:
    nan = "Loss is nan, stopping training"
    result = diagnose_run(
        tmp_path,
        Left(nan, code=1, ended=60),
        Left(nan, code=1, ended=90),
        collective_timeout(ended=660),
        collective_timeout(ended=660),
        lost_connection(ended=200),
        Left(code=137, signal=9, ended=700),
        Left(code=9, ended=700),
        Left("RuntimeError: CUDA error: out of memory", code=1, ended=300),
        Left(),
        Left(None, started=False),
        first=(0, 1),
    )
    assert (result.cause, result.rank) == ("nan-loss", 0)
    assert {item.what: item.ranks for item in result.followed_by} == {
        "waited in a collective until its timeout": "2-3",
        "failed the same way (nan-loss)": "1",
        "lost the connection to another rank": "4",
        "ended by signal 9": "5",
        "ended with exit code 9": "6",
        "failed as well (gpu-out-of-memory)": "7",
        "did not record their end": "8",
        "never started": "9",
        "the job ended: FAILED, exit code 1": "",
    }
