"""Runs that survive: each fault made for real, and the final weights compared with an undisturbed run's.

All runs share one cluster and train at the same time. What each took is printed at the end (``pytest -rP``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dtslurm.store.rundir import RunDir
from tests.conftest import skip_or_fail_without_slurm
from tests.e2e.conftest import Cli
from tests.e2e.test_lost_agents import LARGE, nodes_with_heartbeats
from tests.lab.cluster import SlurmLab
from tests.lab.software import SlurmUnavailable, Software

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

PARTITIONS = (
    "SlurmctldDebug=debug2",
    "DebugFlags=Steps",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=60 MaxTime=1-00:00:00 State=UP",
    "PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=1-00:00:00 State=UP",
)
TRAIN = Path(__file__).with_name("surviving_train.py")
ALONE = "--sbatch=--exclusive"  # its nodes will be lost or taken
RESTARTS, SPARE, DEAF = ("--max-restarts", "2"), ("--spare-nodes", "1"), ("--env", "DEAF=yes")
LAYOUTS = ("", ", large layout")  # of the files in the run directory
# Name of a run -> its fault and its options. All are started at once.
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "undisturbed": ("none@0", RESTARTS),
    "exit1": ("exit1@12", RESTARTS),
    "signal9": ("signal9@12", RESTARTS),
    "signal11": ("signal11@12", RESTARTS),
    "mistake": ("error@12", RESTARTS),
    "node lost": ("wait@12", (*SPARE, ALONE)),
    "node frozen": ("wait@12", (*SPARE, ALONE)),
    "slurmd killed": ("slow@12@0", (*RESTARTS, ALONE)),
    "slurmstepd killed": ("mark@6", (*RESTARTS, "--env", "PACE=2")),
    "batch node lost": ("wait@12", (*RESTARTS, ALONE)),
    "preempted": ("slow@12@0", (*RESTARTS, ALONE)),
    "time limit": ("wait@12", ("-t", "2", "--total-time", "1h", *DEAF)),
    # Slurm sends it up to 30 s early: to ranks that listen by then, with time left to save, on any machine.
    "time limit, early signal": ("slow@12@0", ("-t", "2", "--signal-before", "45", *RESTARTS)),
    "hang": ("stop@12", (*RESTARTS, "--hang-timeout", "15s")),
    "node lost, large layout": ("wait@12", (*SPARE, ALONE, *LARGE)),
    "node frozen, large layout": ("wait@12", (*SPARE, ALONE, *LARGE)),
    "hang, large layout": ("stop@12", (*RESTARTS, "--hang-timeout", "15s", *LARGE)),
    "hang, time-out learned": ("stop@36", (*RESTARTS, "--env", "PACE=0.5")),
    "hang of ranks that compute": ("spin@12", (*RESTARTS, "--hang-timeout", "20s")),
    "broken GPU": ("gpu@12", RESTARTS),
    "requeue forbidden": ("exit85@12@0", ("--cluster", "chained", *RESTARTS)),
    "twice": ("slow@12@0", RESTARTS),
    "cancelled": ("slow@12@0", RESTARTS),
    "cancelled by scancel": ("mark@6", (*RESTARTS, "--env", "PACE=2")),
}


@dataclass
class Case:
    """One run and its fault."""

    name: str
    job: str
    run: RunDir
    cli: Cli

    def cancel(self) -> None:
        self.cli("cancel", self.job)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.run.events() if event["event"] == name]

    def nodes(self, attempt: int) -> list[str]:
        return next(list(event["nodes"]) for event in self.events("attempt") if event["attempt"] == attempt)

    def causes(self) -> list[str]:
        return [event["cause"] for event in self.events("attempt_ended")]

    def fault_at(self) -> float:
        return float((self.run.path / "fault").read_text())

    def final(self) -> Any:
        return json.loads((self.run.path / "final.json").read_text())

    def batch(self) -> str:
        return (self.run.path / "logs/batch.log").read_text()


def take_over(lab: SlurmLab, case: Case) -> None:
    wish = ["sbatch", "-p", "high", "-N2", "--exclusive", "-w", ",".join(case.nodes(0)), "-o", "/dev/null"]
    lab.run([*wish, "--wrap=sleep 2"])


def scancel(lab: SlurmLab, case: Case) -> None:
    lab.run(["scancel", case.job])


def queue_again(lab: SlurmLab, case: Case) -> None:
    """Start a second copy of a run that is at work, wait for its end; leave its exit code and its seconds."""
    began = time.time()
    done = lab.run(["sbatch", "--wait", "-o", "/dev/null", case.run.script_path], check=False, timeout=600)
    (case.run.path / "second").write_text(json.dumps([done.returncode, time.time() - began, case.causes()]))


def kill_stepd(_lab: SlurmLab, case: Case) -> None:
    """Kill what keeps the second node's rank for Slurm, as the kernel does when memory runs out."""
    pid = json.loads((case.run.path / "ranks/0/1.json").read_text())["pid"]
    while True:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        if "slurmstepd" in name:
            break
        pid = int(rest.split()[1])
    os.kill(pid, signal.SIGKILL)


