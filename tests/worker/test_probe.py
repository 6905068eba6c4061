"""The probe of a node: GPUs of two vendors, fabrics, disks, limits and torch."""

from __future__ import annotations

import ast
import json
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize("end", ["exit 1", "kill -9 $$"])
def test_output_of_a_failed_tool_is_not_used(node: Path, end: str) -> None:
    program(node, "tool", "printf 'caf\\303\\251 \\377'")
    assert gpus.run_tool(["tool"]) == "café \ufffd"
    program(node, "tool", f"echo 5 GPUs\n{end}")
    assert gpus.run_tool(["tool"]) == ""
    assert gpus.run_tool(["no-such-tool"]) == ""


def test_tool_that_takes_too_long_is_stopped(node: Path) -> None:
    program(node, "tool", "echo 5 GPUs\nexec sleep 600")
    assert gpus.run_tool(["tool"], 0.05) == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-1", -1), ("1" * 18, int("1" * 18)), ("1" * 19, None), ("", None), ("1.5", None)],
)
def test_only_whole_numbers_are_read(text: str, value: int | None) -> None:
    assert gpus.number(text) == value


def test_probe_reports_what_could_tell_of_gpus(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(node / "bin"))
    assert gpus.tools(str(node)) == []
    program(node, "rocm-smi", "exit 1")
    (node / "sys/module/amdgpu").mkdir(parents=True)
    assert gpus.tools(str(node)) == ["rocm-smi", "amdgpu"]


def test_probe_reports_what_is_known_of_each_nvidia_gpu(node: Path) -> None:
    rows = [
        "No, such, GPU, at, all",
        "1, H100, 1",
        "0, H100, 81559.5, 0000:0F:00.0, 1",
        "1, GB10, [N/A], F:00.0, 2",
    ]
    put(node, {"query": "\n".join(rows), "sys/bus/pci/devices/0000:0f:00.0/numa_node": "-1\n"})
    program(node, "nvidia-smi", f"cat {node}/query")
    common = {"vendor": "nvidia", "numa": None}
    assert gpus.gpus(str(node)) == [
        {"index": 0, "name": "H100", "memory_mib": 81559, "bus": "0000:0f:00.0", "driver": "1", **common},
        {"index": 1, "name": "GB10", "memory_mib": None, "bus": "f:00.0", "driver": "2", **common},
    ]


def test_probe_lists_amd_gpus_in_the_order_of_their_buses(node: Path) -> None:
    for card, bus in enumerate(["0000:c1:00.0", "0000:41:00.0"]):
        memory = "" if card else str((3 << 20) + 5)
        put(node, {f"sys/devices/{bus}/mem_info_vram_total": memory, f"sys/devices/{bus}/product_name": "MI"})
        (node / f"sys/class/drm/card{card}").mkdir(parents=True)
        (node / f"sys/class/drm/card{card}/device").symlink_to(node / "sys/devices" / bus)
    common = {"name": "MI", "vendor": "amd", "numa": None}
    assert gpus.gpus(str(node)) == [
        {"index": 0, "bus": "0000:41:00.0", "memory_mib": None, **common},
        {"index": 1, "bus": "0000:c1:00.0", "memory_mib": 3, **common},
    ]


@pytest.mark.parametrize(
    ("output", "link"),
    [
        ("GPU0  GPU1\\nGPU0  0  PCIE\\nGPU1  PCIE  0", {"kind": "pcie"}),
        ("XGMI or PCIE\\n  GPU0  GPU1\\nGPU0  0  PCIE\\nGPU1  PCIE  0", {"kind": "pcie"}),
        ("no GPU", {}),
    ],
)
def test_probe_reports_the_links_of_amd_gpus(node: Path, output: str, link: dict[str, str]) -> None:
    program(node, "rocm-smi", f"printf '{output}'")
    assert gpus.links([{"vendor": "amd"}] * 2, str(node)) == link
    assert gpus.links([{"vendor": "amd"}], str(node)) == {}


def topology(count: int, link: str) -> str:
    names = [f"GPU{index}" for index in range(count)]
    rows = [[name, *("X" if other == name else link for other in names)] for name in names]
    return "\n".join("\t".join(row) for row in [names, *rows])


@pytest.mark.parametrize(
    ("count", "link"),
    [
        (1, {}),
        (2, {"kind": "nvlink", "links": 18, "all": True}),
        (4, {"kind": "nvlink", "links": 18, "all": True}),
        (5, {"kind": "nvswitch", "links": 18, "all": True}),
        (8, {"kind": "nvswitch", "links": 18, "all": True}),
    ],
)
def test_more_than_four_gpus_are_linked_by_switches(node: Path, count: int, link: dict[str, object]) -> None:
    put(node, {"topo": topology(count, "NV18")})
    program(node, "nvidia-smi", f'[ "$1" = topo ] && cat {node}/topo')
    assert gpus.links([{"vendor": "nvidia"}] * count, str(node)) == link


