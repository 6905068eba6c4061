"""Real torch training under the supervisor, on nodes that have networks of their own; all runs at once.

A sample of these tests is part of one run of the suite; only the runs that they look at are submitted.

After each fault the final weights are those of an undisturbed run, bit for bit. What each took is printed at
the end (``pytest -rP``).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dtslurm.store.rundir import RunDir
from tests.conftest import skip_or_fail_without_slurm
from tests.e2e.conftest import Cli
from tests.lab.network import NetworkLab, possible
from tests.lab.software import SlurmUnavailable, Software

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.sampled(1, "faults"),
]

TRAIN = Path(__file__).with_name("surviving_torch.py")
PARTITIONS = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=40 MaxTime=1-00:00:00 State=UP",
    "PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=1-00:00:00 State=UP",
)
NODES = 15
ALONE = "--sbatch=--exclusive"  # its nodes will be lost or taken
RESTARTS = ("--max-restarts", "2")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "undisturbed": ("", ("-l", "srun", *RESTARTS)),
    "cable pulled": ("crawl@70", ("-l", "srun", "--spare-nodes", "1", ALONE)),
    "slow, then killed": ("slow@30,kill@110", ("-l", "torchrun", *RESTARTS)),
    "no spare node": ("crawl@50", ("-l", "torchrun", *RESTARTS, "--launcher-option", "nnodes=1:2", ALONE)),
    "first node lost": ("crawl@50", ("-l", "srun", *RESTARTS, ALONE)),
    "again and again": (
        "exit@30,segv@70,stop@90",
        ("-l", "srun", *RESTARTS, "--hang-timeout", "45s"),  # two crashes, and a hang has its own
    ),
    "disk full": ("full@70", ("-l", "srun", *RESTARTS)),
    "slurmd killed": ("crawl@50", ("-l", "srun", *RESTARTS, ALONE)),
    "preempted": ("crawl@50", ("-l", "srun", *RESTARTS, ALONE)),
    "time limit": ("crawl@30", ("-l", "srun", "-t", "3", "--total-time", "1h")),
    "time limit, early signal": ("crawl@30", ("-l", "srun", "-t", "3", "--signal-before", "30", *RESTARTS)),
}


@dataclass
class Case:
    """One run, and when its fault was made."""

    job: str
    run: RunDir
    fault_at: float = 0.0

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.run.events() if event["event"] == name]

    def causes(self) -> list[str]:
        return [event["cause"] for event in self.events("attempt_ended")]

    def nodes(self, attempt: int) -> list[str]:
        return next(list(event["nodes"]) for event in self.events("attempt") if event["attempt"] == attempt)

    def log(self, attempt: int = 0, rank: int = 0) -> str:
        return (self.run.logs(attempt) / f"rank-{rank}.log").read_text()

    def batch(self) -> str:
        return (self.run.path / "logs/batch.log").read_text()

    def weights(self) -> Any:
        return torch.load(self.run.path / "final.pt")

    def newest(self) -> Path | None:
        """Return the newest checkpoint that is complete."""
        return max((self.run.path / "checkpoints").glob("step-*"), default=None)


@dataclass
class Survival:
    """The cluster, the command line beside its controller, the runs, and the table of what was seen."""

    lab: NetworkLab
    cli: Cli
    small_disk: Path
    cases: dict[str, Case] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    restarted_at: float = 0.0
    spoilt_step: int = 0
    second_code: int | None = None
    second_seconds: float = 0.0

    def submit(self, name: str) -> None:
        fault, words = RUNS[name]
        options = ["-N2", "-p", "low", "--env", f"FAULT={fault}", *words]
        options += ["--python", sys.executable, "--no-snapshot"]
        if name == "disk full":
            env = {"DTSLURM_CHECKPOINT_DIR": self.small_disk, "MARK": self.cli.folder}
            options += [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
        job = self.cli.submit("-J", name.replace(" ", "-").replace(",", ""), *options, "train.py")
        self.cases[name] = Case(job, self.cli.run_dir(job))

    def at_its_fault(self, name: str, kind: str) -> Case:
        """Wait for the moment of a run at which a fault is to be made from outside."""
        case = self.cases[name]
        self.cli.wait_until((case.run.path / f"fault-{kind}").exists, 240)
        self.cli.wait_until(lambda: case.newest() is not None, 240)
        self.cli.wait_until(lambda: len(list((case.run.path / "ranks/0/beats").glob("*.json"))) == 2, 240)
        return case

    def over(self, name: str) -> Case:
        """Wait until a run has decided to go on no more."""
        case = self.cases[name]
        try:
            self.cli.wait_until(
                lambda: any(item["action"] == "stop" for item in case.events("decision")), 300
            )
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}\n{case.run.events()}") from None
        return case

    def row(self, name: str, kind: str, wanted: str, attempt: int = 0, words: str = "") -> None:
        """Note what a fault cost that ended an attempt, and whether it was named rightly."""
        case = self.cases[name]
        at = case.fault_at or float((case.run.path / f"fault-{kind}").read_text())
        first, after = case.run.metrics(attempt), case.run.metrics(attempt + 1)
        ended = case.events("attempt_ended")[attempt]
        decided = [event for event in case.events("decision") if event["attempt"] == attempt]
        cells = [
            f"{ended['time'] - at:.1f} s",
            f"{after[0]['time'] - at:.1f} s" if after else "",
            str(first[-1]["step"] - after[0]["step"] + 1) if after else "",
            str(sum(1 for event in decided if event["counted"])),
            ended["cause"] + (", right" if ended["cause"] == wanted else f", wrong: {wanted}"),
        ]
        self.rows.append(f"| {words or name} | {' | '.join(cells)} |")

    def same(self, case: Case) -> bool:
        """Tell whether a run came to the weights of the undisturbed one, bit for bit."""
        wanted, result = self.over("undisturbed").weights(), case.weights()
        return all(torch.equal(wanted[key], result[key]) for key in wanted)


@pytest.fixture(scope="module")
def survival(
    slurm_software: Software, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Survival]:
    if not possible():
        pytest.skip("networks of one's own take root, ip, unshare and nsenter")
    root = Path(tempfile.mkdtemp(prefix="dtslurm-lab-", dir="/tmp"))
    state = tmp_path_factory.mktemp("survival")
    (state / "project").mkdir()
    shutil.copy(TRAIN, state / "project/train.py")
    disk = state / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted")
    lab = NetworkLab(root, nodes=NODES, extra_conf=PARTITIONS, software=slurm_software)
    try:
        with lab:
            env = {
                **lab.env,
                "DTSLURM_RUN_ROOT": str(state / "runs"),
                "XDG_STATE_HOME": str(state / "state"),
                "OMP_NUM_THREADS": "1",
            }
            result = Survival(lab, Cli("slurm", state / "project", env, prefix=lab.inside([])), disk)
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(result.submit, runs_used_by(request.session.items)))
            if "cable pulled" in result.cases:
                restart_controller(result)
            with ThreadPoolExecutor(len(FAULTS)) as pool:
                list(pool.map(lambda name: FAULTS[name](result), FAULTS.keys() & result.cases.keys()))
            yield result
            head = "| fault | detected in | training again in | steps repeated | restarts used | verdict |"
            print("\n".join(["", head, "|---|---|---|---|---|---|", *result.rows]))
    except SlurmUnavailable as error:
        skip_or_fail_without_slurm(error)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False, capture_output=True)
        shutil.rmtree(root, ignore_errors=True)


def runs_used_by(tests: Sequence[pytest.Item]) -> list[str]:
    """Return the runs that the tests of this file look at."""
    marks = [mark for test in tests if test.path == Path(__file__) for mark in test.iter_markers("runs")]
    return ["undisturbed", *dict.fromkeys(name for mark in marks for name in mark.args)]


def restart_controller(survival: Survival) -> None:
    """Kill the controller and start another, once it has saved that the jobs run."""
    case, lab = survival.at_its_fault("cable pulled", "crawl"), survival.lab
    for item in survival.cases.values():  # a start that it has not saved would be forgotten
        survival.cli.wait_until(lambda item=item: item.events("attempt"), 240)  # type: ignore[misc]
    saved, now = lab.root / "state/job_state", time.time()
    lab.run(["scontrol", "update", f"JobId={case.job}", "Nice=1"])  # what changes is saved
    lab.wait_for("the controller to save it", lambda: saved.exists() and saved.stat().st_mtime > now)
    survival.restarted_at = time.time()
    lab.kill_controller()
    lab.start_controller()


def spoil_and_cut(survival: Survival) -> None:
    """Spoil a run's newest checkpoint, and pull the cable of its second node."""
    case = survival.at_its_fault("cable pulled", "crawl")
    before = case.newest()
    survival.cli.wait_until(lambda: case.newest() != before, 240)  # so that the next one takes long
    newest = case.newest()
    assert newest is not None
    survival.spoilt_step = int(newest.name.split("-")[1])
    for file in newest.glob("*.distcp"):
        data = file.read_bytes()
        file.write_bytes(data[:-64] + bytes(64))
    case.fault_at = time.time()
    survival.lab.cut(case.nodes(0)[1])


