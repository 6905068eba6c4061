"""The preflight checks of a node, each on a simulated node."""

from __future__ import annotations

import ast
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm import assets
from dtslurm.worker.preflight import framework, gpus, kernel, main, network, places, ports
from dtslurm.worker.preflight.findings import Finding, finding, join_names, line, parse_object
from dtslurm.worker.supervisor import health
from tests import disks

DATA = Path(__file__).with_name("data")
CC = shutil.which("cc")
PROGRAMS = sorted((assets.worker("preflight")).glob("*.py"))


def levels(findings: list[Finding]) -> dict[str, str]:
    return {item["check"]: item["level"] for item in findings}


def program(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of that name first on PATH."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_preflight_programs_parse_as_python_3_6(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 6))


# ---- GPUs ----

LOOK = """\
import json, os
from dtslurm.worker.preflight.gpus import gpus
print(json.dumps(gpus(json.loads(os.environ["WANTED"]), os.environ)))
"""


@pytest.fixture
def nvidia(tmp_path: Path) -> Callable[..., list[Finding]]:
    """Look at GPUs by a management library made here, in a process of its own."""
    if CC is None:
        pytest.skip("no C compiler")
    path = tmp_path / "libnvidia-ml.so"
    argv = [CC, "-shared", "-fPIC", "-Wall", "-Werror", "-DHEALTH", "-o", str(path), str(DATA / "nvml.c")]
    subprocess.run(argv, check=True)

    def look(wanted: dict[str, Any], **env: str) -> list[Finding]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "CUDA_"))}
        reply = {"DTSLURM_NVML": str(path), "FAKE_GPUS": "4", "WANTED": json.dumps(wanted), **env}
        argv = [sys.executable, "-c", LOOK]
        done = subprocess.run(argv, env={**clean, **reply}, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        outcome: list[Finding] = json.loads(done.stdout)
        return outcome

    return look


def test_working_gpus_pass_the_checks(nvidia: Callable[..., list[Finding]]) -> None:
    result = nvidia({"gpus": 4, "intra_node": "nvswitch"}, FAKE_ECC="0")
    assert levels(result) == {"gpus": "ok", "ecc": "ok", "nvlink": "ok", "gpu-memory": "warn"}
    assert result[2]["evidence"] == "3 NVLinks are up on each GPU"


@pytest.mark.parametrize(
    ("env", "check", "words"),
    [
        ({"FAKE_GPUS": "3"}, "gpus", "3 of 4 GPUs respond"),
        ({"FAKE_LOST": "2"}, "gpus", "GPU 2 does not respond to the driver"),
        ({"FAKE_NO_DRIVER": "1"}, "gpus", "nvmlInit failed"),
        ({"FAKE_ECC": "7"}, "ecc", "GPU 1 has 7 uncorrected memory errors"),
        ({"FAKE_ECC": "0", "FAKE_PENDING": "1"}, "ecc", "GPU 1 must be reset for a repair of its memory"),
        ({"FAKE_ECC": "0", "FAKE_FAILED": "1"}, "ecc", "GPU 1 has no spare rows left"),
        ({"FAKE_DOWN": "2"}, "nvlink", "GPU 2 has 2 of 3"),
    ],
)
def test_broken_gpu_is_bad(
    nvidia: Callable[..., list[Finding]], env: dict[str, str], check: str, words: str
) -> None:
    [result] = [item for item in nvidia({"gpus": 4}, **env) if item["check"] == check]
    assert result["level"] == "bad"
    assert words in result["evidence"]


def test_gpu_check_is_skipped_for_a_job_without_gpus() -> None:
    assert gpus.gpus({"gpus": 0}, {}) == []


def test_gpus_are_unknown_without_a_vendor_library_or_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    env = {"DTSLURM_NVML": str(tmp_path / "none.so")}
    assert levels(gpus.gpus({"gpus": 8}, env)) == {"gpus": "unknown"}
    assert levels(gpus.gpus({"gpus": 8, "vendor": "intel"}, env)) == {"gpus": "unknown"}
    assert levels(gpus.gpus({"gpus": 8, "vendor": "amd"}, env, str(tmp_path))) == {"gpus": "unknown"}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("0, 0, No, No\n1, 0, No, No", {"gpus": "ok", "ecc": "ok"}),
        ("0, 0, No, No", {"gpus": "bad", "ecc": "ok"}),
        ("0, 0, 1, 0\n1, 0, 0, 0", {"gpus": "ok", "ecc": "bad"}),
        ("0, 0\n1, 3", {"gpus": "ok", "ecc": "bad"}),
        ("0, [N/A], [N/A], [N/A]\n1, [N/A], [N/A], [N/A]", {"gpus": "ok", "ecc": "unknown"}),
    ],
)
def test_nvidia_smi_table_is_used_without_the_library(rows: str, expected: dict[str, str]) -> None:
    assert levels(gpus.by_table(rows, 2)) == expected