def test_links_are_unknown_without_the_topology(a100s: Path) -> None:
    put(a100s, {"topo": ""})
    assert gpus.links(gpus.gpus(str(a100s)), str(a100s)) == {}


def test_gpus_with_different_numbers_of_links_have_the_largest(a100s: Path) -> None:
    put(a100s, {"topo": TOPOLOGY.replace("NV4", "NV12", 1), "links": "\t Link 0: 26.562 GB/s\n"})
    expected = {"kind": "nvlink", "links": 12, "all": True, "gbs": 26.6}
    assert gpus.links(gpus.gpus(str(a100s)), str(a100s)) == expected


def test_topology_has_the_links_of_each_gpu_to_the_others() -> None:
    text = (
        "\nGPU0 is here\n\tGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tGPU NUMA ID\n\n"
        "GPU0\t X \tNV4\tSYS\tPXB\tPXB\tN/A\nGPU1\tNV4\t X \tPIX\tPXB\tPXB\tN/A\n"
        "GPU2\tSYS\tPIX\t X \tPXB\tPXB\tN/A\n"
        "NIC0\tPXB\tPXB\tPXB\t X\n\nLegend:\n  X = Self\n"
    )
    assert gpus.matrix(text) == ["NV4", "SYS", "NV4", "PIX", "SYS", "PIX"]
    assert gpus.matrix("no devices were found\n") == []


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


def test_probe_reports_the_importable_torch(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setenv("HOME", str(node))  # as in a profile: python: ~/bin/python
    assert probe.torch("~/bin/python-without", 10) == {"python": f"{node}/bin/python-without"}


@pytest.mark.parametrize(("seconds", "slow"), [(59.9, False), (60.0, True), (61.0, True)])
def test_probe_tells_a_slow_import_of_torch_from_a_failed_one(
    node: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, slow: bool
) -> None:
    program(node, "python", "exit 1")
    clock = iter([1000.0, 1000.0 + seconds])
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = {"python": f"{node}/bin/python"}
    assert probe.torch("python", 60) == ({**found, "seconds": 60, "slow": True} if slow else found)
    assert probe.torch("", 60) is None


def test_probe_reports_all_values_of_an_adapter(node: Path) -> None:
    put(node, port("mlx5_0", "InfiniBand", "2.5 Gb/sec (1X SDR)"))
    put(
        node,
        {
            "sys/class/infiniband/mlx5_0/device/net/ib1/mtu": "",
            "sys/class/infiniband/mlx5_0/device/net/ib0/mtu": "",
        },
    )
    put(node, port("bnxt", "Ethernet", "unknown", state="4", numa=-1))
    put(node, {"sys/class/infiniband/bnxt/hca_type": "", "sys/class/infiniband/bnxt/board_id": "B1"})
    put(node, {f"sys/class/cxi/cxi{number}/device/numa_node": str(number) for number in (10, 2)})
    assert probe.hcas(str(node)) == [
        {"name": "bnxt", "port": "1", "state": "", "layer": "Ethernet", "rate_gbps": None, "numa": None,
         "model": "B1", "interfaces": []},
        {"name": "mlx5_0", "port": "1", "state": "ACTIVE", "layer": "InfiniBand", "rate_gbps": 2.5, "numa": 0,
         "model": "MT4129", "interfaces": ["ib0", "ib1"]},
        {"name": "cxi2", "layer": "Slingshot", "numa": 2},
        {"name": "cxi10", "layer": "Slingshot", "numa": 10},
    ]  # fmt: skip


def test_probe_reports_the_interfaces_that_are_up(node: Path) -> None:
    states = {
        "lo": "up",
        "br-1": "up",
        "eth10": "up",
        "eth2": "unknown",
        "eth3": "down",
        "ib0": "up",
        "veth1": "up",
    }
    put(node, {f"sys/class/net/{name}/operstate": state + "\n" for name, state in states.items()})
    put(node, {"sys/class/net/eth2/speed": "-1", "sys/class/net/ib0/speed": "400000"})
    put(node, {"sys/class/net/ib0/mtu": "4092", "sys/class/net/ib0/device/numa_node": "1"})
    unknown = {"mbps": None, "mtu": None, "numa": None}
    assert probe.interfaces(str(node)) == [
        {"name": "eth2", **unknown},
        {"name": "eth10", **unknown},
        {"name": "ib0", "mbps": 400_000, "mtu": 4092, "numa": 1},
    ]


@pytest.mark.parametrize(
    ("peer", "by", "resolves"),
    [
        (["localhost", "192.0.2.1"], "localhost", True),
        (["no.such.node.invalid", "127.0.0.1"], "127.0.0.1", False),
    ],
)
def test_probe_reaches_a_peer_by_its_name_or_else_its_address(
    monkeypatch: pytest.MonkeyPatch, peer: list[str], by: str, resolves: bool
) -> None:
    def resolve(host: str, *_: object) -> list[Any]:
        if host.endswith(".invalid"):
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 9))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    expected = {"peer": peer[0], "by": by, "address": "127.0.0.1", "resolves": resolves, "interface": "lo"}
    assert probe.route([["none.invalid", "none.invalid"], peer]) == expected
    assert probe.route([]) is None


