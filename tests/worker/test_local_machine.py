"""The embedded scheduler's view of its machine, and the environment of its jobs."""

from __future__ import annotations

import builtins
import io
import os
import pwd
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.localslurm import environment, machine
from dtslurm.worker.localslurm.queue import bin_dir
from dtslurm.worker.localslurm.state import State

SMI = """\
#!/bin/sh
case "$*" in
-L) {listed} ;;
*) {asked} ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine without device files, whose nvidia-smi does what it is told to."""
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": [] if path == "/dev" else real(path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(listed: str = ":", asked: str = ":") -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(SMI.format(listed=listed, asked=asked))
        program.chmod(0o700)

    return make


TWO = "echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-b)'"


@pytest.mark.parametrize(
    ("visible", "mine"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("", []),
        ("1,7,0", ["1"]),  # as CUDA does: what is no device hides all that follow
        ("0,-1,1", ["0"]),
        ("GPU-a, MIG-b", ["GPU-a", "MIG-b"]),
    ],
)
def test_gpus_follow_cuda_visible_devices(
    smi: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, mine: list[str]
) -> None:
    smi(listed=TWO)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpus() == mine


def test_gpus_are_counted_by_device_files_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "listdir", lambda _path: ["nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm"])
    assert machine.gpus() == ["0", "1"]


@pytest.mark.parametrize("listed", ["exit 9", "echo 'No devices were found'"])
def test_machine_without_a_working_driver_has_no_gpus(
    smi: Any, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    smi(listed=listed, asked="exit 9")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert machine.gpus() == []
    assert machine.gpu_model() == {}


@pytest.mark.parametrize(
    ("row", "model"),
    [
        ("NVIDIA H100 80GB HBM3, 81559", {"name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559}),
        ("GB10, [N/A]", {"name": "GB10"}),
    ],
)
def test_gpu_model_contains_only_known_fields(smi: Any, row: str, model: dict[str, Any]) -> None:
    smi(asked=f"echo '{row}'")
    assert machine.gpu_model() == model


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, 8192),
        ({"/sys/fs/cgroup/memory.max": "max\n"}, 8192),
        ({"/sys/fs/cgroup/memory.max": f"{2 << 30}\n"}, 2048),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 << 30}\n"}, 3072),
        ({"/sys/fs/cgroup/memory.max": f"{1 << 50}\n"}, 8192),
    ],
)
def test_memory_is_the_smaller_of_machine_and_cgroup_limit(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], memory: int
) -> None:
    def opened(path: str) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2 << 20}.__getitem__)
    result = machine.memory_mib()
    monkeypatch.undo()
    assert result == memory


