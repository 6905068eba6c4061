"""Launchers outside torch: their refusals, and the environment that their templates set."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtslurm import assets
from dtslurm.config import profiles
from dtslurm.launch import registry
from dtslurm.launch.layout import resolve
from dtslurm.model.jobs.job import JobSpec, Resources, TaskLayout
from dtslurm.model.units import Walltime
from dtslurm.render.engine import Templates
from dtslurm.render.script import RunPlace, Site, render


def job(launcher: str, **fields: Any) -> JobSpec:
    values = {"name": "x", "script": "tell.py", "work_dir": "/w", "launcher": launcher, **fields}
    return JobSpec(**values)


def layout(nodes: int = 2, ranks: int = 2, gpus: int = 0) -> TaskLayout:
    return TaskLayout(
        nodes=nodes, ranks_per_node=ranks, gpus_per_node=gpus, cpus_per_rank=None, mem=None, time=None
    )


def problems(name: str, shape: TaskLayout, **fields: Any) -> str:
    launcher = registry.load(name)
    spec = job(name, **fields)
    return "; ".join([*launcher.check_options(spec), *launcher.check(spec, shape)])


@pytest.mark.parametrize(
    ("name", "shape", "options", "said"),
    [
        ("jax", layout(ranks=3, gpus=4), {}, "3 ranks cannot share 4 per node"),
        ("jax", layout(ranks=8, gpus=4), {}, "8 ranks cannot share 4 per node"),
        ("tensorflow", layout(ranks=3, gpus=4), {}, "cannot be shared by 3 workers"),
        ("tensorflow", layout(), {"form": "slurm"}, "fails without GPUs"),
        ("tensorflow", layout(), {"form": "ps"}, "must be one of tf_config, slurm"),
        ("mpi", layout(), {"mpi": "openmpi"}, "must be one of profile, pmix"),
        ("mpi", layout(), {"start": "mpirun", "mpi": "pmix"}, "which mpirun does not use"),
        ("horovod", layout(), {"form": "gloo", "mpi": "pmix"}, "Gloo does not use MPI"),
        ("ray", layout(), {}, "starts one driver, not 2"),
        ("ray", layout(ranks=1), {"join_timeout": "soon"}, "must be a whole number"),
    ],
)
def test_unsuitable_job_is_refused(name: str, shape: TaskLayout, options: dict[str, str], said: str) -> None:
    assert said in problems(name, shape, launcher_options=options)


def test_mpirun_with_an_early_signal_is_refused() -> None:
    options = {"start": "mpirun"}
    assert "early signal" in problems("mpi", layout(), launcher_options=options, signal_before=60)
    assert not problems("mpi", layout(), signal_before=60)


@pytest.mark.parametrize("name", ["jax", "tensorflow", "mpi", "horovod", "ray"])
def test_ordinary_job_is_accepted(name: str) -> None:
    assert not problems(name, layout(ranks=1 if name == "ray" else 4, gpus=4))


def submission(
    launcher: str, nodes: int, ranks: int, gpus: int, profile: str = "slurm", **fields: Any
) -> str:
    cluster = profiles.load(profile, cwd=Path("/nowhere"), env={"HOME": "/nowhere"}).profile
    loaded = registry.load(launcher)
    resources = Resources(nodes=nodes, ntasks_per_node=ranks, gpus_per_node=gpus, time=Walltime(600))
    shape = resolve(resources, cluster, one_process=loaded.one_process).layout
    assert shape is not None
    place = RunPlace("/run", None, "0123456789ab")
    spec = job(launcher, resources=resources, **fields)
    site = Site(cluster, Templates(folders=(assets.templates(),)))
    return render(spec, site, shape, loaded, place).script


def srun_of(script: str) -> str:
    match = re.search(r"^srun (?:.*\\\n)*.*$", script, re.MULTILINE)
    assert match
    return match[0]


@pytest.mark.parametrize(
    ("launcher", "options", "word"),
    [
        ("mpi", {"mpi": "pmix"}, "--mpi=pmix"),
        ("mpi", {"mpi": "cray_shasta"}, "--mpi=cray_shasta"),
        ("horovod", {"mpi": "pmi2"}, "--mpi=pmi2"),
        ("horovod", {"form": "gloo"}, "--mpi=none"),
    ],
)
def test_srun_mpi_type_follows_the_option(launcher: str, options: dict[str, str], word: str) -> None:
    assert word in srun_of(submission(launcher, 2, 2, 0, launcher_options=options)).split()


@pytest.mark.parametrize(
    ("launcher", "options", "has_pmi"),
    [
        ("mpi", {}, True),
        ("mpi", {"mpi": "none"}, False),
        ("horovod", {"form": "mpi"}, True),
        ("torchrun", {}, False),
        ("srun", {}, False),
        ("deepspeed", {}, False),
    ],
)
def test_only_ranks_with_mpi_need_the_pmi_of_the_profile(
    tmp_path: Path, launcher: str, options: dict[str, str], has_pmi: bool
) -> None:
    (tmp_path / "ours.yaml").write_text("extends: slurm\nslurm: {mpi: pmix}\n")
    text = srun_of(submission(launcher, 2, 2, 0, str(tmp_path / "ours.yaml"), launcher_options=options))
    assert ("--mpi=pmix" in text.split()) is has_pmi


def test_srun_mpi_type_is_left_to_slurm_by_default() -> None:
    assert "--mpi" not in srun_of(submission("mpi", 2, 2, 0))


def task_environment(script: str, folder: Path, **env: str) -> dict[str, str]:
    """Run what one task runs, with a training script that tells its environment."""
    [text] = re.findall(r'/task\.sh" <<\'(?:\w+)\' \|\| exit\n(.*?)\nEND\n', script, re.DOTALL)
    for name in ("logs/0", "ranks/0"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    tell = "import json, os; print(json.dumps(dict(os.environ)))"
    (folder / "tell.py").write_text(tell)
    own = {"DTSLURM_RUN_DIR": str(folder), "DTSLURM_ATTEMPT": "0", "PATH": os.environ["PATH"]}
    place = {"MASTER_ADDR": "n9", "MASTER_PORT": "12000", "SLURMD_NODENAME": "n10", "SLURM_NODEID": "1"}
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={**own, **place, **env},
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert done.returncode == 0
    values: dict[str, str] = json.loads((folder / f"logs/0/rank-{env['SLURM_PROCID']}.log").read_text())
    return values


THIRD = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("gpus", "visible", "ids"),
    [
        (2, "0,1", "1"),  # all GPUs of the node: one's own by number
        (2, "0", "0"),  # bound by Slurm: the only one
        (2, "", "1"),  # nothing set, as with --gpu-bind=none: all of them
        (8, "0,1,2,3,4,5,6,7", "4,5,6,7"),
        (8, "0,1,2,3", "0,1,2,3"),
    ],
)
def test_jax_device_ids_follow_the_visible_gpus(tmp_path: Path, gpus: int, visible: str, ids: str) -> None:
    script = submission("jax", 2, 2, gpus)
    result = task_environment(script, tmp_path, CUDA_VISIBLE_DEVICES=visible, **THIRD)
    assert result["JAX_LOCAL_DEVICE_IDS"] == ids
    assert result["JAX_COORDINATOR_ADDRESS"] == "n9:12000"


def test_jax_device_ids_are_not_set_without_gpus(tmp_path: Path) -> None:
    assert "JAX_LOCAL_DEVICE_IDS" not in task_environment(submission("jax", 2, 2, 0), tmp_path, **THIRD)


@pytest.mark.parametrize(
    ("visible", "own"),
    [
        ("0,1,2,3", "2,3"),
        ("4,5,6,7", "6,7"),
        ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d"),
        ("", "2,3"),
        ("0,1", "0,1"),
    ],
)
def test_tensorflow_worker_sees_only_its_gpus(tmp_path: Path, visible: str, own: str) -> None:
    script = submission("tensorflow", 2, 2, 4)
    result = task_environment(script, tmp_path, CUDA_VISIBLE_DEVICES=visible, WORKER_HOSTS="n9\nn10", **THIRD)
    assert result["CUDA_VISIBLE_DEVICES"] == own


def test_tf_config_lists_all_workers(tmp_path: Path) -> None:
    result = task_environment(submission("tensorflow", 2, 2, 0), tmp_path, WORKER_HOSTS="n9\nn10", **THIRD)
    assert json.loads(result["TF_CONFIG"]) == {
        "cluster": {"worker": ["n9:12000", "n9:12001", "n10:12002", "n10:12003"]},
        "task": {"type": "worker", "index": 3},
    }


def test_horovod_variables_are_set_for_gloo(tmp_path: Path) -> None:
    script = submission("horovod", 2, 2, 0, launcher_options={"form": "gloo"})
    result = task_environment(script, tmp_path, GLOO_SOCKET_IFNAME="ib0", **THIRD)
    assert {key: value for key, value in result.items() if key.startswith("HOROVOD_")} == {
        "HOROVOD_HOSTNAME": "n10",
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "n9",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "12000",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "ib0",
    }


def test_mpi_ranks_are_taken_from_slurm(tmp_path: Path) -> None:
    result = task_environment(submission("mpi", 2, 2, 0), tmp_path, PMIX_RANK="3", **THIRD)
    assert (result["RANK"], result["LOCAL_RANK"], result["GROUP_RANK"], result["WORLD_SIZE"]) == (
        "3",
        "1",
        "1",
        "4",
    )


def test_ray_job_runs_a_single_driver_rank() -> None:
    script = submission("ray", 3, 1, 2, profile="local")
    assert "tell.py: 1 rank" in script
    assert '"$SLURM_JOB_NODELIST" 1 1 "' in script
    assert "--num-gpus=2" in script
    assert "RAY_USAGE_STATS_ENABLED=0" in script
    assert "unset OMP_NUM_THREADS" in script


def test_ray_retains_omp_num_threads_of_the_user() -> None:
    assert "unset OMP_NUM_THREADS" not in submission("ray", 2, 1, 0, env=(("OMP_NUM_THREADS", "4"),))


@pytest.mark.parametrize(("name", "options"), [("mpi", {"start": "mpirun"}), ("horovod", {"form": "gloo"})])
def test_launcher_that_runs_outside_the_container_is_refused(name: str, options: dict[str, str]) -> None:
    asked = {"launcher_options": options, "container": "me/image:1"}
    assert "outside the image" in problems(name, layout(), **asked)
    assert not problems(name, layout(), launcher_options=options)


def test_unknown_launcher_options_reach_srun_mpirun_and_ray() -> None:
    words = srun_of(submission("srun", 2, 2, 0, launcher_options={"cpu-freq": "high", "label": None})).split()
    assert {"--cpu-freq=high", "--label"} <= set(words)
    text = submission("mpi", 2, 2, 0, launcher_options={"start": "mpirun", "mca": "btl self,tcp"})
    assert "--bind-to none --mca btl self,tcp \\" in text
    assert "words+=(--object-store-memory=8)" in submission(
        "ray", 2, 1, 0, launcher_options={"object-store-memory": "8"}
    )


def test_launcher_single_refuses_unknown_options() -> None:
    shape = layout(nodes=1, ranks=1)
    assert "has no option 'tee'" in problems("single", shape, launcher_options={"tee": "3"})
