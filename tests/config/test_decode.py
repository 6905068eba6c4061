from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtslurm.config import decode, profiles, rules, strict_yaml
from dtslurm.errors import ProfileInvalid
from dtslurm.model.cluster import ClusterProfile, Fabric, NodeType, Variable
from dtslurm.model.units import Memory, Walltime
from tests.config.conftest import ProfileFolders

UNSEEN_GPUS = "would bypass dtslurm; write slurm.gpu_request, and the node type's gpus"
OPTION = "should be an option such as --exclusive or --name=value"
TEN_MISTAKES = """\
title: ten mistakes
sheduler: slurm
slurm:
  gpu_request: gpu-per-node
  min_poll_s: 0
  max_time: tomorrow
  partitions:
    gpu: {node_type: a100}
  extra_options: --exclusive
node_types:
  big:
    gpus: {model: A100, count: eight}
    sockets: 0
    memory: lots
fabric:
  environment:
    NCCL-NET: {value: IB}
"""


def test_ten_mistakes_are_reported_together_with_their_lines(profile_folders: ProfileFolders) -> None:
    profile_folders.project("x", TEN_MISTAKES)
    forms = "gpus-per-node, gpus-per-node-typed, gres, gres-typed, constraint, none"
    times = "write minutes, HH:MM:SS, D-HH:MM:SS or a form like 2h30m"
    result = {
        2: "sheduler: unknown key; did you mean 'scheduler'?",
        4: f"slurm.gpu_request: should be one of {forms}, not 'gpu-per-node'; did you mean 'gpus-per-node'?",
        5: "slurm.min_poll_s: should be at least 1, not 0",
        6: f"slurm.max_time: 'tomorrow' is not a duration; {times}",
        8: "slurm.partitions.gpu.node_type: there is no node type 'a100' (big)",
        9: "slurm.extra_options: should be a list, not '--exclusive'",
        12: "node_types.big.gpus.count: should be a whole number, not 'eight'",
        13: "node_types.big.sockets: should be more than 0, not 0",
        14: "node_types.big.memory: 'lots' is not a memory size; write for example 64G, 512000M or 1.5T",
        15: "fabric.kind: is missing",
        17: "fabric.environment.NCCL-NET: is not a variable name; use only letters, digits and _",
    }
    assert profile_folders.problems("x") == [
        f"cluster_profiles/x.yaml:{line}: {text}" for line, text in result.items()
    ]


def test_the_message_counts_the_problems(profile_folders: ProfileFolders) -> None:
    profile_folders.project("x", "a: 1\nb: 2\n")
    with pytest.raises(ProfileInvalid, match=r"^2 problems in cluster_profiles/x.yaml\n"):
        profile_folders.load("x")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("partition: gpu", "1: partition: unknown key; did you mean 'slurm.partition'?"),
        ("slurm: 3", "1: slurm: should be a mapping, not '3'"),
        ("slurm: [a]", "1: slurm: should be a mapping, not a list"),
        ("slurm: {partition: [a, b]}", "1: slurm.partition: should be a single value, not a list"),
        (
            "slurm:\n  requeue_exit_codes: [1, two]",
            "2: slurm.requeue_exit_codes[1]: should be a whole number, not 'two'",
        ),
        (
            "slurm: {requeue_exit_codes: [256]}",
            "1: slurm.requeue_exit_codes[0]: should be at most 255, not 256",
        ),
        ("slurm: {max_nodes: 8.5}", "1: slurm.max_nodes: should be a whole number, not '8.5'"),
        ("slurm: {max_nodes: -1}", "1: slurm.max_nodes: should be more than 0, not -1"),
        ("slurm: {min_poll_s: .inf}", "1: slurm.min_poll_s: should be a number, not '.inf'"),
        ("slurm: {min_poll_s: nan}", "1: slurm.min_poll_s: should be a number, not 'nan'"),
        ("slurm: {exclusive: maybe}", "1: slurm.exclusive: should be true or false, not 'maybe'"),
        ('slurm: {account: "a\\n#SBATCH --x"}', "1: slurm.account: should be one line"),
        (
            "environment: {modules: [~]}",
            "1: environment.modules[0]: is empty; give a value or leave the key out",
        ),
        ("environment: {variables: {A: [1]}}", "1: environment.variables.A: should be a mapping, not a list"),
        ("environment: {variables: {A: }}", "1: environment.variables.A.value: is missing"),
        ("environment: {variables: [A=1]}", "1: environment.variables: should be a mapping, not a list"),
        ("default_node_type: big", "1: default_node_type: there is no node type 'big' (none is defined)"),
        (
            "slurm: {default_time: 2h, max_time: 1h}",
            "1: slurm.default_time: 2h is more than max_time, which is 1h",
        ),
        (
            "node_types: {a: {sockets: 1, cores_per_socket: 8, usable_cores: 9}}",
            "1: node_types.a.usable_cores: 9 is more than the node's 8 cores",
        ),
        (
            "slurm: {partition: gup, partitions: {gpu: }}",
            "1: slurm.partition: there is no partition in slurm.partitions 'gup'; did you mean 'gpu'? (gpu)",
        ),
        (
            "slurm: {partition: 'gpu,gup', partitions: {gpu: }}",
            "1: slurm.partition: there is no partition in slurm.partitions 'gup'; did you mean 'gpu'? (gpu)",
        ),
        (
            "slurm: {srun_options: [exclusive]}",
            f"1: slurm.srun_options[0]: {OPTION}, not 'exclusive'",
        ),
        (
            'slurm: {srun_options: ["--foo bar"]}',
            "1: slurm.srun_options[0]: should be one word, --name=value, not '--foo bar'",
        ),
        (
            'slurm: {extra_options: ["-N 3"]}',
            "1: slurm.extra_options[0]: '-N 3' is not a long option of sbatch; write --name or --name=value",
        ),
        (
            "slurm: {extra_options: [--time=60]}",
            "1: slurm.extra_options[0]: '--time=60' would bypass dtslurm; write slurm.default_time",
        ),
        (
            "slurm: {extra_options: ['--gres=nvme:1,gpu:2']}",
            f"1: slurm.extra_options[0]: '--gres=nvme:1,gpu:2' {UNSEEN_GPUS}",
        ),
        (
            "slurm: {gpu_request: gres-typed}\nnode_types: {a: {gpus: {model: A100, count: 4}}, cpu: }",
            "1: slurm.gpu_request: gres-typed needs node_types.a.gpus.slurm_type; add it, or gres",
        ),
        (
            "slurm: {gpu_request: constraint}\nnode_types: {a: {gpus: {model: A100, count: 4}}, cpu: }",
            "1: slurm.gpu_request: constraint needs node_types.a.constraint; add it, or none",
        ),
        (
            "slurm: {gpu_request: constraint}",
            "1: slurm.gpu_request: constraint needs slurm.constraint; add it, or none",
        ),
    ],
)
def test_each_mistake_in_a_profile_has_a_clear_message(
    profile_folders: ProfileFolders, text: str, problem: str
) -> None:
    profile_folders.project("x", text + "\n")
    assert profile_folders.problems("x") == [f"cluster_profiles/x.yaml:{problem}"]


