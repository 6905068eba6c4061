"""Which jobs a run can start in, and how a request fits into one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import SlurmUnavailable
from dtslurm.model.jobs.job import JobSpec, Resources, TaskLayout
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.runs.allocation import HeldAllocation
from dtslurm.model.runs.state import JobState, JobStatus, StateFlag
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit import allocation
from dtslurm.slurm import parse_scontrol
from tests.slurm import recorded
from tests.slurm.recorded import VERSIONS

JOB = JobStatus(job_id="17", state=JobState.RUNNING, partition="main", nodelist="n[1-4]", source="scontrol")
HELD = HeldAllocation(
    job=JOB, is_own=True, nodes=("n1", "n2", "n3", "n4"), gpus_per_node=8, cpus_per_node=64, runs=(),
    version="22.05.8",
)  # fmt: skip


class Scheduler:
    """A scheduler that knows one job."""

    def __init__(self, held: HeldAllocation | None) -> None:
        self.held = held

    def read_allocation(self, job_id: str) -> HeldAllocation | None:
        if job_id == "404":
            raise SlurmUnavailable("the controller is down", evidence=["timed out"])
        return self.held


def problems_of(held: HeldAllocation | None, job_id: str = "17") -> str:
    cluster: Any = SimpleNamespace(scheduler=Scheduler(held), name="lab")
    return "; ".join(allocation.read_allocation(cluster, job_id).problems)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"is_own": False}, "belongs to another user"),
        ({"job": replace(JOB, state=JobState.PENDING, reason="Priority")}, "job 17 is pending (Priority)"),
        ({"job": replace(JOB, state=JobState.TIMEOUT)}, "job 17 has ended: its state is TIMEOUT"),
        ({"job": replace(JOB, state=JobState.SUSPENDED)}, "is not running: its state is SUSPENDED"),
        ({"job": replace(JOB, flags=frozenset({StateFlag.CONFIGURING}))}, "its state is CONFIGURING"),
        ({"nodes": ()}, "is not running"),
        ({"job": replace(JOB, job_id="17_2")}, "is a task of a job array"),
        ({"job": replace(JOB, comment="dtslurm:tok:hash")}, "is a run itself"),
        ({"job": replace(JOB, comment="dtslurm:tok:hash dtslurm-allocation")}, ""),
        ({"runs": ("17.3",)}, "run 17.3 is running in this allocation (dtslurm cancel 17.3 ends it)"),
        ({"version": "21.08.8"}, "Slurm 21.08.8 shares only CPUs between steps"),
        ({"version": "20.11.4"}, "needs Slurm 22.05 or later"),
        ({"version": ""}, ""),
        ({"version": "26.11.0-0rc1"}, ""),
    ],
)
def test_job_in_which_no_run_can_start_is_refused_with_the_reason(
    change: dict[str, Any], problem: str
) -> None:
    text = problems_of(replace(HELD, **change))
    assert problem in text
    assert bool(problem) == bool(text)


def test_unknown_jobs_and_other_ids_are_refused() -> None:
    assert "Slurm knows no such job" in problems_of(None)
    assert "a task of a job array is no allocation" in problems_of(HELD, "17_2")
    assert "'17.3' is not a job id" in problems_of(HELD, "17.3")
    assert "'-1' is not a job id" in problems_of(HELD, "-1")
    assert "the controller is down; timed out" in problems_of(HELD, "404")


def fit(request: JobRequest) -> tuple[JobRequest, list[str]]:
    profile: Any = SimpleNamespace(slurm=SimpleNamespace(partitions={"main": None}))
    fitted = allocation.fit_request(request, HELD, profile)
    return fitted.value, fitted.notices


def test_request_without_a_size_gets_that_of_the_allocation() -> None:
    request, notices = fit(JobRequest(script="train.py"))
    assert (request.nodes, request.gpus_per_node, request.cpus_per_task) == (4, 8, 8)
    assert (request.partition, request.requeue, notices) == ("main", False, [])
    request, _ = fit(JobRequest(script="train.py", spare_nodes=1, gpus_per_node=2, ntasks_per_node=4))
    assert (request.nodes, request.gpus_per_node, request.cpus_per_task) == (3, 2, 16)
    request, _ = fit(JobRequest(script="train.py", launcher="single"))
    assert (request.nodes, request.cpus_per_task) == (1, 64)


def test_options_without_effect_are_named_and_dropped() -> None:
    options = {"time": "60", "partition": "gpu", "mem": "3G", "signal_before": 9, "sbatch": ("--exclusive",)}
    request, notices = fit(JobRequest(script="train.py", requeue=True, **options))  # type: ignore[arg-type]
    assert notices == [
        "no effect in allocation 17: --time, --partition, --mem, --signal-before, --requeue, --sbatch"
    ]
    assert (request.time, request.partition, request.mem, request.sbatch) == (None, "main", None, ())
    assert request.requeue is False


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, None),
        ({"array": "0-3"}, "--array"),
        ({"array": "0-3", "trials": Trials()}, "a sweep"),
        ({"dependency": "afterok:1"}, "--dependency"),
        ({"total_time": "9h"}, "--total-time"),
        ({"once": "key"}, "--once"),
        ({"time": "60"}, "--time"),
    ],
)
def test_options_that_need_a_job_of_its_own_contradict(options: dict[str, Any], name: str | None) -> None:
    problems = allocation.find_contradictions(JobRequest(script="train.py", **options))
    assert [text.partition(" contradicts --in")[0] for text in problems] == ([name] if name else [])


def test_time_limit_of_a_file_is_no_contradiction() -> None:
    request = JobRequest(script="train.py", time="60", origins={"time": "job.yaml:2"})
    assert allocation.find_contradictions(request) == []
    assert len(allocation.find_contradictions(replace(request, origins={"time": "command line"}))) == 1


@pytest.mark.parametrize(
    ("resources", "nodes", "expected"),
    [
        ({}, 2, ("n1", "n2")),
        ({"exclude": "n[1-2]"}, 2, ("n3", "n4")),
        ({"nodelist": "n4"}, 2, ("n1", "n4")),
        ({"nodelist": "n9"}, 2, "n9 is not in allocation 17 (n[1-4])"),
        ({"exclude": "n1"}, 4, "needs 4 nodes, and allocation 17 has 3 without n1"),
        ({"nodelist": "n[1"}, 1, "--nodelist or --exclude"),
        ({}, 5, "needs 5 nodes, and allocation 17 has 4"),
    ],
)
def test_nodes_of_a_run_are_chosen_in_the_allocation(
    resources: dict[str, str], nodes: int, expected: tuple[str, ...] | str
) -> None:
    layout = TaskLayout(nodes=nodes, ranks_per_node=8, gpus_per_node=8, cpus_per_rank=8, mem=None, time=None)
    asked: Any = resources
    spec = JobSpec(
        name="train", script="train.py", work_dir="/", launcher="srun", resources=Resources(**asked)
    )
    chosen = allocation.choose_nodes(spec, HELD, layout)
    if isinstance(expected, str):
        assert expected in "; ".join(chosen.problems)
    else:
        assert chosen.value.allocation is not None
        assert (chosen.problems, chosen.value.allocation.nodes) == ([], expected)


def test_run_that_needs_more_gpus_or_cpus_is_refused() -> None:
    layout = TaskLayout(nodes=1, ranks_per_node=9, gpus_per_node=9, cpus_per_rank=9, mem=None, time=None)
    spec = JobSpec(name="train", script="train.py", work_dir="/", launcher="srun")
    text = "; ".join(allocation.choose_nodes(spec, HELD, layout).problems)
    assert "needs 9 GPUs per node, and allocation 17 has 8" in text
    assert "needs 81 CPUs per node, and allocation 17 has 64" in text


@pytest.mark.parametrize("version", VERSIONS)
def test_allocation_is_read_from_scontrol_of_every_version(version: str) -> None:
    text = recorded.read(version, "jobs.txt")
    record = next(part for part in text.split("\n\n") if "JobName=ok\n" in part or "JobName=ok " in part)
    held = parse_scontrol.allocation(record + "\n", uid=0, observed_at=1.0)
    assert held is not None
    assert (held.is_own, held.nodes) == (True, ("n1", "n2"))
    assert held.cpus_per_node >= 1
    other = parse_scontrol.allocation(record + "\n", uid=4711, observed_at=1.0)
    assert other is not None
    assert not other.is_own
    assert parse_scontrol.allocation("", uid=0, observed_at=1.0) is None


@pytest.mark.parametrize(("gres", "gpus"), [("gpu:8", 4), ("gpu:a100:4,gpu:h100:4", 4), ("(null)", 0)])
def test_gpus_and_cpus_of_an_allocation_are_counted_per_node(gres: str, gpus: int) -> None:
    record = (
        "JobId=17 JobName=a UserId=u(5) GroupId=g(5) JobState=RUNNING "
        f"NodeList=n[1-2] NumNodes=2 NumCPUs=16 TRES=cpu=16,mem=8G,node=2 JOB_GRES={gres} "
        "Comment=dtslurm:t:h dtslurm-allocation StdErr="
    )
    held = parse_scontrol.allocation(record, uid=None, observed_at=1.0)
    assert held is not None
    assert (held.nodes, held.gpus_per_node, held.cpus_per_node) == (("n1", "n2"), gpus, 8)
    assert "dtslurm-allocation" in held.job.comment
    assert held.is_own