def lose_a_node(survival: Survival, name: str, number: int) -> None:
    case = survival.at_its_fault(name, "crawl")
    case.fault_at = time.time()
    survival.lab.kill_node(case.nodes(0)[number])


def kill_a_daemon(survival: Survival) -> None:
    case = survival.at_its_fault("slurmd killed", "crawl")
    case.fault_at = time.time()
    survival.lab.kill_slurmd(case.nodes(0)[0])


def take_over(survival: Survival) -> None:
    """Queue a job of higher priority for the nodes of a run."""
    case = survival.at_its_fault("preempted", "crawl")
    wish = ["sbatch", "-p", "high", "-N2", "--exclusive", "-w", ",".join(case.nodes(0)), "-o", "/dev/null"]
    case.fault_at = time.time()
    survival.lab.run([*wish, "--wrap=sleep 2"])


def queue_again(survival: Survival) -> None:
    """Start a second copy of a run that is at work, and wait for its end."""
    case = survival.at_its_fault("time limit", "crawl")
    began = time.time()
    words = ["sbatch", "--wait", "-o", "/dev/null", str(case.run.script_path)]
    survival.second_code = survival.lab.run(words, check=False, timeout=600).returncode
    survival.second_seconds = time.time() - began


FAULTS: dict[str, Callable[[Survival], None]] = {
    "time limit": queue_again,
    "preempted": take_over,
    "cable pulled": spoil_and_cut,
    "slurmd killed": kill_a_daemon,
    "no spare node": lambda survival: lose_a_node(survival, "no spare node", 1),
    "first node lost": lambda survival: lose_a_node(survival, "first node lost", 0),
}


