"""The fabric check with real torch processes that communicate through gloo."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dtslurm
from tests.ports import free_port

pytest.importorskip("torch", reason="the check measures with torch")
pytestmark = pytest.mark.slow
PROGRAM = Path(dtslurm.__file__).parent / "worker" / "probe" / "fabric_check.py"


def run(tmp_path: Path, *arguments: str, ranks: int = 2, started: int | None = None) -> list[tuple[int, str]]:
    """Start that many of the ranks and return each one's exit code and output."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, tmp_path / "fabric.json", *arguments],
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": str(ranks),
                "SLURM_LOCALID": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks if started is None else started)
    ]
    return [(process.wait(600), output) for process in processes for output in [process.communicate()[0]]]


def test_fabric_check_reports_the_bandwidth_of_each_size(tmp_path: Path) -> None:
    ended = run(tmp_path, "0", "infiniband", "5", ranks=3)
    assert [code for code, _ in ended] == [0, 0, 0], ended
    assert "fabric check: " in ended[0][1]
    assert not ended[1][1]
    document = json.loads((tmp_path / "fabric.json").read_text())
    assert document["backend"] == "gloo"
    assert document["problem"] is None
    assert set(document["sizes"]) <= {"1048576", "4194304", "16777216"}
    assert document["busbw_gbs"] == max(document["sizes"].values()) > 0
    assert document["hosts"] == [socket.gethostname()] * 3
    assert document["ring_gbs"][document["slowest_rank"]] == min(document["ring_gbs"])


def test_fabric_check_fails_below_half_of_the_expected_bandwidth(tmp_path: Path) -> None:
    ended = run(tmp_path, "1000000", "any", "3")
    assert [code for code, _ in ended] == [86, 0]
    (line,) = [line for line in ended[0][1].splitlines() if line.startswith("fabric check failed: ")]
    assert "less than half of the 1e+06 expected; rank " in line
    assert "check NCCL_SOCKET_IFNAME" in line
    assert json.loads((tmp_path / "fabric.json").read_text())["problem"] in line


def test_fabric_check_fails_after_its_limit_when_a_rank_is_missing(tmp_path: Path) -> None:
    start = time.monotonic()
    ((code, output),) = run(tmp_path, "0", "any", "1", "3", started=1)
    assert code == 86
    assert "fabric check failed: it did not end within 5 s: ranks did not find each other" in output
    assert time.monotonic() - start < 180  # not its usual limit, 240 s


TOLD = "n1:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"


@pytest.mark.parametrize(("fabric", "code"), [("slingshot", 86), ("any", 0)])
def test_fabric_check_fails_when_nccl_uses_tcp_on_a_faster_fabric(
    tmp_path: Path, fabric: str, code: int
) -> None:
    # Stands before torch on the path, and writes what NCCL would: there is no GPU here.
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, threading, time\n"
        "def write():\n"
        "    while 'NCCL_DEBUG_FILE' not in os.environ: time.sleep(0.01)\n"
        f"    open(os.environ['NCCL_DEBUG_FILE'], 'w').write({TOLD!r})\n"
        "threading.Thread(target=write, daemon=True).start()\n"
    )
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        ended = run(tmp_path, "0", fabric, "2")
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    assert ended[0][0] == code
    assert "via NET/Socket/0" in ended[0][1]
    text = f"fabric check failed: NCCL uses TCP (NET/Socket) on {socket.gethostname()} instead of {fabric}"
    assert (text in ended[0][1]) == (code == 86)


def test_fabric_check_parses_as_python_3_6() -> None:
    ast.parse(PROGRAM.read_text(), feature_version=(3, 6))
