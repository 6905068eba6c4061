"""Matrix product rates of measured and of unmeasured GPUs."""

from __future__ import annotations

import pytest

from dtslurm.planner.compute import Kernels
from dtslurm.planner.hardware import gpus
from tests.planner.conftest import SHIPPED


def matmul_share(name: str) -> float:
    return gpus()[name].matmul_tflops / gpus()[name].bf16_tflops


def test_an_unmeasured_gpu_gets_the_mean_matmul_share_of_its_generation() -> None:
    measured = [matmul_share(name) for name in ("B200-180-SXM", "GB200", "B300-SXM")]
    assert matmul_share("GB300") == pytest.approx(sum(measured) / 3)
    assert matmul_share("A800-80-SXM") < 0.869  # A100 over PCIe reaches less than over SXM
    assert matmul_share("MI300A") < 0.7 < matmul_share("RTX 4090")


@pytest.mark.parametrize(("name", "best"), [("H100-80-SXM", 1402.6), ("GB200", 3616), ("A100-80-SXM", 0)])
def test_fp8_rates_are_relative_to_the_best_measurement(name: str, best: float) -> None:
    assert gpus()[name].matmul_fp8_tflops == best


def test_an_unmeasured_fp8_rate_follows_the_16_bit_share() -> None:
    chip = gpus()["MI325X"]
    assert chip.matmul_fp8_tflops / chip.fp8_tflops == pytest.approx(0.94 * matmul_share("MI325X"))


def test_an_fp8_product_is_faster_than_bf16_and_below_the_peak() -> None:
    for name in ("H100-80-SXM", "B200-180-SXM", "MI325X"):
        gpu = gpus()[name]
        wide, narrow = (Kernels(gpu, "megatron", precision, SHIPPED) for precision in ("bf16", "fp8"))
        assert wide.rate < narrow.rate < gpu.fp8_tflops * 1e12
