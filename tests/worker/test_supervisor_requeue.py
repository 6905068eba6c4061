"""Requeues and successor jobs, against a scontrol with prescribed answers."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.supervisor import agents, lease, main, options, requeue, slurm
from dtslurm.worker.supervisor.attempts import AttemptEnd
from dtslurm.worker.supervisor.main import STALE, Supervisor
from tests.worker.conftest import slurm_requests

ASKED = ["--nodes=2", "--world-size=2"]
NODE = "NodeName={} CoresPerSocket=8 State={} ThreadsPerCore=1 Reason={}\n"


def test_f23_requeued_job_excludes_bad_nodes_and_starts_now_on_request(site: Path) -> None:
    done, _ = requeue.continue_job(options.read([*ASKED, "--start-now"]), str(site), ["n2", "n5"], None)
    assert done
    assert slurm_requests(site) == [
        "requeue 17",
        "update JobId=17 ExcNodeList=n2,n5",
        "update JobId=17 StartTime=now+15",  # what is past when this start has ended is forgotten
    ]


def test_f23_requeue_reports_the_delay_of_slurm(site: Path) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 121))
    (site / "state").write_text(f"JobId=17 JobState=PENDING Reason=BeginTime EligibleTime={at}\n")
    done, words = requeue.continue_job(options.read(ASKED), str(site), [], None)
    assert done
    assert re.search(r"delays the job for 1[12]\d s; .*: scontrol update JobId=17 StartTime=now$", words)


def test_f28_requeue_is_repeated_until_slurm_accepts(site: Path) -> None:
    (site / "refusals").write_text("Socket timed out on send/recv operation\n" * 3)
    assert requeue.continue_job(options.read(ASKED), str(site), [], None)[0]
    assert slurm_requests(site) == ["requeue 17"] * 4


def test_f40_job_already_requeued_by_slurm_is_not_requeued_again(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (site / "state").write_text("JobId=17 JobState=RUNNING Requeue=1 Restarts=2 BatchFlag=2\n")
    assert requeue.continue_job(options.read(ASKED), str(site), [], None) == (
        "requeue",
        "Slurm had already requeued the job",
    )
    assert slurm_requests(site) == []
    (site / "state").write_text("JobId=17 JobState=RUNNING Requeue=1 Restarts=1 BatchFlag=2\n")
    assert requeue.continue_job(options.read(ASKED), str(site), [], None) == ("requeue", "")
    assert slurm_requests(site) == ["requeue 17"]


def test_f34_cancelled_job_is_not_requeued(site: Path) -> None:
    (site / "state").write_text("JobId=17 JobState=CANCELLED\n")
    done, words = requeue.continue_job(
        options.read([*ASKED, "--script=/run/script.sbatch"]), str(site), [], None
    )
    assert not done
    assert "cancelled" in words
    assert not any(line.startswith("requeue") for line in slurm_requests(site))


def test_f38_no_requeue_job_is_allowed_a_single_requeue(site: Path) -> None:
    (site / "state").write_text("JobId=17 JobState=RUNNING Requeue=0 Restarts=0 BatchFlag=1\n")
    assert requeue.continue_job(options.read(ASKED), str(site), [], None) == ("requeue", "")
    assert slurm_requests(site) == ["update JobId=17 Requeue=1", "requeue 17", "update JobId=17 Requeue=0"]


def test_f35_array_task_is_requeued_alone(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "15")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm.own_id() == "15_3"
    assert requeue.continue_job(options.read(ASKED), str(site), [], None)[0]
    assert slurm_requests(site) == ["requeue 15_3"]


def test_f35_array_task_gets_no_successor_job(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "15")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    words = [*ASKED, "--script=/run/script.sbatch", "--go-on-by=afterany"]
    done, why = requeue.continue_job(options.read(words), str(site), [], None)
    assert not done
    assert "array" in why  # the script once more would be the whole array


def test_f38_successor_job_inherits_the_claim_and_the_comment(site: Path) -> None:
    (site / "refusals").write_text("Requested operation is presently disabled for job 17\n")
    (site / "claim").symlink_to("job-17")
    done, words = requeue.continue_job(
        options.read([*ASKED, "--script=/run/script.sbatch"]), str(site), ["n2"], None
    )
    assert (done, words) == ("afterany", "job 18 continues after the end of this job")
    assert (site / "claim").readlink() == Path("job-18")
    line = (
        "sbatch --parsable --dependency=afterany:17 --comment=dtslurm:abc:def --exclude=n2 /run/script.sbatch"
    )
    assert slurm_requests(site) == ["requeue 17", f"{line} none none"]


def test_f47_slurm_command_completes_although_the_supervisor_receives_term() -> None:
    assert slurm.call(["sh", "-c", "kill -TERM $$; echo there"]) == (0, "there")


# ---- What an end that comes from outside means ----


def cause_of_early_end(site: Path, monkeypatch: pytest.MonkeyPatch, state: str, ends_in: float) -> str:
    """Return the cause that is given to an end that Slurm made so long before the job's time limit."""
    (site / "state").write_text(state)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + ends_in)))
    keeper = Supervisor(ASKED)
    keeper.term_at = time.time()
    return str(keeper.from_outside(143).get("cause"))


