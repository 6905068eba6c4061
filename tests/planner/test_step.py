"""Time: terms add up, and what must hold of any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dtslurm.planner import hardware, presets
from dtslurm.planner.collectives import Group, Network, group
from dtslurm.planner.layout import Layout
from tests.planner.conftest import SHIPPED, estimator, nodes
from tests.planner.test_memory import layouts

EIGHT_B = {name: estimator(count=64, framework=name) for name in ("megatron", "torchtitan", "deepspeed")}


@given(layout=layouts, framework=st.sampled_from(sorted(EIGHT_B)))
def test_terms_are_never_negative_and_sum_to_the_total(layout: Layout, framework: str) -> None:
    time = EIGHT_B[framework].timer.step(layout)
    assert all(value >= 0 for value in time.terms.values())
    assert sum(time.terms.values()) == pytest.approx(time.total)
    assert time.total > 0


@given(layout=layouts)
def test_no_layout_computes_faster_than_the_data_sheet(layout: Layout) -> None:
    made = EIGHT_B["megatron"].estimate(layout)
    assert 0 < made.mfu < 1


@given(layout=layouts)
def test_recomputing_takes_longer(layout: Layout) -> None:
    plain = EIGHT_B["megatron"].timer.step(replace(layout, recompute="none"))
    again = EIGHT_B["megatron"].timer.step(replace(layout, recompute="full"))
    assert again.total > plain.total


@given(layout=layouts)
def test_the_bubble_of_equal_stages_is_the_papers(layout: Layout) -> None:
    # Narayanan et al. 2021: bubble over ideal time = (p - 1) / (v m); unequal stages only add to it
    assume(layout.pp > 1)
    time = EIGHT_B["megatron"].timer.step(layout)
    on_stage = ("matmul", "attention", "elementwise", "head", "recompute", "launch", "tp_comm", "cp_comm")
    busy = sum(time.terms[key] for key in on_stage) + time.terms["fsdp_comm"]
    least = busy * (layout.pp - 1) / layout.micro_batches
    assert time.terms["bubble"] >= least * (1 - 1e-9)


def test_interleaving_and_zero_bubble_shrink_the_bubble() -> None:
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


def test_a_ring_moves_what_rings_move() -> None:
    network = Network(nodes(2), "megatron", SHIPPED)
    eight = Group(8, 1)
    gathered = network.gather(1e12, eight)
    assert gathered == pytest.approx(1e12 * 7 / 8 / network.inner, rel=1e-3)
    assert network.reduce(1e12, eight) == pytest.approx(2 * gathered, rel=1e-3)
    assert network.gather(1e9, Group(1, 1)) == 0


def test_groups_follow_the_order_tp_cp_dp_pp() -> None:
    machine = nodes(4)
    assert group(machine, 8, 1) == Group(8, 1)
    assert group(machine, 32, 1) == Group(8, 4)
    assert group(machine, 4, 8) == Group(1, 4)  # tp fills a node, so data parallel neighbours are apart
    assert group(machine, 16, 2) == Group(4, 4)


def test_a_rack_of_nvl72_is_one_domain() -> None:
    gb200 = hardware.find_gpu("GB200")
    assert gb200 is not None
    machine = hardware.machine(gb200, 16)
    assert machine.gpus_per_node == 4
    assert group(machine, 64, 1) == Group(64, 1)


def test_tensor_parallelism_over_nodes_is_dear() -> None:
    inside = estimator(count=2).timer.step(Layout(tp=8, dp=2, gbs=64))
    across = estimator(count=2).timer.step(Layout(tp=16, dp=1, gbs=64))
    assert across.terms["tp_comm"] > 2 * inside.terms["tp_comm"]


def test_a_thin_network_slows_zero_3() -> None:
    layout = Layout(dp=64, gbs=64, zero=3)
    fast = estimator("llama-2-13b", 8, framework="fsdp")
    thin = replace(fast.machine, nic_gbs=1.5)
    slow = type(fast)(fast.model, thin, fast.seq_len, "fsdp", "bf16", SHIPPED)
    assert slow.estimate(layout).time.total > 2 * fast.estimate(layout).time.total


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_runs(name: str) -> None:
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
def test_a_gpu_is_known_however_it_is_spelt(spelt: str, name: str) -> None:
    found = hardware.find_gpu(spelt)
    assert found is not None
    assert found.name == name


def test_an_unknown_gpu_is_none() -> None:
    assert hardware.find_gpu("Voodoo 2") is None