FAULTS: dict[str, Callable[[SlurmLab, Case], None]] = {
    "cancelled": lambda _lab, case: case.cancel(),
    "cancelled by scancel": scancel,
    "twice": queue_again,
    "slurmd killed": lambda lab, case: lab.kill_slurmd(case.nodes(0)[0]),
    "slurmstepd killed": kill_stepd,
    "batch node lost": lambda lab, case: lab.kill_node(case.nodes(0)[0]),
    "node lost": lambda lab, case: lab.kill_node(case.nodes(0)[1]),
    "node lost, large layout": lambda lab, case: lab.kill_node(case.nodes(0)[1]),
    "node frozen, large layout": lambda lab, case: lab.freeze_node(case.nodes(0)[1]),
    "node frozen": lambda lab, case: lab.freeze_node(case.nodes(0)[1]),
    "preempted": take_over,
}


@dataclass
class Survival:
    """The cluster, the command line on it, its runs, and the table of what was seen."""

    lab: SlurmLab
    cli: Cli
    cases: dict[str, Case] = field(default_factory=dict)
    injected: dict[str, float] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)

    def submit(self, name: str, fault: str, words: tuple[str, ...]) -> Case:
        options = ["-N2", "-l", "srun", "-p", "low", "-J", name.replace(" ", "-").replace(",", "")]
        options += ["--env", f"FAULT={fault}", *words, "--python", sys.executable, "train.py"]
        job = self.cli.submit(*options)
        self.cases[name] = Case(name, job, self.cli.run_dir(job), self.cli)
        return self.cases[name]

    def wait_until(self, happened: Callable[[], object], limit: float = 180) -> None:
        self.cli.wait_until(happened, limit)

    def over(self, name: str) -> Case:
        """Wait until a run has decided to go on no more."""
        case = self.cases[name]
        try:
            self.wait_until(lambda: any(event["action"] == "stop" for event in case.events("decision")))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}\n{case.run.events()}\n{case.batch()}") from None
        return case

    def at_its_fault(self, name: str) -> Case:
        case = self.cases[name]
        self.wait_until((case.run.path / "fault").exists)
        self.wait_until(lambda: len(nodes_with_heartbeats(case.run)) == 2)
        return case

    def inject(self) -> None:
        """Make the faults that runs wait for, each at once when its run is there."""

        def make(name: str) -> None:
            case = self.at_its_fault(name)
            self.injected[name] = time.time()
            FAULTS[name](self.lab, case)

        with ThreadPoolExecutor(len(FAULTS)) as pool:
            list(pool.map(make, FAULTS))

    def row(self, case: Case, *wanted: str) -> None:
        """Note what a fault cost, and whether it was named rightly."""
        fault_at = self.injected.get(case.name) or case.fault_at()
        first = case.run.metrics(0)
        after = next((rows for number in range(1, 9) if (rows := case.run.metrics(number))), [])
        ended = case.events("attempt_ended")[0]
        cells = [
            f"{ended['time'] - fault_at:.1f} s",
            f"{after[0]['time'] - fault_at:.1f} s" if after else "",
            str(first[-1]["step"] - after[0]["step"] + 1) if first and after else "",
            str(sum(1 for event in case.events("decision") if event["counted"])),
            ended["cause"] + (", right" if ended["cause"] in wanted else f", wrong: {wanted}"),
        ]
        self.rows.append(f"| {case.name} | {' | '.join(cells)} |")

    def explain(self, case: Case) -> str:
        """Return what the run and the controller recorded about the ends of the run's attempts."""
        log = (self.lab.root / "log/slurmctld.log").read_text(errors="replace").splitlines()
        moments = [
            time.strftime("[%Y-%m-%dT%H:%M:%S", time.localtime(event["time"] - before))
            for event in case.events("attempt_ended")
            for before in range(3)
        ]
        lines = [line for line in log if line.startswith(tuple(moments))]
        return "\n".join([str(case.run.events()), case.batch(), *lines])

    def survived(self, case: Case, *causes: str) -> None:
        """Judge: it ended well, for these causes in turn, with the weights of an undisturbed run."""
        assert case.causes() == [*causes, "done"], self.explain(case)
        assert case.final() == self.over("undisturbed").final()
        numbers = [event["attempt"] for event in case.events("attempt")]
        assert numbers == sorted(set(numbers))


