"""The sampler's readers for GPUs of several vendors, and for the job's memory and CPU time."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtslurm import assets
from dtslurm.services.observe.telemetry import PARTS as PULSE
from dtslurm.services.submit.submit import SAMPLER
from dtslurm.worker import sampler
from dtslurm.worker.sampler import gpu_reader
from dtslurm.worker.sampler_amd import Amdgpu
from dtslurm.worker.sampler_nvidia import NvidiaSmi, Nvml
from dtslurm.worker.sampler_values import counter, numbers, select_job_gpus
from tests.waiting import wait_until

DATA = Path(__file__).with_name("data")
CC = shutil.which("cc")
Library = Callable[..., dict[str, str]]


@pytest.mark.parametrize(
    "name",
    [*SAMPLER, *(f"{name.replace('.', '/')}.py" for name in (*PULSE, "telemetry.telemetry", "lib.answer"))],
)
def test_sampler_programs_parse_as_python_3_6(name: str) -> None:
    ast.parse(assets.worker(name).read_text(), feature_version=(3, 6))


# ---- GPUs ----


@pytest.fixture
def fake_nvml_environment(tmp_path: Path) -> Library:
    """Build a management library; return the environment of a job on its machine."""
    if CC is None:
        pytest.skip("no C compiler")

    def build(gpus: int, *flags: str, **env: str) -> dict[str, str]:
        path = tmp_path / f"libnvidia-ml-{len(flags)}.so"
        argv = [CC, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(path), *flags, str(DATA / "nvml.c")]
        subprocess.run(argv, check=True)
        return {"DTSLURM_NVML": str(path), "FAKE_GPUS": str(gpus), **env}

    return build


def sampled_gpus(env: dict[str, str], times: int = 1, gpu_count: int = 8) -> list[Any]:
    """Look at the GPUs in a process of its own: a wrong call into the library would end it."""
    program = (
        "import json, os; from dtslurm.worker.sampler import gpu_reader\n"
        f"reader = gpu_reader(os.environ, {gpu_count})\n"
        f"print(json.dumps([reader and reader.sample() for _ in range({times})]))"
    )
    argv = [sys.executable, "-c", program]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "CUDA_"))}
    done = subprocess.run(argv, env={**clean, **env}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    result: list[Any] = json.loads(done.stdout)
    return result


def test_nvml_reader_reports_all_fields_of_each_gpu(fake_nvml_environment: Library) -> None:
    (gpus,) = sampled_gpus(fake_nvml_environment(2))
    assert gpus[1] == {
        "index": 1,
        "uuid": "GPU-0001",
        "name": "NVIDIA Fake",
        "util": 91,
        "memory_used": 79 << 30,
        "memory_total": 80 << 30,
        "power_w": 650.5,
        "temperature_c": 61,
        "sm_mhz": 1755,
        "throttle": ["power", "thermal"],
        "ecc_corrected": 5_000_000_000,
        "ecc_uncorrected": 1,
        "xid": [79, 119],
    }
    assert (gpus[0]["throttle"], "xid" in gpus[0]) == ([], False)


def test_xid_record_stays_short_when_the_driver_reports_many_errors() -> None:
    class Flood(Nvml):
        def __init__(self) -> None:
            self.xids, self.gpus, self.events = {}, [], ctypes.c_void_p(1)
            self.left = 10_000

        def call(self, name: str, *words: Any) -> bool:
            self.left -= 1
            words[1]._obj.device, words[1]._obj.data = 7, 79 if not self.left else 31
            return self.left >= 0

    reader = Flood()
    reader.sample()
    (seen,) = reader.xids.values()
    assert len(seen) < 100
    assert seen[-1] == 79


def test_nvml_reader_uses_the_field_names_of_newer_drivers(fake_nvml_environment: Library) -> None:
    first, second, third = sampled_gpus(fake_nvml_environment(3, "-DNEW_NAMES"), times=3)
    assert "sm_activity" not in first[0]  # it is told between two looks
    assert [gpu.get("sm_activity") for gpu in second] == [0.5, 0.52, None]
    assert third[1]["sm_activity"] == 0.52
    assert third[1]["throttle"] == ["power", "thermal"]
    assert third[1]["xid"] == [79, 119]
    assert "ecc_corrected" not in third[2]


def test_nvml_reader_reports_the_available_fields_of_a_mig_device(fake_nvml_environment: Library) -> None:
    (gpus,) = sampled_gpus(fake_nvml_environment(2, CUDA_VISIBLE_DEVICES="MIG-aaaa,MIG-gone"))
    assert [(gpu["uuid"], gpu["memory_total"]) for gpu in gpus] == [("MIG-aaaa", 80 << 30)]
    assert not {"util", "power_w", "temperature_c"} & set(gpus[0])


def test_job_without_gpus_gets_no_reader(fake_nvml_environment: Library) -> None:
    assert sampled_gpus(fake_nvml_environment(8), gpu_count=0) == [None]
    assert sampled_gpus(fake_nvml_environment(8, CUDA_VISIBLE_DEVICES=""), gpu_count=1) == [None]
    assert sampled_gpus(fake_nvml_environment(8, CUDA_VISIBLE_DEVICES="NoDevFiles"), gpu_count=1) == [None]


def test_nvml_reader_is_absent_when_the_driver_does_not_answer(
    fake_nvml_environment: Library, tmp_path: Path
) -> None:
    env = fake_nvml_environment(8, FAKE_NO_DRIVER="1", PATH=str(tmp_path / "nothing"))
    assert sampled_gpus(env) == [None]


SEEN = [{"index": number, "minor": number, "uuid": f"GPU-{number}a"} for number in range(4)]


@pytest.mark.parametrize(
    ("env", "mine"),
    [
        ({}, [0, 1, 2, 3]),  # GPUs were asked for, and nobody says which
        ({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, [2, 3]),
        ({"SLURM_JOB_GPUS": "0-2"}, [0, 1, 2]),
        (
            {"SLURM_STEP_GPUS": "4-7", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            [0, 1, 2, 3],
        ),  # others are out of sight
        ({"SLURM_STEP_GPUS": "0,1,2,3,4,5,6,7"}, [0, 1, 2, 3]),  # a task that sees a part
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3a"}, [2, 3]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"SLURM_STEP_GPUS": "nonsense", "CUDA_VISIBLE_DEVICES": "3"}, [3]),
    ],
)
def test_gpu_selection_contains_only_gpus_of_the_job(env: dict[str, str], mine: list[int]) -> None:
    assert [gpu["index"] for gpu in select_job_gpus(SEEN, env, 4)] == mine


def test_number_list_skips_invalid_parts() -> None:
    assert numbers("0,2-4,x,7-") == [0, 2, 3, 4]


SMI = """\
0, GPU-aa, NVIDIA A100-SXM4-80GB, 97, 40536, 81920, 312.45, 61, 1410, 0x0000000000000004, 0, 0
1, GPU-bb, NVIDIA A100-SXM4-80GB, [N/A], 0, 81920, [Not Supported], 30, 210, 0x0000000000000001, [N/A], [N/A]
Unable to determine the device handle for GPU 0000:41:00.0: Unknown Error
"""


def test_nvidia_smi_reader_parses_rows_of_the_running_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{SMI}END\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reader = NvidiaSmi({}, 2)
    try:
        end = time.monotonic() + 30
        while len(gpus := reader.sample()) < 2 and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        reader.process.kill()
        reader.process.wait()
        assert reader.output is not None
        reader.output.close()
    assert gpus[0] == {
        "index": 0,
        "uuid": "GPU-aa",
        "name": "NVIDIA A100-SXM4-80GB",
        "util": 97.0,
        "memory_used": 40536 << 20,
        "memory_total": 81920 << 20,
        "power_w": 312.45,
        "temperature_c": 61.0,
        "sm_mhz": 1410.0,
        "throttle": ["power"],
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
    }
    assert not {"util", "power_w", "ecc_corrected"} & set(gpus[1])


def test_gpu_reader_is_absent_on_a_machine_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Amdgpu.__init__, "__defaults__", (str(tmp_path),))
    assert gpu_reader({"DTSLURM_NVML": str(tmp_path / "none.so")}, 8) is None


# ---- The job on its node ----

V2 = "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n"
V1 = "4:memory:/slurm/uid_0/job_77/step_0/task_0\n2:cpu,cpuacct:/slurm/uid_0/job_77/step_0\n1:name=x:/\n"


def files(top: Path, folder: str, **values: str) -> None:
    (top / folder).mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (top / folder / name.replace("__", ".")).write_text(value + "\n")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., sampler.JobResources]:
    """Return the job 77 as a control group of the given text has it."""

    def make(text: str, number: str = "77") -> sampler.JobResources:
        (tmp_path / "cgroup").write_text(text)
        monkeypatch.setattr(sampler.job_cgroup, "__defaults__", (str(tmp_path),))
        return sampler.JobResources(
            {"SLURM_JOB_ID": number, "SLURM_CPUS_ON_NODE": "4"}, str(tmp_path / "cgroup")
        )

    return make


def test_memory_and_cpu_come_from_cgroup_v2(
    job: Callable[[str], sampler.JobResources], tmp_path: Path
) -> None:
    folder = "system.slice/slurmstepd.scope/job_77"
    files(tmp_path, folder, memory__current="5000", memory__max="9000", cpu__stat="usage_usec 3000000")
    files(tmp_path, folder, memory__stat="anon 1\ninactive_file 1000\nactive_file 7")
    mine = job(V2)
    assert mine.sample() == {"cgroup_memory": 4000, "cgroup_limit": 9000}
    assert mine.before is not None
    mine.before = (mine.before[0] - 10, 1.0)  # ten seconds and two CPU seconds ago
    assert mine.sample()["cpu_percent"] == pytest.approx(5, abs=0.5)
    files(tmp_path, folder, memory__max="max", cpu__stat="usage_usec 1")
    later = mine.sample()
    assert ("cgroup_limit" in later, later["cpu_percent"]) == (False, 0.0)  # a counter that went back


def test_memory_and_cpu_come_from_cgroup_v1(
    job: Callable[[str], sampler.JobResources], tmp_path: Path
) -> None:
    files(
        tmp_path,
        "memory/slurm/uid_0/job_77",
        memory__usage_in_bytes="5000",
        memory__stat="total_inactive_file 7",
    )
    files(tmp_path, "memory/slurm/uid_0/job_77", memory__limit_in_bytes="9223372036854771712")
    files(tmp_path, "cpuacct/slurm/uid_0/job_77", cpuacct__usage="2500000000")
    mine = job(V1)
    assert mine.cpu_seconds() == 2.5
    assert mine.sample() == {"cgroup_memory": 4993}


def test_cpu_time_comes_from_the_processes_of_the_job_without_cgroups(
    job: Callable[..., sampler.JobResources],
) -> None:
    number = f"77{os.getpid()}"  # no other job on this machine has it
    mine = job("0::/user.slice\n", number)
    assert mine.cpu_seconds() == 0
    env = {**os.environ, "SLURM_JOB_ID": number}
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); time.sleep(100)"
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        assert 0.25 <= (mine.cpu_seconds() or 0) < 30
        busy.kill()
        busy.wait()
    assert (mine.cpu_seconds() or 0) >= 0.25  # what has ended was still spent
    assert "cgroup_memory" not in mine.sample()


# ---- The loop ----


def test_sampler_pause_grows_with_sampling_cost_and_file_size() -> None:
    assert sampler.pause(0.001, 0) == 5
    assert sampler.pause(0.04, 0) == pytest.approx(10)
    assert sampler.pause(99, 0) == 60
    assert [sampler.pause(0, size << 20) for size in (7, 9, 17, 33)] == [5, 10, 20, 40]


def test_sampler_ignores_signals_and_ends_with_its_parent(tmp_path: Path) -> None:
    for name in SAMPLER:
        shutil.copy(assets.worker(name), tmp_path)
    (tmp_path / "metrics" / "2").mkdir(parents=True)
    env = {**os.environ, "DTSLURM_RUN_DIR": str(tmp_path), "DTSLURM_ATTEMPT": "2", "SLURM_NODEID": "3"}
    with subprocess.Popen(["sleep", "600"]) as parent:
        argv = [sys.executable, "-BES", str(tmp_path / "sampler.py"), str(parent.pid), "0"]
        with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, start_new_session=True) as it:
            try:
                path = tmp_path / "metrics" / "2" / "node-3.jsonl"
                wait_until(path.exists, limit=300)
                for name in ("HUP", "INT", "TERM", "USR1", "USR2"):  # they are for the ranks
                    it.send_signal(getattr(signal, f"SIG{name}"))
                time.sleep(0.3)
                assert it.poll() is None
                parent.kill()
                parent.wait()
                assert it.wait(600) == 0
                assert it.stderr is not None
                assert it.stderr.read() == b""
            finally:
                it.kill()
    record = json.loads(path.read_text().splitlines()[0])
    assert (record["node_rank"], record["schema"]) == (3, 1)
    assert not (tmp_path / "__pycache__").exists()


def test_sampler_ends_when_the_run_directory_is_missing(tmp_path: Path) -> None:
    for name in SAMPLER:
        shutil.copy(assets.worker(name), tmp_path)
    env = {**os.environ, "DTSLURM_RUN_DIR": str(tmp_path / "gone"), "DTSLURM_ATTEMPT": "0"}
    argv = [sys.executable, "-BES", str(tmp_path / "sampler.py"), str(os.getpid()), "0"]
    assert subprocess.run(argv, env=env, timeout=600, check=False).returncode == 0


def test_counter_without_a_number_is_absent(tmp_path: Path) -> None:
    files(tmp_path, "a", one="12", two="N/A", three="")
    result = [counter(str(tmp_path / "a" / name)) for name in ("one", "two", "three", "four")]
    assert result == [12, None, None, None]
