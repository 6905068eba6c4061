"""The probe of a node: GPUs of two vendors, fabrics, disks, limits and torch."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dtslurm import assets
from dtslurm.discover import from_probe
from dtslurm.remote.worker_program import inline_program
from dtslurm.services.clusters import probing
from dtslurm.worker.probe import gpus, probe

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV4\tNV4\tNV4\tPXB\t0-31\t0
GPU1\tNV4\t X \tNV4\tNV4\tPXB\t0-31\t0
GPU2\tNV4\tNV4\t X \tNV4\tSYS\t32-63\t1
GPU3\tNV4\tNV4\tNV4\t X \tSYS\t32-63\t1
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:
  X    = Self
"""
LINKS = "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\n" + "".join(f"\t Link {i}: 25 GB/s\n" for i in range(12))
ROUTES = (
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    "ib0\t0000140A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
)


def program(folder: Path, name: str, body: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without anything, whose programs are those of its bin folder and the system's."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


@pytest.fixture
def a100s(node: Path) -> Path:
    """Four GPUs on two NUMA nodes, each pair with NVLink."""
    rows = [f"{i}, NVIDIA A100-SXM4-40GB, 40960, 00000000:{i:02X}:00.0, 550.54" for i in range(4)]
    put(node, {"query": "\n".join(rows) + "\nbroken row\n", "topo": TOPOLOGY, "links": LINKS})
    put(node, {f"sys/bus/pci/devices/0000:{i:02x}:00.0/numa_node": f"{i // 2}\n" for i in range(4)})
    cases = f"topo) cat {node}/topo;; nvlink) cat {node}/links;; *) cat {node}/query;;"
    program(node, "nvidia-smi", f'case "$1" in {cases} esac')
    return node


@pytest.mark.parametrize("name", ["probe/probe.py", "probe/gpus.py"])
def test_probe_programs_parse_as_python_3_6(name: str) -> None:
    ast.parse(assets.worker(name).read_text(), feature_version=(3, 6))


def test_probe_reports_nvidia_gpus_and_nvlinks(a100s: Path) -> None:
    result = gpus.gpus(str(a100s))
    assert [gpu["numa"] for gpu in result] == [0, 0, 1, 1]
    assert result[3] == {
        "index": 3, "name": "NVIDIA A100-SXM4-40GB", "memory_mib": 40960, "vendor": "nvidia",
        "bus": "0000:03:00.0", "driver": "550.54", "numa": 1,
    }  # fmt: skip
    assert gpus.links(result, str(a100s)) == {"kind": "nvlink", "links": 4, "all": True, "gbs": 300.0}
    put(a100s, {"proc/driver/nvidia-nvswitch/devices/0000:c4:00.0": ""})
    assert gpus.links(result, str(a100s))["kind"] == "nvswitch"


@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("SYS", {"kind": "pcie"}),
        ("NV4", {"kind": "nvlink", "links": 4, "all": False}),
    ],
)
def test_probe_reports_pcie_when_gpu_pairs_lack_nvlink(
    a100s: Path, words: str, link: dict[str, object]
) -> None:
    text = TOPOLOGY.replace("NV4", "SYS")
    put(a100s, {"topo": text.replace("X \tSYS", f"X \t{words}", 1)})
    assert gpus.links(gpus.gpus(str(a100s)), str(a100s)) == link


def test_probe_reports_amd_gpus_and_xgmi_links(node: Path) -> None:
    for i in range(2):
        put(node, {f"sys/class/drm/card{i}/device/mem_info_vram_total": str(64 << 30)})
        put(node, {f"sys/class/drm/card{i}/device/numa_node": str(i)})
        put(node, {f"sys/class/drm/card{i}/device/product_name": "AMD Instinct MI250X"})
    program(node, "rocm-smi", "printf '        GPU0  GPU1\\nGPU0  0  XGMI\\nGPU1  XGMI  0\\n'")
    result = gpus.gpus(str(node))
    assert [(gpu["vendor"], gpu["memory_mib"], gpu["numa"]) for gpu in result] == [
        ("amd", 65536, 0),
        ("amd", 65536, 1),
    ]
    assert gpus.links(result, str(node)) == {"kind": "xgmi"}


def port(device: str, layer: str, rate: str, state: str = "4: ACTIVE", numa: int = 0) -> dict[str, str]:
    above = f"sys/class/infiniband/{device}"
    return {
        f"{above}/ports/1/state": state, f"{above}/ports/1/rate": rate, f"{above}/ports/1/link_layer": layer,
        f"{above}/device/numa_node": str(numa), f"{above}/hca_type": "MT4129",
    }  # fmt: skip