def test_probe_uses_the_most_specific_route_that_is_up(node: Path) -> None:
    table = ROUTES.splitlines()
    rows = [
        "short 0000140A 0",
        "down 0003140A 00000000 0000 0 0 0 00FFFFFF 0 0 0",
        "any 00000000 0 0001 0 0 0 0 0 0 0",
    ]
    rows += ["host 0403140A 0 0005 0 0 0 FFFFFFFF 0 0 0", "odd 0503140A 0 0002 0 0 0 FFFFFFFF 0 0 0"]
    put(node, {"proc/net/route": "\n".join([table[0], table[2], *rows, table[1]])})
    program(node, "ip", "exit 1")
    found = {target: probe.interface_to(target, "10.20.0.1", str(node)) for target in
             ("10.20.3.4", "10.20.3.5", "10.21.0.1", "fe80::1")}  # fmt: skip
    assert found == {"10.20.3.4": "host", "10.20.3.5": "ib0", "10.21.0.1": "any", "fe80::1": ""}
    assert probe.interface_to("::1", "::1", str(node)) == "lo"
    assert probe.interface_to("127.0.0.1", "127.0.0.5", str(node)) == "lo"


def test_probe_without_hosts_asks_for_none() -> None:
    assert probe.online([], 1) == {}


def test_probe_reports_the_sizes_of_disks_in_mib(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(f_blocks=1000, f_bavail=500, f_frsize=1 << 16)

    def statvfs(path: str) -> SimpleNamespace:
        if path == str(node / "hung"):
            raise OSError
        return status

    monkeypatch.setattr("os.statvfs", statvfs)
    for name in ("hung", "of me", "of me/2"):
        (node / name).mkdir()
    mounts = [
        "tmpfs /dev",
        f"a {node}/of\\040me/2 ext4 rw 0 0",
        f"b {node}/of\\040me nfs4 rw 0 0",
        "c / xfs rw 0 0",
    ]
    put(node, {"proc/self/mounts": "\n".join(mounts)})
    paths = [str(node / name) for name in ("hung", "of me/2", "of me", "")]
    result = probe.disks(paths, str(node))
    assert [(disk["path"], disk["kind"], disk["shared"]) for disk in result] == [
        (paths[1], "ext4", False), (paths[2], "nfs4", True), (paths[3], "xfs", False),
    ]  # fmt: skip
    assert {(disk["size_mib"], disk["free_mib"]) for disk in result} == {(62, 31)}
    put(node, {"proc/self/mounts": ""})
    assert [disk["kind"] for disk in probe.disks(paths[1:2], str(node))] == [""]
    assert probe.size_of(paths[0]) is None


def test_probe_reports_soft_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = {
        resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY,
        resource.RLIMIT_NOFILE: 1024,
        resource.RLIMIT_NPROC: 0,
    }
    monkeypatch.setattr(resource, "getrlimit", lambda number: (soft[number], 1 << 20))
    assert probe.limits() == {"memlock": "unlimited", "nofile": 1024, "nproc": 0}


def test_probe_of_a_bare_node_reports_what_is_known(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(node / "bin"))
    for name in ("https_proxy", "HTTPS_PROXY", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    result = probe.look({}, str(node))
    assert result["node"] == socket.gethostname()
    assert not {"numa_nodes", "route", "torch"} & set(result)
    names = ("gpus", "gpu_tools", "links", "hcas", "interfaces", "disks", "runtimes", "online", "proxy")
    assert [result[name] for name in names] == [[], [], {}, [], [], [], [], {}, False]


def test_probe_reports_the_environment_of_a_node(
    node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(node / "bin"))
    monkeypatch.setenv("SLURMD_NODENAME", "g7")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    program(node, "podman", "exit 1")
    program(node, "apptainer", "exit 1")
    put(node, {f"sys/devices/system/node/node{number}/x": "" for number in range(3)})
    result = probe.look({}, str(node))
    assert (result["node"], result["numa_nodes"], result["proxy"]) == ("g7", 3, True)
    assert result["runtimes"] == ["apptainer", "podman"]
    monkeypatch.setattr(sys, "argv", ["probe.py", '{"disks": []}'])
    probe.main()
    mark, text = capsys.readouterr().out.split(":", 1)
    assert (mark + ":", json.loads(text)["node"]) == (probe.MARK, "g7")


@pytest.mark.parametrize(("limit", "expected"), [(60, (5.0, 60)), (2, (2.0, 2))])
def test_probe_keeps_to_the_limit_of_its_request(
    node: Path, monkeypatch: pytest.MonkeyPatch, limit: float, expected: tuple[float, float]
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(probe, "online", lambda _hosts, limit: limits.append(limit))
    monkeypatch.setattr(probe, "torch", lambda _python, limit: limits.append(limit))
    probe.look({"limit": limit}, str(node))
    assert tuple(limits) == expected


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