def test_f30_job_ended_before_its_time_limit_was_preempted(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = "JobId=17 JobState=RUNNING PreemptTime=None\n"
    assert cause_of_early_end(site, monkeypatch, running, 3600) == "preempted"  # however long or short it ran
    assert cause_of_early_end(site, monkeypatch, running, 10) == "time-limit"
    assert (
        cause_of_early_end(site, monkeypatch, "JobState=RUNNING PreemptTime=2026-11-20T10:00:00\n", 10)
        == "preempted"
    )
    assert cause_of_early_end(site, monkeypatch, "JobState=TIMEOUT PreemptTime=None\n", 3600) == "time-limit"


def test_f31_f34_cancelled_job_and_stop_file_have_the_cause_cancelled(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cause_of_early_end(site, monkeypatch, "JobState=CANCELLED PreemptTime=None\n", 3600) == "cancelled"
    (site / "stop").touch()
    monkeypatch.setattr(main, "CANCEL_S", 0.1)
    assert cause_of_early_end(site, monkeypatch, "JobState=RUNNING\n", 3600) == "cancelled"
    assert Supervisor(ASKED).run() == 1
    assert not (site / "logs").exists()  # nothing was started


def test_f40_f42_late_copy_of_a_run_starts_nothing(site: Path) -> None:
    lease.take(str(site), 7)
    assert Supervisor(ASKED).run() == STALE
    assert not (site / "events.jsonl").exists()
    assert lease.holder(str(site)) == 7


def test_f33_run_without_progress_exits_with_93_and_records_its_budget(
    site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper = Supervisor(ASKED)

    def attempt(number: int, _nodes: object) -> AttemptEnd:
        values: dict[str, Any] = {"exit_code": 1, "cause": "hang", "rank": number, "progressed": False}
        keeper.ledger.event("attempt_ended", number, **values)
        return keeper.ledger.history()[-1]

    monkeypatch.setattr(keeper, "attempt", attempt)
    assert keeper.run() == 93
    result = [(item["action"], item.get("used"), item.get("of")) for item in keeper.ledger.events("decision")]
    assert result == [("restart", 1, 3), ("restart", 2, 3), ("stop", None, None)]
    assert keeper.ledger.events("decision")[0]["budget"] == "hangs and time-outs"
    assert keeper.ledger.events("ended")[0]["exit_code"] == 93
    assert "(restart 2 of 3 after hangs and time-outs)" in capfd.readouterr().out


def test_f33_exit_code_of_the_ranks_is_returned_when_restarts_are_used_up(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Supervisor([*ASKED, "--max-restarts=1"])

    def attempt(number: int, _nodes: object) -> AttemptEnd:
        keeper.ledger.event("attempt_ended", number, exit_code=7, cause="exit-code", progressed=True)
        return keeper.ledger.history()[-1]

    monkeypatch.setattr(keeper, "attempt", attempt)
    assert keeper.run() == 7
    assert keeper.ledger.events("decision")[-1]["reason"] == "the one restart after crashes is used up"


def test_f48_node_with_unkillable_processes_is_used_last(site: Path) -> None:
    keeper = Supervisor(ASKED)
    keeper.nodes = ["n1", "n2", "n3"]
    states = {"n1": "MIXED", "n2": "MIXED+DRAIN", "n3": "MIXED"}
    (site / "state").write_text(
        "".join(NODE.format(name, state, "Kill_task_failed") for name, state in states.items())
    )
    assert slurm.bad_nodes(keeper.nodes) == {"n2": "MIXED+DRAIN"}
    keeper.lost += slurm.bad_nodes(keeper.nodes)
    assert keeper.choose() == ["n1", "n3"]
    keeper.nodes = ["n1", "n2"]
    assert keeper.choose() == ["n1", "n2"]  # there is no other


def test_f41_unreachable_node_ends_an_idle_attempt(site: Path) -> None:
    keeper = Supervisor(ASKED)
    (site / "state").write_text(
        NODE.format("n1", "MIXED", "") + NODE.format("n2", "MIXED+NOT_RESPONDING", "")
    )
    assert keeper.cut_off(["n1", "n2"], is_idle=False) == {}  # it may be busy
    assert [keeper.in_doubt] == [True]
    result = keeper.cut_off(["n1", "n2"], is_idle=True)
    assert (result["cause"], result["node"]) == ("node-failure", "n2")
    (site / "state").write_text(NODE.format("n2", "ALLOCATED+POWER_DOWN", ""))
    assert keeper.cut_off(["n1", "n2"], is_idle=True) == {}  # once the job is over
    assert [keeper.in_doubt] == [False]
    (site / "state").write_text(NODE.format("n2", "DOWN+NOT_RESPONDING", ""))
    assert keeper.cut_off(["n1", "n2"], is_idle=False)["node"] == "n2"


def test_requeue_retains_the_nodes_that_the_job_already_excludes(site: Path) -> None:
    (site / "state").write_text("JobId=17 JobState=RUNNING ExcNodeList=n[8-9] Comment=dtslurm:abc:def\n")
    requeue.continue_job(options.read(ASKED), str(site), ["n2"], None)
    assert slurm_requests(site) == ["requeue 17", "update JobId=17 ExcNodeList=n[8-9],n2"]
    (site / "state").write_text("JobId=17 JobState=RUNNING ExcNodeList=(null) Comment=dtslurm:abc:def\n")
    words = [*ASKED, "--go-on-by=afterany", "--script=/run/script.sbatch"]
    requeue.continue_job(options.read(words), str(site), ["n2"], None)
    assert "--exclude=n2 /run/script.sbatch" in slurm_requests(site)[-1]


@pytest.mark.parametrize(
    ("job", "bad", "excluded", "stays"),
    [
        ("NumNodes=2-2", ["n1", "n2"], "n1,n2", ""),
        ("NumNodes=8", ["n1", "n2"], "n2", "n1"),  # the newest goes first
        ("NumNodes=9", ["n1", "n2"], "", "n1,n2"),
        ("NumNodes=7 ExcNodeList=n8,n9", ["n1"], "n8,n9", "n1"),
        ("NumNodes=7 ExcNodeList=n1,n9", ["n1", "n2"], "n9,n2", "n1"),  # n1 is of an earlier start
        ("NumNodes=1 ReqNodeList=n1", ["n1", "n2"], "n2", "n1"),
        ("NumNodes=1 Features=a100", ["n1", "n2"], "n2", "n1"),
        ("NumNodes=1 Features=(null)", ["n1", "gone"], "n1,gone", ""),
    ],
)
def test_f32b_requeue_excludes_only_nodes_that_the_job_does_not_need(
    site: Path, job: str, bad: list[str], excluded: str, stays: str
) -> None:
    (site / "state").write_text(f"JobId=17 JobState=RUNNING Partition=main {job}\n")
    rows = [f"n{number} {'a100,fast' if number < 3 else 'fast'}\n" for number in range(1, 10)]
    (site / "nodes").write_text("".join(rows))
    done, words = requeue.continue_job(options.read(ASKED), str(site), bad, None)
    assert done
    assert slurm_requests(site)[1:] == ([f"update JobId=17 ExcNodeList={excluded}"] if excluded else [])
    assert words.startswith(f"{stays} is not excluded: the job ") if stays else not words


def test_f32b_requeue_excludes_nothing_when_slurm_does_not_list_the_nodes(site: Path) -> None:
    (site / "nodes").unlink()
    _, words = requeue.continue_job(options.read(ASKED), str(site), ["n2"], None)
    assert slurm_requests(site) == ["requeue 17"]
    assert "Slurm may allocate n2 again: Slurm does not list the nodes" in words


def test_f87_node_that_starts_no_step_is_lost_only_if_slurm_answers(site: Path) -> None:
    keeper = Supervisor(ASKED)
    (site / "state").write_text("slurm_load_node error: Unable to contact slurm controller\n")
    assert keeper.silent("n2", 10.0, "") == {}
    assert keeper.lost == []
    (site / "state").write_text(NODE.format("n2", "MIXED", ""))
    result = keeper.silent("n2", 10.0, "srun: error: Task launch failed")
    assert (result["cause"], result["node"], keeper.lost) == ("node-failure", "n2", ["n2"])
    text = "no heartbeat for 10 s, and Slurm (node state: MIXED) started no step on it: srun: error"
    assert text in result["summary"]


def test_f87_probe_step_uses_no_resources_of_the_job(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    (site / "health.json").write_text('{"srun_options": ["--network=x"]}')
    program = site / "bin/srun"
    program.write_text(f'#!/bin/sh\necho "$@" >>{site}/started\nenv >{site}/env\n[ "$3" = --nodelist=n2 ]\n')
    program.chmod(0o700)
    assert agents.answering(str(site), ["n2", "n3"]) == ["n2"]
    words = (site / "started").read_text()
    assert "--overlap --mpi=none --mem=0 --gres=none --cpu-bind=none --network=x true" in words
    env = (site / "env").read_text()
    assert "SLURM_JOB_ID=17" in env
    assert not re.search("SLURM_MEM_PER_CPU|SLURMD_NODENAME", env)


def test_f87_hanging_node_does_not_answer_the_probe_step(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = site / "bin/srun"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    assert agents.answering(str(site), ["n2"], 0.2) == []
    program.unlink()
    assert agents.answering(str(site), ["n2"], 0.2) == []


def test_f32b_completing_job_needs_its_original_number_of_nodes(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "9")
    (site / "state").write_text("JobId=17 JobState=COMPLETING Partition=main NumNodes=1\n")
    assert slurm.exclude(["n2"]) == (True, "n2 is not excluded: the job needs 9 of 9 nodes")


@pytest.mark.parametrize(
    ("job", "step", "possible"), [(None, "", False), ("17", "", True), ("17", "17.3", False)]
)
def test_only_a_job_of_its_own_can_be_requeued(
    monkeypatch: pytest.MonkeyPatch, job: str | None, step: str, possible: bool
) -> None:
    for name, value in {"SLURM_JOB_ID": job, "DTSLURM_STEP_ID": step or None}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "call", lambda *_: (0, ""))
    assert slurm.can_requeue() is possible
    assert slurm.step_in_allocation() == step
    if step:
        assert not slurm.tell_ranks()  # TERM would reach other steps of the allocation
