"""The executor supports every parameter of submitit's Slurm executor, or rejects it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.slurm import slurm

from dtslurm import slurm_parameters
from dtslurm.errors import RequestInvalid
from dtslurm.executor import DtslurmExecutor
from dtslurm.services.submit import functions

# For each parameter, a value and the resulting options of `submit`.
HONOURED: dict[str, tuple[Any, dict[str, Any]]] = {
    "account": ("physics", {"account": "physics"}),
    "additional_parameters": ({"nice": 5, "exclusive": True}, {"sbatch": ("--nice=5", "--exclusive")}),
    "array_parallelism": (3, {}),
    "comment": ("a b", {"sbatch": ("--comment=a b",)}),
    "constraint": ("a100", {"constraint": "a100"}),
    "cpus_per_gpu": (4, {"sbatch": ("--cpus-per-gpu=4",)}),
    "cpus_per_task": (4, {"cpus_per_task": 4}),
    "dependency": ("afterok:7", {"dependency": "afterok:7"}),
    "exclude": ("n1", {"exclude": "n1"}),
    "exclusive": (True, {"sbatch": ("--exclusive",)}),
    "gpus_per_node": (2, {"gpus_per_node": 2}),
    "gpus_per_task": (1, {"sbatch": ("--gpus-per-task=1",)}),
    "gres": ("mps:50", {"sbatch": ("--gres=mps:50",)}),
    "job_name": ("train", {"job_name": "train"}),
    "mail_type": ("END", {"sbatch": ("--mail-type=END",)}),
    "mail_user": ("a@b.org", {"sbatch": ("--mail-user=a@b.org",)}),
    "mem": ("4GB", {"mem": "4GB"}),
    "mem_per_cpu": ("1G", {"sbatch": ("--mem-per-cpu=1G",)}),
    "mem_per_gpu": ("9G", {"sbatch": ("--mem-per-gpu=9G",)}),
    "nodelist": ("n2", {"nodelist": "n2"}),
    "nodes": (2, {"nodes": 2}),
    "ntasks_per_node": (2, {"ntasks_per_node": 2}),
    "num_gpus": (2, {"gpus_per_node": 2}),
    "partition": ("gpu", {"partition": "gpu"}),
    "qos": ("long", {"qos": "long"}),
    "setup": (["module load x"], {"setup": ("module load x",)}),
    "signal_delay_s": (30, {"signal_before": 30}),
    "srun_args": (["--cpu-bind", "none", "--mpi=none"], {"launcher_options": ("cpu-bind=none", "mpi=none")}),
    "stderr_to_stdout": (True, {}),
    "teardown": (["rm -rf x"], {"teardown": ("rm -rf x",)}),
    "time": (90, {"time": "90"}),
    "use_srun": (True, {}),
    "wckey": ("mine", {"sbatch": ("--wckey=mine",)}),
}


def test_the_parameter_list_matches_submitit() -> None:
    assert set(HONOURED) == set(slurm._get_default_parameters())


def submit_options(monkeypatch: pytest.MonkeyPatch, executor: Any) -> dict[str, Any]:
    """Return the options that a function would be submitted with."""
    result: list[dict[str, Any]] = []

    def submit(
        _context: object, _pickles: object, options: dict[str, Any], *_: object, **__: object
    ) -> list[Any]:
        request = functions.request_of(options)
        result.append({name: getattr(request, name) for name in options})
        return []

    monkeypatch.setattr(functions, "submit_functions", submit)
    (getattr(executor, "_executor", executor))._internal_process_submissions(
        [submitit.core.utils.DelayedSubmission(print)]
    )
    return result[0]


@pytest.mark.filterwarnings("ignore:num_gpus is deprecated")
@pytest.mark.parametrize("prefix", ["slurm_", "dtslurm_", ""])
@pytest.mark.parametrize("name", HONOURED)
def test_each_submitit_parameter_becomes_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, prefix: str
) -> None:
    value, expected = HONOURED[name]
    executor: Any
    if prefix:
        executor = submitit.AutoExecutor(tmp_path, cluster="dtslurm", dtslurm_profile="local")
    else:
        executor = DtslurmExecutor(tmp_path, profile="local")
    executor.update_parameters(**{prefix + name: value})
    options = submit_options(monkeypatch, executor)
    assert {key: options[key] for key in expected} == expected
    inner = getattr(executor, "_executor", executor)
    assert inner.parameters[name] == value


@pytest.mark.parametrize(
    "parameters",
    [
        {"gpus_per_node": 2},
        {"gpus_per_task": 1},
        {"gres": "gpu:2"},
        {"additional_parameters": {"gres": "gpu:2"}},
        {"additional_parameters": {"gpus-per-node": 2}},
        {"sbatch": ["--gpus=2"]},
    ],
)
def test_a_job_keeps_the_gpus_that_its_parameters_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]
) -> None:
    executor = DtslurmExecutor(tmp_path, profile="local")
    executor.update_parameters(**parameters)
    assert submit_options(monkeypatch, executor).get("gpus_per_node") != 0


def test_dtslurm_parameters_take_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = submitit.AutoExecutor(
        tmp_path, cluster="dtslurm", dtslurm_profile="local", slurm_max_num_timeout=7, slurm_python="/opt/py"
    )
    assert executor._executor.max_num_timeout == 7  # type: ignore[attr-defined]
    executor.update_parameters(
        timeout_min=60, slurm_timeout_min=120, slurm_partition="a", dtslurm_partition="b", local_setup=["x"]
    )
    options = submit_options(monkeypatch, executor)
    assert (options["time"], options["partition"], options["python"]) == ("120", "b", "/opt/py")
    assert options["gpus_per_node"] == 0  # as with submitit, where none are asked for


def test_other_executors_are_not_changed(tmp_path: Path) -> None:
    executor = submitit.AutoExecutor(tmp_path, cluster="local", slurm_max_num_timeout=7)
    executor.update_parameters(slurm_partition="a", timeout_min=3)
    assert executor._executor.parameters == {"timeout_min": 3}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"use_srun": False}, "use_srun=False is not supported"),
        ({"additional_parameters": ["nice"]}, "additional_parameters should be a mapping, not ['nice']"),
        ({"srun_args": ["-v"]}, "srun_args: '-v' is not a long option"),
        ({"srun_args": ["--mpi=none"], "launcher": "torchrun"}, "launcher torchrun starts the ranks"),
        ({"partitionn": "a"}, "unknown parameter 'partitionn'; did you mean 'partition'?"),
        ({"nodes": "two"}, "nodes should be a whole number"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(
    tmp_path: Path, parameters: dict[str, Any], message: str
) -> None:
    executor = DtslurmExecutor(tmp_path, profile="local")
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are looked at
        executor.update_parameters(**parameters)
    assert isinstance(caught.value, RequestInvalid)
    assert message in str(caught.value)
    assert "partitionn" not in executor.parameters


def test_a_false_flag_is_omitted() -> None:
    assert slurm_parameters.convert_parameters({"exclusive": False}) == {}


@pytest.mark.parametrize(
    ("minutes", "limit"), [(5, 5), (0.5, "00:00:30"), (1.5, "00:01:30"), (1e-9, "00:00:01"), ("2h", "2h")]
)
def test_fractional_minutes_are_converted_to_a_time_limit(minutes: Any, limit: Any) -> None:
    assert slurm_parameters.convert_parameters({"time": minutes})["time"] == limit