@pytest.fixture(scope="module")
def survival(slurm_software: Software, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survival]:
    root = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))
    state = tmp_path_factory.mktemp("survival")
    (state / "project").mkdir()
    shutil.copy(TRAIN, state / "project/train.py")
    profiles = state / "config/dtslurm/cluster_profiles"
    profiles.mkdir(parents=True)
    (profiles / "chained.yaml").write_text("extends: slurm\nslurm:\n  requeue: forbidden\n")
    try:
        with SlurmLab(root, nodes=18, gpus=0, extra_conf=PARTITIONS, software=slurm_software) as lab:
            env = {
                **lab.env,
                "DTSLURM_RUN_ROOT": str(state / "runs"),
                "XDG_STATE_HOME": str(state / "state"),
                "XDG_CONFIG_HOME": str(state / "config"),
            }
            result = Survival(lab, Cli("slurm", state / "project", env))
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda item: result.submit(item[0], *item[1]), RUNS.items()))
            result.inject()
            yield result
            head = "| fault | detected in | training again in | steps repeated | restarts used | verdict |"
            print("\n".join(["", head, "|---|---|---|---|---|---|", *result.rows]))
    except SlurmUnavailable as error:
        skip_or_fail_without_slurm(error)
    finally:
        shutil.rmtree(root, ignore_errors=True)


# ---- Faults that come from outside ----


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lost_node_is_replaced_by_a_spare_node(survival: Survival, layout: str) -> None:
    case = survival.over("node lost" + layout)
    survival.row(case, "node-failure")
    survival.survived(case, "node-failure")
    node = case.nodes(0)[1]
    assert case.events("node_excluded")[0]["node"] == node
    assert node not in case.nodes(1)
    assert len(case.nodes(1)) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f41_frozen_node_is_detected_by_its_missing_heartbeats(survival: Survival, layout: str) -> None:
    case = survival.over("node frozen" + layout)
    survival.row(case, "node-failure")
    survival.survived(case, "node-failure")
    assert case.events("attempt_ended")[0]["node"] == case.nodes(0)[1]
    assert case.nodes(0)[1] not in case.nodes(1)


def test_f40_f42_attempt_on_a_node_lost_to_slurm_ends(survival: Survival) -> None:
    case = survival.over("slurmd killed")
    survival.row(case, "lost", "node-failure")
    assert case.causes()[0] in {"lost", "node-failure"}  # whoever was quicker: Slurm, or the copy's own srun
    survival.survived(case, case.causes()[0])
    began = next(event["time"] for event in case.events("attempt") if event["attempt"] == 1)
    late = [row for row in case.run.metrics(0) if row["time"] > began + 10]
    assert not late, "the old copy went on after the new one had begun"