@pytest.mark.parametrize("customs", ["gpu_request: constraint, constraint: gpu", "gpu_request: gres-typed"])
def test_a_gpu_request_form_is_accepted_if_its_values_are_present(
    profile_folders: ProfileFolders, customs: str
) -> None:
    """Discover writes no Slurm type of nodes with GPUs of several makes: those are asked for without."""
    profile_folders.project(
        "x",
        f"""\
        slurm: {{{customs}}}
        node_types:
          a: {{gpus: {{model: A100, count: 4, slurm_type: a100}}}}
          mixed: {{gpus: {{model: A100+V100, count: 4}}}}
          cpu:
        """,
    )
    assert len(profile_folders.load("x").profile.node_types) == 3


def test_a_variable_may_be_given_by_its_value_alone(profile_folders: ProfileFolders) -> None:
    profile_folders.project("x", 'environment: {variables: {A: "1", B: {value: no, why: ours}}}\n')
    variables = profile_folders.load("x").profile.environment.variables
    assert variables == {"A": Variable(value="1"), "B": Variable(value="no", why="ours")}


def test_f80_values_are_not_converted_by_yaml_1_1_rules(profile_folders: ProfileFolders) -> None:
    profile_folders.project(
        "x",
        """\
        slurm:
          default_time: 2:30:00
          account: 012345
          qos: no
          max_nodes: 010
          exclusive: yes
          partition: 1e3
        node_types:
          n: {memory: 494000}
        """,
    )
    profile = profile_folders.load("x").profile
    customs = profile.slurm
    assert (customs.default_time, customs.account, customs.qos) == (Walltime(9000), "012345", "no")
    assert (customs.max_nodes, customs.exclusive, customs.partition) == (10, True, "1e3")
    assert profile.node_types["n"].memory == Memory(494000)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--ntasks=1", "would contradict the generated script; use --ntasks-per-node"),
        ("-n1", "would contradict the generated script; use --ntasks-per-node"),
        ("-N=1", "would contradict the generated script; use -N/--nodes"),
        ("--cpus=2", "would contradict the generated script; use -c/--cpus-per-task"),
        ("-c2", "would contradict the generated script; use -c/--cpus-per-task"),
        ("--output=/tmp/x.log", "cannot be passed to Slurm: dtslurm reads the job's output"),
        ("-o/tmp/x.log", "cannot be passed to Slurm: dtslurm reads the job's output"),
        ("--error=/tmp/x.log", "cannot be passed to Slurm: dtslurm reads the job's output"),
        ("--export=NONE", "cannot be passed to Slurm: the script sets its own environment"),
        ("--kill-on-bad-exit=0", "cannot be passed to Slurm: dtslurm decides whether the other ranks end"),
        ("-K0", "cannot be passed to Slurm: dtslurm decides whether the other ranks end"),
        ("--wait=60", "cannot be passed to Slurm: dtslurm decides whether the other ranks end"),
        ("-wn1", "cannot be passed to Slurm: dtslurm selects the nodes of each step"),
        ("--relative=1", "cannot be passed to Slurm: dtslurm selects the nodes of each step"),
        ("--mpi=pmix", "would bypass dtslurm; write slurm.mpi"),
        ("--gpu-bind=none", "would bypass dtslurm; write slurm.gpu_bind"),
        ("--cpu-bind=cores", "would bypass dtslurm; write slurm.cpu_bind"),
        ("-mblock", "would bypass dtslurm; write slurm.distribution"),
    ],
)
def test_srun_options_that_the_script_sets_are_refused(
    profile_folders: ProfileFolders, option: str, message: str
) -> None:
    profile_folders.project("x", f"slurm: {{srun_options: ['{option}']}}\n")
    (problem,) = profile_folders.problems("x")
    assert problem.startswith(f"cluster_profiles/x.yaml:1: slurm.srun_options[0]: {option!r} {message}")


