"""What a site's configuration says of how jobs end."""

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


def of(
    what: str, *, graces: dict[str, int] | None = None, save: float | None = None, **more: str
) -> EndingBehaviour:
    return next(one for one in describe_endings({**SITE, **more}, graces or {}, save) if one.what == what)


def test_f25_f27_it_is_told_who_hears_of_a_preemption_and_who_requeues() -> None:
    found = of("preemption", graces={"low": 120, "all": 5})
    assert found.found == "PreemptMode=REQUEUE by partition_prio, grace: 5 s in all, 120 s in low"
    assert "ranks alone are told, by TERM;" in found.hint
    assert "this Slurm does not" in found.hint
    assert "this Slurm does not" not in of("preemption", SLURM_VERSION="24.05.1").hint
    assert "the signal asked for" in of("preemption", PreemptParameters="send_user_signal").hint
    assert of("preemption", PreemptType="preempt/qos").found.endswith("grace: by QOS")
    assert of("preemption").found.endswith("grace: none")
    for none in ("preempt/none", "(null)", ""):
        assert of("preemption", PreemptType=none.replace("(null)", "")) == EndingBehaviour(
            "preemption", "none", ""
        )


def test_f29_the_early_signal_needs_the_time_of_a_save_and_a_minute() -> None:
    assert of("early signal").found == "comes up to 60 s before the asked time"
    assert of("early signal").hint == "--signal-before: the seconds that a save takes, and 60"
    assert of("early signal", save=14.2).hint.startswith("--signal-before 75: ")
    assert of("early signal", OverTimeLimit="5 min").found.endswith("OverTimeLimit=5 min")


def test_f39_a_save_longer_than_slurm_waits_is_told_to_be_lost() -> None:
    assert of("end of a job").found == "KillWait=30 s from TERM to KILL"
    assert "your longest save" not in of("end of a job", save=29.0).hint
    assert "your longest save takes 31 s: it is lost" in of("end of a job", save=31.0).hint


def test_f23_f38_it_is_told_how_long_a_requeued_job_waits_and_where_it_is_forbidden() -> None:
    assert of("requeue").found == "a requeued job waits 121 s"
    assert of("requeue", AuthInfo="socket=/run/munge,cred_expire=5") == EndingBehaviour(
        "requeue", "a requeued job waits 6 s", ""
    )
    delayed = of("requeue", SchedulerParameters="bf_continue,requeue_delay=300", AuthInfo="cred_expire=5")
    assert delayed.found == "a requeued job waits 301 s"
    assert "start_now" in delayed.hint
    assert "JobRequeue=0" in of("requeue", JobRequeue="0").found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_tells_all_of_it(version: str) -> None:
    config = parse_scontrol.config((DATA / version / "config.txt").read_text())
    found = {one.what: one.found for one in describe_endings(config, {})}
    assert found["preemption"] == "none"
    assert found["end of a job"] == "KillWait=5 s from TERM to KILL"
    assert found["requeue"] == "a requeued job waits 6 s"
    assert describe_endings({}, {}) == []


def test_the_grace_of_a_partition_is_read_where_there_is_any() -> None:
    text = (DATA / "22.05.8/partitions.txt").read_text()
    assert parse_scontrol.graces(text) == {}
    assert parse_scontrol.graces(text.replace("GraceTime=0", "GraceTime=30", 1)) == {"main": 30}
