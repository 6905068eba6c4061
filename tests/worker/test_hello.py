"""The first job's script: its ranks connect to rank 0."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dtslurm import assets
from dtslurm.worker import hello
from tests.ports import free_port


def start_rank(rank: int, size: int, port: int) -> subprocess.Popen[str]:
    values = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **{key: str(value) for key, value in values.items()}}
    program = [sys.executable, str(assets.worker("hello.py"))]
    return subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_rank_0_prints_a_line_about_each_rank_in_their_order() -> None:
    port = free_port()
    ranks = [start_rank(rank, 3, port) for rank in (2, 1, 0)]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert outputs[:2] == ["", ""]
    lines = outputs[2].splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["0", "1", "2"]
    assert lines[0].endswith(", GPUs: none")
    assert lines[3] == "all 3 ranks are connected"


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_without_the_others_ends_with_an_error_that_names_the_address(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(hello, "PATIENCE_S", 0.3)
    port = free_port()
    values = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for key, value in values.items():
        monkeypatch.setenv(key, str(value))
    with pytest.raises(SystemExit) as ended:
        hello.main()
    assert f"has no connection by 127.0.0.1:{port}" in str(ended.value.code)