def test_failed_nvidia_smi_makes_the_gpus_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error"
    program(tmp_path, "nvidia-smi", f'echo "{words}"; exit 255', monkeypatch)
    [result] = gpus.gpus({"gpus": 8}, {"DTSLURM_NVML": str(tmp_path / "none.so")})
    assert (result["level"], result["evidence"]) == ("bad", f"nvidia-smi failed: {words}")


def test_old_nvidia_smi_is_queried_with_fewer_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = 'Field "remapped_rows.pending" is not a valid field to query.'
    text = f"case $1 in *remapped*) echo '{refusal}'; exit 2;; esac; echo '0, 0'"
    program(tmp_path, "nvidia-smi", text, monkeypatch)
    result = gpus.gpus({"gpus": 1}, {"DTSLURM_NVML": str(tmp_path / "none.so")})
    assert levels(result) == {"gpus": "ok", "ecc": "ok"}


def test_amd_gpus_are_checked_through_sysfs(tmp_path: Path) -> None:
    for card, errors in enumerate(("ue: 0\nce: 4", "ue: 2\nce: 0")):
        device = tmp_path / f"class/drm/card{card}/device"
        (device / "ras").mkdir(parents=True)
        (device / "gpu_busy_percent").write_text("0")
        (device / "ras/umc_err_count").write_text(errors)
    wanted = {"gpus": 2, "vendor": "amd"}
    result = gpus.gpus(wanted, {}, str(tmp_path))
    assert levels(result) == {"gpus": "ok", "ecc": "bad"}
    assert result[1]["evidence"] == "GPU 1 has 2 uncorrected memory errors"
    assert levels(gpus.gpus({**wanted, "gpus": 4}, {}, str(tmp_path)))["gpus"] == "bad"


@pytest.mark.parametrize(
    ("counts", "intra_node", "expected"),
    [
        ([(0, 0), (0, 0)], "pcie", None),
        ([(0, 0), (0, 0)], "nvswitch", "unknown"),
        ([(12, 12), (12, 12)], "nvlink", "ok"),
        ([(4, 12), (4, 12)], "nvlink", "ok"),  # boards of four GPUs, and bridges, do not use all
        ([(0, 12), (0, 12)], "nvlink", "bad"),
        ([(0, 12), (0, 12)], "", "ok"),
        ([(12, 12), (11, 12)], "", "bad"),
    ],
)
def test_nvlink_count_is_compared_among_the_gpus_of_a_node(
    counts: list[tuple[int, int]], intra_node: str, expected: str | None
) -> None:
    assert levels(gpus.links(counts, intra_node)).get("nvlink") == expected


def test_gpu_memory_already_in_use_is_a_warning() -> None:
    sampled = [
        {"index": 0, "memory_used": 70 << 30, "memory_total": 80 << 30},
        {"index": 1, "memory_used": 1},
    ]
    assert gpus.in_use(sampled) == [finding("gpu-memory", "warn", "already in use: GPU 0: 70.0 GiB")]
    assert gpus.in_use([{"index": 0, "memory_used": 1 << 30, "memory_total": 80 << 30}]) == []


