"""The sampler, the health checks and the probe agree with nvidia-smi."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.localslurm import machine
from dtslurm.worker.preflight import gpus as preflight
from dtslurm.worker.probe import gpus
from dtslurm.worker.sampler_nvidia import NvidiaSmi, Nvml
from tests.gpu import nvidia_smi
from tests.gpu.conftest import SCRIPTS, GpuCli, Record
from tests.waiting import wait_until

pytestmark = [pytest.mark.gpu(alone=True), pytest.mark.slow]

MIB = 1 << 20
HELD_GIB = 20
# Tolerances, relative and absolute: nvidia-smi reads each value at another moment.
NEAR = {
    "util": (0.0, 10.0),
    "memory_total": (0.015, 0.0),  # nvmlDeviceGetMemoryInfo includes what the driver reserves
    "memory_used": (0.0, 1024.0 * MIB),
    "power_w": (0.2, 20.0),
    "temperature_c": (0.0, 6.0),
    "sm_mhz": (0.15, 0.0),
    "ecc_corrected": (0.0, 0.0),
    "ecc_uncorrected": (0.0, 0.0),
}


def busy(gpu_python: Path, seconds: int, gib: int) -> subprocess.Popen[str]:
    """Start a program that holds memory and multiplies matrices; return when it does."""
    argv = [str(gpu_python), str(SCRIPTS / "burn.py"), str(seconds), str(gib)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    def works() -> bool:  # the utilization alone may still be that of the previous program
        now = sample_of_nvidia_smi()
        return bool(now["util"] > 90 and now["memory_used"] >= gib << 30)

    wait_until(works, "its work", limit=90)
    return process


def sample_of_nvidia_smi() -> dict[str, Any]:
    """Return what nvidia-smi says now, in the sampler's words."""
    cells = nvidia_smi.ask(*NvidiaSmi.FIELDS)[0]
    row = NvidiaSmi.row(", ".join(cells.values()))
    assert row is not None, cells
    return row


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert (ours["index"], ours["uuid"], ours["name"]) == (theirs["index"], theirs["uuid"], theirs["name"])
    for name, (share, least) in NEAR.items():
        if name in theirs:
            far = abs(ours[name] - theirs[name])
            assert far <= max(share * theirs[name], least), f"{name}: {ours} {theirs}"


def test_nvml_values_match_nvidia_smi(gpu_python: Path, record: Record) -> None:
    """Compare use, memory, power, temperature, clock and errors, at rest and under load."""
    nvml = Nvml(dict(os.environ), 1)
    program = NvidiaSmi(dict(os.environ), 1)
    try:
        seen = {"at_rest": {"sampler": nvml.sample()[0], "nvidia_smi": sample_of_nvidia_smi()}}
        with busy(gpu_python, 8, HELD_GIB) as process:
            nvml.sample()
            time.sleep(2)  # SM activity is an average over the time since the last sample
            seen["busy"] = {"sampler": nvml.sample()[0], "nvidia_smi": sample_of_nvidia_smi()}
            health = {item["check"]: item for item in preflight.gpus({"gpus": 1}, dict(os.environ))}
            process.wait(60)
            rate = process.stdout.read().split()[-1] if process.stdout else ""
        wait_until(program.sample, "a row of the program", limit=30)
        by_program = program.sample()[0]
    finally:
        program.process.kill()
        program.process.wait()
    record("devices", "sampler", seen)
    record("devices", "sampler_tflops", float(rate))
    record("devices", "health_busy", health)
    record("devices", "rows", {"sampler": nvidia_smi.ask(*NvidiaSmi.FIELDS)[0]})
    for values in seen.values():
        compare(values["sampler"], values["nvidia_smi"])
    assert by_program["uuid"] == seen["busy"]["sampler"]["uuid"]
    assert seen["busy"]["sampler"]["sm_activity"] > 0.8
    assert seen["busy"]["sampler"]["memory_used"] > HELD_GIB << 30
    assert health["gpu-memory"]["level"] == "warn"


