"""Rules that every rendered script obeys."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.errors import RenderError, RequestInvalid
from dtslurm.launch import registry
from dtslurm.model.cluster import Variable
from dtslurm.model.jobs.job import JobSpec
from dtslurm.model.jobs.roles import RoleOptions, Roles, RoleSpec
from dtslurm.model.jobs.sbatch import split_option
from dtslurm.model.shell import RawShell, join
from dtslurm.render.directives import quoted
from dtslurm.render.engine import Engine
from dtslurm.render.script import training_command
from dtslurm.render.text import insert_dependency
from tests.render.conftest import Render, load_profile


def test_f81_a_missing_template_value_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("--mem={{ memm }}")
    with pytest.raises(RenderError, match="memm"):
        Engine([tmp_path]).render("t.j2", {"mem": 1})


def test_none_in_a_template_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("{{ value }}")
    with pytest.raises(RenderError):
        Engine([tmp_path]).render("t.j2", {"value": None})


def test_a_template_error_is_reported_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("one\n{% if %}\n")
    with pytest.raises(RenderError, match=r"t\.j2:2"):
        Engine([tmp_path]).render("t.j2", {})


def test_c8_templates_cannot_reach_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(RenderError):
        Engine([tmp_path]).render("t.j2", {})


CAPTURES = {
    "super": "{% extends 'base.j2' %}{% block body %}{{ super() }}{% endblock %}",
    "self": "{% extends 'base.j2' %}{% block end %}{{ self.body() }}{% endblock %}",
    "macro": "{% macro show(it) %}echo {{ it }}\n{% endmacro %}{{ show(value) }}",
    "call": "{% macro run() %}{{ caller() }}{% endmacro %}{% call run() %}echo {{ value }}\n{% endcall %}",
    "set": "{% set text %}echo {{ value }}\n{% endset %}{{ text }}",
    "indent": "{% set text %}echo {{ value }}\n{% endset %}{{ text|indent(2, true) }}",
    "trim": "{% set text %}  echo {{ value }}\n{% endset %}{{ text|trim }}",
}


@pytest.mark.parametrize("case", CAPTURES)
@pytest.mark.parametrize("value", ["plain", "$(touch pwned) ; `touch pwned` '\" *"])
def test_template_text_is_not_quoted_and_values_are_quoted(case: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "base.j2").write_text(
        "{% block body %}echo {{ value }}\n{% endblock %}{% block end %}{% endblock %}"
    )
    (tmp_path / "t.j2").write_text(CAPTURES[case])
    script = Engine([tmp_path]).render("t.j2", {"value": value})
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()) == {value}
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "changed",
    [
        "{{ text ~ value }}",
        "{{ text + value }}",
        "{{ text|replace('x', value) }}",
        '{{ text|trim("\'") }}',
        "{{ [text, value]|join }}",
        "{{ text.format(value) }}",
        "{{ text|indent(value) }}",
        "{{ text[:1] ~ value }}",
        "{{ value|trim }}",
    ],
)
def test_text_changed_by_a_template_is_quoted_again(changed: str, tmp_path: Path) -> None:
    (tmp_path / "t.j2").write_text("{% set text %}echo x {{ value }}\n{% endset %}: " + changed)
    script = Engine([tmp_path]).render("t.j2", {"value": "\n$(touch pwned)"})
    subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, check=False)
    assert not (tmp_path / "pwned").exists()


def test_teardown_lines_of_the_profile_follow_the_teardown_lines_of_the_job(render_job: Render) -> None:
    local = load_profile("local")
    profile = replace(local, environment=replace(local.environment, teardown=("echo site",)))
    text = render_job(profile, "srun", account=None, teardown=("echo job\n",)).script
    assert "\necho job\necho site\n" in text
    assert "teardown" not in render_job("local", "srun", account=None).script


def test_a_user_template_can_extend_a_block(render_job: Render, tmp_path: Path) -> None:
    own = "{% extends 'base.sbatch.j2' %}{% block setup %}{{ super() }}\nulimit -c 0\n{% endblock %}"
    (tmp_path / "own.j2").write_text(own)
    asked = {"account": None, "ntasks_per_node": 2}
    plain = render_job("local", "srun", **asked).script
    text = render_job("local", "srun", template="own.j2", folders=[tmp_path], **asked).script
    assert [line for line in text.splitlines() if line not in plain.splitlines()] == ["ulimit -c 0"]
    assert set(plain.splitlines()) <= set(text.splitlines())


@pytest.mark.parametrize(
    ("template", "argument", "said"),
    [
        ("echo hello\n", "", "does not begin with an interpreter line"),
        ("#!/bin/bash\necho {{ training }}\n", "a\r\nb", "DOS line break"),
        ("#!/bin/bash\n{% for _ in range(99) %}{{ 'x' * 60_000 }}{% endfor %}\n", "", "larger than 4 MB"),
    ],
)
def test_f12_a_script_that_sbatch_would_refuse_is_refused(
    render_job: Render, tmp_path: Path, template: str, argument: str, said: str
) -> None:
    (tmp_path / "own.j2").write_text(template)
    with pytest.raises(RenderError, match=said):
        render_job("local", "single", account=None, args=(argument,), template="own.j2", folders=[tmp_path])


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_c5_any_value_is_preserved_by_shell_quoting(value: str) -> None:
    printed = subprocess.run(["bash", "-c", f"printf %s {join([value])}"], capture_output=True, check=True)
    assert printed.stdout == value.encode()


def test_bytes_that_are_not_utf_8_are_preserved(render_job: Render) -> None:
    argument = os.fsdecode(b"\xff\xfe")
    script = render_job("local", "single", account=None, args=(argument,)).script
    assert b"\xff\xfe" in script.encode("utf-8", "surrogateescape")


def test_shell_expressions_are_not_quoted() -> None:
    assert join(["a b", RawShell('"$X"')]) == "'a b' \"$X\""


@pytest.mark.parametrize(
    ("value", "written"), [("gpu", "gpu"), ("gpu&hbm80g", '"gpu&hbm80g"'), ('a"b\\c', '"a\\"b\\\\c"')]
)
def test_directive_values_are_quoted(value: str, written: str) -> None:
    assert quoted(value) == written


def test_f11_c4_a_line_break_in_a_directive_is_refused(render_job: Render) -> None:
    with pytest.raises(RequestInvalid, match="--job-name"):
        render_job("local", "single", account=None, name="a\n#SBATCH --account=other")


def test_sbatch_options_replace_generated_directives(render_job: Render) -> None:
    script = render_job("local", "single", account=None, sbatch_options=("--open-mode=truncate",)).script
    assert script.count("--open-mode") == 1


@pytest.mark.parametrize("profile", ["mi300x8", "aws-p4d"])
def test_an_unknown_number_of_cpus_is_not_requested(render_job: Render, profile: str) -> None:
    """Some clusters add CPUs for each GPU, which a requested number would replace."""
    assert "#SBATCH --cpus-per-task" not in render_job(profile, "torchrun").script


def test_gres_options_are_combined_with_the_gpu_request(render_job: Render) -> None:
    asked = {"gpus_per_node": 2, "sbatch_options": ("--gres=nvme:200",)}
    script = render_job("della", "torchrun", account=None, **asked).script
    assert "#SBATCH --gres=gpu:2,nvme:200\n" in script
    asked["sbatch_options"] = ("--gres=nvme:100", "--gres=nvme:200")
    assert "#SBATCH --gres=gpu:2,nvme:200\n" in render_job("della", "torchrun", account=None, **asked).script


@pytest.mark.parametrize("text", ["-N2", "exclusive", "--Upper=1", "--"])
def test_only_long_sbatch_options_are_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="long option of sbatch"):
        split_option(text)


def test_launchers_are_found_by_name_with_suggestions() -> None:
    assert {"single", "srun", "torchrun"} <= set(registry.names())
    with pytest.raises(RequestInvalid, match="did you mean 'torchrun'"):
        registry.load("torchrum")


def test_the_early_signal_is_rendered_only_on_request(render_job: Render) -> None:
    assert "USR2" not in render_job("local", "torchrun", account=None).script
    script = render_job("local", "torchrun", account=None, signal_before=60).script
    assert "#SBATCH --signal=USR2@60" in script
    assert script.count("trap '' USR2") == 2


@pytest.mark.parametrize("options", [{}, {"max_restarts": 2}], ids=["plain", "supervised"])
def test_f24_a_new_attempt_does_not_overwrite_earlier_logs(
    options: dict[str, Any], render_job: Render
) -> None:
    script = render_job("slurm", "srun", account=None, **options).script
    assert "#SBATCH --open-mode=append\n" in script
    assert 'logs="$DTSLURM_RUN_DIR/logs/$DTSLURM_ATTEMPT"' in script
    assert "/logs/rank-" not in script  # nothing of a rank is kept outside of its attempt


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "single"])
def test_srun_steps_do_not_end_other_ranks_when_a_rank_has_finished(
    launcher: str, render_job: Render
) -> None:
    script = render_job("slurm", launcher, account=None, fabric_check=launcher != "single").script
    waits = re.findall(r"--wait=\S+", script)
    assert waits
    assert set(waits) == {"--wait=0"}


def choose_port(script: str, attempt: int) -> int:
    """Return the port that the script chooses for this attempt of job 4211, or of process 4211."""
    part = script[script.index("MASTER_PORT=$((") : script.index("export MASTER_ADDR")]
    program = f"job=4211; {part.replace('$$', '$job').replace('SLURM_JOB_ID', 'job')} echo $MASTER_PORT"
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "DTSLURM_ATTEMPT": str(attempt)}
    done = subprocess.run(["bash", "-c", program], env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_f51_a_master_port_in_use_is_skipped(render_job: Render) -> None:
    script = render_job("local", "srun", account=None, nodes=2).script
    first = choose_port(script, 0)
    assert choose_port(script, 1) != first  # another attempt, another port
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", first))
        held.listen()
        assert choose_port(script, 0) > first


def test_jobs_of_slurm_and_of_the_local_scheduler_choose_different_ports(render_job: Render) -> None:
    scripts = [render_job(cluster, "srun", account=None, nodes=2).script for cluster in ("slurm", "local")]
    slurm, local = [{choose_port(script, attempt) for attempt in range(4)} for script in scripts]
    assert len(slurm | local) == 8


@pytest.mark.parametrize("mark", ["stop", "tasks/3/stop"])
def test_n2_a_cancelled_job_that_slurm_restarts_does_not_train(
    mark: str, render_job: Render, tmp_path: Path
) -> None:
    script = render_job("local", "single", account=None, array="0-4").script
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).touch()
    job = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    programs = 'scancel() { echo "scancel $*"; }; sleep() { echo "sleep $*"; }; '
    ended = subprocess.run(
        ["bash", "-c", programs + script.replace("/scratch/me/runs/train-1", str(tmp_path))],
        env={**os.environ, **job}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.splitlines()) == (
        1,
        [
            "this run was cancelled, or its files were removed. To run it again, use dtslurm resubmit.",
            "scancel 7_3",
            "sleep 15",
        ],
    )
    assert not list(tmp_path.rglob("events.jsonl"))


def test_insert_dependency_keeps_existing_dependencies() -> None:
    script = "#!/bin/sh\n#SBATCH --dependency=afterok:1\n#SBATCH -N 2\n# words\n\ntrain\n#SBATCH --no\n"
    head, _, rest = insert_dependency(script, "afterany:7").partition("# words\n")
    assert head.splitlines() == [
        "#!/bin/sh",
        "#SBATCH -N 2",
        "#SBATCH --dependency=afterok:1,afterany:7",
        "#SBATCH --kill-on-invalid-dep=yes",
    ]
    assert rest == "\ntrain\n#SBATCH --no\n"


@pytest.mark.parametrize(
    ("written", "had"),
    [
        ("$HOME/hf", "/home/me/hf"),
        ("${HOME}/hf:$A", "/home/me/hf:a b"),
        ("it's $A; $(date) `date` \\ \" ${A:-x} $1 $", "it's a b; $(date) `date` \\ \" ${A:-x} $1 $"),
        ("$(date)", "$(date)"),
        ("no variable's", "no variable's"),
    ],
)
def test_variables_of_a_profile_may_refer_to_other_variables(
    render_job: Render, written: str, had: str
) -> None:
    site = load_profile("a100x8-ib")
    setup = replace(site.environment, variables={"HF_HOME": Variable(value=written)})
    script = render_job(replace(site, environment=setup), "single", gpus_per_node=1).script
    [line] = re.findall(r"^export HF_HOME=.*", script, re.MULTILINE)
    result = subprocess.run(
        ["bash", "-c", f'{line}\nprintf %s "$HF_HOME"'],
        capture_output=True,
        text=True,
        check=True,
        env={"HOME": "/home/me", "A": "a b"},
    )
    assert result.stdout == had


def test_variables_given_by_the_user_are_not_expanded(render_job: Render) -> None:
    script = render_job("a100x8-ib", "single", gpus_per_node=1, env=(("HF_HOME", "$HOME/hf"),)).script
    assert "\nexport HF_HOME='$HOME/hf'\n" in script


@pytest.mark.parametrize(
    ("launcher", "options", "written"),
    [
        ("torchrun", {}, "no-requeue"),
        ("torchrun", {"health_check": True}, "no-requeue"),
        ("torchrun", {"requeue": True}, "requeue"),
        ("torchrun", {"resumes": True}, "requeue"),
        ("torchrun", {"resumes": True, "requeue": False}, "no-requeue"),
        ("torchrun", {"max_restarts": 0}, "requeue"),
        ("torchrun", {"spare_nodes": 1}, "requeue"),
        ("torchrun", {"total_time": 3600}, "requeue"),
        ("torchrun", {"max_restarts": 1, "requeue": False}, "no-requeue"),
        ("torchrun", {"launcher_options": {"max_restarts": "2"}}, "requeue"),
        ("lightning", {}, "no-requeue"),
        ("lightning", {"launcher_options": {"requeue": "lightning"}}, "requeue"),
        ("torchrun", {"sbatch_options": ("--requeue",)}, "requeue"),
        ("torchrun", {"requeue": True, "sbatch_options": ("--no-requeue",)}, "no-requeue"),
    ],
)
def test_slurm_requeue_is_enabled_only_for_runs_that_can_resume(
    render_job: Render, launcher: str, options: dict[str, Any], written: str
) -> None:
    script = render_job("a100x8-ib", launcher, **options).script
    assert re.findall(r"^#SBATCH --((?:no-)?requeue)$", script, re.MULTILINE) == [written]
    assert ("--go-on-by=afterany" in script) is (options == {"max_restarts": 1, "requeue": False})


@pytest.mark.parametrize(("custom", "written"), [("forbidden", "no-requeue"), ("required", "requeue")])
@pytest.mark.parametrize("options", [{}, {"max_restarts": 1}])
def test_the_requeue_setting_of_the_profile_takes_precedence(
    render_job: Render, custom: Any, written: str, options: dict[str, Any]
) -> None:
    profile = load_profile("a100x8-ib")
    profile = replace(profile, slurm=replace(profile.slurm, requeue=custom))
    script = render_job(profile, "torchrun", **options).script
    assert re.findall(r"^#SBATCH --((?:no-)?requeue)$", script, re.MULTILINE) == [written]


def test_only_slurm_variables_are_expanded_in_arguments(tmp_path: Path) -> None:
    arguments = [
        "--seed=$SLURM_ARRAY_TASK_ID",
        "${SLURM_ARRAY_TASK_ID}/it's $(id) `id` $HOME ${x}",
        "$SLURM_ARRAY_TASK_IDX",
        "$$SLURM_JOB_ID and $${SLURM_JOB_ID}",
        "$DTSLURM_RUN_DIR",
        "a;b",
    ]
    spec = JobSpec(name="x", script="./tell", args=tuple(arguments), work_dir="/w", launcher="srun")
    program = tmp_path / "tell"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o700)
    env = {"SLURM_ARRAY_TASK_ID": "3 4", "SLURM_JOB_ID": "7", "DTSLURM_RUN_DIR": "/r", "HOME": "/h"}
    command = join(training_command(spec))
    done = subprocess.run(
        ["bash", "-c", command], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "--seed=3 4",
        "3 4/it's $(id) `id` $HOME ${x}",
        "$SLURM_ARRAY_TASK_IDX",
        "$SLURM_JOB_ID and ${SLURM_JOB_ID}",
        "/r",
        "a;b",
    ]


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "accelerate", "deepspeed", "lightning", "mpi"])
def test_ranks_are_bound_to_the_cpus_near_their_gpus_by_every_launcher(
    launcher: str, render_job: Render
) -> None:
    script = render_job("lumi", launcher, nodes=2).script
    assert "cpus=(49-55 57-63 17-23 25-31 1-7 9-15 33-39 41-47)" in script
    assert 'taskset -cp "${cpus[LOCAL_RANK]}"' in script
    assert "--cpu-bind" not in script


@pytest.mark.parametrize(
    "options",
    [
        {"gpus_per_node": 4},
        {"ntasks_per_node": 4},
        {"cpus_per_task": 2},
        {"launcher_options": {"numa-binding": "node"}},
    ],
)
def test_ranks_are_not_bound_if_the_cpus_may_belong_to_other_jobs(
    options: dict[str, Any], render_job: Render
) -> None:
    assert "taskset" not in render_job("lumi", "torchrun", **options).script


@pytest.mark.parametrize(
    ("names", "has_folder"),
    [
        ((), False),
        (("KINETO_USE_DAEMON",), True),
        (("KINETO_USE_DAEMON", "KINETO_IPC_SOCKET_DIR"), False),  # the user's own daemon
    ],
)
def test_pytorch_asks_for_requests_in_a_folder_of_the_rank(
    render_job: Render, names: tuple[str, ...], has_folder: bool
) -> None:
    script = render_job("a100x8-ib", "torchrun", env=tuple((name, "1") for name in names)).script
    assert ('KINETO_IPC_SOCKET_DIR="$requests"' in script) is has_folder
    assert ('rm -rf "$requests"' in script) is has_folder


def roles_with_server(environment: str | None = None) -> Roles:
    """Return a main role and a server on a node of its own."""
    options = RoleOptions(command=("serve",), environment=environment)
    server = RoleSpec(
        name="rollout", options=options, nodes=1, on="", instances=1, ports=(), restart="alone"
    )  # fmt: skip
    return Roles(main="trainer", others=(server,))


@pytest.mark.parametrize(
    ("environment", "activated"),
    [
        ("/envs/vllm", "/envs/vllm"),
        ("envs/my vllm", "envs/my vllm"),
        ("~/envs/vllm", "{home}/envs/vllm"),
        ("~/my envs/v~l$m", "{home}/my envs/v~l$m"),
        ("~", "{home}"),
        ("~/", "{home}"),
        ("~root/envs", "/root/envs"),
        ("~nobody-here/envs", "~nobody-here/envs"),
        ("~ /envs", "~ /envs"),
        ("~`touch x`/envs", "~`touch x`/envs"),
    ],
)
def test_the_environment_of_a_role_is_below_the_home_folder_of_the_job(
    environment: str, activated: str, render_job: Render, tmp_path: Path
) -> None:
    """The shell of the job expands ``~``, because the home folder may differ from that of this machine."""
    script = render_job("a100x8-ib", "srun", roles=roles_with_server(environment)).script
    (line,) = re.findall(r"^source (.*)/bin/activate \|\| exit$", script, re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", f"printf %s {line}"],
        env={"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == activated.format(home=tmp_path)


def test_only_a_script_without_roles_runs_without_dtslurm(render_job: Render) -> None:
    sentence = "The script runs without dtslurm."
    with_roles = render_job("a100x8-ib", "srun", roles=roles_with_server()).script
    assert "# Rendered by dtslurm" in with_roles
    assert sentence not in with_roles
    assert sentence in render_job("a100x8-ib", "srun", max_restarts=2).script
