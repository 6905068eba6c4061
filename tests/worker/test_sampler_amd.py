"""The sampler's readers for AMD GPUs: sysfs, rocm-smi and amd-smi."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtslurm.worker.sampler import gpu_reader
from dtslurm.worker.sampler_amd import Amdgpu, AmdSmi, RocmSmi

DATA = Path(__file__).with_name("data")


def amd_card(top: Path, number: int, **files: str) -> None:
    device = top / f"card{number}" / "device"
    (device / "hwmon" / "hwmon3").mkdir(parents=True)
    values = {
        "gpu_busy_percent": "88",
        "mem_info_vram_total": str(64 << 30),
        "unique_id": f"{number:x}",
        **files,
    }
    for name, value in values.items():
        place = device / "hwmon" / "hwmon3" if "_input" in name or "_average" in name else device
        (place / name).write_text(value + "\n")


def test_amd_sysfs_reader_reports_gpus_without_a_program(tmp_path: Path) -> None:
    amd_card(tmp_path, 1, mem_info_vram_used=str(3 << 30), power1_average="305000000", temp1_input="40000")
    amd_card(tmp_path, 2, power1_input="90000000", temp2_input="71000", freq1_input="1700000000")
    first, second = Amdgpu({}, 2, str(tmp_path)).sample()
    assert first == {
        "index": 0, "uuid": "GPU-1", "util": 88, "memory_used": 3 << 30, "memory_total": 64 << 30,
        "power_w": 305.0, "temperature_c": 40.0,
    }  # fmt: skip
    assert (second["power_w"], second["temperature_c"], second["sm_mhz"]) == (90.0, 71.0, 1700.0)
    only = Amdgpu({"ROCR_VISIBLE_DEVICES": "1"}, 1, str(tmp_path)).sample()
    assert [gpu["uuid"] for gpu in only] == ["GPU-2"]
    with pytest.raises(OSError, match="no AMD GPU"):
        Amdgpu({}, 1, str(tmp_path / "none"))


ROCM = {
    "card0": {
        "Unique ID": "0x18f68e602b8a790f",
        "Temperature (Sensor edge) (C)": "41.0",
        "Temperature (Sensor junction) (C)": "47.0",
        "Average Graphics Package Power (W)": "92.0",
        "GPU use (%)": "35",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "11026432",
    },
    "card1": {"GPU use (%)": "N/A", "Current Socket Graphics Package Power (W)": "140.0"},
    "system": {"Driver version": "6.7.0"},
}


def test_rocm_smi_reader_parses_json_of_several_versions() -> None:
    first, second = RocmSmi.read(json.dumps(ROCM).encode())
    assert first == {
        "index": 0, "uuid": "0x18f68e602b8a790f", "util": 35.0, "memory_used": 11026432,
        "memory_total": 68702699520, "power_w": 92.0, "temperature_c": 47.0,
    }  # fmt: skip
    assert second == {"index": 1, "uuid": "", "power_w": 140.0}
    for spoilt in (b"", b"WARNING: no\n{", b"[]", b'{"cardx": {}}', b'{"card0": 5}'):
        assert RocmSmi.read(spoilt) == []


AMD_SMI = {
    "gpu": 0,
    "usage": {"gfx_activity": {"value": 97, "unit": "%"}, "umc_activity": {"value": 40, "unit": "%"}},
    "power": {"socket_power": {"value": 612, "unit": "W"}, "throttle_status": "UNTHROTTLED"},
    "clock": {"gfx_0": {"clk": {"value": 2100, "unit": "MHz"}, "min_clk": {"value": 500, "unit": "MHz"}}},
    "temperature": {"edge": "N/A", "hotspot": {"value": 71, "unit": "C"}},
    "ecc": {"total_correctable_count": 3, "total_uncorrectable_count": 0, "cache_correctable_count": "N/A"},
    "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 283, "unit": "MB"}},
}
OLDER = {
    "gpu": 1,
    "usage": {"gfx_activity": 12},
    "power": {"socket_power": "N/A"},
    "temperature": {"edge": 40},
}


def amd_smi(folder: Path, document: object, listed: object) -> None:
    """Put an amd-smi into a folder that answers with these."""
    program = folder / "amd-smi"
    (folder / "told").write_text(json.dumps(document))
    (folder / "listed").write_text(json.dumps(listed))
    program.write_text(
        f'#!/bin/sh\n[ "$1" = list ] && exec /bin/cat {folder}/listed\nexec /bin/cat {folder}/told\n'
    )
    program.chmod(0o755)


@pytest.mark.parametrize("wrapped", [True, False])
def test_amd_smi_reader_is_used_without_the_sysfs_files(
    wrapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Amdgpu.__init__, "__defaults__", (str(tmp_path),))
    gpus = [AMD_SMI, OLDER]
    amd_smi(tmp_path, {"gpu_data": gpus} if wrapped else gpus, [{"gpu": 0, "uuid": "c3ff-0"}, {"gpu": 1}])
    reader = gpu_reader({"DTSLURM_NVML": str(tmp_path / "none.so")}, 2)
    assert isinstance(reader, AmdSmi)
    first, second = reader.sample()
    assert first == {
        "index": 0, "uuid": "c3ff-0", "util": 97.0, "memory_used": 283 << 20, "memory_total": 196592 << 20,
        "power_w": 612.0, "temperature_c": 71.0, "sm_mhz": 2100.0, "ecc_corrected": 3, "ecc_uncorrected": 0,
    }  # fmt: skip
    assert second == {"index": 1, "uuid": "", "util": 12.0, "temperature_c": 40.0}
    only = AmdSmi({"ROCR_VISIBLE_DEVICES": "1"}, 1).sample()
    assert [gpu["index"] for gpu in only] == [1]


def test_rocm_smi_is_used_when_amd_smi_lists_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Amdgpu.__init__, "__defaults__", (str(tmp_path),))
    amd_smi(tmp_path, [], [])
    (tmp_path / "rocm-smi").write_text(f"#!/bin/sh\nexec /bin/cat {tmp_path}/rocm\n")
    (tmp_path / "rocm-smi").chmod(0o755)
    (tmp_path / "rocm").write_text(json.dumps(ROCM))
    reader = gpu_reader({"DTSLURM_NVML": str(tmp_path / "none.so")}, 2)
    assert isinstance(reader, RocmSmi)
    assert [gpu.get("util") for gpu in reader.sample()] == [35.0, None]


@pytest.mark.parametrize(
    "spoilt",
    ["", "Traceback", "{}", '{"gpu_data": 5}', '[5, {"gpu": "0"}]', '[{"gpu": 0, "usage": [1]}]', "[" * 9999],
)
def test_amd_smi_reader_takes_no_values_from_malformed_output(spoilt: str) -> None:
    assert all(set(gpu) == {"index", "uuid"} for gpu in AmdSmi.read(spoilt.encode()))
