"""Golden scripts of the renderer. ``UPDATE_GOLDEN=1 pytest tests/render`` rewrites them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dtslurm
from dtslurm.model.jobs.roles import Readiness, RoleOptions, Roles, RoleSpec
from dtslurm.model.jobs.trials import Trials
from dtslurm.model.shell import RawShell
from dtslurm.render.script import RunPlace
from tests.render.conftest import Render

SHELLCHECK = Path(sys.executable).parent / "shellcheck"
GOLDEN = Path(__file__).parent / "golden"

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "local-single": ("local", "single", {"account": None}),
    "local-torchrun": ("local", "torchrun", {"account": None, "ntasks_per_node": 2}),
    "local-2nodes-torchrun": ("local", "torchrun", {"account": None, "nodes": 2, "ntasks_per_node": 2}),
    "a100x8-ib-single": ("a100x8-ib", "single", {"gpus_per_node": 1}),
    "a100x8-ib-1node-torchrun": ("a100x8-ib", "torchrun", {}),
    "a100x8-ib-sweep-torchrun": (
        "a100x8-ib",
        "torchrun",
        {
            "array": "0-99%10",
            "args": ("--lr", "${lr}"),
            "env": (("TAG", "lr${lr}"),),
            "trials": Trials(env=("TAG",)),
        },
    ),
    "a100x8-ib-sweep-shared": (
        "a100x8-ib",
        "srun",
        {"ntasks_per_node": 16, "array": "0-9", "args": ("--lr", "${lr}"), "trials": Trials(per_task=16)},
    ),
    "a100x8-ib-4nodes-torchrun": ("a100x8-ib", "torchrun", {"nodes": 4}),
    "a100x8-ib-4nodes-srun": ("a100x8-ib", "srun", {"nodes": 4}),
    "a100x8-ib-65nodes-srun": ("a100x8-ib", "srun", {"nodes": 65, "max_restarts": 3, "signal_before": 120}),
    "h100x8-ib-c10d-restarts": (
        "h100x8-ib",
        "torchrun",
        {"nodes": 2, "launcher_options": {"rdzv_backend": "c10d", "max_restarts": "2"}},
    ),
    "mi250x8-slingshot-2nodes-srun": ("mi250x8-slingshot", "srun", {"nodes": 2}),
    "perlmutter-4nodes-torchrun": ("perlmutter", "torchrun", {"nodes": 4}),
    "perlmutter-2nodes-srun": ("perlmutter", "srun", {"nodes": 2}),
    "leonardo-2nodes-torchrun": ("leonardo", "torchrun", {"nodes": 2}),
    "h100x8-ib-2nodes-srun-pyxis": (
        "h100x8-ib",
        "srun",
        {
            "nodes": 2,
            "python": "python",
            "runtime": "pyxis",
            "container": "nvcr.io/nvidia/pytorch:25.01-py3",
            "container_mounts": ("/data:/data:ro",),
        },
    ),
    "leonardo-2nodes-torchrun-apptainer": (
        "leonardo",
        "torchrun",
        {
            "nodes": 2,
            "python": "python",
            "runtime": "apptainer",
            "container": "docker://pytorch/pytorch:2.9.0",
        },
    ),
    "perlmutter-2nodes-torchrun-podman-hpc": (
        "perlmutter",
        "torchrun",
        {"nodes": 2, "python": "python", "runtime": "podman-hpc", "container": "me/train:1"},
    ),
    "a100x8-ib-2nodes-torchrun-spare": (
        "a100x8-ib",
        "torchrun",
        {"nodes": 2, "max_restarts": 3, "spare_nodes": 1, "hang_timeout": 600, "total_time": 604800},
    ),
    "perlmutter-2nodes-srun-restarts": (
        "perlmutter",
        "srun",
        {"nodes": 2, "max_restarts": 2, "array": "0-3"},
    ),
    "everything": (
        "a100x8-ib",
        "torchrun",
        {
            "name": 'it\'s a "job"; $(x)',
            "nodes": 2,
            "array": "0-9%2",
            "dependency": "afterok:17",
            "activate": "/home/me/ve nv",
            "python": "python",
            "env": (("GREETING", "it's; $(date)"), ("NCCL_DEBUG", "INFO")),
            "setup": ("ulimit -n 65536",),
            "signal_before": 300,
            "sbatch_options": ("--mail-type=END",),
            "args": ("a b", "it's", "l1\nEND\nl2", "é", "$(x)", ""),
        },
    ),
    "a100x8-ib-plain-sbatch-secrets": (
        "a100x8-ib",
        "torchrun",
        {
            "secrets": ("WANDB_API_KEY", "HF_TOKEN"),
            "place": RunPlace(RawShell('"/scratch/me/runs/train-$SLURM_JOB_ID"'), None, "0123456789ab"),
        },
    ),
    "perlmutter-2nodes-jax": ("perlmutter", "jax", {"nodes": 2}),
    "h100x8-ib-jax-shares": ("h100x8-ib", "jax", {"nodes": 2, "ntasks_per_node": 4, "signal_before": 300}),
    "a100x8-ib-2nodes-tensorflow": ("a100x8-ib", "tensorflow", {"nodes": 2}),
    "local-2nodes-tensorflow": ("local", "tensorflow", {"account": None, "nodes": 2, "ntasks_per_node": 2}),
    "h100x8-ib-tensorflow-slurm": (
        "h100x8-ib",
        "tensorflow",
        {"nodes": 2, "launcher_options": {"form": "slurm"}},
    ),
    "a100x8-ib-2nodes-mpi": ("a100x8-ib", "mpi", {"nodes": 2, "launcher_options": {"mpi": "pmix"}}),
    "h100x8-ib-mpirun": ("h100x8-ib", "mpi", {"nodes": 2, "launcher_options": {"start": "mpirun"}}),
    "mi250x8-slingshot-2nodes-horovod": ("mi250x8-slingshot", "horovod", {"nodes": 2}),
    "a100x8-ib-2nodes-horovod-gloo": (
        "a100x8-ib",
        "horovod",
        {"nodes": 2, "launcher_options": {"form": "gloo"}},
    ),
    "a100x8-ib-4nodes-ray": ("a100x8-ib", "ray", {"nodes": 4}),
    "local-ray-signal": ("local", "ray", {"account": None, "signal_before": 300}),
    "a100x8-ib-2nodes-deepspeed": ("a100x8-ib", "deepspeed", {"nodes": 2, "signal_before": 120}),
    "local-2nodes-deepspeed-nossh": (
        "local",
        "deepspeed",
        {"account": None, "nodes": 2, "ntasks_per_node": 2, "launcher_options": {"form": "nossh"}},
    ),
    "a100x8-ib-2nodes-accelerate": ("a100x8-ib", "accelerate", {"nodes": 2, "signal_before": 120}),
    "local-teardown": ("local", "single", {"account": None, "teardown": ("rm -rf scratch", "echo finished")}),
    "a100x8-ib-array-output": (
        "a100x8-ib",
        "srun",
        {
            "array": "0-3",
            "args": ("--seed", "$SLURM_ARRAY_TASK_ID", "--out=x/${SLURM_JOB_ID}.pt"),
            "output": "logs/%x-%A_%a.out",
            "error": "/scratch/me/%3a.err",
            "launcher_options": {"label": None, "cpu-freq": "high"},
        },
    ),
    "local-output-teardown": (
        "local",
        "single",
        {"account": None, "output": "out.log", "teardown": ("rm -rf scratch",)},
    ),
    "local-teardown-supervised": (
        "local",
        "srun",
        {"account": None, "teardown": ("rm -rf scratch",), "max_restarts": 1},
    ),
    "local-2nodes-accelerate": ("local", "accelerate", {"nodes": 2, "ntasks_per_node": 2}),
    "a100x8-ib-accelerate-config": (
        "a100x8-ib",
        "accelerate",
        {"launcher_options": {"config_file": "conf/my fsdp.yaml", "mixed_precision": "bf16"}},
    ),
    "a100x8-ib-2nodes-lightning": (
        "a100x8-ib",
        "lightning",
        {"nodes": 2, "signal": "USR1", "signal_before": 120},
    ),
    "a100x8-ib-2nodes-llamafactory": (
        "a100x8-ib",
        "llamafactory",
        {"nodes": 2, "script": "sft.yaml", "args": ()},
    ),
    "h100x8-ib-2nodes-megatron": (
        "h100x8-ib",
        "megatron",
        {"nodes": 2, "script": "pretrain_gpt.py", "args": ("--tensor-model-parallel-size", "8")},
    ),
    "h100x8-ib-2nodes-torchtitan": ("h100x8-ib", "torchtitan", {"nodes": 2, "script": "8b.toml", "args": ()}),
    "h100x8-ib-2nodes-nvrx": (
        "h100x8-ib",
        "nvrx",
        {"nodes": 2, "signal_before": 120, "launcher_options": {"max_restarts": "3"}},
    ),
    "h100x8-ib-4nodes-torchrun-elastic": (
        "h100x8-ib",
        "torchrun",
        {"nodes": 4, "launcher_options": {"nnodes": "2:4", "max_restarts": "3"}},
    ),
    "h100x8-ib-4nodes-torchrun-shrinks": (
        "h100x8-ib",
        "torchrun",
        {"nodes": 4, "max_restarts": 3, "launcher_options": {"nnodes": "2:4"}},
    ),
    "h100x8-ib-nvrx-elastic": (
        "h100x8-ib",
        "nvrx",
        {"nodes": 4, "launcher_options": {"nnodes": "3:4", "max_restarts": "3"}},
    ),
    "a100x8-ib-2nodes-deepspeed-torchrun": (
        "a100x8-ib",
        "deepspeed",
        {"nodes": 2, "launcher_options": {"form": "torchrun"}},
    ),
    "a100x8-ib-2nodes-deepspeed-srun": (
        "a100x8-ib",
        "deepspeed",
        {"nodes": 2, "launcher_options": {"form": "srun"}},
    ),
    "a100x8-ib-4nodes-staging": (
        "a100x8-ib",
        "torchrun",
        {
            "nodes": 4,
            "signal_before": 300,
            "stage_in": (
                "/data/imagenet:$TMPDIR/imagenet:name=imagenet,shards=node",
                "/data/it's a file.tar:/local/wiki:name=wiki,method=unpack",
            ),
            "stage_out": ("$TMPDIR/samples:samples:name=samples",),
            "artifacts": ("export/*.safetensors",),
        },
    ),
    "a100x8-ib-2nodes-srun-staging-spare": (
        "a100x8-ib",
        "srun",
        {"nodes": 2, "spare_nodes": 1, "stage_in": ("/data/imagenet:$TMPDIR/imagenet:name=imagenet",)},
    ),
    "a100x8-ib-roles": (
        "a100x8-ib",
        "torchrun",
        {
            "nodes": 2,
            "ntasks_per_node": 7,
            "signal_before": 120,
            "args": ("--servers", "${role.rollout.urls}"),
            "env": (("JUDGE", "${role.judge.urls}"), ("MODE", "grpo")),
            "secrets": ("HUB_KEY", "JUDGE_KEY"),
            "runtime": "pyxis",
            "roles": Roles(
                main="trainer",
                after=(("rollout", "ready"), ("judge", "ready")),
                others=(
                    RoleSpec(
                        name="rollout",
                        options=RoleOptions(
                            command=("vllm", "serve", "a model", "--port", "${port.http}"),
                            ready=Readiness(http="/health"),
                            env={"KEY": "it's ${port.weights}"},
                            setup=("module load cuda",),
                            environment="~/envs/vllm",
                        ),
                        nodes=2,
                        on="",
                        instances=2,
                        ports=("http", "weights"),
                        restart="alone",
                    ),
                    RoleSpec(
                        name="judge",
                        options=RoleOptions(
                            command=("python", "judge.py"),
                            gpus=1,
                            environment="/v e",
                            container="me/judge:1",
                            secrets=("JUDGE_KEY",),
                        ),
                        nodes=0,
                        on="trainer",
                        instances=1,
                        ports=("http",),
                        restart="never",
                    ),
                ),
            ),
        },
    ),
    "a100x8-ib-2nodes-fabric-check": ("a100x8-ib", "torchrun", {"nodes": 2, "fabric_check": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_case_matches_its_golden_script(case: str, render_job: Render) -> None:
    profile, launcher, asked = CASES[case]
    script = render_job(profile, launcher, **asked).script.replace(dtslurm.__version__, "VERSION")
    path = GOLDEN / f"{case}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(script)
    assert script == path.read_text()


def test_every_golden_script_has_a_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_golden_scripts_pass_bash_and_shellcheck(path: Path, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    # SC1091: files that exist on the cluster only. SC2016: users' own values, which must not expand.
    command = [str(SHELLCHECK), "--shell=bash", "--severity=style", "--exclude=SC1091,SC2016"]
    done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for number, (end, body) in enumerate(
        re.findall(r"<<'(\w+)' \|\| exit\n(.*?)\n\1\n", path.read_text(), re.DOTALL)
    ):
        if end == "END_OF_PYTHON":
            compile(body, path, "exec")
            continue
        inner = tmp_path / f"{number}.sh"
        inner.write_text(body + "\n")
        subprocess.run(["bash", "-n", inner], check=True)
        done = subprocess.run([*command, inner], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
