"""scontrol show: jobs, partitions, nodes and configuration of several versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.model.runs.state import JobState, JobStatus
from dtslurm.model.units import Memory, Walltime
from dtslurm.slurm import parse_scontrol as show
from tests.slurm import recorded
from tests.slurm.recorded import VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_scontrol_jobs_of_every_version_are_parsed(version: str) -> None:
    listing = show.jobs(recorded.read(version, "jobs.txt"), uid=0)
    assert not listing.skipped
    jobs = {job.name: job for job in listing.jobs}
    assert (jobs["fail"].state, jobs["fail"].exit_code, jobs["fail"].restarts) == (JobState.FAILED, 3, 0)
    assert (jobs["segv"].exit_code, jobs["segv"].signal) == (None, 11)
    assert jobs["ok"].comment == "run=a1;kind=train"
    assert (jobs["ok"].nodelist, jobs["ok"].nodes, jobs["ok"].partition) == ("n[1-2]", 2, "main")
    assert jobs["requ"].restarts == 1
    assert jobs["big"].reason.startswith("Nodes_required")
    ids = [job.job_id for job in listing.jobs]
    array = next(job.job_id for job in listing.jobs if job.name == "arr").split("_")[0]
    assert {f"{array}_{task}" for task in range(6)} <= set(ids)
    het = next(job.raw_id for job in listing.jobs if job.name == "het")
    assert {f"{het}+0", f"{het}+1"} <= set(ids)


def test_every_field_of_the_one_line_form_is_parsed() -> None:
    jobs = {job.job_id: job for job in show.jobs(recorded.read("22.05.8", "jobs_oneline.txt"), uid=0).jobs}
    assert len(jobs) == 14
    assert jobs["12"] == JobStatus(
        job_id="12", raw_id="12", state=JobState.RUNNING, raw_state="RUNNING", name='line\nbreak|pipe=eq "q"',
        partition="main", nodelist="n1", nodes=1, submit_time=1795269424, start_time=1795269424, restarts=0,
        comment="dtslurm:cafe0001", source="scontrol",
    )  # fmt: skip
    assert (jobs["14"].name, jobs["14"].state) == ("x JobState=FAKE y", JobState.PENDING)
    assert jobs["14"].comment == "c JobState=FAKE Reason=None"
    assert (jobs["16"].signal, jobs["15"].exit_code, jobs["18"].restarts) == (53, 3, 1)
    assert jobs["13_0"].name == "bad\udcff"
    assert jobs["19+1"].raw_id == "20"


@pytest.mark.parametrize(("value", "preempted_at"), [("1795269430", 1795269430), ("None", None), ("", None)])
def test_the_time_of_a_preemption_is_parsed(value: str, preempted_at: int | None) -> None:
    output = "JobId=7 JobName=train UserId=root(0) JobState=FAILED PreemptEligibleTime=1795269424 "
    [job] = show.jobs(f"{output}PreemptTime={value} SuspendTime=None\n").jobs
    assert job.preempted_at == preempted_at


def test_jobs_of_other_users_are_ignored() -> None:
    assert show.jobs(recorded.read("22.05.8", "jobs.txt"), uid=1000).jobs == []


@pytest.mark.parametrize("version", VERSIONS)
def test_scontrol_nodes_of_every_version_are_parsed(version: str) -> None:
    first, second = show.nodes(recorded.read(version, "nodes.txt"))
    assert (first.name, second.name) == ("n1", "n2")
    assert (first.cpus, first.sockets, first.cores_per_socket, first.threads_per_core) == (8, 1, 8, 1)
    assert first.memory == Memory(4000)
    assert first.gpus == (("a100", 8),)
    assert first.partitions == ("main",)


@pytest.mark.parametrize("version", VERSIONS)
def test_scontrol_config_of_every_version_is_parsed(version: str) -> None:
    config = show.config(recorded.read(version, "config.txt"))
    assert config["SelectType"] == "select/cons_tres"
    assert (config["MaxArraySize"], config["JobRequeue"], config["GresTypes"]) == ("10001", "1", "gpu")
    assert config["ClusterName"] == "lab"
    assert config.get("RequeueExit") == ""


def test_a_recorded_partition_is_parsed() -> None:
    (partition,) = show.partitions(recorded.read("22.05.8", "partitions.txt"))
    assert partition == show.PartitionInfo(name="main", default=True, state="UP", total_nodes=2)


def test_partition_limits_are_parsed() -> None:
    text = (
        "PartitionName=gpu AllowGroups=ALL AllowAccounts=ml,vision AllowQos=ALL DenyQos=debug Default=NO "
        "MaxNodes=16 MaxTime=2-00:00:00 State=DRAIN TotalNodes=32\n"
        "PartitionName=cpu DenyAccounts=x MaxTime=NONE\n"
    )
    gpu, cpu = show.partitions(text)
    assert gpu == show.PartitionInfo(
        name="gpu", state="DRAIN", max_nodes=16, max_time=Walltime(172800), total_nodes=32,
        allow_accounts=("ml", "vision"), deny_qos=("debug",),
    )  # fmt: skip
    assert (cpu.deny_accounts, cpu.max_time) == (("x",), None)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("gpu:a100:8", (("a100", 8),)), ("gpu:8", (("", 8),)), ("gpu", (("", 1),)), ("(null)", ()), ("", ()),
     ("gpu:h100:4(S:0,2),craynetwork:4", (("h100", 4),)), ("shard:16,gpu:l40s:2(S:0-1)", (("l40s", 2),)),
     ("gpu:a100:4,gpu:nvidia_a100_3g.20gb:8", (("a100", 4), ("nvidia_a100_3g.20gb", 8)))],
)  # fmt: skip
def test_gpus_are_parsed_from_gres(gres: str, gpus: tuple[tuple[str, int], ...]) -> None:
    assert show.gpus(gres) == gpus


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("\n|=\"'\x1f\udcff"), max_size=30))
def test_c3_f62_a_job_name_does_not_change_other_fields(name: str) -> None:
    record = (
        f"JobId=7 JobName={name} UserId=a(5) GroupId=a(5) MCS_label=N/A JobState=FAILED Reason=None "
        "Dependency=(null) Restarts=0 ExitCode=3:0 SubmitTime=1795269424\n"
    )
    (job,) = show.jobs(record, uid=5).jobs
    assert (job.job_id, job.state, job.exit_code) == ("7", JobState.FAILED, 3)


@given(
    st.binary(max_size=200)
    | st.lists(
        st.sampled_from(
            [b"JobId=", b"1", b" UserId=a(5)", b"\n", b"JobState=", b"\xff", b" NodeName=", b"Gres=gpu:"]
        )
    ).map(b"".join)
)
def test_f61_arbitrary_bytes_do_not_break_the_scontrol_parsers(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    show.jobs(text)
    show.partitions(text)
    show.nodes(text.replace("JobId", "NodeName"))
    show.config(text)
