"""The rank behind a collective that did not end, or behind a lost connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.diagnose.failures import (
    BARRIER,
    ENQUEUED,
    GLOO,
    LOST,
    Left,
    collective_timeout,
    diagnose_run,
    lost_connection,
)


def flight_entry(number: int, state: str = "completed", name: str = "nccl:all_reduce") -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "process_group": ["0", "default_pg"],
        "is_p2p": False,
        "profiling_name": name,
        "state": state,
        "frames": [],
    }


# ---- Who is late ----


def test_the_rank_named_by_a_monitored_barrier_is_late(tmp_path: Path) -> None:
    result = diagnose_run(
        tmp_path, collective_timeout(BARRIER.format(2)), Left(code=143, signal=15), Left(code=143, signal=15)
    )
    assert (result.cause, result.rank, result.confidence) == ("collective-timeout", 2, 0.9)
    assert "1 rank waited for rank 2 in a collective" in result.summary
    assert result.summary.endswith("the barrier reports that this rank did not arrive")


def test_several_ranks_named_by_a_barrier_are_counted(tmp_path: Path) -> None:
    named = "Ranks 1, 2 failed to pass monitoredBarrier in 60000 ms"
    result = diagnose_run(
        tmp_path, collective_timeout(f"RuntimeError: {named}"), Left(), Left(), Left(code=143, signal=15)
    )
    assert result.rank == 1
    assert "did not arrive, like 1 more" in result.summary


@pytest.mark.parametrize("missing", [False, True])
def test_a_flight_record_identifies_the_rank_that_is_behind(tmp_path: Path, missing: bool) -> None:
    dumps = {rank: [flight_entry(7), flight_entry(8, "scheduled")] for rank in (0, 1, 3)}
    if not missing:
        dumps[2] = [flight_entry(7)]
    result = diagnose_run(
        tmp_path,
        collective_timeout(),
        collective_timeout(),
        collective_timeout(),
        collective_timeout(),
        dumps=dumps,
    )
    assert result.rank == 2
    words = (
        "only this rank wrote no flight record"
        if missing
        else "ends at collective 7, the records of other ranks at 8"
    )
    assert words in result.summary


def test_a_flight_record_identifies_the_rank_with_a_different_collective(tmp_path: Path) -> None:
    dumps = {rank: [flight_entry(8, "scheduled")] for rank in (0, 1, 2)}
    dumps[1] = [flight_entry(8, "scheduled", "nccl:broadcast")]
    result = diagnose_run(
        tmp_path, collective_timeout(), collective_timeout(), collective_timeout(), dumps=dumps
    )
    assert result.rank == 1
    assert "it called nccl:broadcast where other ranks called nccl:all_reduce" in result.summary


def test_the_only_rank_without_a_timeout_is_late(tmp_path: Path) -> None:
    silent = Left("reading shard 7 of 9", code=137, signal=9, ended=640)
    result = diagnose_run(tmp_path, collective_timeout(), collective_timeout(), silent, lost_connection())
    assert (result.rank, result.confidence) == (2, 0.85)
    assert "only this rank reports neither a timeout nor a lost connection" in result.summary
    assert [line.text for line in result.evidence if line.rank == 2][-1] == "reading shard 7 of 9"
    assert "check what rank 2 did at that time" in result.advice


def test_the_exit_code_0_of_the_late_rank_is_mentioned(tmp_path: Path) -> None:
    result = diagnose_run(
        tmp_path, collective_timeout(), collective_timeout(), Left("done", code=0, ended=30)
    )
    assert result.rank == 2
    assert "and it had ended with exit code 0" in result.summary


def test_among_ranks_with_network_errors_the_rank_without_a_timeout_is_late(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, collective_timeout(GLOO), collective_timeout(GLOO), lost_connection())
    assert result.rank == 2
    assert "only this rank reports no timeout" in result.summary


def test_among_successful_ranks_the_first_to_end_is_late(tmp_path: Path) -> None:
    fine = [Left(code=0, ended=40), Left(code=0, ended=30)]
    result = diagnose_run(tmp_path, collective_timeout(), collective_timeout(), *fine)
    assert (result.rank, result.confidence) == (3, 0.8)
    assert "ended with exit code 0 while other ranks still waited for it" in result.summary


def test_among_silent_ranks_the_rank_without_any_output_is_late(tmp_path: Path) -> None:
    quiet = [Left("step 2", code=143, signal=15), Left(None, code=143, signal=15)]
    result = diagnose_run(tmp_path, collective_timeout(), collective_timeout(), *quiet)
    assert result.rank == 3
    assert "it never wrote output" in result.summary


def test_among_silent_ranks_the_rank_whose_log_stopped_first_is_late(tmp_path: Path) -> None:
    quiet = [Left(code=143, signal=15, wrote=wrote) for wrote in (90, 50, 95)]
    result = diagnose_run(tmp_path, collective_timeout(), *quiet)
    assert (result.rank, result.confidence) == (2, 0.75)
    assert "among 3 ranks without a timeout, its log stopped first" in result.summary


@pytest.mark.parametrize("hosts", [("n2", "n2"), ("n2", "n3")])
def test_ranks_that_stopped_together_give_low_confidence(tmp_path: Path, hosts: tuple[str, str]) -> None:
    quiet = [Left(code=143, signal=15, wrote=90 + number, host=host) for number, host in enumerate(hosts)]
    result = diagnose_run(tmp_path, collective_timeout(), collective_timeout(), *quiet)
    assert (result.rank, result.confidence) == (2, 0.5)
    place = ", all on n2" if hosts == ("n2", "n2") else ""
    assert f"2 ranks report no timeout{place}; which of them hung first is not known" in result.summary


def test_enqueued_work_numbers_identify_the_late_rank_if_most_ranks_are_silent(tmp_path: Path) -> None:
    quiet = [Left(code=143, signal=15, wrote=90) for _ in range(4)]
    numbers = [collective_timeout(ENQUEUED.format(number)) for number in (9, 8, 9)]
    result = diagnose_run(tmp_path, *numbers, *quiet)
    assert result.rank == 1
    assert "its last enqueued work is 8, that of other ranks 9" in result.summary


def test_the_rank_with_the_least_enqueued_work_is_late(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, *(collective_timeout(ENQUEUED.format(number)) for number in (9, 9, 8)))
    assert (result.rank, result.confidence) == (2, 0.8)


def test_no_rank_is_named_if_all_wait_alike(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, *(collective_timeout(ENQUEUED.format(9)) for _ in range(3)))
    assert (result.cause, result.rank, result.confidence) == ("collective-timeout", None, 0.5)
    assert result.summary.startswith("3 ranks waited in a collective that did not end, and no rank is known")


# ---- Who was dead before ----


def test_a_rank_that_ended_before_the_timeouts_is_the_cause(tmp_path: Path) -> None:
    result = diagnose_run(
        tmp_path, collective_timeout(), Left("step 2", code=3, ended=60), collective_timeout(host="n2")
    )
    assert (result.cause, result.rank) == ("exit-code", 1)


def test_a_rank_that_ended_after_the_timeouts_is_the_late_rank(tmp_path: Path) -> None:
    result = diagnose_run(
        tmp_path, collective_timeout(), Left("step 2", code=3, ended=630), collective_timeout(host="n2")
    )
    assert (result.cause, result.rank) == ("collective-timeout", 1)
    assert "waited for rank 1" in result.summary


def test_a_signal_takes_precedence_over_an_exit_code_unless_the_signal_came_later(tmp_path: Path) -> None:
    ends = [Left(code=3, ended=60), Left(code=137, signal=9, ended=61), lost_connection()]
    assert diagnose_run(tmp_path / "a", *ends).rank == 1
    late = [Left(code=3, ended=60), Left(code=137, signal=9, ended=90), lost_connection()]
    assert diagnose_run(tmp_path / "b", *late, first=(0, 3)).rank == 0


# ---- A node, a link, a connection ----


def test_a_node_without_any_end_record_is_reported_as_failed(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, lost_connection(), lost_connection(), Left(host="n2"), Left(host="n2"))
    assert (result.cause, result.node, result.blame) == ("node-failure", "n2", "node")
    assert "--exclude n2" in result.advice


def test_no_node_is_blamed_while_the_job_is_running(tmp_path: Path) -> None:
    result = diagnose_run(
        tmp_path,
        collective_timeout(),
        collective_timeout(),
        Left(host="n2"),
        Left(host="n2"),
        over=False,
        state="RUNNING",
    )
    assert result.cause == "collective-timeout"


def test_a_single_rank_without_an_end_record_is_reported_as_killed(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, lost_connection(), lost_connection(), Left())
    assert (result.cause, result.rank, result.confidence) == ("killed", 2, 0.5)
    assert "ended without a record while other ranks lost their connection to it" in result.summary


def test_a_rank_without_an_end_record_is_not_reported_as_killed_while_the_job_runs(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, lost_connection(), lost_connection(), Left(), over=False, state="RUNNING")
    assert (result.cause, result.rank) == ("collective-timeout", 0)


def test_a_rank_that_ended_early_is_reported(tmp_path: Path) -> None:
    result = diagnose_run(tmp_path, lost_connection(), lost_connection(), Left(code=0, ended=99))
    assert (result.cause, result.rank, result.blame) == ("collective-timeout", 2, "code")
    assert "rank 2 ended with exit code 0 while other ranks still exchanged data with it" in result.summary


def test_a_network_error_is_reported_as_link_down(tmp_path: Path) -> None:
    line = "NCCL WARN NET/IB: Got completion from peer 10.1.3.7<33057> with status=12 opcode=0 len=0"
    result = diagnose_run(tmp_path, lost_connection(line), lost_connection(), lost_connection())
    assert (result.cause, result.rank) == ("link-down", 0)
    assert result.evidence[0].text == line


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_lost_connections_without_a_cause_are_reported_with_low_confidence(
    tmp_path: Path, ended: int
) -> None:
    left = Left(code=143, signal=15, ended=99, told_to_end=True)
    result = diagnose_run(tmp_path, lost_connection(), lost_connection(), *(left for _ in range(ended)))
    assert (result.cause, result.confidence) == ("collective-timeout", 0.35)
    assert result.summary == "ranks lost the connection to each other, and no rank reports a cause"
    assert result.rank == (2 if ended == 1 else 0)  # it alone received SIGTERM and reports no lost peer
    assert result.evidence[0].text == LOST
