"""The sampler's loop in this process: its lines, its end, and the counters of network ports."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker import sampler
from dtslurm.worker.sampler_values import processes
from tests.waiting import wait_until


class Gpus:
    """Looks at GPUs of which nothing, or nothing any more, can be known."""

    def __init__(self, *looks: Any) -> None:
        self.looks = list(looks)

    def sample(self) -> Any:
        look = self.looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look


class Loop:
    """Runs the sampler beside a process; time passes as it sleeps, and after so many lines that one ends."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.now = 100.0
        self.beside = subprocess.Popen(["sleep", "600"])
        self.path = folder / "metrics/1/node-2.jsonl"
        self.path.parent.mkdir(parents=True)
        clock = SimpleNamespace(
            monotonic=lambda: self.now, sleep=self.sleep, time=lambda: self.now, process_time=lambda: 0.0
        )
        monkeypatch.setattr(sampler, "time", clock)
        self.happens: Callable[[], None] = self.end
        self.disks: list[list[str]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.happens()

    def end(self) -> None:
        self.beside.kill()
        self.beside.wait()

    def run(self, gpus: Gpus | None = None, **env: str) -> list[dict[str, Any]]:
        self.monkeypatch.setattr(sampler, "gpu_reader", lambda _env, _asked: gpus)
        result = {"DTSLURM_RUN_DIR": str(self.folder), "DTSLURM_ATTEMPT": "1", "SLURM_NODEID": "2", **env}
        sampler.run(self.beside.pid, 0, result)
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    made = Loop(tmp_path, monkeypatch)
    yield made
    made.end()


def test_sample_contains_node_memory_and_disks(loop: Loop) -> None:
    [line] = loop.run(SLURMD_NODENAME="n7", TMPDIR="/no/such/folder")
    assert (line["schema"], line["node"], line["node_rank"], line["time"]) == (1, "n7", 2, 100.0)
    assert 0 < line["memory_used"] < line["memory_total"]
    assert set(line["disks"]) >= {"/tmp", str(loop.folder)}
    assert "/no/such/folder" not in line["disks"]
    assert "gpus" not in line
    assert line["load"] >= 0


def test_shared_disks_are_sampled_less_often(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = sampler.disks
    monkeypatch.setattr(sampler, "disks", lambda paths: asked.extend(paths) or real(paths))  # type: ignore[func-returns-value]
    loop.happens = lambda: loop.end() if loop.now >= 190 else None
    lines = loop.run()
    assert len(lines) == 18  # every five seconds
    assert asked.count(str(loop.folder)) == 2  # and this once a minute
    assert all(str(loop.folder) in line["disks"] for line in lines)


def test_failed_gpu_sample_keeps_the_other_values(loop: Loop) -> None:
    loop.happens = lambda: loop.end() if loop.now >= 110 else None
    gpus = Gpus([{"index": 0}], subprocess.TimeoutExpired("nvidia-smi", 5), [])
    lines = loop.run(gpus)
    assert [line.get("gpus") for line in lines[:2]] == [[{"index": 0}], None]
    assert "memory_used" in lines[1]


def test_sampler_writes_less_often_to_a_large_file(loop: Loop) -> None:
    loop.path.write_text(f'"{"x" * (9 << 20)}"\n')
    loop.happens = lambda: loop.end() if loop.now >= 125 else None
    assert [line["time"] for line in loop.run()[1:]] == [100.0, 110.0, 120.0]


def test_sampler_continues_after_a_write_error_and_ends_with_the_run_directory(loop: Loop) -> None:
    loop.path.mkdir()  # no line can be added

    def happens() -> None:
        if loop.now == 105:
            loop.path.rmdir()
        if loop.now >= 115:
            loop.path.unlink()
            loop.path.parent.rmdir()

    loop.happens = happens
    assert loop.run() == []
    assert loop.now == 115
    assert loop.beside.poll() is None  # it ended by itself


def test_sampler_writes_nothing_when_its_process_has_ended(loop: Loop) -> None:
    loop.end()
    assert loop.run() == []


# ---- Network ports ----


@pytest.fixture
def sysfs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """Lets /sys be what a test says."""

    def make(files: Mapping[str, str]) -> None:
        def found(pattern: str) -> list[str]:
            depth = pattern.count("/") + 1
            paths = {"/".join(path.split("/")[:depth]) for path in files}
            return [path for path in paths if fnmatch.fnmatch(path, pattern)]

        monkeypatch.setattr(glob, "glob", found)
        monkeypatch.setattr(sampler, "contents", lambda path: files.get(path, ""))
        monkeypatch.setattr(
            sampler, "counter", lambda path: int(files[path]) if files.get(path, "").isdigit() else None
        )

    return make


def test_network_ports_report_bytes_and_errors(sysfs: Callable[[Mapping[str, str]], None]) -> None:
    ib, net = "/sys/class/infiniband", "/sys/class/net"
    sysfs(
        {
            f"{ib}/mlx5_0/ports/1/counters/port_rcv_data": "10",
            f"{ib}/mlx5_0/ports/1/counters/port_xmit_data": "20",
            f"{ib}/mlx5_0/ports/1/counters/symbol_error": "3",
            f"{ib}/mlx5_0/ports/1/counters/link_downed": "1",
            f"{ib}/mlx5_0/ports/2/counters/port_rcv_data": "N/A (no PMA)",
            f"{ib}/rdmap0/ports/1/hw_counters/rx_bytes": "7",
            f"{ib}/rdmap0/ports/1/hw_counters/tx_bytes": "8",
            f"{net}/eth0/statistics/rx_bytes": "100",
            f"{net}/eth0/statistics/tx_bytes": "200",
            f"{net}/eth0/statistics/rx_errors": "5",
            f"{net}/eth1/operstate": "down",
            f"{net}/eth1/statistics/rx_bytes": "1",
            f"{net}/eth1/statistics/tx_bytes": "1",
            f"{net}/bond0/statistics/rx_bytes": "1",
            f"{net}/lo/statistics/rx_bytes": "1",
            f"{net}/lo/statistics/tx_bytes": "1",
            f"{net}/docker0/statistics/rx_bytes": "1",
        }
    )
    assert sampler.nics() == {
        "mlx5_0": {"rx_bytes": 40, "tx_bytes": 80, "errors": 4},  # counted in words
        "mlx5_0/2": {},
        "rdmap0": {"rx_bytes": 7, "tx_bytes": 8},
        "eth0": {"rx_bytes": 100, "tx_bytes": 200, "errors": 5},
    }


def test_memory_is_reported_only_when_the_kernel_reports_both_values(
    sysfs: Callable[[Mapping[str, str]], None],
) -> None:
    sysfs({"/proc/meminfo": "MemTotal:  100 kB\nMemAvailable:   30 kB\n"})
    assert sampler.memory() == {"memory_total": 102400, "memory_used": 71680}
    sysfs({"/proc/meminfo": "MemTotal:  100 kB\n"})
    assert sampler.memory() == {}


def test_vanished_processes_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = SimpleNamespace(name="999999999", path="/proc/999999999", stat=Path("/proc/999999999").stat)
    zombie = SimpleNamespace(name="999999998", path="/proc/999999998", stat=Path("/proc/self").stat)
    real = list(os.scandir("/proc"))
    monkeypatch.setattr(os, "scandir", lambda _path: [gone, zombie, *real])
    values = dict(processes())
    assert os.getpid() in values
    assert not {999999999, 999999998} & set(values)
    assert not sampler.belongs_to_job(999999999, "17")


def test_node_of_a_large_job_writes_its_samples_every_two_minutes(loop: Loop) -> None:
    sizes: list[int] = []

    def happens() -> None:
        sizes.append(loop.path.stat().st_size)
        if loop.now >= 450:
            loop.end()

    loop.happens = happens
    lines = loop.run(SLURM_STEP_NUM_NODES="65")
    assert [line["time"] for line in lines] == [100.0 + 5 * number for number in range(70)]
    assert len(set(sizes)) == 3  # at once, and after 120 and 240 s; the rest at the end
    assert loop.run(SLURM_STEP_NUM_NODES="64", DTSLURM_PLAIN_NODES="64") == lines


def test_samples_of_a_large_job_are_kept_while_the_disk_is_full(loop: Loop) -> None:
    loop.path.mkdir()
    loop.happens = lambda: loop.path.rmdir() if loop.now == 150 else loop.end() if loop.now >= 230 else None
    assert [line["time"] for line in loop.run(SLURM_NNODES="2", DTSLURM_PLAIN_NODES="1")] == [
        100.0 + 5 * number for number in range(26)
    ]


def test_only_the_first_ports_of_many_are_sampled(sysfs: Callable[[Mapping[str, str]], None]) -> None:
    files = {}
    for number in range(70):
        files[f"/sys/class/net/eth{number:02}/statistics/rx_bytes"] = "1"
        files[f"/sys/class/net/eth{number:02}/statistics/tx_bytes"] = "2"
    sysfs(files)
    ports = sampler.nics()
    assert list(ports) == [f"eth{number:02}" for number in range(64)]
    assert ports["eth00"] == {"rx_bytes": 1, "tx_bytes": 2, "errors": 0}


def test_errors_in_both_directions_are_summed(sysfs: Callable[[Mapping[str, str]], None]) -> None:
    statistics = {"rx_bytes": 1, "tx_bytes": 2, "rx_errors": 3, "tx_errors": 4}
    sysfs({f"/sys/class/net/eth0/statistics/{name}": str(value) for name, value in statistics.items()})
    assert sampler.nics() == {"eth0": {"rx_bytes": 1, "tx_bytes": 2, "errors": 7}}


# ---- The job's part of the node ----


def test_cgroup_of_the_job_is_that_above_its_steps(tmp_path: Path) -> None:
    for folder in ("slurm/job_7", "memory/slurm/job_7", "cpu,cpuacct", "cpu/slurm/job_7"):
        (tmp_path / folder).mkdir(parents=True)
    text = (
        "0::/slurm/job_7/step_0/job_7\n5:memory:/slurm/job_7/step_0\n4:cpu,cpuacct:/slurm/job_7\n"
        "3:pids:/slurm/job_77\n2:name=systemd:/user\nnothing\n"
    )
    assert sampler.job_cgroup(text, "7", str(tmp_path)) == {
        "": str(tmp_path / "slurm/job_7"),
        "memory": str(tmp_path / "memory/slurm/job_7"),
        "cpu": str(tmp_path / "cpu/slurm/job_7"),
    }
    assert sampler.job_cgroup(text, "8", str(tmp_path)) == {}


def test_cgroup_of_version_2_may_be_below_that_of_version_1(tmp_path: Path) -> None:
    (tmp_path / "unified/slurm/job_7").mkdir(parents=True)
    assert sampler.job_cgroup("0::/slurm/job_7", "7", str(tmp_path)) == {
        "": str(tmp_path / "unified/slurm/job_7")
    }


def test_disks_have_their_used_and_total_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def statvfs(path: str) -> SimpleNamespace:
        if path == "/gone":
            raise OSError("no such file")
        return SimpleNamespace(f_blocks=100, f_bfree=30, f_bavail=10, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert sampler.disks(["/gone", "/tmp"]) == {"/tmp": {"used": 70 * 4096, "total": 100 * 4096}}


def test_process_belongs_to_the_job_in_its_environment() -> None:
    with subprocess.Popen(
        ["sleep", "600"], env={"SLURM_JOB_ID": "17", "PATH": os.environ["PATH"]}
    ) as process:
        try:
            wait_until(lambda: sampler.belongs_to_job(process.pid, "17"))
            assert not sampler.belongs_to_job(process.pid, "1")
            assert not sampler.belongs_to_job(process.pid, "177")
        finally:
            process.kill()


def test_start_time_is_that_of_a_process_that_runs() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        started = sampler.process_start_time(process.pid)
        assert int(started) >= int(sampler.process_start_time(os.getpid()))
        process.kill()
        wait_until(lambda: not sampler.process_start_time(process.pid))  # a zombie has ended
    assert sampler.process_start_time(process.pid) == ""


def test_lines_are_appended_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    assert sampler.append(path, {"a": 1, "b": [2]}) == 16
    assert sampler.append(path, {"a": 3}, {}) == 27
    assert (tmp_path / "x").read_bytes() == b'{"a":1,"b":[2]}\n{"a":3}\n{}\n'
    assert sampler.append(str(tmp_path), {}) is None