def test_f40_f42_step_without_slurmstepd_is_ended_and_restarted(survival: Survival) -> None:
    case = survival.over("slurmstepd killed")
    survival.row(case, "killed", "done")
    survival.survived(case, *case.causes()[:-1])
    assert set(case.causes()[:-1]) <= {"killed"}
    if len(case.causes()) > 1:  # Slurm takes most of a minute; on a slow machine it may come too late
        began = next(event["time"] for event in case.events("attempt") if event["attempt"] == 1)
        assert not [row for row in case.run.metrics(0) if row["time"] > began + 10]


def test_lost_batch_node_causes_a_requeue_on_other_nodes(survival: Survival) -> None:
    case = survival.over("batch node lost")
    survival.row(case, "lost")
    survival.survived(case, "lost")
    assert case.nodes(0)[0] not in case.nodes(1)


def test_f25_f27_preempted_run_saves_and_is_requeued(survival: Survival) -> None:
    case = survival.over("preempted")
    survival.row(case, "preempted")
    survival.survived(case, "preempted")
    assert case.run.ranks(0)[0].exit_code == 85
    saved = case.run.metrics(0)[-1]["step"]
    assert case.run.metrics(1)[0]["step"] == saved + 1  # nothing is repeated


def test_second_copy_of_a_running_run_is_refused(survival: Survival) -> None:
    case = survival.cases["twice"]
    code, seconds, causes = json.loads((case.run.path / "second").read_text())
    assert (code, causes) == (87, [])
    survival.rows.append(f"| run a second time | {seconds:.1f} s | | 0 | 0 | refused, right |")
    case.cancel()


def test_f34_cancelled_run_stays_cancelled(survival: Survival) -> None:
    case = survival.cases["cancelled"]
    assert survival.cli.wait_for_end(case.job)["statuses"][0]["state"] == "CANCELLED"
    time.sleep(10)  # longer than a requeued job waits here
    assert case.causes() in ([], ["cancelled"])  # if there was time to write it
    assert [event["attempt"] for event in case.events("attempt")] == [0]
    assert survival.cli.wait_for_end(case.job)["statuses"][0]["state"] == "CANCELLED"


def test_f34_scancel_ends_a_run_whose_ranks_exit_with_85(survival: Survival) -> None:
    case = survival.cases["cancelled by scancel"]
    survival.wait_until(lambda: case.run.ranks(0)[0].exit_code is not None)
    assert case.run.ranks(0)[0].exit_code == 85
    time.sleep(10)  # longer than a requeued job waits here
    assert survival.cli.wait_for_end(case.job)["statuses"][0]["state"] == "CANCELLED"
    assert [event["attempt"] for event in case.events("attempt")] == [0]
    assert case.causes() in ([], ["cancelled"])  # if there was time to write it


# ---- Faults that runs make by themselves ----


@pytest.mark.parametrize(
    ("name", "code", "cause"),
    [("exit1", 1, "exit-code"), ("signal9", 137, "killed"), ("signal11", 139, "segfault")],
)
def test_f43_failed_rank_is_restarted_within_the_same_job(
    survival: Survival, name: str, code: int, cause: str
) -> None:
    case = survival.over(name)
    survival.row(case, cause)
    survival.survived(case, cause)
    ended = case.events("attempt_ended")[0]
    assert (ended["exit_code"], ended["rank"], ended["node"]) == (code, 1, case.nodes(0)[1])
    assert {event["job_id"] for event in case.events("attempt")} == {case.job}
    assert f"rank 1 failed first, with exit code {code}" in (case.run.logs(0) / "step.log").read_text()


def test_logs_and_diagnosis_of_every_attempt_are_available(survival: Survival) -> None:
    case = survival.over("signal9")
    text = survival.cli("logs", case.job, "--attempt", "0", "--rank", "1").stdout
    assert "step 12" in text
    assert "step 13" not in text
    assert "step 40" in survival.cli("logs", case.job, "--rank", "1").stdout
    document = json.loads(survival.cli("diagnose", case.job, "--attempt", "0", "--json").stdout)
    assert (document["verdict"]["cause"], document["verdict"]["rank"]) == ("killed", 1)
    assert survival.cli.wait_for_end(case.job)["statuses"][0]["state"] == "COMPLETED"


