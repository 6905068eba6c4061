"""The options of the embedded scheduler's srun, and the nodes, tasks, CPUs and GPUs of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.localslurm.options import Refused
from dtslurm.worker.localslurm.srun_options import bind_gpus, plan, read_options, tasks_of, working_folder

# A job with three tasks and six CPUs on its first node, and one task and two CPUs on its second.
JOB = {
    "id": 7,
    "nodes": 2,
    "ntasks": 4,
    "tasks_per_node": [3, 1],
    "cpus_per_node": [6, 2],
    "gpu_ids": [["0", "1"], ["2", "3"]],
}
FEWER_NODES = "Warning: can't run 1 processes on 2 nodes, setting nnodes to 1"
IGNORED = (
    "Warning: can't honor --ntasks-per-node set to 1 which doesn't match the requested tasks 3 "
    "with the number of requested nodes 2. Ignoring --ntasks-per-node."
)
TOO_MANY = "Unable to create step for job 7: More processors requested than permitted"
NO_GRES = "Unable to create step for job 7: Invalid generic resource (gres) specification"


def plan_step(words: str, **environment: str) -> Any:
    return plan([*words.split(), "true"], environment, JOB)


@pytest.mark.parametrize(
    ("option", "variables"),
    [
        ("ntasks", ["SLURM_NTASKS", "SLURM_NPROCS"]),
        ("nodes", ["SLURM_NNODES", "SLURM_JOB_NUM_NODES"]),
        ("ntasks-per-node", ["SLURM_NTASKS_PER_NODE"]),
        ("cpus-per-task", ["SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"]),
        ("distribution", ["SLURM_DISTRIBUTION"]),
        ("export", ["SRUN_EXPORT_ENV", "SLURM_EXPORT_ENV"]),
        ("kill-on-bad-exit", ["SLURM_KILL_BAD_EXIT"]),
        ("wait", ["SLURM_WAIT"]),
        ("open-mode", ["SLURM_OPEN_MODE"]),
    ],
)
def test_srun_variables_set_options_unless_the_command_line_does(option: str, variables: list[str]) -> None:
    environment = {variable: str(number) for number, variable in enumerate(variables, 1)}
    assert read_options(["true"], environment) == ({option: "1", "given": set()}, ["true"])
    last = {variables[0]: "", variables[-1]: "9"}
    assert read_options(["true"], last) == ({option: "9", "given": set()}, ["true"])
    given = read_options([f"--{option}=5", "true", "-x"], environment)
    assert given == ({option: "5", "given": {option}}, ["true", "-x"])


def test_srun_options_have_the_letters_and_values_of_slurm() -> None:
    words = "-N1 -n2 -c 3 -m cyclic -K -W5 -oout -e err -i in -l -w local1 -x local2 -D / -Jj -u -k -Q -v"
    long = "--gres=gpu --mem=1G --gpu-bind=none --cpu-bind=none --open-mode=a --overlap --exact --mpi=none"
    options, _ = read_options([*words.split(), *long.split(), "--gpus-per-node=1", "true"], {})
    del options["given"]
    assert options == {
        "nodes": "1", "ntasks": "2", "cpus-per-task": "3", "distribution": "cyclic",
        "kill-on-bad-exit": None, "wait": "5", "output": "out", "error": "err", "input": "in", "label": None,
        "nodelist": "local1", "exclude": "local2", "chdir": "/", "job-name": "j", "unbuffered": None,
        "no-kill": None, "quiet": None, "verbose": None, "gres": "gpu", "mem": "1G", "gpu-bind": "none",
        "cpu-bind": "none", "open-mode": "a", "overlap": None, "exact": None, "mpi": "none",
        "gpus-per-node": "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--bogus", "the embedded scheduler's srun does not offer the option --bogus"),
        ("-Z", "the embedded scheduler's srun does not offer the option -Z"),
        ("--label=1", "--label takes no value"),
        ("--nodes", "--nodes needs a value"),
        ("-n2", "No command given to execute."),
    ],
)
def test_srun_command_line_with_an_error_is_refused(words: str, problem: str) -> None:
    with pytest.raises(Refused) as caught:
        read_options(words.split(), {})
    assert caught.value.problems == [problem]


@pytest.mark.parametrize(
    ("words", "tasks", "warnings"),
    [
        ("", {0: [0], 1: [1]}, []),
        ("-n4", {0: [0, 1, 2], 1: [3]}, []),  # as the job
        ("-n4 -c1", {0: [0, 1], 1: [2, 3]}, []),
        ("-n4 -c2", {0: [0, 1, 2], 1: [3]}, []),
        ("-n2 -c3", {0: [0, 1]}, []),  # no CPUs for a task on the second node
        ("-n8", {0: [0, 1, 2, 3, 4, 5], 1: [6, 7]}, []),
        ("-N1 -n4", {0: [0, 1, 2, 3]}, []),
        ("-n1", {0: [0]}, [FEWER_NODES]),
        ("-n2", {0: [0], 1: [1]}, []),
        ("--ntasks-per-node=2", {0: [0, 1], 1: [2, 3]}, []),
        ("-n4 --ntasks-per-node=2", {0: [0, 1], 1: [2, 3]}, []),
        ("--ntasks-per-node=3", {0: [0, 1, 2, 3], 1: [4, 5]}, []),
        (
            "-n3 --ntasks-per-node=1",
            {0: [0, 1], 1: [2]},
            [IGNORED],
        ),
        ("-N1 -n1 -w local2", {1: [0]}, []),
        ("-N1 -n1 -x local1", {1: [0]}, []),
        ("-N1 -n2 -w local2,local1,local2", {0: [0], 1: [1]}, []),
        ("-N2 -n2 -w local2", {0: [0], 1: [1]}, []),
        ("-n4 -m cyclic", {0: [0, 2, 3], 1: [1]}, []),
        ("-n4 -m CYCLIC:block", {0: [0, 2, 3], 1: [1]}, []),
        ("-n4 -m plane=2", {0: [0, 1, 3], 1: [2]}, []),
        ("-n4 -m *:cyclic", {0: [0, 1, 2], 1: [3]}, []),
        ("-n4 -m block,NoPack", {0: [0, 1, 2], 1: [3]}, []),
        ("-n4 -m :cyclic", {0: [0, 1, 2], 1: [3]}, []),
        ("--mpi=none", {0: [0], 1: [1]}, []),
        ("--mpi=list", {0: [0], 1: [1]}, []),
        (
            "--mpi=pmix",
            {0: [0], 1: [1]},
            ["Warning: the embedded scheduler has no MPI plugin; --mpi=pmix has no effect"],
        ),
    ],
)
def test_step_places_tasks_on_the_nodes_of_its_job(
    words: str, tasks: dict[int, list[int]], warnings: list[str]
) -> None:
    step = plan_step(words)
    assert {node.place: node.tasks for node in step.nodes} == tasks
    assert step.warnings == warnings
    assert step.ntasks == sum(len(ids) for ids in tasks.values())
    assert step.command == ["true"]


@pytest.mark.parametrize("cpus", [2, 3, 4])
def test_step_with_tasks_per_node_does_not_take_those_of_the_job(cpus: int) -> None:
    job = {**JOB, "cpus_per_node": [6, cpus]}  # for which it has at least enough CPUs
    step = plan(["-n4", "--ntasks-per-node=2", "true"], {}, job)
    assert [node.tasks for node in step.nodes] == [[0, 1], [2, 3]]


def test_tasks_per_node_of_the_job_are_ignored_without_a_warning() -> None:
    step = plan_step("-n3", SLURM_NTASKS_PER_NODE="1")
    assert ([node.tasks for node in step.nodes], step.warnings) == ([[0, 1], [2]], [])


@pytest.mark.parametrize(
    ("words", "environment", "cpus", "cpus_per_task"),
    [
        ("-n2", {}, [6, 2], None),
        ("-n4 --exact", {}, [3, 1], None),
        ("-n4 -c1", {}, [2, 2], 1),
        ("-n4 -c2", {}, [6, 2], 2),
        ("-n2", {"SLURM_CPUS_PER_TASK": "2"}, [6, 2], 2),
        ("-n2 --exact", {"SLURM_CPUS_PER_TASK": "2"}, [2, 2], 2),
        ("-n2", {"SLURM_CPUS_PER_TASK": "3"}, [6, 2], None),  # more than the second node has
        ("-n2", {"SRUN_CPUS_PER_TASK": "3"}, [6], 3),
    ],
)
def test_step_uses_all_cpus_of_its_nodes_unless_it_is_exact(
    words: str, environment: dict[str, str], cpus: list[int], cpus_per_task: int | None
) -> None:
    step = plan_step(words, **environment)
    assert [node.cpus for node in step.nodes] == cpus
    assert step.cpus_per_task == cpus_per_task


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("", [["0", "1"], ["2", "3"]]),
        ("--gpus-per-node=1", [["0"], ["2"]]),
        ("--gpus-per-node=a100:2", [["0", "1"], ["2", "3"]]),
        ("--gres=gpu:1", [["0"], ["2"]]),
        ("--gres=none", [[], []]),
        ("--gres=none --gpus-per-node=1", [["0"], ["2"]]),
    ],
)
def test_step_uses_the_gpus_that_it_requests(words: str, gpus: list[list[str]]) -> None:
    assert [node.gpus for node in plan_step(words).nodes] == gpus


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("-n9", TOO_MANY),
        ("-n5 -c2", TOO_MANY),
        ("-N3", "Only allocated 2 nodes asked for 3"),
        ("-N2 -x local2", "Only allocated 1 nodes asked for 2"),
        ("-N1 -w local1 -x local1", "A node is both required and excluded"),
        ("-w local0", "Requested node local0 is not in this job's allocation"),
        ("-w local3", "Requested node local3 is not in this job's allocation"),
        ("-x local[", "invalid node list 'local['"),
        ("-m plane=0", "Invalid --distribution specification: plane=0"),
        ("-m plane=x", "Invalid --distribution specification: plane=x"),
        ("-m arbitrary", "the embedded scheduler does not offer --distribution=arbitrary"),
        ("--gpus-per-node=3", NO_GRES),
        ("--gres=gpu:3", NO_GRES),
        ("--gres=fpga", "'fpga': this machine has no generic resource 'fpga', only gpu"),
    ],
)
def test_step_that_does_not_fit_its_job_is_refused(words: str, problem: str) -> None:
    with pytest.raises(Refused) as caught:
        plan_step(words)
    assert caught.value.problems == [problem]


@pytest.mark.parametrize("name", ["nodes", "ntasks", "ntasks-per-node", "cpus-per-task"])
def test_number_that_is_none_is_refused_with_its_option(name: str) -> None:
    with pytest.raises(Refused, match=f"^Invalid --{name} specification: 'x'"):
        plan_step(f"--{name}=x")


def test_tasks_are_in_the_order_of_their_ids() -> None:
    tasks = tasks_of(plan_step("-n4 -m cyclic -w local1,local2"))
    assert [(task.id, task.local_id, task.node_id, task.node_name) for task in tasks] == [
        (0, 0, 0, "local1"),
        (1, 0, 1, "local2"),
        (2, 1, 0, "local1"),
        (3, 2, 0, "local1"),
    ]
    (task,) = tasks_of(plan_step("-N1 -n1 -w local2"))
    assert (task.node_id, task.node_name) == (0, "local2")


@pytest.mark.parametrize(
    ("binding", "local_id", "gpus"),
    [
        (None, 1, ["a", "b", "c"]),
        ("none", 1, ["a", "b", "c"]),
        ("closest", 1, ["a", "b", "c"]),
        ("verbose", 1, ["a", "b", "c"]),
        ("v", 1, ["a", "b", "c"]),
        ("verbose,closest", 1, ["a", "b", "c"]),
        ("verbose,single:1", 1, ["b"]),
        ("single", 4, ["b"]),
        ("single:1", 2, ["c"]),
        ("per_task:2", 0, ["a", "b"]),
        ("per_task:2", 1, ["c", "a"]),
        ("map_gpu:2,0", 0, ["c"]),
        ("map_gpu:2,0", 1, ["a"]),
        ("map_gpu:2,0", 2, ["c"]),
    ],
)
def test_gpu_binding_gives_each_task_its_gpus(binding: str | None, local_id: int, gpus: list[str]) -> None:
    assert bind_gpus(binding, ["a", "b", "c"], local_id) == gpus
    assert bind_gpus(binding, [], local_id) == []


@pytest.mark.parametrize(
    ("binding", "problem"),
    [
        ("single:x", "Invalid --gpu-bind specification: single:x"),
        ("map_gpu:1", "Invalid --gpu-bind specification: map_gpu:1"),
        ("map_gpu:x", "Invalid --gpu-bind specification: map_gpu:x"),
        ("mask_gpu:1", "the embedded scheduler does not offer --gpu-bind=mask_gpu:1"),
    ],
)
def test_invalid_gpu_binding_is_refused(binding: str, problem: str) -> None:
    with pytest.raises(Refused) as caught:
        bind_gpus(binding, ["a"], 0)
    assert caught.value.problems == [problem]


def test_tasks_run_in_the_folder_of_srun_unless_chdir_is_given() -> None:
    assert working_folder(plan_step("")) == str(Path.cwd())
    assert working_folder(plan_step("-D /x")) == "/x"
