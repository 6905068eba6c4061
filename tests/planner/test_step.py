"""The time model: sums of terms, and properties of any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dtslurm.planner import hardware
from dtslurm.planner.collectives import Group, Network, group
from dtslurm.planner.compute import Kernels
from dtslurm.planner.estimate import Estimator
from dtslurm.planner.layout import Layout
from dtslurm.planner.models import presets
from dtslurm.planner.setting import Setting
from tests.planner.conftest import SHIPPED, estimator, nodes
from tests.planner.test_memory import layouts

EIGHT_B = {name: estimator(count=64, framework=name) for name in ("megatron", "torchtitan", "deepspeed")}


@given(layout=layouts, framework=st.sampled_from(sorted(EIGHT_B)))
def test_time_terms_are_not_negative_and_sum_to_the_total(layout: Layout, framework: str) -> None:
    time = EIGHT_B[framework].timer.step(layout)
    assert all(value >= 0 for value in time.terms.values())
    assert sum(time.terms.values()) == pytest.approx(time.total)
    assert time.total > 0


@given(layout=layouts)
def test_model_flops_utilization_is_below_one(layout: Layout) -> None:
    made = EIGHT_B["megatron"].estimate(layout)
    assert 0 < made.mfu < 1


@given(layout=layouts)
def test_full_recomputation_takes_longer(layout: Layout) -> None:
    plain = EIGHT_B["megatron"].timer.step(replace(layout, recompute="none"))
    again = EIGHT_B["megatron"].timer.step(replace(layout, recompute="full"))
    assert again.total > plain.total


@given(layout=layouts)
def test_the_recomputation_of_mlps_takes_longer_than_none_and_less_than_full(layout: Layout) -> None:
    none, mlp, full = (
        EIGHT_B["megatron"].timer.step(replace(layout, recompute=mode)).total
        for mode in ("none", "mlp", "full")
    )
    assert none < mlp < full


@given(layout=layouts)
def test_the_bubble_of_equal_stages_is_at_least_that_of_the_paper(layout: Layout) -> None:
    # Narayanan et al. 2021: bubble over ideal time = (p - 1) / (v m); unequal stages only add to it
    assume(layout.pp > 1)
    time = EIGHT_B["megatron"].timer.step(layout)
    on_stage = ("matmul", "attention", "elementwise", "head", "recompute", "launch", "tp_comm", "cp_comm")
    busy = sum(time.terms[key] for key in on_stage) + time.terms["fsdp_comm"]
    least = busy * (layout.pp - 1) / layout.micro_batches
    assert time.terms["bubble"] >= least * (1 - 1e-9)


def test_interleaved_and_zero_bubble_schedules_reduce_the_bubble() -> None:
    plain = Layout(tp=8, pp=8, dp=8, gbs=128, zero=1)
    timer = estimator("llama-3-70b", 64).timer
    bubbles = [
        timer.step(layout).terms["bubble"]
        for layout in (
            plain,
            replace(plain, vp=5),
            replace(plain, schedule="zb1p"),
            replace(plain, schedule="zbv"),
        )
    ]
    assert bubbles[0] > bubbles[2] > bubbles[3]
    assert bubbles[0] > bubbles[1]


def test_ring_collectives_move_the_expected_bytes() -> None:
    network = Network(nodes(2), ("megatron",), SHIPPED)
    eight = Group(8, 1)
    gathered = network.gather(1e12, eight)
    assert gathered == pytest.approx(1e12 * 7 / 8 / network.inner, rel=1e-3)
    assert network.reduce(1e12, eight) == pytest.approx(2 * gathered, rel=1e-3)
    assert network.gather(1e9, Group(1, 1)) == 0


def test_process_groups_follow_the_order_tp_cp_dp_pp() -> None:
    machine = nodes(4)
    assert group(machine, 8, 1) == Group(8, 1)
    assert group(machine, 32, 1) == Group(8, 4)
    assert group(machine, 4, 8) == Group(1, 4)  # tp fills a node, so data parallel neighbours are apart
    assert group(machine, 16, 2) == Group(4, 4)


def test_a_rack_of_nvl72_is_one_nvlink_domain() -> None:
    gb200 = hardware.find_gpu("GB200")
    assert gb200 is not None
    machine = hardware.machine(gb200, 16)
    assert machine.gpus_per_node == 4
    assert group(machine, 64, 1) == Group(64, 1)


def test_tensor_parallelism_across_nodes_costs_more_communication() -> None:
    inside = estimator(count=2).timer.step(Layout(tp=8, dp=2, gbs=64))
    across = estimator(count=2).timer.step(Layout(tp=16, dp=1, gbs=64))
    assert across.terms["tp_comm"] > 2 * inside.terms["tp_comm"]


def test_a_slow_network_slows_zero_3() -> None:
    layout = Layout(dp=64, gbs=64, zero=3)
    fast = estimator("llama-2-13b", 8, framework="fsdp")
    thin = replace(fast.machine, nic_gbs=1.5)
    slow = Estimator(Setting(fast.model, thin, fast.seq_len, "fsdp", "bf16", SHIPPED))
    assert slow.estimate(layout).time.total > 2 * fast.estimate(layout).time.total


def test_copies_of_fsdp_exchange_gradients_behind_the_backward_pass() -> None:
    fast = estimator("llama-2-7b", 16, framework="torchtitan")
    thin = replace(fast.machine, nic_gbs=6.25)
    timer = Estimator(Setting(fast.model, thin, fast.seq_len, "torchtitan", "bf16", SHIPPED)).timer
    long, short = (
        timer.step(Layout(dp=128, shard=8, mbs=mbs, gbs=128 * mbs, zero=3)).terms["dp_comm"] for mbs in (8, 1)
    )
    assert long < 0.5 * short


def test_deepspeeds_hooks_slow_short_sequences() -> None:
    # QwenLM/Qwen, README: Qwen-1.8B on one A100, 0.26 s a micro-batch of 256 tokens under ZeRO-3
    layout = Layout(dp=8, mbs=1, gbs=8, zero=3, recompute="full")
    hooked, plain = (
        estimator("llama-3.2-1b", 1, framework=name, seq_len=256).timer.step(layout).terms["launch"]
        for name in ("deepspeed", "fsdp")
    )
    assert hooked > 1.5 * plain
    still = replace(layout, zero=1)
    assert (
        estimator("llama-3.2-1b", 1, framework="deepspeed", seq_len=256).timer.step(still).terms["launch"]
        < hooked
    )


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_can_be_estimated(name: str) -> None:
    made = estimator(name, 1, seq_len=512).estimate(Layout(dp=8, gbs=64, zero=1))
    assert 0 < made.mfu < 1


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("H100-SXM5-80GB", "H100-80-SXM"),
        ("H100-80GB", "H100-80-SXM"),
        ("h100", "H100-80-SXM"),
        ("H100-PCIe", "H100-80-PCIe"),
        ("A100-SXM4-40GB", "A100-40-SXM"),
        ("A100-80GB", "A100-80-SXM"),
        ("MI250X", "MI250X-GCD"),
        ("NVIDIA GH200 120GB", "GH200-96"),
        ("L40S", "L40S"),
        ("L4", "L4"),
        ("V100-32GB", "V100-32-SXM2"),
        ("B200-180-SXM", "B200-180-SXM"),
        ("B200", "B200-180-SXM"),
        ("A100-SXM-64GB", "A100-64-SXM custom (Leonardo)"),
        ("H100 NVL", "H100-94-NVL"),
        ("H800", "H800-80-SXM"),
        ("rtx4090", "RTX 4090"),
    ],
)
def test_a_gpu_is_found_in_every_spelling(spelt: str, name: str) -> None:
    gpu = hardware.find_gpu(spelt)
    assert gpu is not None
    assert gpu.name == name


def test_an_unknown_gpu_is_not_found() -> None:
    assert hardware.find_gpu("Voodoo 2") is None


def test_an_output_layer_with_an_odd_vocabulary_is_slow_unless_padded() -> None:
    odd, even = (replace(presets.preset("gpt2"), vocab=rows) for rows in (50257, 50304))
    for name, padded in (("fsdp", False), ("megatron", True)):
        kernels = Kernels(nodes(1).gpu, name, "bf16", SHIPPED)
        ratio = sum(kernels.head(odd, 8192, 1)) / sum(kernels.head(even, 8192, 1))
        assert ratio == pytest.approx(1.0, abs=0.01) if padded else ratio > 1.5
    shared = Kernels(nodes(1).gpu, "fsdp", "bf16", SHIPPED)
    assert shared.head(odd, 8192, 2) == shared.head(even, 8192, 2)  # two ranks share a table of whole tiles


def test_small_collectives_within_a_node_match_measurements() -> None:
    network = Network(nodes(1, "A100-80GB"), ("megatron",), SHIPPED)
    for mib, busbw in ((8, 110), (64, 172), (512, 223)):  # NCCL, GB/s, eight A100
        nbytes = mib * 2**20
        measured = nbytes * 2 * 7 / 8 / (busbw * 1e9)
        assert network.reduce(nbytes, Group(8, 1)) == pytest.approx(measured, rel=0.3)


def test_sharded_weights_are_gathered_once_per_step_with_a_pipeline() -> None:
    eight = EIGHT_B["torchtitan"].timer
    terms = eight.step(Layout(pp=4, dp=128, mbs=1, gbs=4096, zero=3)).terms
    assert terms["fsdp_comm"] == 0 < terms["dp_comm"]
    assert eight.step(Layout(dp=512, mbs=1, gbs=4096, zero=3)).terms["fsdp_comm"] > 0


def test_two_gpus_of_a_mesh_share_one_link() -> None:
    # stas00/ml-engineering, network: all-reduce of 16 GiB on two MI300X 47.7 GB/s, on eight 313
    gpu = hardware.find_gpu("MI300X")
    assert gpu
    network = Network(hardware.machine(gpu, 1), ("megatron",), SHIPPED)
    nbytes = 16 * 1024**3
    speed = {n: 2 * (n - 1) / n * nbytes / network.reduce(nbytes, Group(n, 1)) / 1e9 for n in (2, 8)}
    assert speed == {2: pytest.approx(47.7, rel=0.1), 8: pytest.approx(313, rel=0.05)}


def test_two_gpus_behind_a_switch_use_all_links() -> None:
    gpu = hardware.find_gpu("H100-80GB")
    assert gpu
    assert hardware.machine(gpu, 1).reach(2) == 1
    assert hardware.machine(gpu, 1, gpus_per_node=4).reach(2) == pytest.approx(1 / 3)


def test_softmax_is_fused_for_multiples_of_four_heads() -> None:
    shape = presets.preset("gpt3-175b")
    machine = nodes(8)
    odd = replace(
        shape, stacks=(replace(shape.stacks[0], attention=replace(shape.stacks[0].attention, heads=16)),)
    )
    timer = Estimator(Setting(odd, machine, 128, "megatron-2021", "fp16", SHIPPED)).timer
    two, four = (timer.layers(Layout(tp=8, dp=1, mbs=m, gbs=m, sp=False))[0] for m in (1, 2))
    assert two.terms["launch"] > four.terms["launch"]


def test_virtual_stages_hide_expert_communication_in_tuned_recipes() -> None:
    gpu = hardware.find_gpu("H100-80GB")
    assert gpu
    setting = Setting(presets.preset("deepseek-v3"), hardware.machine(gpu, 64), 4096, "nemo", "bf16", SHIPPED)
    timer = Estimator(setting).timer
    plain = Layout(tp=1, pp=8, dp=64, ep=32, mbs=1, gbs=4096, zero=1)
    exposed, hidden = (timer.step(replace(plain, vp=vp)).terms["ep_comm"] for vp in (1, 4))
    assert hidden < 0.7 * exposed


def test_a_slow_host_costs_time_with_small_kernels_unless_cuda_graphs_are_used() -> None:
    layout = Layout(tp=2, pp=4, dp=16, ep=32, mbs=1, gbs=1024, zero=1)

    def launch(model: str, gpu_name: str, framework: str, chosen: Layout) -> float:
        gpu = hardware.find_gpu(gpu_name)
        assert gpu
        machine = hardware.machine(gpu, 128 // gpu.node_gpus)
        setting = Setting(presets.preset(model), machine, 4096, framework, "bf16", SHIPPED)
        return Estimator(setting).timer.step(chosen).terms["launch"]

    grace, x86 = (launch("deepseek-v3", name, "nemo-2024", layout) for name in ("GB200", "B200-180-SXM"))
    assert grace > 1.5 * x86  # narrow experts run without graphs in those recipes
    dense = Layout(tp=2, pp=4, dp=16, mbs=1, gbs=1024, zero=1)
    graphs, none = (launch("llama-3-8b", "GB200", name, dense) for name in ("nemo-2024", "megatron"))
    assert graphs < 0.2 * none


def test_uneven_routing_waits_for_the_busiest_experts() -> None:
    gpu = hardware.find_gpu("H100-80GB")
    assert gpu
    setting = Setting(
        presets.preset("qwen3-235b-a22b"), hardware.machine(gpu, 32), 16384, "nemo", "bf16", SHIPPED
    )
    layout = Layout(tp=4, pp=8, vp=4, dp=8, ep=8, mbs=1, gbs=256, zero=1)
    uneven, even = (Estimator(replace(setting, even=even)).timer.step(layout) for even in (False, True))
    assert uneven.terms["experts"] == pytest.approx(SHIPPED["expert_imbalance"] * even.terms["experts"])
    # 295 TFLOP/s forced to be even, 237 as it comes (Megatron-MoE-ModelZoo)
    assert uneven.total / even.total == pytest.approx(295 / 237, abs=0.12)
    alone = replace(layout, ep=1)
    assert Estimator(setting).timer.step(alone).terms["ep_comm"] == 0


def test_expert_tensor_parallelism_reduces_memory_and_adds_communication() -> None:
    gpu = hardware.find_gpu("H100-80GB")
    assert gpu
    setting = Setting(presets.preset("grok-1"), hardware.machine(gpu, 64), 8192, "nemo-2024", "bf16", SHIPPED)
    made = Estimator(setting)
    layout = Layout(tp=4, pp=8, cp=2, dp=8, ep=8, vp=8, mbs=1, gbs=1024, zero=1)
    split = replace(layout, etp=4)
    assert made.timer.step(split).terms["ep_comm"] > made.timer.step(layout).terms["ep_comm"]
    assert made.memory(split).terms["weights"] < 0.5 * made.memory(layout).terms["weights"]
    # gathered once more, the same products in all
    ratio = made.timer.step(split).terms["experts"] / made.timer.step(layout).terms["experts"]
    assert ratio == pytest.approx(1, abs=0.05)


def test_adapters_of_eager_frameworks_cost_traffic_and_launches() -> None:
    gpu = hardware.find_gpu("A100-80GB")
    assert gpu
    machine = hardware.machine(gpu, 1)

    def step(framework: str, seq_len: int, *, frozen: bool = True, zero: int = 0) -> dict[str, float]:
        shape = presets.preset("llama-2-13b")
        setting = Setting(shape, machine, seq_len, framework, "bf16", SHIPPED, frozen=frozen)
        layout = Layout(dp=8 if zero else 1, mbs=1, gbs=8, zero=zero, recompute="full")
        return Estimator(setting).timer.step(layout).terms

    adapted, whole = (step("fsdp", 8192, frozen=frozen) for frozen in (True, False))
    # input and result of each product: 22 and 20 bytes of each in a forward and a backward pass
    inputs, results = 3 * 5120 + 13824, 3 * 5120 + 2 * 5120 + 2 * 13824
    added = 40 * 8 * 8192 * (22 * inputs + 20 * results) / (gpu.hbm_gbs * 1e9 * SHIPPED["hbm_efficiency"])
    assert adapted["elementwise"] - whole["elementwise"] == pytest.approx(added)
    fused = [step("nemo", 8192, frozen=frozen)["elementwise"] for frozen in (True, False)]
    assert fused[0] == fused[1]
    assert step("fsdp", 128)["launch"] > 1.2 * step("fsdp", 128, frozen=False)["launch"]
    hooks = [step("deepspeed", 128, frozen=frozen, zero=3)["launch"] for frozen in (True, False)]
    assert hooks[0] > 1.5 * hooks[1]


def test_frozen_weights_scatter_no_gradients_under_zero_3() -> None:
    network = replace(nodes(16), nic_gbs=1.0)
    setting = Setting(presets.preset("llama-3-8b"), network, 4096, "torchtitan", "bf16", SHIPPED)
    layout = Layout(dp=128, mbs=1, gbs=128, zero=3)
    whole, frozen = (
        Estimator(replace(setting, frozen=frozen)).timer.step(layout).terms["fsdp_comm"]
        for frozen in (False, True)
    )
    assert frozen < 0.6 * whole  # two gathers instead of two gathers and a scatter in 32 bits