def test_other_srun_options_are_accepted(profile_folders: ProfileFolders) -> None:
    options = ["--auto-resume=1", "--network=single_node_vni", "--mem=0", "-u", "--gres=nvme:1", "--exact"]
    profile_folders.project("x", f"slurm: {{srun_options: {options}}}\n")
    assert profile_folders.load("x").profile.slurm.srun_options == tuple(options)


def test_empty_values_give_the_default_and_quoted_values_are_text(profile_folders: ProfileFolders) -> None:
    profile_folders.project(
        "x", "slurm:\nfabric:\nenvironment: {python: ''}\nnode_types: {cpu: }\nlogin: {user: null}\n"
    )
    profile = profile_folders.load("x").profile
    assert profile.fabric is None
    assert profile.environment.python == ""
    assert profile.node_types == {"cpu": NodeType()}
    assert profile.slurm == ClusterProfile(name="x").slurm


def test_values_are_converted_to_the_types_of_the_model(profile_folders: ProfileFolders) -> None:
    profile_folders.project("x", "fabric: {kind: roce, rate_gbps: 400, hcas: [mlx5_0]}\n")
    assert profile_folders.load("x").profile.fabric == Fabric(kind="roce", rate_gbps=400.0, hcas=("mlx5_0",))


KEYS = st.sampled_from(
    [
        *("name", "title", "slurm", "node_types", "fabric", "environment", "partitions", "gpus", "count"),
        *("kind", "variables", "value", "extra_options", "max_time", "default_node_type", "memory", "x y"),
    ]
)
SCALARS = st.sampled_from(
    ["", "~", "8", "-1", "eight", "'q'", "1e400", "nan", '"\\0"', "2:30:00", "&a b", "*a"]
)
FLOW = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(item or '~' for item in items)}]")
        | st.dictionaries(KEYS, inner, max_size=4).map(
            lambda entries: "{" + ", ".join(f"{key}: {value}" for key, value in entries.items()) + "}"
        )
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, FLOW, max_size=6))
def test_random_profiles_raise_only_profile_invalid(entries: dict[str, str]) -> None:
    text = "".join(f"{key}: {value}\n" for key, value in entries.items())
    result: tuple[str, ...] = ()
    try:
        root, problems = strict_yaml.parse(text.encode(), "f.yaml")
        decode.decode(ClusterProfile, root, problems=problems, check=rules.profile_problems)
    except ProfileInvalid as error:
        result = error.problems
    assert all(problem.startswith("f.yaml:") and "pydantic" not in problem for problem in result)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node_types: {a: {rank_cpus: [0-6;, 7]}}", "node_types.a.rank_cpus[0]: should be CPUs such as 0-6"),
        (
            "node_types: {a: {gpus: {model: X, count: 4}, rank_cpus: [0-6, 7-13]}}",
            "node_types.a.rank_cpus: has CPUs for 2 ranks, but a node has 4 GPUs",
        ),
        ("checked: yesterday", "checked: should be 'on a live cluster DATE' or 'documentation DATE'"),
        ("login: {python: ~/python}", "login.python: should be the name of a program or an absolute path"),
    ],
)
def test_fields_with_a_form_of_their_own_are_validated(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster_profiles" / "x.yaml"
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o644)
    with pytest.raises(ProfileInvalid) as caught:
        profiles.load("x", cwd=tmp_path, env={})
    assert f"1: {message}" in caught.value.problems[0]