# ---- The kernel's log ----


@pytest.mark.parametrize(
    ("xid", "age", "expected"),
    [
        (79, 60.0, "bad"),
        (79, 7200.0, "warn"),  # somebody may have reset the GPU since
        (79, 90000.0, "ok"),
        (13, 60.0, "ok"),  # the application's doing
        (74, 60.0, "warn"),
    ],
)
def test_xid_level_depends_on_its_code_and_age(xid: int, age: float, expected: str) -> None:
    up = 1e6
    log = (
        f"[{up - age:.6f}] NVRM: Xid (PCI:0000:3b:00): {xid}, pid=7, GPU has fallen off the bus.\n[1.0] hello"
    )
    result = kernel.judged(log, up)
    assert result["level"] == expected
    if expected != "ok":
        assert f"Xid {xid} of PCI:0000:3b:00" in result["evidence"]


def test_unreadable_kernel_log_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "dmesg", "exit 1", monkeypatch)
    assert levels(kernel.kernel_log()) == {"xid": "unknown"}
    program(tmp_path, "dmesg", "echo '[    0.1] NVRM: Xid (PCI:0000:3b:00): 79, gone'", monkeypatch)
    assert kernel.kernel_log()[0]["level"] in {"bad", "warn", "ok"}  # by how long this machine is up


# ---- Network adapters ----


def adapter(top: Path, name: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> None:
    port = top / "class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "phys_state").write_text("5: LinkUp\n" if "ACTIVE" in state else "3: Disabled\n")
    (port / "rate").write_text(rate + "\n")


WANTED = {"nodes": 2, "rdma": True, "nic_count": 2, "rate_gbps": 400}


@pytest.mark.parametrize(
    ("adapters", "expected", "words"),
    [
        ({}, "ok", "mlx5_2 is DOWN"),
        ({"nic_count": 2}, "ok", "mlx5_2 is DOWN"),  # not of a network that is judged by it
        (
            WANTED,
            "bad",
            "1 of 2 adapters are up: mlx5_1 runs at 200 of 400 Gb/s, mlx5_2 is DOWN, link Disabled",
        ),
        ({**WANTED, "nodes": 1}, "warn", "1 of 2 adapters"),
        ({**WANTED, "nic_count": 1}, "ok", "1 adapters are up at 400 Gb/s"),
        ({**WANTED, "hcas": ["mlx5_0"]}, "ok", "1 adapters are up"),
        ({**WANTED, "hcas": ["=mlx5_0:1", "mlx5_2"]}, "bad", "mlx5_2 is DOWN, link Disabled"),
        ({**WANTED, "hcas": ["mlx5_9"]}, "bad", "mlx5_9 does not exist"),
        ({**WANTED, "hcas": ["mlx5_1"]}, "bad", "mlx5_1 runs at 200 of 400 Gb/s"),
        ({"nodes": 2, "hcas": ["mlx5_1"]}, "ok", "1 adapters are up"),
    ],
)
def test_adapters_are_checked_against_the_profile(
    tmp_path: Path, adapters: dict[str, Any], expected: str, words: str
) -> None:
    adapter(tmp_path, "mlx5_0")
    adapter(tmp_path, "mlx5_1", rate="200 Gb/sec (4X HDR)")
    adapter(tmp_path, "mlx5_2", state="1: DOWN")
    [result] = ports.ports(adapters, str(tmp_path))
    assert (result["level"], words in result["evidence"]) == (expected, True), result


def test_node_without_adapters_is_checked_against_the_profile(tmp_path: Path) -> None:
    assert ports.ports({}, str(tmp_path)) == []
    assert levels(ports.ports(WANTED, str(tmp_path))) == {"hca": "unknown"}
    assert levels(ports.ports({**WANTED, "hcas": ["mlx5_0"]}, str(tmp_path))) == {"hca": "bad"}


# ---- Places, network, framework ----


def test_writable_directories_pass_the_checks_and_stay_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", str(tmp_path))
    assert "GiB free" in places.disk({"local_disk": "$MINE"}, {})[0]["evidence"]
    assert levels(places.disk({"local_disk": "/nowhere/$NOT_SET"}, {})) == {"disk": "unknown"}
    assert levels(places.run_dir(str(tmp_path))) == {"run-dir": "ok"}
    assert levels(places.run_dir(str(tmp_path / "none"))) == {"run-dir": "bad"}
    assert levels(places.shm(str(tmp_path / "none"))) == {"shm": "unknown"}
    assert list(tmp_path.iterdir()) == []


def test_f16_a_full_file_system_of_runs_is_waited_for_and_not_blamed_on_the_node(tmp_path: Path) -> None:
    with disks.small_disk(tmp_path / "disk", "size=4m") as folder:
        disks.fill(folder)
        [result] = places.run_dir(str(folder), patience_s=0.0)
        assert (result["level"], "No space left" in result["evidence"]) == ("warn", True)
        assert levels([places.writable("disk", str(folder))]) == {"disk": "bad"}  # of this node alone
        removal = threading.Timer(1.5, (folder / "filler").unlink)
        removal.start()
        assert levels(places.run_dir(str(folder), patience_s=60.0)) == {"run-dir": "ok"}
        removal.join()


@pytest.mark.parametrize(("free", "expected"), [(10 << 20, "bad"), (500 << 20, "warn"), (9 << 30, "ok")])
def test_full_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: str) -> None:
    status = os.statvfs(tmp_path)

    def pretended(path: Any) -> Any:
        del path
        values = list(status)
        values[1:5] = [1, 16 << 30, free, free]  # of one byte each
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", pretended)
    assert places.writable("disk", str(tmp_path))["level"] == expected