def test_probe_selects_active_infiniband_ports(node: Path) -> None:
    put(node, port("mlx5_0", "InfiniBand", "400 Gb/sec (4X NDR)"))
    put(node, port("mlx5_10", "InfiniBand", "400 Gb/sec (4X NDR)", numa=1))
    put(node, port("mlx5_2", "InfiniBand", "10 Gb/sec (4X SDR)", state="1: DOWN"))
    put(node, port("mlx5_1", "Ethernet", "25 Gb/sec (1X EDR)"))
    seen = {
        "node": "g1",
        "hcas": probe.hcas(str(node)),
        "interfaces": [{"name": "eth0"}],
        "limits": {"memlock": 65536},
    }
    assert [item["name"] for item in probe.hcas(str(node))] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"]
    result = from_probe.facts_from_probe("gpu", seen)
    assert result.value("fabric", "kind") == "infiniband"
    assert result.value("fabric", "hcas") == ("mlx5_0", "mlx5_10")
    assert result.value("fabric", "rate_gbps") == 400
    assert result.value("node_types", "gpu", "nics", "count") == 2
    assert any("memlock" in line for line in result.notices)
    assert any("NUMA node 1: mlx5_10" in line for line in result.remarks["node_types.gpu"])


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (port("mlx5_0", "Ethernet", "100 Gb/sec"), "roce"),
        (port("rdmap79s0", "Unspecified", "100 Gb/sec"), "efa"),
        (port("hfi1_0", "InfiniBand", "100 Gb/sec"), "omnipath"),
        ({"sys/class/cxi/cxi0/device/numa_node": "0"}, "slingshot"),
        ({"sys/class/net/eth0/operstate": "up"}, "ethernet"),
        ({"sys/class/net/lo/operstate": "unknown", "sys/class/net/docker0/operstate": "up"}, None),
    ],
)
def test_probe_recognizes_the_fabric_kind(node: Path, files: dict[str, str], kind: str | None) -> None:
    put(node, files)
    seen = {"hcas": probe.hcas(str(node)), "interfaces": probe.interfaces(str(node))}
    result = from_probe.fabric_kind(seen)
    assert (result[0] if result else None) == kind


def test_probe_finds_the_interface_to_other_nodes(node: Path) -> None:
    put(node, {"proc/net/route": ROUTES})
    program(node, "ip", "exit 1")
    assert probe.interface_to("10.20.3.4", "10.20.0.1", str(node)) == "ib0"
    assert probe.interface_to("8.8.8.8", "10.20.0.1", str(node)) == "eth0"
    program(node, "ip", 'echo "$4 dev hsn0 src 10.20.0.1 uid 0"')
    assert probe.interface_to("10.20.3.4", "10.20.0.1", str(node)) == "hsn0"
    result = probe.route([["no.such.node.invalid", "127.0.0.1"]])
    assert result is not None
    assert (result["resolves"], result["interface"]) == (False, "lo")
    assert probe.route([["no.such.node.invalid", "also.none.invalid"]]) is None


def test_probe_reports_local_and_shared_disks(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (node / "local").mkdir()
    (node / "shared").mkdir()
    monkeypatch.setenv("LOCAL", str(node / "local"))
    mounts = f"/dev/nvme0 {node}/local xfs rw 0 0\nfs:/x {node}/shared lustre rw 0 0\nnone / overlay rw 0 0\n"
    put(node, {"proc/self/mounts": mounts})
    result = probe.disks(["$LOCAL", "$NOT_SET", str(node / "shared"), "/no/such"], str(node))
    assert [(item["path"], item["kind"], item["shared"]) for item in result] == [
        ("$LOCAL", "xfs", False), (str(node / "shared"), "lustre", True),
    ]  # fmt: skip
    (best,) = from_probe.local_disks({"disks": result})
    assert best["size_mib"] > 0


def test_probe_reports_reachable_internet_hosts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        assert probe.online([["127.0.0.1", number]], 10) == {"127.0.0.1": True}
    assert probe.online([["127.0.0.1", number]], 10) == {"127.0.0.1": False}


def test_probe_reports_the_importable_torch(node: Path) -> None:
    program(node, "python-with", "echo 2.9.0 12.8 31.26")
    assert probe.torch("python-with", 10) == {
        "python": f"{node}/bin/python-with",
        "version": "2.9.0",
        "cuda": "12.8",
        "seconds": 31.3,
    }
    program(node, "python-without", "exit 1")
    assert probe.torch("python-without", 10) == {"python": f"{node}/bin/python-without"}
    assert probe.torch("no-such-python", 10) is None


def test_probe_runs_as_an_inline_program_on_standard_input(a100s: Path) -> None:
    code = inline_program(probing.PARTS, "module.main(sys.argv[1])")
    request = json.dumps({"disks": ["/tmp"], "peers": [["localhost", "127.0.0.1"]]})
    argv = [sys.executable, "-I", "-S", "-", request]
    done = subprocess.run(argv, input=code, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(probe.MARK)
    document = json.loads(done.stdout.removeprefix(probe.MARK))
    assert [gpu["name"] for gpu in document["gpus"]] == ["NVIDIA A100-SXM4-40GB"] * 4
    assert document["disks"][0]["path"] == "/tmp"
    result = from_probe.facts_from_probe("gpu", document, 8)
    assert result.value("node_types", "gpu", "gpus", "model") == "A100-SXM4-40GB"
    assert any("Slurm reports 8 GPUs for gpu, but the job saw 4" in line for line in result.notices)


def test_probe_answers_of_another_shape_are_accepted() -> None:
    answers: tuple[dict[str, object], ...] = (
        {},
        {"gpus": "none"},
        {"gpus": [1]},
        {"hcas": [{}]},
        {"links": None, "limits": None},
    )
    for answer in answers:
        assert from_probe.facts_from_probe("gpu", answer).notices is not None
