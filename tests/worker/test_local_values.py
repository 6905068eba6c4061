"""The parsers of the embedded scheduler: host lists, directives and option values."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.worker.localslurm import hostlist, values
from dtslurm.worker.localslurm.directives import read_options, split_directive
from dtslurm.worker.localslurm.options import Refused
from dtslurm.worker.localslurm.queue import allocate_gpus
from dtslurm.worker.localslurm.request import find_excess_requests, notices, read_request, spread

MACHINE = {"cpus": 8, "memory_mib": 8000, "gpus": []}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a[01-03,7],b", ["a01", "a02", "a03", "a7", "b"]),
        ("n[9-11]-x", ["n9-x", "n10-x", "n11-x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a, b", ["a", "b"]),
        ("", []),
    ],
)
def test_hostlist_expand_returns_node_names(text: str, names: list[str]) -> None:
    assert hostlist.expand(text) == names


@pytest.mark.parametrize("text", ["a[3-1]", "a[", "a]", "a[x]", "a[1-2", "a[]"])
def test_hostlist_expand_refuses_invalid_lists(text: str) -> None:
    with pytest.raises(ValueError, match="invalid node"):
        hostlist.expand(text)


@given(st.sets(st.integers(1, 200), min_size=1))
def test_hostlist_fold_and_expand_are_inverse(numbers: set[int]) -> None:
    folded = hostlist.fold(sorted(numbers))
    assert [hostlist.number_of(name) for name in hostlist.expand(folded)] == sorted(numbers)


def test_hostlist_fold_writes_ranges() -> None:
    assert hostlist.fold([1]) == "local1"
    assert hostlist.fold([1, 2, 3, 5]) == "local[1-3,5]"
    assert hostlist.repeat([2, 2, 1]) == "2(x2),1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" --comment=a#b", ["--comment=a"]),
        (" --comment=a # hello", ["--comment=a"]),
        (r""" --comment="a\"b c" -J 'x \\y'""", ['--comment=a"b c', "-J", r"x \y"]),
        (r" --image=nvcr.io\#x", ["--image=nvcr.io#x"]),
        (' -J ""', ["-J", ""]),
        ("x -N2", ["x", "-N2"]),
    ],
)
def test_directive_text_splits_into_words(text: str, words: list[str]) -> None:
    assert split_directive(text) == words


def test_directives_end_at_the_first_command() -> None:
    text = "#!/bin/bash\n\n# c\n#SBATCH -Jq1\n##SBATCH -N9\n  # indent\n"
    text += "#SBATCH -c2 -n 4 -J q2\necho\n#SBATCH -Jq3\n"
    assert read_options(text) == {"job-name": "q2", "cpus-per-task": "2", "ntasks": "4"}


def test_directives_accept_all_option_forms() -> None:
    text = "#!/bin/sh\n#SBATCH --time 5 --exclusive --nodes=2 -Hn3 --job=x --exclusive=user -k\n"
    assert read_options(text) == {
        "time": "5",
        "exclusive": "user",
        "nodes": "2",
        "hold": None,
        "ntasks": "3",
        "job-name": "x",
        "no-kill": None,
    }


def test_every_invalid_directive_line_is_reported() -> None:
    with pytest.raises(Refused) as caught:
        read_options("#!/bin/sh\n#SBATCH --bogus\n#SBATCH -N 1\n#SBATCH -Z\n#SBATCH --hold=1\n")
    assert caught.value.problems == [
        "line 2: the embedded scheduler does not offer the option --bogus",
        "line 4: the embedded scheduler does not offer the option -Z",
        "line 5: --hold takes no value",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("1:00:00", 3600), ("1-2", 93600), ("1-2:3", 93780), ("1-0:0:1", 86401),
     ("0", None), ("UNLIMITED", None), ("0:01", 1)],
)  # fmt: skip
def test_time_limits_parse_to_seconds(text: str, seconds: int | None) -> None:
    assert values.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "1-", "-5", "1.5"])
def test_invalid_time_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a time limit"):
        values.seconds(text)


def test_memory_sizes_and_gres_parse() -> None:
    assert [values.memory(text) for text in ("0", "480G", "1.5T", "100", "1K", "2gb")] == [
        0, 491520, 1572864, 100, 1, 2048,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not a memory size"):
        values.memory("lots")
    assert [values.gres(text) for text in ("gpu", "gpu:2", "gpu:a100:3", "gpu:a:1,gpu:b:2", "none")] == [
        1,
        2,
        3,
        3,
        0,
    ]


def test_early_signals_parse() -> None:
    assert values.early_signal("USR1") == {"number": signal.SIGUSR1, "batch": False, "before": 60}
    assert values.early_signal("B:SIGTERM@5") == {"number": signal.SIGTERM, "batch": True, "before": 5}
    assert values.early_signal("10@0")["before"] == 0
    for text in ("", "B:", "NOPE", "USR1@x", "USR1@70000", "SIG_DFL"):
        with pytest.raises(ValueError, match="not a signal"):
            values.early_signal(text)


def test_array_specifications_parse() -> None:
    assert values.array("1-3,3-5,9%0") == ([1, 2, 3, 4, 5, 9], 0, 1)
    assert values.array("0-9:3%2") == ([0, 3, 6, 9], 2, 3)
    for text in ("", "x", "3-1", "1-3%", "1-4:0", "1,,2", "99999"):
        with pytest.raises(ValueError, match="array"):
            values.array(text)


def test_dependencies_parse() -> None:
    assert values.dependency("afterok:1:2_3,singleton") == [
        ("afterok", "1"),
        ("afterok", "2_3"),
        ("singleton", ""),
    ]
    for text in ("afterok", "afterok:", "afterok:x", "aftercorr:1", "afterok:1?afterany:2", "after:1+5"):
        with pytest.raises(ValueError, match=r"depend|job id"):
            values.dependency(text)


def test_file_name_patterns_expand() -> None:
    fields = {"j": "17", "x": "my job", "t": "3"}
    assert values.expand_name("%x-%j.%4t.%%.%q%", fields) == "my job-17.0003.%.%q%"


@pytest.mark.parametrize(
    ("directives", "tasks", "cpus"),
    [
        ("", [1], [1]),
        ("-N2", [1, 1], [1, 1]),
        ("-N2 -n3", [2, 1], [2, 1]),
        ("-N4 -n6", [2, 2, 1, 1], [2, 2, 1, 1]),
        ("-N2-3 -n1", [1], [1]),
        ("-N2 --ntasks-per-node=2 -c2", [2, 2], [4, 4]),
        ("-n4 --ntasks-per-node=3", [2, 2], [2, 2]),
        ("-n9", [5, 4], [5, 4]),
        ("-n4 -c4", [2, 2], [8, 8]),
        ("-N2 -n4 --ntasks-per-node=1", [2, 2], [2, 2]),
    ],
)
def test_tasks_and_cpus_are_assigned_to_nodes(directives: str, tasks: list[int], cpus: list[int]) -> None:
    request = read_request(f"#!/bin/sh\n#SBATCH {directives}\n", MACHINE)
    assert (request["tasks_per_node"], request["cpus_per_node"]) == (tasks, cpus)


@given(st.integers(0, 40), st.lists(st.integers(0, 8), min_size=1, max_size=8))
def test_tasks_spread_evenly_within_the_free_room(tasks: int, room: list[int]) -> None:
    if tasks > sum(room):
        with pytest.raises(ValueError, match="no room"):
            spread(tasks, room)
        return
    placed = spread(tasks, room)
    assert sum(placed) == tasks
    assert all(0 <= count <= most for count, most in zip(placed, room, strict=True))
    fullest = max(placed)
    assert all(count >= fullest - 1 for count, most in zip(placed, room, strict=True) if count < most)


def test_gpus_are_allocated_to_a_single_job() -> None:
    machine = {"gpus": ["GPU-a", "GPU-b", "7"]}
    job = {"nodes": 1, "gpus": 2, "machine": machine}
    first = allocate_gpus(job, [])
    assert first == [["GPU-a", "GPU-b"]]
    running = [{**job, "gpu_ids": first}]
    assert allocate_gpus(job, running) is None
    assert allocate_gpus({**job, "gpus": 1}, running) == [["7"]]
    assert allocate_gpus({**job, "gpus": 0}, running) == [[]]
    assert allocate_gpus({"nodes": 2, "gpus": 2, "machine": {"gpus": []}}, running) == [
        ["0", "1"],
        ["0", "1"],
    ]


def test_mem_per_cpu_multiplies_by_the_cpus_of_the_node() -> None:
    request = read_request("#!/bin/sh\n#SBATCH --mem-per-cpu=100M -n3 -N1 -c2\n", MACHINE)
    assert request["memory_mib"] == 600


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (" \n", "the batch script is empty"),
        (
            "echo\n",
            "the batch script's first line must start with #! and name an interpreter, as #!/bin/bash",
        ),
        (
            "#!/bin/sh\r\n",
            "the batch script contains DOS line breaks (\\r\\n) instead of UNIX ones (\\n)",
        ),
        ("#!/bin/sh\n\0", "the batch script contains NUL bytes; it is no text"),
        ("#!/bin/sh\n#SBATCH -N1 x -Z y\n", "line 2: invalid directive in the batch script: x"),
        ("#!/bin/sh\n#SBATCH --no\n", "line 2: the embedded scheduler does not offer the option --no"),
        ("#!/bin/sh\n#SBATCH --nodes\n", "line 2: --nodes needs a value"),
        ("#!/bin/sh\n#SBATCH --open-mode=x\n", "--open-mode must be append or truncate, not 'x'"),
        ("#!/bin/sh\n#SBATCH --kill-on-invalid-dep=x\n", "--kill-on-invalid-dep must be yes or no, not 'x'"),
        ("#!/bin/sh\n#SBATCH -N0\n", "--nodes: '0' is not a positive whole number"),
        (
            "#!/bin/sh\n#SBATCH -N2 --gpus=3\n",
            "--gpus=3 cannot be divided among 2 nodes; use --gpus-per-node",
        ),
    ],
)
def test_invalid_batch_script_is_refused(text: str, problem: str) -> None:
    with pytest.raises(Refused) as caught:
        read_request(text, MACHINE)
    assert caught.value.problems == [problem]


@pytest.mark.parametrize(
    ("directives", "values"),
    [
        ("", {"gpus": 0, "memory_mib": None, "name": None, "partition": "local", "comment": "",
              "append": False, "requeue": True, "held": False, "ntasks_asked": False, "time_limit": None,
              "array_tasks": None, "array_limit": 0, "array_step": 1, "kill_on_invalid_dep": False,
              "dependency": []}),
        ("-N2 --gpus=4", {"gpus": 2, "gpus_per_node_asked": None}),
        ("-N2 --gpus-per-node=3 --gpus=4 --gres=gpu:5", {"gpus": 3, "gpus_per_node_asked": 3}),
        ("-N2 --gres=gpu:5 --gpus=4", {"gpus": 5}),
        ("--mem=5M --mem-per-cpu=100M", {"memory_mib": 5}),
        ("--array=1-9:2%3", {"array_tasks": [1, 3, 5, 7, 9], "array_limit": 3, "array_step": 2}),
        ("-n3", {"ntasks": 3, "ntasks_asked": True}),
        ("--ntasks-per-node=2 -N2", {"ntasks": 4, "ntasks_asked": True, "ntasks_per_node": 2}),
        ("--open-mode=append", {"append": True}),
        ("--open-mode=t --hold --no-requeue", {"append": False, "held": True, "requeue": False}),
        ("--kill-on-invalid-dep=yes -p gpu", {"kill_on_invalid_dep": True, "partition": "gpu"}),
        ("-t 5", {"time_limit": 300}),
        ("--kill-on-invalid-dep=no", {"kill_on_invalid_dep": False}),
    ],
)  # fmt: skip
def test_directives_become_the_request(directives: str, values: dict[str, object]) -> None:
    request = read_request(f"#!/bin/sh\n#SBATCH {directives}\n", MACHINE)
    assert {name: request[name] for name in values} == values


@pytest.mark.parametrize(
    ("more", "gpus", "problems"),
    [
        ({"nodes": 64, "memory_mib": 8000}, [], []),
        ({"nodes": 65}, [], ["65 nodes are requested; at most 64 are emulated on one machine"]),
        ({"memory_mib": 8001}, [], ["8001 MiB of memory are requested; this machine has 8000"]),
        ({"nodes": 2, "gpus": 2}, ["0", "1", "2", "3"], []),
        ({"nodes": 2, "gpus": 2}, [], []),  # the CPU emulates them
        (
            {"nodes": 2, "gpus": 2},
            ["0", "1", "2"],
            ["4 GPUs are requested (2 nodes x 2); this machine has 3"],
        ),
    ],
)
def test_request_for_more_than_the_machine_has_is_reported(
    more: dict[str, int], gpus: list[str], problems: list[str]
) -> None:
    request = {"nodes": 1, "memory_mib": None, "gpus": 0, **more}
    assert find_excess_requests(request, {**MACHINE, "gpus": gpus}) == problems
    unknown = {**MACHINE, "gpus": gpus, "memory_mib": None}
    assert find_excess_requests(request, unknown) == [line for line in problems if "MiB" not in line]


@pytest.mark.parametrize(
    ("more", "gpus", "lines"),
    [
        ({"cpus_per_node": [8]}, [], []),
        ({"nodes": 2}, [], ["2 nodes are emulated on this machine; they share its CPUs"]),
        (
            {"cpus_per_node": [1, 9]},
            [],
            ["9 CPUs per node are requested and this machine has 8: the ranks share them"],
        ),
        ({"gpus": 2}, ["0", "1"], []),
        (
            {"gpus": 2},
            [],
            ["this machine has no GPU: the 2 GPUs per node are emulated, training runs on the CPU"],
        ),
    ],
)
def test_differences_from_a_cluster_are_reported(
    more: dict[str, object], gpus: list[str], lines: list[str]
) -> None:
    request = {"nodes": 1, "cpus_per_node": [1], "gpus": 0, **more}
    assert notices(request, {**MACHINE, "gpus": gpus}) == lines


def test_hostlists_may_be_long_and_names_may_have_other_letters() -> None:
    assert hostlist.expand("n+1*,m") == ["n+1*", "m"]
    assert len(hostlist.expand("a[2-65537]")) == 65536
    with pytest.raises(ValueError, match=r"^invalid node range \[1-65537\]$"):
        hostlist.expand("a[1-65537]")
    assert hostlist.fold([1000, 1002, 1003]) == "local[1000,1002-1003]"
    assert [hostlist.number_of(name) for name in ("local7", "local", "localx", "other7", "7")] == [
        7,
        0,
        0,
        0,
        0,
    ]
    assert hostlist.repeat([]) == ""
    assert hostlist.repeat([1, 2, 1]) == "1,2,1"