def test_disk_that_fails_fsync_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    result = places.writable("disk", str(tmp_path))
    assert (result["level"], result["evidence"]) == ("bad", f"cannot write to {tmp_path}: Input/output error")


def test_head_node_name_must_resolve_for_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(network.dns("localhost", True)) == {"dns": "ok"}

    def unknown(*_: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert levels(network.dns("n7", True)) == {"dns": "bad"}
    assert levels(network.dns("n7", False)) == {"dns": "warn"}


@pytest.mark.parametrize(("off", "expected"), [(0.4, "ok"), (-9.0, "warn"), (400.0, "bad")])
def test_clock_level_depends_on_the_offset(off: float, expected: str) -> None:
    assert network.judged(off)["level"] == expected


def test_clock_offset_within_the_round_trip_time_is_ok() -> None:
    assert network.judged(5.0, 10.0)["level"] == "ok"


@pytest.mark.slow
def test_clock_check_asks_the_time_server_of_the_first_node() -> None:
    clock = health.Clock("localhost")
    try:
        [result] = network.clock("127.0.0.1", clock.port, clock.key)
    finally:
        clock.close()
    assert result["level"] == "ok", result
    assert levels(network.clock("127.0.0.1", clock.port, clock.key)) == {"clock": "unknown"}
    assert levels(network.clock("no.such.host.invalid", 7, "")) == {"clock": "unknown"}


def test_framework_check_imports_the_framework(tmp_path: Path) -> None:
    (tmp_path / "fine.py").write_text("__version__ = '3.1'")
    (tmp_path / "broken.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')"
    )
    look = framework.framework
    assert look(sys.executable, "fine", str(tmp_path))[0]["evidence"].startswith("fine 3.1 imported in ")
    [result] = look(sys.executable, "broken", str(tmp_path))
    assert result["level"] == "bad"
    assert "libcudart.so.12: cannot open" in result["evidence"]
    assert levels(look("/no/such/python", "fine", str(tmp_path))) == {"framework": "bad"}
    assert look(sys.executable, "", str(tmp_path)) == []


def test_slow_framework_import_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(framework, "LIMIT_S", 0.5)
    assert levels(framework.framework(sys.executable, "slow", str(tmp_path))) == {"framework": "warn"}


# ---- A node's look ----


def run(checks: list[main.Check]) -> list[Finding]:
    result: list[Finding] = []
    main.run(checks, result.append)
    return result


def test_hanging_or_crashing_check_does_not_affect_other_checks() -> None:
    def hang() -> list[Finding]:
        time.sleep(600)
        return []

    def crash() -> list[Finding]:
        os.kill(os.getpid(), 9)
        return []

    def mistake() -> list[Finding]:
        raise ValueError("what is this")

    result = run(
        [
            main.Check("stuck", hang, 1.0),
            main.Check("slow", hang, 1.0, "unknown"),
            main.Check("crash", crash),
            main.Check("mistake", mistake),
            main.Check("fine", lambda: [finding("fine", "ok", "yes")]),
        ]
    )
    assert levels(result) == {
        "stuck": "bad", "slow": "unknown", "crash": "unknown", "mistake": "unknown", "fine": "ok",
    }  # fmt: skip
    assert "did not end within 1 s" in next(item for item in result if item["check"] == "stuck")["evidence"]


def test_finding_evidence_is_a_single_printable_line() -> None:
    result = finding("gpus", "bad", "a\n\x1b[31mb\x07" + "c" * 1000)
    assert result["evidence"].isprintable()
    assert len(result["evidence"]) <= 400
    assert parse_object(line(result)) == result
    assert (
        parse_object(b"Welcome to node 7\n")
        == parse_object(b"dtslurm-health: {half\n")
        == parse_object(b"dtslurm-health: 3\n")
        == {}
    )


# ---- Thresholds ----


@pytest.mark.parametrize(
    ("names", "text"),
    [([], ""), (range(4), "0, 1, 2, 3"), (range(5), "0, 1, 2, 3 and 1 more"),
     (range(11), "0, 1, 2, 3 and 7 more")],
)  # fmt: skip
def test_a_long_list_of_names_is_shortened(names: Any, text: str) -> None:
    assert join_names(names) == text


def test_evidence_is_one_short_line_of_printable_text() -> None:
    assert finding("c", "ok", " a\x1b[0m\nb ") == {"check": "c", "level": "ok", "evidence": "a [0m b"}
    assert finding("c", "ok", "x" * 500)["evidence"] == "x" * 400


@pytest.mark.parametrize(
    ("elapsed_s", "output", "code", "result"),
    [
        (30.0, b"noise\n2.1\n\n", 0, ("ok", "torch 2.1 imported in 30.0 s")),
        (30.1, b"2.1", 0, ("warn", "torch 2.1 imported in 30.1 s")),
        (1.0, b"", 0, ("ok", "torch  imported in 1.0 s")),
        (1.0, b"a\nno module\n", 1, ("bad", "the import of torch failed: no module")),
        (1.0, b"", -11, ("bad", "the import of torch failed:")),
    ],
)
def test_framework_import_is_judged_by_its_seconds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    elapsed_s: float,
    output: bytes,
    code: int,
    result: tuple[str, str],
) -> None:
    times = iter([100.0, 100.0 + elapsed_s])
    folders: list[str | None] = []

    def run_program(words: list[str], *, cwd: str | None, **_more: Any) -> SimpleNamespace:
        assert words == ["py", "-c", "import torch; print(torch.__version__)"]
        folders.append(cwd)
        return SimpleNamespace(returncode=code, stdout=output)

    monkeypatch.setattr(framework, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(subprocess, "run", run_program)
    [item] = framework.framework("py", "torch", str(tmp_path))
    assert (item["level"], item["evidence"]) == result
    times = iter([0.0, 0.0])
    framework.framework("py", "torch", str(tmp_path / "none"))
    assert folders == [str(tmp_path), None]
    assert framework.framework("py", "torch; import os", str(tmp_path)) == []
    assert framework.framework("", "torch", str(tmp_path)) == []


@pytest.mark.parametrize(
    ("off", "took", "level", "text"),
    [
        (0.0, 0.0, "ok", "0.0 s behind the first node's"),
        (2.0, None, "ok", "2.0 s ahead of the first node's"),
        (-2.5, 0.0, "warn", "2.5 s behind the first node's"),
        (3.0, 2.0, "ok", "3.0 s ahead of the first node's"),
        (60.0, 0.0, "warn", "60.0 s ahead of the first node's"),
        (61.0, 2.0, "warn", "61.0 s ahead of the first node's"),
        (-61.0, 0.0, "bad", "61.0 s behind the first node's"),
    ],
)
def test_clock_is_judged_by_the_least_possible_difference(
    off: float, took: float | None, level: str, text: str
) -> None:
    assert network.judged(off, took) == finding("clock", level, text)


def test_only_the_signed_answer_to_this_question_has_the_time() -> None:
    nonce = bytes(range(16))

    def receive(message: bytes) -> float | None:
        link: Any = SimpleNamespace(recv=lambda size: message[:size])
        return network._receive_time(link, nonce, "k")

    answer = network.build_answer(network.sign(nonce, "k"), "k", 12.5)
    assert answer is not None
    assert receive(answer) == 12.5
    for message in (
        network.sign(nonce, "k"),
        network.sign(nonce + b"12.5", "another key"),
        network.sign(bytes(16) + b"12.5", "k"),
        network.sign(b"", "k"),
        answer[:-1],
        b"",
    ):
        assert receive(message) is None
    assert network.build_answer(network.sign(nonce, "another key"), "k", 1.0) is None
    assert network.build_answer(network.sign(b"", "k"), "k", 1.0) is None


@pytest.mark.parametrize(
    ("check", "free_mib", "level"),
    [
        ("disk", 63.9, "bad"), ("disk", 64, "warn"), ("disk", 1023.9, "warn"), ("disk", 1024, "ok"),
        ("shm", 31.9, "bad"), ("shm", 32, "warn"), ("shm", 1024, "ok"), ("run-dir", 0, "ok"),
    ],
)  # fmt: skip
def test_free_space_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, free_mib: float, level: str
) -> None:
    status = SimpleNamespace(f_bavail=int(free_mib * 1024), f_frsize=1024, f_blocks=4 << 20)
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    text = f"{tmp_path} has {free_mib / 1024:.1f} of 4.0 GiB free"
    assert places.writable(check, str(tmp_path)) == finding(check, level, text)
    status.f_blocks = 0  # the file system does not tell
    assert places.writable(check, str(tmp_path))["level"] == "ok"


