"""The sampler's readers of small values, and which of a node's GPUs belong to the job."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker import sampler_values


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        ({"SLURM_NNODES": "64"}, False),
        ({"SLURM_NNODES": "65"}, True),
        ({"SLURM_NNODES": "65", "SLURM_STEP_NUM_NODES": "1"}, False),
        ({"SLURM_NNODES": "1", "SLURM_STEP_NUM_NODES": "65"}, True),
        ({"SLURM_NNODES": "65", "SLURM_STEP_NUM_NODES": ""}, True),
        ({"SLURM_NNODES": "many"}, False),
        ({"SLURM_NNODES": "2", "DTSLURM_PLAIN_NODES": "1"}, True),
        ({"SLURM_NNODES": "65", "DTSLURM_PLAIN_NODES": "-1"}, True),
        ({"SLURM_NNODES": "64", "DTSLURM_PLAIN_NODES": ""}, False),
    ],
)
def test_large_job_has_more_nodes_than_plain_jobs(env: dict[str, str], expected: bool) -> None:
    assert sampler_values.is_large_job(env) is expected


def test_output_position_advances_with_the_output(tmp_path: Path) -> None:
    assert sampler_values.output_position(999_999_999) is None
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(["sleep", "600"], stdout=log) as process:
        try:
            assert sampler_values.output_position(process.pid) == 0
            os.write(log.fileno(), b"hello")
            assert sampler_values.output_position(process.pid) == 5
        finally:
            process.kill()


def test_contents_of_a_file_are_its_stripped_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b" a\xff\n")
    assert sampler_values.contents(str(tmp_path / "x")) == "a\ufffd"
    assert sampler_values.contents(str(tmp_path / "gone")) == sampler_values.contents(str(tmp_path)) == ""
    (tmp_path / "x").write_bytes(b"x" * 70_000)
    assert len(sampler_values.contents(str(tmp_path / "x"))) == 65_536


def test_record_of_a_rank_is_the_last_in_the_file_of_its_node(tmp_path: Path) -> None:
    (tmp_path / "4.json").write_text('{"rank": 4, "pid": 1}')
    (tmp_path / "7.json").write_text('{"rank": 7, "pid": 2}')
    records = [{"rank": 4, "pid": 3}, {"rank": 4, "pid": 5}, {"rank": 5, "pid": 6}]
    lines = "".join(json.dumps(record) + "\n" for record in records) + '{"rank": 5, "pi'
    (tmp_path / "ranks-4.jsonl").write_text(lines)
    assert sampler_values.rank_record(str(tmp_path), 4, None) == {"rank": 4, "pid": 1}
    assert sampler_values.rank_record(str(tmp_path), 4, 4) == {"rank": 4, "pid": 5}
    assert sampler_values.rank_record(str(tmp_path), 5, 4) == {"rank": 5, "pid": 6}
    assert sampler_values.rank_record(str(tmp_path), 7, 4) == {"rank": 7, "pid": 2}
    assert sampler_values.rank_record(str(tmp_path), 7, 8) == {"rank": 7, "pid": 2}
    assert sampler_values.rank_record(str(tmp_path), 9, 4) == {}


def test_rank_0_of_a_large_job_has_a_record(tmp_path: Path) -> None:
    (tmp_path / "ranks-0.jsonl").write_text('{"rank": 0, "pid": 3}\n')
    assert sampler_values.rank_record(str(tmp_path), 0, 0) == {"rank": 0, "pid": 3}


def test_processes_of_this_user_have_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    states = dict(sampler_values.processes())
    assert states[os.getpid()][0] in "RSD"
    assert int(states[os.getpid()][1]) == os.getppid()
    user = os.getuid()
    for other in (user + 1, user - 1):
        monkeypatch.setattr(os, "getuid", lambda other=other: other)
        assert os.getpid() not in dict(sampler_values.processes())


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5.0), ("-1.25", -1.25), ("[N/A]", None), ("", None), ("1.", None), ("1e5", None), ("5 W", None)],
)
def test_text_that_is_no_decimal_number_has_no_value(text: str, value: float | None) -> None:
    assert sampler_values.decimal(text) == value


def test_values_that_are_zero_or_empty_stay_in_a_record() -> None:
    record = {"util": 0, "name": "", "xid": [], "power_w": None}
    assert sampler_values.drop_none(record) == {"util": 0, "name": "", "xid": []}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0,2-4", [0, 2, 3, 4]), ("3-3", [3]), ("", []), (" 1 , 5", [1, 5]), ("a,1-,2", [2]), ("4-2", [])],
)
def test_list_of_numbers_has_its_ranges(text: str, expected: list[int]) -> None:
    assert sampler_values.numbers(text) == expected


GPUS: list[dict[str, Any]] = [
    {"index": 0, "minor": 3, "uuid": "GPU-aa"},
    {"index": 1, "minor": 1, "uuid": "GPU-ab"},
    {"index": 2, "uuid": "GPU-cc"},
    {"index": 3, "minor": 0, "uuid": "GPU-dd"},
]


@pytest.mark.parametrize(
    ("env", "gpu_count", "indices"),
    [
        ({}, 4, [0, 1, 2, 3]),
        ({}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, 4, []),  # the job hides all
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 4, []),
        ({"CUDA_VISIBLE_DEVICES": "1, 3,"}, 0, [1, 3]),
        ({"CUDA_VISIBLE_DEVICES": "1,GPU-dd"}, 0, [3]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-cc"}, 0, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1,1"}, 4, []),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1", "SLURM_JOB_GPUS": "0-3"}, 4, []),
        ({"SLURM_JOB_GPUS": "0-3"}, 4, [0, 1, 2, 3]),
        ({"SLURM_JOB_GPUS": "4-7"}, 0, [0, 1, 2, 3]),  # Slurm hides the others
        ({"SLURM_JOB_GPUS": "2-3"}, 4, [0, 2]),  # by the device file, else by the index
        ({"SLURM_JOB_GPUS": "0,2"}, 4, [2, 3]),
        ({"SLURM_STEP_GPUS": "3", "SLURM_JOB_GPUS": "0"}, 4, [0]),
        ({"SLURM_STEP_GPUS": "9", "SLURM_JOB_GPUS": "0"}, 4, [3]),
        ({"SLURM_JOB_GPUS": "9", "CUDA_VISIBLE_DEVICES": "1"}, 4, [1]),
    ],
)  # fmt: skip
def test_gpus_of_the_job_are_those_that_slurm_names(
    env: dict[str, str], gpu_count: int, indices: list[int]
) -> None:
    chosen = sampler_values.select_job_gpus(GPUS, env, gpu_count)
    assert [gpu["index"] for gpu in chosen] == indices


def test_mig_devices_of_the_job_are_numbered() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "GPU-1, MIG-a ,MIG-b"}
    assert sampler_values.mig_devices(env) == [{"index": 0, "uuid": "MIG-a"}, {"index": 1, "uuid": "MIG-b"}]
    assert sampler_values.mig_devices({}) == []