def test_health_checks_pass_on_a_working_gpu(record: Record) -> None:
    """Run the checks with the library, and with nvidia-smi as if there were no library."""
    by_library = preflight.gpus({"gpus": 1, "intra_node": "nvlink"}, dict(os.environ))
    by_program = preflight._by_program(1)  # as where the library is missing
    record("devices", "health", {"by_library": by_library, "by_program": by_program})
    record("devices", "health_row", nvidia_smi.ask(*preflight.FIELDS)[0])
    levels = {item["check"]: item["level"] for item in [*by_library, *by_program]}
    assert levels["gpus"] == "ok"
    assert levels["ecc"] == "ok"
    missing = preflight.gpus({"gpus": 2}, dict(os.environ))
    assert [item["level"] for item in missing if item["check"] == "gpus"] == ["bad"]


def test_probe_and_local_queue_describe_the_machine(record: Record) -> None:
    """Compare `cluster discover` and the local queue with nvidia-smi."""
    (probed,) = gpus.gpus()
    model = machine.gpu_model()
    theirs = nvidia_smi.ask("name", "memory.total", "pci.bus_id")[0]
    record("devices", "probed", probed)
    assert machine.gpus() == ["0"]
    assert model == {"name": theirs["name"], "memory_mib": int(theirs["memory.total"])}
    assert theirs["name"] in probed.values()


def test_telemetry_of_a_run_matches_nvidia_smi(gpu_cli: GpuCli, record: Record) -> None:
    """Compare the telemetry of a run with nvidia-smi at the same time."""
    job = gpu_cli.start("-l", "single", str(SCRIPTS / "burn.py"), "14", str(HELD_GIB))
    run, theirs = gpu_cli.run_dir(job), []
    path = run.path / "metrics" / "0" / "node-0.jsonl"

    def over() -> bool:
        theirs.append((time.time(), sample_of_nvidia_smi()))
        return bool(run.ranks(0)) and run.ranks(0)[0].exit_code is not None

    wait_until(over, "the end of the run", limit=120)
    assert gpu_cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED", gpu_cli.output(job)
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    pairs = []
    for note in notes:
        gpu = note["gpus"][0]
        at, near = min(theirs, key=lambda item: abs(item[0] - float(note["time"])))
        if gpu.get("util", 0) > 90 and near["util"] > 90 and abs(at - float(note["time"])) < 1.5:
            pairs.append({"sampler": gpu, "nvidia_smi": near})
    record("devices", "run", {"notes": len(notes), "pairs": pairs})
    assert pairs, notes
    for pair in pairs:
        compare(pair["sampler"], pair["nvidia_smi"])


def reported() -> list[str]:
    """Return the kernel's lines of the driver's reports."""
    kernel = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    return [line for line in kernel.splitlines() if "Xid" in line]


def test_xid_of_the_driver_is_reported(gpu_python: Path, record: Record) -> None:
    """A kernel that reads beyond its memory causes an Xid event."""
    nvml = Nvml(dict(os.environ), 1)
    assert nvml.sample()[0].get("xid") is None
    before = set(reported())
    argv = [str(gpu_python), str(SCRIPTS / "fail.py"), "illegal-access"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    gpu: dict[str, Any] = {}

    def has_arrived() -> bool:
        gpu.update(nvml.sample()[0])
        return "xid" in gpu

    wait_until(has_arrived, f"an Xid event ({done.stderr[-500:]})", limit=20)
    lines = [line for line in reported() if line not in before]
    record("devices", "xid", {"sampler": gpu.get("xid"), "kernel": lines})
    assert "illegal memory access" in done.stderr
    assert {str(number) for number in gpu["xid"]} == {
        line.partition("): ")[2].partition(",")[0] for line in lines
    }


def test_sample_takes_less_than_a_tenth_of_a_second(record: Record) -> None:
    """Samples are taken beside training."""
    nvml = Nvml(dict(os.environ), 1)
    nvml.sample()
    started = time.perf_counter()
    for _ in range(10):
        nvml.sample()
    seconds = (time.perf_counter() - started) / 10
    record("devices", "look_s", seconds)
    assert seconds < 0.1