@pytest.mark.parametrize(
    ("xids", "level", "text"),
    [
        ([(79, 3600.0)], "bad", "Xid 79 of PCI:1, x, 60 min ago"),
        ([(79, 3601.0)], "warn", "Xid 79 of PCI:1, x, 60 min ago"),
        ([(79, 86_400.0)], "warn", "Xid 79 of PCI:1, x, 24 h ago"),
        ([(79, 86_401.0)], "ok", "no Xid error that requires a reset within a day"),
        (
            [(74, 60.0), (74, 7140.0), (74, 7200.0)],
            "warn",
            "Xid 74 of PCI:1, x, 119 min ago, Xid 74 of PCI:1, x, 2 h ago",
        ),
        (
            [(79, 9.0), (79, 120.0), (74, 5.0), (79, 60.0)],
            "bad",
            "Xid 79 of PCI:1, x, 2 min ago, Xid 79 of PCI:1, x, 1 min ago",
        ),
    ],
)
def test_newest_xids_are_shown_with_their_age(xids: list[tuple[int, float]], level: str, text: str) -> None:
    log = "".join(f"[{1e6 - age:.6f}] NVRM: Xid (PCI:1): {number}, x\n" for number, age in xids)
    assert kernel.judged(log, 1e6) == finding("xid", level, text)
