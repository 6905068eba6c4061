"""The frameworks' own code reads the output of ``dtslurm plan --emit``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.envs import environment
from tests.frameworks.test_torch_family import torch_python  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.sampled(1, "readers"),
]

ACCELERATE = """
import sys
from accelerate.commands.config.config_args import load_config_from_file
config = load_config_from_file(sys.argv[1])
print(config.distributed_type.value, config.num_processes, config.mixed_precision)
"""
DEEPSPEED = """
import json, sys
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
values = json.load(open(sys.argv[1]))
zero = DeepSpeedZeroConfig(**values["zero_optimization"])
print(int(zero.stage), values["train_batch_size"])
"""


TOML = """
import sys
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(["--job.config_file", sys.argv[1]])
print(config.model.flavor, config.training.seq_len, config.parallelism.tensor_parallel_degree)
"""
MODULE = """
import sys
sys.path.insert(0, sys.argv[1])
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(["--module", "planned", "--config", "planned"])
assert config.training.global_batch_size == 256 and config.training.seq_len == 4096
degrees = config.parallelism
recompute = type(config.activation_checkpoint).__qualname__.split(".")[0]
model, layers = config.model_spec.name, len(config.model_spec.model.layers)
print(degrees.tensor_parallel_degree, degrees.pipeline_parallel_degree, recompute, model, layers)
"""


def emitted(tmp_path: Path, form: str, *words: str) -> Path:
    argv = [sys.executable, "-m", "dtslurm", "plan", *words, "--emit", form]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=tmp_path)
    path = tmp_path / f"{form}.out"
    path.write_text(done.stdout)
    return path


def read(python: Path, program: str, path: Path, words: int = 3) -> list[str]:
    done = subprocess.run(
        [str(python), "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{python.parent}:/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "HOME": str(path.parent)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-words:]


def test_accelerate_reads_the_emitted_configuration(torch_python: Path, tmp_path: Path) -> None:  # noqa: F811
    path = emitted(tmp_path, "accelerate", "llama-3-8b", "--gpu", "H100", "-N", "2", "--gbs", "256")
    assert read(torch_python, ACCELERATE, path) == ["FSDP", "16", "bf16"]


def test_accelerate_reads_emitted_hybrid_sharding(torch_python: Path, tmp_path: Path) -> None:  # noqa: F811
    layout = "dp=16,mbs=1,gbs=256,zero=3,shard=8"
    path = emitted(tmp_path, "accelerate", "llama-3-8b", "--gpu", "H100", "-N", "2", "--layout", layout)
    assert read(torch_python, ACCELERATE, path) == ["FSDP", "16", "bf16"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_deepspeed_reads_the_emitted_configuration(torch_python: Path, tmp_path: Path, zero: int) -> None:  # noqa: F811
    layout = f"dp=16,mbs=1,gbs=256,zero={zero},recompute=full"
    words = ("llama-3-8b", "--gpu", "H100", "-N", "2", "--layout", layout)
    path = emitted(tmp_path, "deepspeed", *words)
    assert read(torch_python, DEEPSPEED, path)[-2:] == [str(zero), "256"]


def test_torchtitan_0_2_reads_the_emitted_toml(torch_python: Path, tmp_path: Path) -> None:  # noqa: F811
    layout = "tp=8,dp=2,mbs=1,gbs=256,zero=3,recompute=selective"
    words = ("llama-3-70b", "--gpu", "B200", "-N", "2", "-s", "8192", "--layout", layout)
    path = emitted(tmp_path, "torchtitan-0.2", *words)
    assert read(torch_python, TOML, path) == ["70B", "8192", "8"]


@pytest.fixture(scope="session")
def titan_python() -> Path:
    """A Python with the torchtitan that is configured by Python."""
    return environment("torchtitan", ("torch==2.13.0", "numpy", "torchtitan==0.3.0", "triton"))


@pytest.mark.parametrize(
    ("model", "layout", "told"),
    [
        ("llama-3-70b", "tp=8,dp=2,mbs=1,gbs=256,zero=3,recompute=selective", "8 1 SelectiveAC llama3 80"),
        ("llama-3-8b", "tp=2,pp=2,dp=4,mbs=1,gbs=256,zero=0,recompute=none", "2 2 NoneType llama3 32"),
        ("qwen3-8b", "dp=16,mbs=1,gbs=256,zero=3,recompute=full", "1 1 FullAC qwen3 36"),
        ("qwen3-30b-a3b", "dp=16,ep=8,mbs=1,gbs=256,zero=3,recompute=full", "1 1 FullAC qwen3 48"),
    ],
)
def test_torchtitan_0_3_reads_the_emitted_module(
    titan_python: Path, tmp_path: Path, model: str, layout: str, told: str
) -> None:
    words = (model, "--gpu", "B200", "-N", "2", "-s", "4096", "--layout", layout)
    emitted(tmp_path, "torchtitan-0.3", *words).rename(tmp_path / "planned.py")
    assert read(titan_python, MODULE, tmp_path, words=5) == told.split()
