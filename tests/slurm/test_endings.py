"""The end of jobs according to the configuration of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtslurm.slurm import parse_scontrol
from dtslurm.slurm.endings import EndingBehaviour, describe_endings

DATA = Path(__file__).parent / "data"
VERSIONS = sorted(path.parent.name for path in DATA.glob("*/config.txt"))
SITE = {
    "SLURM_VERSION": "22.05.8",
    "PreemptMode": "REQUEUE",
    "PreemptType": "preempt/partition_prio",
    "KillWait": "30 sec",
    "OverTimeLimit": "0 min",
    "JobRequeue": "1",
}


def ending_behaviour(
    what: str, *, graces: dict[str, int] | None = None, save: float | None = None, **more: str
) -> EndingBehaviour:
    return next(
        ending for ending in describe_endings({**SITE, **more}, graces or {}, save) if ending.what == what
    )


def test_f25_f27_the_preemption_signal_and_requeue_behaviour_are_described() -> None:
    result = ending_behaviour("preemption", graces={"low": 120, "all": 5})
    assert result.found == "PreemptMode=REQUEUE by partition_prio, grace: 5 s in all, 120 s in low"
    assert "only ranks receive a signal: TERM;" in result.hint
    assert "this Slurm does not" in result.hint
    assert "this Slurm does not" not in ending_behaviour("preemption", SLURM_VERSION="24.05.1").hint
    assert "the requested signal" in ending_behaviour("preemption", PreemptParameters="send_user_signal").hint
    assert ending_behaviour("preemption", PreemptType="preempt/qos").found.endswith("grace: by QOS")
    assert ending_behaviour("preemption").found.endswith("grace: none")
    for none in ("preempt/none", "(null)", ""):
        assert ending_behaviour("preemption", PreemptType=none.replace("(null)", "")) == EndingBehaviour(
            "preemption", "none", ""
        )


def test_f29_the_early_signal_needs_the_time_of_a_checkpoint_and_a_minute() -> None:
    assert ending_behaviour("early signal").found == "comes up to 60 s before the requested time"
    assert ending_behaviour("early signal").hint == "--signal-before: the seconds that a save takes, and 60"
    assert ending_behaviour("early signal", save=14.2).hint.startswith("--signal-before 75: ")
    assert ending_behaviour("early signal", OverTimeLimit="5 min").found.endswith("OverTimeLimit=5 min")


def test_f39_a_checkpoint_longer_than_kill_wait_is_reported_as_lost() -> None:
    assert ending_behaviour("end of a job").found == "KillWait=30 s from TERM to KILL"
    assert "your longest save" not in ending_behaviour("end of a job", save=29.0).hint
    assert "your longest save takes 31 s: it is lost" in ending_behaviour("end of a job", save=31.0).hint


def test_f23_f38_the_requeue_delay_and_a_forbidden_requeue_are_described() -> None:
    assert ending_behaviour("requeue").found == "a requeued job waits 121 s"
    assert ending_behaviour("requeue", AuthInfo="socket=/run/munge,cred_expire=5") == EndingBehaviour(
        "requeue", "a requeued job waits 6 s", ""
    )
    delayed = ending_behaviour(
        "requeue", SchedulerParameters="bf_continue,requeue_delay=300", AuthInfo="cred_expire=5"
    )
    assert delayed.found == "a requeued job waits 301 s"
    assert "start_now" in delayed.hint
    assert "JobRequeue=0" in ending_behaviour("requeue", JobRequeue="0").found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_endings_of_every_slurm_version_are_described(version: str) -> None:
    config = parse_scontrol.config((DATA / version / "config.txt").read_text())
    result = {ending.what: ending.found for ending in describe_endings(config, {})}
    assert result["preemption"] == "none"
    assert result["end of a job"] == "KillWait=5 s from TERM to KILL"
    assert result["requeue"] == "a requeued job waits 6 s"
    assert describe_endings({}, {}) == []


def test_the_grace_time_of_a_partition_is_parsed() -> None:
    text = (DATA / "22.05.8/partitions.txt").read_text()
    assert parse_scontrol.parse_grace_times(text) == {}
    assert parse_scontrol.parse_grace_times(text.replace("GraceTime=0", "GraceTime=30", 1)) == {"main": 30}