@pytest.mark.runs("time limit")
def test_f40_second_copy_of_a_running_run_is_refused(survival: Survival) -> None:
    case = survival.cases["time limit"]
    assert survival.second_code == 87
    survival.rows.append(
        f"| run a second time | {survival.second_seconds:.1f} s | | 0 | 0 | refused, right |"
    )
    assert {event["job_id"] for event in case.events("attempt")} == {case.job}


@pytest.mark.runs("cable pulled")
def test_f56_restarted_controller_does_not_affect_runs(survival: Survival) -> None:
    case = survival.over("cable pulled")
    began, ended = case.events("attempt")[0]["time"], case.events("attempt_ended")[0]["time"]
    assert began < survival.restarted_at < case.fault_at < ended
    assert survival.over("undisturbed").causes() == ["done"]
    survival.rows.append("| controller killed and started again | | | 0 | 0 | none, right |")


@pytest.mark.runs("cable pulled")
def test_f40_f41_f68_unreachable_node_is_replaced_and_a_damaged_checkpoint_skipped(
    survival: Survival,
) -> None:
    case = survival.over("cable pulled")
    survival.row("cable pulled", "crawl", "node-failure", words="node cut off the network")
    assert case.causes() == ["node-failure", "done"]
    assert case.events("attempt_ended")[0]["node"] == case.nodes(0)[1]
    assert case.nodes(0)[1] not in case.nodes(1)
    [restored] = case.events("restored")
    assert survival.spoilt_step >= 60  # it went on saving until the cable was pulled
    assert (restored["step"], restored["attempt"]) == (survival.spoilt_step - 20, 1)
    assert survival.same(case)
    seconds = restored["time"] - case.events("attempt")[1]["time"]
    words = "newest checkpoint damaged (from the start of the attempt that reads it)"
    more = survival.spoilt_step - restored["step"]
    survival.rows.append(
        f"| {words} | {seconds:.1f} s | {seconds:.1f} s | {more} more | 0 | left out, right |"
    )
    # The copy that was cut off still ran, and could reach the disks: it was ended by its own watcher.
    late = [row for row in case.run.metrics(0) if row["time"] > case.events("attempt")[1]["time"]]
    assert not late


