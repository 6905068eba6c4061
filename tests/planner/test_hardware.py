"""Matrix product rates of measured and of unmeasured GPUs."""

from __future__ import annotations

import pytest

from dtslurm.planner.compute import Kernels
from dtslurm.planner.hardware import find_gpu, gpus, machine
from tests.planner.conftest import SHIPPED


def matmul_share(name: str) -> float:
    return gpus()[name].matmul_tflops / gpus()[name].bf16_tflops


def test_an_unmeasured_gpu_gets_the_mean_matmul_share_of_its_generation() -> None:
    measured = [matmul_share(name) for name in ("B200-180-SXM", "GB200", "B300-SXM")]
    assert matmul_share("GB300") == pytest.approx(sum(measured) / 3)
    assert matmul_share("A800-80-SXM") < 0.869  # A100 over PCIe reaches less than over SXM
    assert matmul_share("MI300A") < 0.7 < matmul_share("RTX 4090")


def test_a_card_without_a_measurement_follows_its_twin() -> None:
    # 3090 Ti: 81 TFLOP/s measured, of 80 (mli/transformers-benchmarks)
    assert matmul_share("RTX 3090") == pytest.approx(81 / 80)


@pytest.mark.parametrize("text", ["Gaudi2", "gaudi 2", "Intel Gaudi2 HL-225H"])
def test_gaudi_is_known_however_it_is_spelt(text: str) -> None:
    gpu = find_gpu(text)
    assert gpu is not None
    assert (gpu.name, gpu.matmul_tflops) == ("Gaudi2", 418.7)


@pytest.mark.parametrize(("name", "ratio"), [("MI250X-GCD", 4.0), ("MI300X", 1 / 7), ("H100-80-SXM", 1.0)])
def test_two_neighbours_reach_their_own_links(name: str, ratio: float) -> None:
    nodes = machine(gpus()[name], 1)
    assert nodes.reach(2) == pytest.approx(ratio)
    assert nodes.reach(8) == 1.0


def test_flash_attention_2_is_the_fastest_kernel_before_hopper() -> None:
    def ratio(name: str, framework: str) -> float:
        speeds = [
            Kernels(gpus()[name], kind, "bf16", SHIPPED).attention_rate for kind in ("megatron", framework)
        ]
        return speeds[1] / speeds[0]

    assert ratio("A100-80-SXM", "fsdp") == ratio("RTX 4090", "deepspeed") == 1
    assert ratio("H100-80-SXM", "fsdp") < 0.8
    assert ratio("A100-80-SXM", "llm-foundry") < 1  # FlashAttention 1


def test_a_chip_without_tf32_multiplies_32_bits_slowly() -> None:
    slow, fast = (
        Kernels(gpus()[name], "fsdp", "fp32", SHIPPED).rate
        / Kernels(gpus()[name], "fsdp", "fp16", SHIPPED).rate
        for name in ("V100-32-SXM2", "A100-80-SXM")
    )
    assert slow < 0.2
    assert fast > 0.4


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