def test_machine_reports_no_memory_and_one_cpu_when_the_system_hides_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(_name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    assert machine.memory_mib() is None
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.cpus() == 1


# ---- What a job is told ----


def record(**more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "id": 17, "name": "train", "partition": "local", "nodes": 2, "ntasks": 4, "ntasks_asked": False,
        "ntasks_per_node": None, "cpus_per_task": None, "gpus_per_node_asked": None, "export": None,
        "memory_mib": None, "restarts": 0, "array_tasks": None, "array_id": None, "array_task": None,
        "array_step": 1, "cpus_per_node": [2, 2], "tasks_per_node": [2, 2], "gpu_ids": [[], []],
        "machine": {"gpus": []}, "start_time": 1000.7, "time_limit": 60, "submit_dir": "/w",
        "submit_host": "h", "login": {"PATH": "/usr/bin", "USER": "me"}, "exported": {},
    }  # fmt: skip
    return {**values, **more}


def job_environment(tmp_path: Path, **more: Any) -> dict[str, str]:
    return environment.batch_environment(State(str(tmp_path)), record(**more), "/bin-dir")


ASKED = {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_PER_NODE"}
ASKED |= {"SLURM_MEM_PER_NODE", "SLURM_RESTART_COUNT", "SLURM_EXPORT_ENV", "SLURM_ARRAY_JOB_ID"}
ASKED |= {"CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS"}


def test_job_environment_describes_nodes_and_times(tmp_path: Path) -> None:
    env = job_environment(tmp_path)
    assert (
        env.items()
        >= {
            "PATH": "/bin-dir:/usr/bin",
            "SLURM_JOB_NODELIST": "local[1-2]",
            "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
            "SLURM_JOB_START_TIME": "1000",
            "SLURM_JOB_END_TIME": "1060",
            "SLURM_JOB_USER": "me",
            "SLURMD_NODENAME": "local1",
        }.items()
    )
    assert not ASKED & set(env)  # as Slurm: what was not asked for is not there
    year = int(job_environment(tmp_path, time_limit=None)["SLURM_JOB_END_TIME"])
    assert year == 1000 + 365 * 86400


def test_job_environment_describes_the_requested_resources(tmp_path: Path) -> None:
    env = job_environment(
        tmp_path, ntasks_asked=True, ntasks_per_node=2, cpus_per_task=1, gpus_per_node_asked=1, export="NONE",
        memory_mib=512, restarts=3, array_tasks=[3, 5], array_id=16, array_task=5, array_step=2,
        gpu_ids=[["GPU-a"], ["GPU-b"]], machine={"gpus": ["GPU-a", "GPU-b"]}, exported={"SLURM_NNODES": "9"},
    )  # fmt: skip
    assert set(env) >= ASKED
    names = ["SLURM_NTASKS", "SLURM_MEM_PER_NODE", "SLURM_RESTART_COUNT", "SLURM_NNODES", "SLURM_JOB_GPUS"]
    assert [env[name] for name in names] == ["4", "512", "3", "2", "GPU-a"]
    array = {name[12:]: value for name, value in env.items() if name.startswith("SLURM_ARRAY_")}
    assert array == {
        "JOB_ID": "16", "TASK_ID": "5", "TASK_COUNT": "2", "TASK_MIN": "3", "TASK_MAX": "5", "TASK_STEP": "2",
    }  # fmt: skip


def test_job_without_gpus_gets_an_empty_cuda_visible_devices(tmp_path: Path) -> None:
    assert job_environment(tmp_path, machine={"gpus": ["0"]})["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("job_gpus", "machine_gpus", "set_before", "value"),
    [
        (["0"], [], {}, "true"),
        (["0"], [], {"ACCELERATE_USE_CPU": "no"}, "no"),
        (["0"], ["0"], {}, None),
        ([], [], {}, None),
        ([], ["0"], {}, None),
    ],
)
def test_accelerate_uses_the_cpu_for_emulated_gpus(
    tmp_path: Path,
    job_gpus: list[str],
    machine_gpus: list[str],
    set_before: dict[str, str],
    value: str | None,
) -> None:
    more = {"gpu_ids": [job_gpus, job_gpus], "machine": {"gpus": machine_gpus}, "exported": set_before}
    assert job_environment(tmp_path, **more).get("ACCELERATE_USE_CPU") == value


def test_login_environment_contains_only_login_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"LC_ALL": "C", "SECRET": "x", "HOME": "/mine"}
    result = environment.login_environment(source)
    assert result["HOME"] == "/mine"
    assert result["USER"] == result["LOGNAME"] == pwd.getpwuid(os.getuid()).pw_name
    assert (result["LC_ALL"], result["PATH"]) == ("C", "/usr/local/bin:/usr/bin:/bin")
    assert "SECRET" not in result

    def unknown(_uid: int) -> pwd.struct_passwd:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert set(environment.login_environment(source)) == {"LC_ALL", "HOME", "PATH"}


@pytest.mark.parametrize(
    ("export", "environment_of_rank"),
    [
        (None, {}),
        ("NONE", {}),
        ("ALL,A=1", {"A": "1"}),
        ("A=x=y,B,C", {"A": "x=y", "B": "b"}),
        ("A=", {"A": ""}),
    ],
)
def test_export_option_selects_variables_by_name(
    export: str | None, environment_of_rank: dict[str, str]
) -> None:
    assert environment.exported(export, {"B": "b", "D": "d", "NONE": "z", "ALL": "z"}) == environment_of_rank


def test_file_name_fields_of_an_array_task_use_the_array_id() -> None:
    alone = environment.name_fields(record())
    task = environment.name_fields(record(id=19, array_id=17, array_task=2))
    assert (alone["A"], alone["a"], alone["j"]) == ("17", "4294967294", "17")
    assert (task["A"], task["a"], task["j"]) == ("17", "2", "19")


def test_bin_directory_puts_srun_and_scontrol_first_after_a_login_profile(tmp_path: Path) -> None:
    state = State(str(tmp_path / "a 'state'"))
    folder = Path(bin_dir(state))
    assert {path.name for path in folder.iterdir()} == {"srun", "scontrol", "profile"}
    assert stat.S_IMODE((folder / "srun").stat().st_mode) == 0o700
    inodes = {path.stat().st_ino for path in folder.iterdir()}
    assert {path.stat().st_ino for path in Path(bin_dir(state)).iterdir()} == inodes  # written once
    words = f'BASH_ENV=x; . "{folder}/profile"; . "{folder}/profile"; echo $PATH; echo [$BASH_ENV]'
    shown = subprocess.run(
        ["sh", "-c", words], env={"PATH": "/usr/bin"}, stdout=subprocess.PIPE, text=True, check=True
    )
    assert shown.stdout.splitlines() == [f"{folder}:/usr/bin", "[]"]
