"""Launchers of the torch family: their refusals, and the commands that start ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
from base64 import urlsafe_b64decode
from pathlib import Path
from typing import Any

import pytest

from dtslurm.launch import registry
from dtslurm.launch.base import Launcher
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from tests.render.conftest import Render, render_job

__all__ = ["render_job"]

FAMILY = ["accelerate", "deepspeed", "lightning", "llamafactory", "megatron", "nvrx", "torchtitan"]
SCRIPTS = {"llamafactory": "sft.yaml", "torchtitan": "llama.toml"}


def layout(nodes: int = 2, ranks: int = 4, gpus: int = 4) -> TaskLayout:
    return TaskLayout(
        nodes=nodes, ranks_per_node=ranks, gpus_per_node=gpus, cpus_per_rank=None, mem=None, time=None
    )


def job(launcher: str, **asked: Any) -> JobSpec:
    fields = {"name": "train", "script": SCRIPTS.get(launcher, "train.py"), "work_dir": "/w", **asked}
    return JobSpec(**{**fields, "launcher": launcher})


def problems(name: str, spec: JobSpec, place: TaskLayout | None = None) -> str:
    launcher = registry.load(name)
    return "; ".join([*launcher.check_options(spec), *launcher.check(spec, place or layout())])


@pytest.mark.parametrize("name", FAMILY)
def test_plain_job_has_no_problems(name: str) -> None:
    launcher = registry.load(name)
    assert isinstance(launcher, Launcher)
    assert launcher.name == name
    assert not problems(name, job(name))


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("nodes", [1, 3])
def test_every_rank_is_started_through_its_record(name: str, nodes: int, render_job: Render) -> None:
    script = SCRIPTS.get(name, "train.py")
    asked = {"account": None, "nodes": nodes, "ntasks_per_node": 2, "script": script, "signal_before": 60}
    text = render_job("local", name, **asked).script
    assert 'mv "$ranks/.$RANK.json" "$ranks/$RANK.json"' in text
    task = text.partition("task.sh\" <<'END'")[2].partition("\nEND\n")[0]
    if registry.load(name).agent:
        assert "trap '' USR2" in task
        assert '"$DTSLURM_RUN_DIR/rank.sh"' in task
        assert ("$SLURM_NODEID" in task) == (nodes > 1 or name == "deepspeed")


def test_deepspeed_receives_the_ranks_of_every_node(render_job: Render) -> None:
    text = render_job("local", "deepspeed", account=None, nodes=3, ntasks_per_node=2).script
    [line] = [line for line in text.splitlines() if line.startswith("nodes=")]
    [world] = [line for line in text.splitlines() if line.startswith("world_info=")]
    done = subprocess.run(
        ["bash", "-c", f'{line}\n{world}\necho "$world_info"'], capture_output=True, text=True, check=True
    )
    assert json.loads(urlsafe_b64decode(done.stdout.strip())) == {"0": [0, 1], "1": [0, 1], "2": [0, 1]}


def run_end(text: str, tmp_path: Path, exit_codes: list[int | None], said: int = 0) -> tuple[int, str]:
    """Run a script from the step's end on, as if the launcher had ended with ``said``."""
    _, _, after = text.partition("\ncode=$?\n")
    end = f"code={said}\n" + after.replace("sleep 2", ":")  # nothing shows up late here
    for rank, code in enumerate(exit_codes):
        value = "null" if code is None else code
        (tmp_path / f"{rank}.json").write_text(f'{{"rank": {rank}, "exit_code": {value}, "signal": null}}\n')
    done = subprocess.run(
        ["bash", "-c", end],
        env={**os.environ, "ranks": str(tmp_path), "logs": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("exit_codes", "failure", "code"),
    [([0, 0], None, 0), ([0, 7], "1 7", 7), ([0, None], None, 1), ([0], None, 1)],
)
@pytest.mark.parametrize("launcher", ["srun", "torchrun", "deepspeed"])
def test_launcher_exit_code_0_does_not_hide_a_failed_rank(
    launcher: str,
    exit_codes: list[int | None],
    failure: str | None,
    code: int,
    render_job: Render,
    tmp_path: Path,
) -> None:
    text = render_job("local", launcher, account=None, ntasks_per_node=2).script
    if failure:
        (tmp_path / "first-failure").write_text(failure + "\n")
    assert run_end(text, tmp_path, exit_codes)[0] == code


STACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'


@pytest.mark.parametrize(
    ("log", "code", "error"),
    [
        (f"step 1\n{STACK}KeyError: 'label'\n", 1, "KeyError: 'label'"),
        (f"[rank1]: {STACK}[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n[rank1]: more\n", 1,
         "torch.OutOfMemoryError: CUDA out of memory."),
        (f"{STACK}ValueError: first\nDuring handling:\n{STACK}RuntimeError\n", 1, "RuntimeError"),
        (f"{STACK}KeyError: 'label'\n" + 30 * "it went on\n", 1, ""),
        (f"{STACK}KeyError: 'label'\n", 7, ""),
        ("no exception: at all\n", 1, ""),
    ],
)  # fmt: skip
def test_exception_at_the_end_of_the_failed_rank_log_is_recorded(
    log: str, code: int, error: str, render_job: Render, tmp_path: Path
) -> None:
    text = render_job("local", "srun", account=None, ntasks_per_node=2).script
    (tmp_path / "first-failure").write_text(f"1 {code}\n")
    (tmp_path / "rank-1.log").write_text(log)
    assert run_end(text, tmp_path, [0, code], 1)[0] == code
    file = tmp_path / "first-failure-error"
    assert (file.read_text().strip() if file.exists() else "") == error


ELASTIC: dict[str, Any] = {"nnodes": "1:2", "max_restarts": "2"}


@pytest.mark.parametrize(
    ("said", "world", "exit_codes", "failures", "code"),
    [
        (137, 2, [0, 0, None, 137], {3: (5, 137)}, 0),  # a node was lost, the other has finished
        (0, 4, [0, 0, 0, 0], {}, 0),
        (1, 2, [1, 7, None, 42], {0: (30, 1), 1: (20, 7), 3: (10, 42)}, 7),  # 42 was before the restart
        (1, 4, [1, 1, 1, 9], {0: (30, 1), 1: (31, 1), 2: (12, 1), 3: (11, 9)}, 9),
        (137, 4, [None, None, None, None], {}, 137),
        (0, 2, [0, None, 0, 0], {}, 1),
        (1, None, [], {}, 1),  # no rank was ever started
    ],
)
def test_elastic_job_ends_with_the_result_of_the_last_started_ranks(
    said: int,
    world: int | None,
    exit_codes: list[int | None],
    failures: dict[int, tuple[int, int]],
    code: int,
    render_job: Render,
    tmp_path: Path,
) -> None:
    asked = {"account": None, "nodes": 2, "ntasks_per_node": 2, "launcher_options": ELASTIC}
    text = render_job("local", "torchrun", **asked).script
    if world is not None:
        (tmp_path / "world_size").write_text(f"{world}\n")
    for rank, (time, failed) in failures.items():
        (tmp_path / f"{rank}.failure").write_text(f"{time} {rank} {failed}\n")
    assert run_end(text, tmp_path, exit_codes, said)[0] == code
    assert (tmp_path / "first-failure").exists() == (bool(failures) and code != 0)


def test_elastic_options_are_checked() -> None:
    def told(name: str = "torchrun", nodes: int = 2, **options: Any) -> str:
        return problems(name, job(name, launcher_options=options), layout(nodes=nodes))

    for name in ("torchrun", "nvrx", "llamafactory", "megatron", "torchtitan"):
        assert not told(name, **ELASTIC)
    for wrong in ("2", "2:", "0:2", "3:2", "a:b", "1:2:3", "1: 2"):
        assert "must be MIN:MAX" in told(nnodes=wrong, max_restarts="1")
    assert "request --nodes 2, or give nnodes=1:4" in told(nodes=4, **ELASTIC)
    assert "request --nodes 4, or give nnodes=2:2" in told(nnodes="3:4", max_restarts="1")
    assert "add, for example, --launcher-option max_restarts=3" in told(nnodes="1:2")
    assert "rdzv_backend=c10d" in told(rdzv_backend="static", **ELASTIC)


def test_torchrun_restarts_on_the_remaining_nodes_under_a_supervisor(render_job: Render) -> None:
    asked: dict[str, Any] = {"nodes": 4, "max_restarts": 2, "launcher_options": {"nnodes": "2:4"}}
    text = render_job("slurm", "torchrun", account=None, **asked).script.replace(" \\\n ", "")
    assert "#SBATCH --no-kill\n" in text
    assert '--nodes="$nodes" --ntasks="$nodes"' in text
    assert '--nnodes="$SLURM_STEP_NUM_NODES"' in text
    assert "--node-rank" in text  # a fixed number meets at once; c10d would wait for more
    assert "--nodes=4 --least-nodes=2" in text
    twice = job("torchrun", max_restarts=2, launcher_options={"nnodes": "2:4", "max_restarts": "3"})
    assert "remove --launcher-option max_restarts" in problems("torchrun", twice, layout(nodes=4))


def test_elastic_job_script_continues_without_a_lost_node(render_job: Render) -> None:
    asked = {"account": None, "nodes": 2, "launcher_options": ELASTIC}
    text = render_job("slurm", "torchrun", **asked).script
    assert "#SBATCH --no-kill\n" in text
    assert "--no-kill --kill-on-bad-exit=0 --wait=0" in text.replace(" \\\n ", "")
    assert "--nnodes=1:2" in text
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text


@pytest.mark.parametrize(("form", "task"), [("torchrun", "torch.distributed.run"), ("srun", "SLURM_PROCID")])
def test_deepspeed_script_starts_with_the_chosen_launcher_form(
    form: str, task: str, render_job: Render
) -> None:
    options = {"form": form}
    asked = {"account": None, "nodes": 2, "ntasks_per_node": 2}
    text = render_job("local", "deepspeed", launcher_options=options, **asked).script
    assert task in text
    assert "deepspeed.launcher" not in text
    assert "4 ranks (2 nodes x 2) by deepspeed" in text
    chosen = registry.load("deepspeed").chosen(job("deepspeed", launcher_options=options))
    more = {"rdzv_backend": "c10d", "max_restarts": "1", **options}
    wrong = "; ".join(chosen.check_options(job("deepspeed", launcher_options=more)))
    assert ("'rdzv_backend' is for form=torchrun" in wrong) == (form == "srun")


def test_devices_chosen_by_slurm_reach_deepspeed_ranks() -> None:
    launcher, spec = registry.load("deepspeed"), job("deepspeed")
    words = " ".join(launcher.command(spec, layout(), ("true",)))
    shown = {}
    for value in ("4,5", None):
        env = {key: item for key, item in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        if value:
            env["CUDA_VISIBLE_DEVICES"] = value
        wrapped = words[words.index("env ") :].replace("true", "printenv CUDA_VISIBLE_DEVICES")
        done = subprocess.run(["bash", "-c", wrapped], env=env, capture_output=True, text=True, check=False)
        shown[value] = done.stdout.strip()
    assert shown == {"4,5": "4,5", None: ""}
    assert "CUDA_VISIBLE_DEVICES" not in " ".join(launcher.command(spec, layout(gpus=0), ("true",)))


def test_accelerate_uses_the_configuration_of_the_user_or_a_generated_file(render_job: Render) -> None:
    own = render_job("local", "accelerate", account=None, ntasks_per_node=2).script
    assert "distributed_type: MULTI_GPU" in own
    assert '--config_file="$DTSLURM_RUN_DIR/accelerate.yaml"' in own
    options = {"config_file": "fsdp config.yaml"}
    users = render_job(
        "local", "accelerate", account=None, ntasks_per_node=2, launcher_options=options
    ).script
    assert "'--config_file=fsdp config.yaml'" in users
    assert "accelerate.yaml" not in users
    wrong = problems("accelerate", job("accelerate", launcher_options={"mixed_precision": "f16"}))
    assert wrong == "launcher option mixed_precision must be one of no, fp16, bf16, fp8, not 'f16'"


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_lightning_refuses_job_names_that_disable_slurm_detection(name: str) -> None:
    assert "set another --job-name" in problems("lightning", job("lightning", name=name))


def test_lightning_job_is_requeued_only_by_dtslurm_or_by_lightning(
    render_job: Render, tmp_path: Path
) -> None:
    options = {"requeue": "lightning"}
    both = job("lightning", launcher_options=options, max_restarts=2)
    assert "would both requeue" in problems("lightning", both)
    assert (
        "bin/scontrol" not in render_job("local", "lightning", account=None, launcher_options=options).script
    )

    text = render_job("local", "lightning", account=None).script
    body = text.partition("bin/scontrol\" <<'END' || exit\n")[2].partition("\nEND\n")[0]
    ours, theirs = tmp_path / "bin" / "scontrol", tmp_path / "slurm" / "scontrol"
    for path, content in ((ours, body), (theirs, '#!/bin/bash\necho "slurm: $*"')):
        path.parent.mkdir()
        path.write_text(content + "\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    env = {"DTSLURM_RUN_DIR": str(tmp_path), "PATH": f"{ours.parent}:{theirs.parent}:{os.environ['PATH']}"}

    def scontrol(*words: str) -> subprocess.CompletedProcess[str]:
        argv = ["bash", "-c", 'scontrol "$@"', "-", *words]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    assert scontrol("show", "hostnames", "a[1-2]").stdout == "slurm: show hostnames a[1-2]\n"
    declined = scontrol("requeue", "17")
    assert (declined.returncode, declined.stdout) == (1, "")
    assert "not requeued" in declined.stderr


def test_lightning_ranks_start_without_an_ignored_signal(render_job: Render) -> None:
    text = render_job("local", "lightning", account=None, signal="USR1", signal_before=60).script
    assert "trap : USR1" in text
    assert "trap '' USR1" not in text


def test_configuration_file_takes_the_place_of_the_script() -> None:
    spec = job("llamafactory", args=("learning_rate=1e-5",))
    training = registry.load("llamafactory").training(spec)
    assert (training.module, training.script) == (True, "llamafactory.launcher")
    assert training.args == ("sft.yaml", "learning_rate=1e-5")
    assert "needs a configuration" in problems("llamafactory", job("llamafactory", script="train.py"))

    titan = registry.load("torchtitan")
    training = titan.training(job("torchtitan"))
    assert (training.script, training.args) == ("torchtitan.train", ("--job.config_file", "llama.toml"))
    own = job("torchtitan", script="torchtitan.train", module=True, args=("--module", "llama3"))
    assert titan.training(own) == own
    assert not problems("torchtitan", own)
    assert "needs a .toml" in problems("torchtitan", job("torchtitan", script="train.sh"))


def test_megatron_parallel_sizes_must_divide_the_ranks() -> None:
    args = ("--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size=3")
    result = problems("megatron", job("megatron", args=args))
    assert result == "8 ranks cannot be divided into model replicas of tensor 4 x pipeline 3 x context 1 = 12"
    assert not problems("megatron", job("megatron", args=args), layout(nodes=3))


def test_megatron_must_handle_the_signal_that_is_sent() -> None:
    deaf = job("megatron", args=("--exit-signal-handler",), signal_before=60)
    assert "give Megatron --exit-signal SIGUSR2" in problems("megatron", deaf)
    args = ("--exit-signal-handler", "--exit-signal", "SIGUSR2")
    assert not problems("megatron", job("megatron", args=args, signal_before=60))


def test_nvrx_requires_c10d_and_reserves_exit_code_93(render_job: Render) -> None:
    options = {"max_restarts": "3"}
    assert not problems("nvrx", job("nvrx", launcher_options=options))
    assert "must be one of c10d" in problems("nvrx", job("nvrx", launcher_options={"rdzv_backend": "static"}))
    text = render_job("local", "nvrx", account=None, nodes=2, launcher_options=options).script
    assert '[ "$code" -ne 93 ]' in text


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("megatron", "CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("torchtitan", "PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    ],
)
def test_gpu_variables_are_not_set_without_gpus(name: str, variable: str, value: str) -> None:
    launcher = registry.load(name)
    assert launcher.variables(job(name), layout())[variable].value == value
    assert variable not in launcher.variables(job(name), layout(gpus=0))


@pytest.mark.parametrize("name", ["accelerate", "torchrun", "srun"])
def test_accelerate_use_cpu_is_set_for_ranks_without_gpus(name: str) -> None:
    launcher = registry.load(name)
    assert launcher.variables(job(name), layout(gpus=0))["ACCELERATE_USE_CPU"].value == "true"
    assert "ACCELERATE_USE_CPU" not in launcher.variables(job(name), layout())
    assert "ACCELERATE_USE_CPU" not in launcher.variables(job(name), layout(nodes=1, ranks=1, gpus=0))


def test_registry_lists_launcher_names_without_loading_them() -> None:
    assert {*FAMILY, "torchrun", "srun", "single"} <= set(registry.own()) <= set(registry.names())


def test_deepspeed_needs_a_rendezvous_on_a_single_node() -> None:
    assert registry.load("deepspeed").needs_rendezvous(layout(nodes=1))


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("torchrun", "torch.distributed.run"),
        ("nvrx", "nvidia_resiliency_ext.fault_tolerance.launcher"),
        ("accelerate", "accelerate.commands.launch"),
        ("deepspeed", "deepspeed.launcher.launch"),
    ],
)
def test_unknown_launcher_options_reach_the_launcher(name: str, program: str, render_job: Render) -> None:
    options = {"role": "it's a role", "log-dir": "/tmp/x", "quiet": None}
    assert not problems(name, job(name, launcher_options=options))
    text = render_job("local", name, account=None, ntasks_per_node=2, launcher_options=options).script
    [command] = re.findall(rf"^exec .*-m {program} (?:.*\\\n)*.*$", text, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    place = words.index("--role=it's a role")
    assert words[place + 1 : place + 3] == ["--log-dir=/tmp/x", "--quiet"]
    assert place < words.index("bash")


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("torchrun", "nproc-per-node", "use --nodes and --ntasks-per-node"),
        ("torchrun", "nproc_per_node", "use --nodes and --ntasks-per-node"),
        ("torchrun", "rdzv_endpoint", "dtslurm chooses the rendezvous address"),
        ("torchrun", "max-restart", "write the full name, --launcher-option max_restarts="),
        ("torchrun", "no-python", "give the script"),
        ("accelerate", "num_processes", "use --nodes and --ntasks-per-node"),
        ("accelerate", "rdzv_backend", "dtslurm chooses the rendezvous"),
        ("accelerate", "max_restarts", "use --max-restarts, with which dtslurm restarts the ranks"),
        ("deepspeed", "hostfile", "use --nodes and --ntasks-per-node"),
        ("lightning", "ntasks", "use --ntasks-per-node"),
        ("lightning", "output", "run directory"),
        ("torchrun", "a b", "not a valid option name"),
    ],
)
def test_launcher_options_set_by_dtslurm_are_refused(name: str, option: str, message: str) -> None:
    assert message in problems(name, job(name, launcher_options={option: "2"}))


def test_dashes_and_underscores_in_launcher_options_are_equivalent(render_job: Render) -> None:
    options = {"max-restarts": "2", "rdzv-backend": "c10d"}
    text = render_job("a100x8-ib", "torchrun", nodes=2, launcher_options=options).script
    assert text.count("--max-restarts=") == 1
    assert "--max-restarts=2" in text
    assert "--rdzv-backend=c10d" in text
    assert not problems("torchrun", job("torchrun", launcher_options=options))
    bare: dict[str, str | None] = {"max_restarts": None}
    assert "needs a value" in problems("torchrun", job("torchrun", launcher_options=bare))


def test_launcher_options_passed_unchecked_give_a_notice() -> None:
    launcher = registry.load("torchrun")
    [tee, typo] = launcher.notices(
        job("torchrun", launcher_options={"tee": "3", "nnode": "2", "max_restarts": "0"})
    )
    assert tee.startswith(
        "--tee=3 is passed to torchrun unchecked: dtslurm writes each rank's output to its log"
    )
    assert typo == "--nnode=2 is passed to torchrun unchecked; did you mean 'nnodes'?"