@pytest.mark.runs("slow, then killed")
def test_f43_f46_slow_rank_is_named_without_a_restart_and_a_killed_rank_is_restarted(
    survival: Survival,
) -> None:
    case = survival.over("slow, then killed")
    survival.row("slow, then killed", "kill", "killed", words="rank killed under torchrun")
    assert "rank 1 is slow: " in case.log()
    assert case.causes() == ["killed", "done"]  # nothing came of the slowness
    slow_at = float((case.run.path / "fault-slow").read_text())
    named = [row for row in case.run.metrics(0) if row.get("slowest_rank") == 1 and row["time"] > slow_at]
    seconds = named[0]["time"] - slow_at
    survival.rows.append(f"| rank slow for 15 steps | {seconds:.1f} s | | 0 | 0 | named, right |")
    ended = case.events("attempt_ended")[0]
    assert (ended["exit_code"], ended["rank"], ended["node"]) == (137, 1, case.nodes(0)[1])
    assert case.events("restored")[-1]["step"] == 100
    assert survival.same(case)


@pytest.mark.runs("first node lost")
def test_job_is_requeued_after_its_first_node_with_the_supervisor_is_lost(survival: Survival) -> None:
    case = survival.over("first node lost")
    survival.row("first node lost", "crawl", "lost")
    assert case.causes() == ["lost", "done"]
    assert case.nodes(0)[0] not in case.nodes(1)
    assert survival.same(case)


@pytest.mark.runs("slurmd killed")
def test_f40_f42_copy_without_slurmd_runs_until_slurm_starts_another_copy(
    survival: Survival,
) -> None:
    case = survival.over("slurmd killed")
    # Whoever is quicker: Slurm, the copy's own srun, or its ranks, told to end on the other node. On a busy
    # machine the next start may fail for a reason that nobody can tell; it is made again.
    first_cause, *between, last_cause = case.causes()
    survival.row("slurmd killed", "crawl", first_cause, words="slurmd of the first node killed")
    assert first_cause in {"lost", "node-failure", "checkpointed"}
    assert (between in ([], ["unknown"]), last_cause) == (True, "done"), case.batch()
    assert case.nodes(0)[0] not in case.nodes(1)
    first, second, *_ = (event["time"] for event in case.events("attempt"))
    after = [row for row in case.run.metrics(0) if row["time"] > case.fault_at + 1]
    assert after, "what runs in a step needs no slurmd"
    assert not [row for row in case.run.metrics(0) if row["time"] > second + 10]
    assert first < case.fault_at < second
    assert survival.same(case)


@pytest.mark.runs("preempted")
def test_f25_f27_preempted_run_saves_in_its_grace_time_and_continues(survival: Survival) -> None:
    case = survival.over("preempted")
    survival.row("preempted", "SIGTERM", "preempted", words="preempted by a higher priority")
    assert case.causes() == ["preempted", "done"]
    assert case.run.ranks(0)[0].exit_code == 85
    repeats_nothing(case)
    assert survival.same(case)