def test_code_error_stops_the_run_without_a_restart(survival: Survival) -> None:
    case = survival.over("mistake")
    survival.row(case, "python-exception")
    assert case.causes() == ["python-exception"]
    assert "a mistake in the code" in case.batch()
    status = survival.cli.wait_for_end(case.job)["statuses"][0]
    assert (status["state"], status["exit_code"]) == ("FAILED", 1)


def test_f47_node_with_a_broken_gpu_is_excluded_by_the_requeue(survival: Survival) -> None:
    case = survival.over("broken GPU")
    survival.row(case, "gpu-fault")
    survival.survived(case, "gpu-fault")
    node = case.nodes(0)[1]
    *lost, broken = case.events("node_excluded")  # another test may have killed a node before Slurm used it
    assert (broken["node"], broken["reason"]) == (node, "a GPU failed")
    assert all(event["reason"].startswith("health: ") for event in lost)
    assert node not in case.nodes(1)  # though it is up


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f45_hanging_rank_is_detected_named_and_restarted(survival: Survival, layout: str) -> None:
    case = survival.over("hang" + layout)
    survival.row(case, "hang")
    survival.survived(case, "hang")
    hang = case.events("hang")[0]
    assert (hang["rank"], hang["node"]) == (1, case.nodes(0)[1])
    text = (case.run.path / "ranks/0/stacks" / f"{case.nodes(0)[0]}.txt").read_text()
    assert text.startswith("rank 0\n")
    assert not [path for path in case.run.logs(0).glob("*.log") if " Killed  " in path.read_text()]


def test_f45_hang_timeout_is_learned_from_the_steps(survival: Survival) -> None:
    case = survival.over("hang, time-out learned")
    survival.row(case, "hang")
    survival.survived(case, "hang")
    hang = case.events("hang")[0]
    assert (hang["rank"], hang["node"]) == (1, case.nodes(0)[1])
    assert re.search(r"no rank wrote output for \d+ s.* \(the longest pause before: \d+ s\)", hang["summary"])


def test_f45_ranks_that_spin_in_the_same_place_are_a_hang(survival: Survival) -> None:
    case = survival.over("hang of ranks that compute")
    survival.row(case, "hang")
    survival.survived(case, "hang")
    text = (case.run.path / "ranks/0/stacks" / f"{case.nodes(0)[1]}.txt").read_text()
    assert text.startswith("rank 1\n")


def test_run_with_a_total_time_continues_after_the_time_limit(survival: Survival) -> None:
    case = survival.over("time limit")
    survival.row(case, "time-limit")
    causes = case.causes()
    survival.survived(case, *causes[:-1])
    assert set(causes[:-1]) == {"time-limit"}, survival.explain(case)


def test_f29_run_saves_at_the_early_signal_and_continues(survival: Survival) -> None:
    case = survival.over("time limit, early signal")
    survival.row(case, "checkpointed")
    causes = case.causes()
    survival.survived(case, *causes[:-1])
    assert set(causes[:-1]) == {"checkpointed"}, survival.explain(case)
    assert case.run.metrics(1)[0]["step"] == case.run.metrics(0)[-1]["step"] + 1


def test_f38_successor_job_continues_when_requeue_is_forbidden(survival: Survival) -> None:
    case = survival.over("requeue forbidden")
    survival.row(case, "checkpointed")
    survival.survived(case, "checkpointed")
    first, second = (event["job_id"] for event in case.events("attempt"))
    assert first == case.job != second
    shown = survival.cli.wait_for_end(case.job)  # by the first job's id
    assert (shown["record"]["job_id"], shown["statuses"][0]["state"]) == (second, "COMPLETED")


# ---- The controller, which all runs need ----


def test_f28_requeue_is_retried_until_the_controller_answers(survival: Survival) -> None:
    case = survival.submit("controller frozen", "exit85@12@0", RESTARTS)
    survival.at_its_fault(case.name)
    survival.lab.pause_controller()
    time.sleep(12)  # longer than scontrol waits for an answer
    survival.lab.resume_controller()
    survival.over(case.name)
    survival.row(case, "checkpointed")
    survival.survived(case, "checkpointed")
