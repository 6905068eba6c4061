from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.checks import job_checks
from dtslurm.launch import registry
from dtslurm.model.cluster import ClusterProfile, EnvironmentSetup, Fabric, Variable
from dtslurm.model.jobs.job import JobSpec, Resources, TaskLayout
from dtslurm.model.units import Memory, Walltime


def layout_of(nodes: int, time: Walltime | None = None) -> TaskLayout:
    return TaskLayout(
        nodes=nodes,
        ranks_per_node=1,
        gpus_per_node=0,
        cpus_per_rank=None,
        mem=None,
        time=time,
        one_process=False,
    )


@pytest.mark.parametrize(
    ("expression", "indices"),
    [("0-3", [0, 1, 2, 3]), ("1,5,7", [1, 5, 7]), ("0-9:4", [0, 4, 8]), ("0-9:2,20%4", [0, 2, 4, 6, 8, 20])],
)
def test_array_indices_expands_an_array_expression(expression: str, indices: list[int]) -> None:
    assert job_checks.parse_array_indices(expression) == indices


@pytest.mark.parametrize(
    "expression", ["", "a", "3-1", "0-9:0", "0-", "-1", "1,,2", "0-9%", "0-9%0", "0-9%x", "1 2"]
)
def test_malformed_array_expressions_are_refused(expression: str) -> None:
    assert job_checks.check_array(expression, None)


def test_arrays_above_max_array_size_or_with_duplicates_are_refused() -> None:
    assert job_checks.check_array("0-999", 1000) == []
    assert "MaxArraySize" in job_checks.check_array("0-1000", 1000)[0]
    assert "twice" in job_checks.check_array("1,1", None)[0]


@pytest.mark.parametrize(
    "expression", ["afterok:12", "afterany:12:13_4", "singleton", "afterok:1,afterany:2", "after:5+10"]
)
def test_valid_dependencies_are_accepted(expression: str) -> None:
    assert job_checks.check_dependency(expression) == []


@pytest.mark.parametrize("expression", ["", "afterok", "12", "afterok:x", "afterok:1;rm"])
def test_malformed_dependencies_are_refused(expression: str) -> None:
    assert job_checks.check_dependency(expression)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\0b", "a\x1bb", "x" * 201])
def test_f84_job_names_that_slurm_cannot_store_are_refused(name: str) -> None:
    assert job_checks.check_job_name(name)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=100))
def test_any_other_printable_job_name_is_accepted(name: str) -> None:
    assert job_checks.check_job_name(name) == [] or not name.strip() or set(name) <= set("0123456789_+")


@pytest.mark.parametrize("name", ["107", "107_2", "107_[1-4]"])
def test_a_job_name_that_looks_like_a_job_id_is_refused(name: str) -> None:
    assert job_checks.check_job_name(name) == [
        f"the job name {name!r} looks like a job id: set another name with --job-name (-J)"
    ]


@pytest.mark.parametrize("name", ["v107", "107b", "107.2", "2024-10-31", "3_epochs", "1_2_3", "_1"])
def test_a_job_name_with_digits_that_is_no_job_id_is_accepted(name: str) -> None:
    assert job_checks.check_job_name(name) == []


def test_environment_variable_names_are_checked() -> None:
    assert job_checks.check_variables([("A_1", "x"), ("_b", "")]) == []
    assert len(job_checks.check_variables([("1A", ""), ("A B", ""), ("A;B", ""), ("", "")])) == 4


@pytest.mark.parametrize(
    "name",
    [
        "DTSLURM_RUN_DIR",
        "DTSLURM_ATTEMPT",
        "SRUN_CPUS_PER_TASK",
        "SLURM_JOB_ID",
        "SLURM_JOBID",
        "SLURM_JOB_NODELIST",
        "SLURM_STEP_NODELIST",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_CPUS_PER_TASK",
        "SLURMD_NODENAME",
    ],
)
def test_env_cannot_set_a_variable_that_the_job_depends_on(name: str) -> None:
    [problem] = job_checks.check_variables([(name, "3")])
    assert problem.startswith(f"--env {name} is ")
    assert problem.endswith("remove it")


def test_env_may_set_variables_that_srun_reads() -> None:
    names = (
        "WAIT MPI_TYPE CPU_BIND UNBUFFEREDIO EXPORT_ENV DISTRIBUTION STEP_GRES GPU_BIND JOB_NAME CONF DEBUG"
    )
    own = ["DTSLURM_CHECKPOINT_DIR", "DTSLURM_SYSFS", "DTSLURM_STAGE_A_DIR", "RANK", "MASTER_PORT"]
    assert (
        job_checks.check_variables(
            [(name, "1") for name in (*(f"SLURM_{name}" for name in names.split()), *own)]
        )
        == []
    )