@pytest.mark.runs("time limit, early signal")
def test_f29_torch_run_saves_at_the_early_signal_and_continues(survival: Survival) -> None:
    case = survival.over("time limit, early signal")
    survival.row("time limit, early signal", "SIGUSR2", "checkpointed")
    assert case.causes() == ["checkpointed", "done"]
    result = float((case.run.path / "fault-SIGUSR2").read_text())
    assert 30 - 5 <= case.events("attempt")[0]["time"] + 180 - result <= 30 + 60 + 5
    repeats_nothing(case)
    assert survival.same(case)


@pytest.mark.runs("time limit")
def test_f39_run_with_a_total_time_continues_after_a_time_limit_without_a_signal(survival: Survival) -> None:
    case = survival.over("time limit")
    survival.row("time limit", "SIGTERM", "time-limit", words="time limit, no early signal")
    assert case.causes() == ["time-limit", "done"]
    assert not (case.run.path / "fault-SIGUSR2").exists()
    repeats_nothing(case)  # it saved in the seconds that the supervisor gave it
    assert survival.same(case)


def repeats_nothing(case: Case) -> None:
    """The second start goes on at the very step at which the first one saved when it was told."""
    last = case.run.metrics(0)[-1]["step"]
    assert case.events("restored")[-1]["step"] == last >= 30
    assert case.run.metrics(1)[0]["step"] == last + 1


@pytest.mark.runs("again and again")
def test_f33_f43_f45_repeated_faults_end_with_the_same_weights(survival: Survival) -> None:
    case = survival.over("again and again")
    causes = {"exit": "exit-code", "segv": "segfault", "stop": "hang"}
    for attempt, (kind, cause) in enumerate(causes.items()):
        words = {"exit": "rank ends with 1", "segv": "rank killed by SIGSEGV", "stop": "rank hangs"}[kind]
        survival.row("again and again", kind, cause, attempt, words)
    assert case.causes() == [*causes.values(), "done"]
    assert {event["rank"] for event in case.events("attempt_ended")[:3]} == {1}
    budgets = [(event["budget"], event["used"]) for event in case.events("decision")[:3]]
    assert budgets == [("crashes", 1), ("crashes", 2), ("hangs and time-outs", 1)]
    restored = {event["attempt"]: event["step"] for event in case.events("restored")}
    assert [restored[attempt] for attempt in (1, 2, 3)] == [20, 60, 80]
    assert survival.same(case)


@pytest.mark.runs("no spare node")
def test_torchrun_continues_on_fewer_nodes_when_no_spare_node_exists(survival: Survival) -> None:
    case = survival.over("no spare node")
    survival.row("no spare node", "crawl", "node-failure", words="node lost, none spare")
    assert case.causes() == ["node-failure", "done"]
    assert [event["action"] for event in case.events("decision")] == ["shrink", "stop"]
    assert case.nodes(1) == case.nodes(0)[:1]
    assert [event["world_size"] for event in case.events("attempt")] == [2, 1]
    assert case.events("restored")[-1]["step"] >= 40
    assert case.run.metrics(1)[-1]["step"] == 240
    wanted = survival.over("undisturbed").weights()  # the same samples in the same batches, summed elsewise
    assert all(torch.allclose(wanted[key], item, atol=1e-2) for key, item in case.weights().items())
    assert survival.cli.wait_for_end(case.job)["statuses"][0]["state"] == "COMPLETED"


@pytest.mark.runs("disk full")
def test_full_disk_stops_the_run_and_its_last_checkpoint_resumes(survival: Survival) -> None:
    case = survival.over("disk full")
    case.fault_at = float((survival.cli.folder / "fault-full").read_text())
    survival.row("disk full", "full", "disk-full", words="disk full while it saves")
    assert case.causes() == ["disk-full"]
    assert not (case.run.path / "final.pt").exists()
    (survival.small_disk / ".filler").unlink()
    job = survival.cli("resubmit", case.job, "--from-checkpoint", "--parsable").stdout.strip()
    survival.cli.started.append(job)
    again = survival.cases["disk full"] = Case(job, survival.cli.run_dir(job))
    survival.over("disk full")
    assert again.causes() == ["done"]
    assert again.events("restored")[-1]["step"] == 60
    assert survival.same(again)
