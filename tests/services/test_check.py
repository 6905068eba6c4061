from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.job import JobSpec, TaskLayout
from dtslurm.model.units import Walltime
from dtslurm.services import check


@pytest.mark.parametrize(
    ("expression", "indices"),
    [("0-3", [0, 1, 2, 3]), ("1,5,7", [1, 5, 7]), ("0-9:4", [0, 4, 8]), ("0-9:2,20%4", [0, 2, 4, 6, 8, 20])],
)
def test_array_expressions(expression: str, indices: list[int]) -> None:
    assert check.array_indices(expression) == indices


@pytest.mark.parametrize(
    "expression", ["", "a", "3-1", "0-9:0", "0-", "-1", "1,,2", "0-9%", "0-9%0", "0-9%x", "1 2"]
)
def test_malformed_arrays(expression: str) -> None:
    assert check.array(expression, None)


def test_arrays_beyond_the_sites_limit() -> None:
    assert check.array("0-999", 1000) == []
    assert "MaxArraySize" in check.array("0-1000", 1000)[0]
    assert "twice" in check.array("1,1", None)[0]


@pytest.mark.parametrize(
    "expression", ["afterok:12", "afterany:12:13_4", "singleton", "afterok:1,afterany:2", "after:5+10"]
)
def test_dependencies(expression: str) -> None:
    assert check.dependency(expression) == []


@pytest.mark.parametrize("expression", ["", "afterok", "12", "afterok:x", "afterok:1;rm"])
def test_malformed_dependencies(expression: str) -> None:
    assert check.dependency(expression)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\0b", "a\x1bb", "x" * 201])
def test_f84_names_slurm_cannot_hold(name: str) -> None:
    assert check.job_name(name)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=100))
def test_any_other_name_is_taken(name: str) -> None:
    assert check.job_name(name) == [] or not name.strip()


def test_variable_names() -> None:
    assert check.variables([("A_1", "x"), ("_b", "")]) == []
    assert len(check.variables([("1A", ""), ("A B", ""), ("A;B", ""), ("", "")])) == 4


def test_signals() -> None:
    assert check.signals("USR2", 60) == []
    assert len(check.signals("usr 2", 0)) == 2
    assert check.signals("USR1", 65536)
    assert "cannot hear it" in check.signals("KILL", 60)[0]
    assert "none of HUP" in check.signals("FOO", 60)[0]


@pytest.mark.parametrize(("lead", "refused", "told"), [(600, 1, 1), (599, 0, 1), (300, 0, 0)])
def test_a_signal_that_comes_too_early(lead: int, refused: int, told: int) -> None:
    spec = JobSpec(name="x", script="x.py", work_dir="/w", launcher="srun", signal_before=lead)
    limit = Walltime(600)
    layout = TaskLayout(
        nodes=1,
        ranks_per_node=1,
        gpus_per_node=0,
        cpus_per_rank=None,
        mem=None,
        time=limit,
        one_process=False,
    )
    assert len(check.site(spec, ClusterProfile(name="x"), layout)) == refused
    assert len(check.lead_notices(None, lead, limit)) == told


def test_a_signal_without_a_time_to_send_it() -> None:
    assert check.lead_notices("TERM", None, None) == [
        "--signal TERM is sent only with --signal-before SECONDS"
    ]
    assert check.lead_notices(None, None, None) == []


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--nodes=3", "use -N/--nodes"),
        ("--arr=1-3", "use -a/--array"),
        ("--time=60", "use -t/--time"),
        ("--ntasks=4", "use --ntasks-per-node"),
        ("--test-only", "queues nothing"),
        ("--wrap=hostname", "script"),
        ("--wait", "would not return"),
        ("--parsable", "answer"),
        ("--output=x.log", "run directory"),
        ("--export=ALL", "--env"),
        ("-N3", "not a long sbatch option"),
    ],
)
def test_what_a_script_is_built_on_is_not_passed_on(option: str, told: str) -> None:
    [problem] = check.sbatch_options([option])
    assert problem.startswith(f"--sbatch '{option}'")
    assert told in problem


def test_all_else_is_passed_on() -> None:
    options = "hold exclusive begin=now+1hour no-requeue reservation=x gres=nvme:200 mem=0 comment=x nice"
    more = "mail-type=END mail-user=me licenses=fs switches=1 wait-all-nodes=1 time-min=60 gpu_cmode=shared"
    assert check.sbatch_options([f"--{option}" for option in f"{options} {more}".split()]) == []