@pytest.mark.parametrize(
    ("launcher", "nodes", "refused"),
    [
        ("torchrun", 2, "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"),
        ("torchrun", 1, "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"),
        ("srun", 1, "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"),
        ("lightning", 2, "RANK LOCAL_RANK MASTER_ADDR MASTER_PORT"),
        ("ray", 2, "RANK LOCAL_RANK MASTER_ADDR MASTER_PORT"),
        ("single", 1, ""),
    ],
)
@pytest.mark.parametrize("where", ["--env", "environment.variables", "fabric.environment"])
def test_env_cannot_set_a_variable_that_the_launcher_overwrites(
    where: str, launcher: str, nodes: int, refused: str
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG")
    values = {name: Variable(value="x") for name in names}
    spec = JobSpec(name="x", script="x.py", work_dir="/w", launcher=launcher)
    profile = ClusterProfile(name="ours")
    if where == "--env":
        spec = replace(spec, env=tuple((name, "x") for name in names))
    elif where == "environment.variables":
        profile = replace(profile, environment=EnvironmentSetup(variables=values))
    else:
        profile = replace(profile, fabric=Fabric(kind="roce", environment=values))
    launcher_variables = job_checks.check_launcher_variables(
        spec, profile, layout_of(nodes), registry.load(launcher)
    )
    if where == "fabric.environment" and nodes == 1:
        assert launcher_variables == []  # it is for jobs on several nodes
        return
    at = "--env " if where == "--env" else f"{where}."
    assert [line.removeprefix(at).split()[0] for line in launcher_variables] == refused.split()
    assert all(f"launcher {launcher}" in line for line in launcher_variables)
    assert all("slurm.head_address" in line for line in launcher_variables if "MASTER_ADDR" in line)


def test_signal_names_and_lead_times_are_checked() -> None:
    assert job_checks.check_signal("USR2", 60) == []
    assert len(job_checks.check_signal("usr 2", 0)) == 2
    assert job_checks.check_signal("USR1", 65536)
    assert "cannot handle this signal" in job_checks.check_signal("KILL", 60)[0]
    assert "not one of HUP" in job_checks.check_signal("FOO", 60)[0]


@pytest.mark.parametrize(("lead", "refused", "notice_count"), [(600, 1, 1), (599, 0, 1), (300, 0, 0)])
def test_a_signal_lead_time_near_the_time_limit_is_warned_about_or_refused(
    lead: int, refused: int, notice_count: int
) -> None:
    spec = JobSpec(name="x", script="x.py", work_dir="/w", launcher="srun", signal_before=lead)
    limit = Walltime(600)
    assert len(job_checks.find_rule_conflicts(spec, ClusterProfile(name="x"), layout_of(1, limit))) == refused
    assert len(job_checks.note_lead_time(None, lead, limit)) == notice_count


def test_a_signal_without_a_lead_time_causes_a_notice() -> None:
    assert job_checks.note_lead_time("TERM", None, None) == [
        "--signal TERM is sent only with --signal-before SECONDS"
    ]
    assert job_checks.note_lead_time(None, None, None) == []


def job_with(*options: str, resources: Resources | None = None) -> JobSpec:
    return JobSpec(
        name="train",
        script="train.py",
        work_dir="/w",
        launcher="torchrun",
        sbatch_options=options,
        resources=resources or Resources(),
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--nodes=3", "use -N/--nodes"),
        ("--arr=1-3", "use -a/--array"),
        ("--time=60", "use -t/--time"),
        ("--ntasks=4", "use --ntasks-per-node"),
        ("--gres=gpu:1", "use --gpus-per-node"),
        ("--gres=nvme:100,gpu:a100:2", "use --gpus-per-node"),
        ("--gres=gpu", "use --gpus-per-node"),
        ("--gpus-per-socket=2", "use --gpus-per-node"),
        ("--tres-per-node=gres/gpu:2", "use --gpus-per-node"),
        ("--test-only", "would queue no job"),
        ("--wrap=hostname", "script"),
        ("--wait", "would not return"),
        ("--parsable", "answer"),
        ("--output=x.log", "run directory"),
        ("--export=ALL", "--env"),
        ("-N3", "not a long option of sbatch"),
    ],
)
def test_sbatch_options_that_conflict_with_the_script_are_refused(option: str, message: str) -> None:
    [problem] = job_checks.check_sbatch_options(job_with(option), None)
    assert problem.removeprefix("--sbatch ").startswith(f"'{option}'")
    assert message in problem


def test_all_other_sbatch_options_are_accepted() -> None:
    options = "hold exclusive begin=now+1hour no-requeue reservation=x gres=nvme:200 mem=0 comment=x nice"
    options += " gres=nvme:1,mps:100,gpu_shard:2,craynetwork:0 tres-per-task=license/x:1"
    more = "mail-type=END mail-user=me licenses=fs switches=1 wait-all-nodes=1 time-min=60 gpu_cmode=shared"
    every = [f"--{option}" for option in f"{options} {more}".split()]
    assert job_checks.check_sbatch_options(job_with(*every), None) == []


@pytest.mark.parametrize(
    ("option", "same"),
    [
        ("--ntasks=8", True),
        ("--ntasks=4", False),
        ("--gpus=8", True),
        ("--gpus-per-task=1", True),
        ("--gpus-per-task=2", False),
        ("--ntasks-per-gpu=1", True),
        ("--cpus-per-gpu=6", True),
        ("--tasks-per-node=4", True),
    ],
)
def test_sbatch_counts_are_accepted_only_if_they_match_the_layout(option: str, same: bool) -> None:
    shape = TaskLayout(nodes=2, ranks_per_node=4, gpus_per_node=4, cpus_per_rank=6, mem=None, time=None)
    assert (job_checks.check_sbatch_options(job_with(option), shape) == []) is same


def test_mem_and_mem_per_cpu_together_are_refused() -> None:
    spec = job_with("--mem-per-cpu=4G", resources=Resources(mem=Memory(1024)))
    [problem] = job_checks.check_sbatch_options(spec, None)
    assert problem == "--mem and --mem-per-cpu contradict each other; give only one of these options"


def test_an_array_variable_in_the_arguments_requires_an_array() -> None:
    [problem] = job_checks.check_arguments(["--seed=$SLURM_ARRAY_TASK_ID", "$SLURM_JOB_ID"], None)
    assert problem.startswith(
        "$SLURM_ARRAY_TASK_ID in the script's arguments has a value only in a job array"
    )
    assert job_checks.check_arguments(["--seed=${SLURM_ARRAY_TASK_ID}"], "0-3") == []
