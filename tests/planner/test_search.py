"""The search for layouts: valid, fitting, ranked and explained."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtslurm.planner import explain, search
from dtslurm.planner.divide import find_layout_problems
from dtslurm.planner.layout import Layout, LayoutProblem, parse_layout
from dtslurm.planner.models import presets
from tests.planner.conftest import SHIPPED, estimator, training_task
from tests.planner.test_memory import layouts


@pytest.mark.parametrize(
    ("model", "count", "gbs"),
    [("llama-3-8b", 2, 256), ("qwen3-30b-a3b", 2, 256), ("deepseek-v3", 64, 4096), ("t5-base", 1, 64)],
)
@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "fsdp", "deepspeed"])
def test_every_layout_of_the_search_is_valid(model: str, count: int, gbs: int, framework: str) -> None:
    asked = training_task(model, count, gbs=gbs, framework=framework)
    groups = list(search.layouts(asked))
    assert groups
    for group in groups[:400]:
        for layout in group:
            assert find_layout_problems(asked.model, layout, asked.machine.gpus, asked.seq_len) == []


def test_ranked_layouts_fit_and_are_in_order() -> None:
    match = search.search(training_task("llama-3-70b", 8), SHIPPED)
    assert all(item.fits for item in match.ranked)
    best = match.ranked[0].time.total
    times = [item.time.total for item in match.ranked]
    assert best <= min(times) * (1 + search.NEAR)
    far = [time for time in times if time > min(times) * (1 + search.NEAR)]
    assert far == sorted(far)


def test_no_fitting_layout_is_faster_than_the_best() -> None:
    asked = training_task("llama-3-8b", 1, gbs=64)
    estimator = asked.estimator(SHIPPED)
    fitting = [
        estimate.time.total
        for group in search.layouts(asked)
        for layout in group
        if (estimate := estimator.estimate(layout)).fits
    ]
    assert search.search(asked, SHIPPED).ranked[0].time.total <= min(fitting) * (1 + search.NEAR)


def test_tensor_parallelism_of_large_models_stays_within_a_node() -> None:
    best = search.search(training_task("llama-3-405b", 128, seq_len=8192, gbs=512), SHIPPED).ranked[0].layout
    assert best.tp <= 8
    assert best.pp > 1


def test_reasons_name_the_term_that_costs_time() -> None:
    lines = explain.runners_up(search.search(training_task("llama-3-70b", 8), SHIPPED))
    assert any("slower" in line and "%" in line for line in lines)


def test_the_smallest_number_of_nodes_that_fits_is_reported() -> None:
    asked = training_task("llama-3-405b", 4, gbs=512)
    match = search.search(asked, SHIPPED)
    assert not match.ranked
    nodes = search.smallest_nodes(asked, SHIPPED, 4096)
    assert nodes is not None
    assert nodes > 4
    assert any(f"{nodes} nodes" in line for line in explain.what_would_fit(match, SHIPPED))
    larger = replace(asked, machine=replace(asked.machine, nodes=nodes))
    assert search.search(larger, SHIPPED).ranked
    smaller = replace(asked, machine=replace(asked.machine, nodes=nodes // 2))
    assert not search.search(smaller, SHIPPED).ranked


def test_more_nodes_never_take_longer_on_the_scaling_curve() -> None:
    curve = search.scaling(training_task("llama-3-8b", 1, gbs=1024), SHIPPED, [1, 2, 4, 8])
    times = [item.time.total for _, item in curve if item]
    assert len(times) == 4
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("params", [("gpt2", 512), ("llama-3-70b", 1024)])
def test_the_default_batch_is_a_power_of_two(params: tuple[str, int]) -> None:
    model, gpus = params
    gbs = search.default_batch(presets.preset(model), 4096, gpus)
    assert gbs & (gbs - 1) == 0


@given(layout=layouts)
def test_a_layout_can_be_parsed_from_its_text(layout: Layout) -> None:
    read = parse_layout(str(layout))
    assert replace(read, sp=layout.sp) == layout


@settings(max_examples=200)
@given(text=st.text(max_size=60))
def test_any_text_is_a_layout_or_a_layout_problem(text: str) -> None:
    with contextlib.suppress(LayoutProblem):
        assert parse_layout(text).gpus >= 1


numbers = st.integers(1, 40)


@given(
    tp=numbers, pp=numbers, cp=numbers, ep=numbers, dp=numbers, vp=st.integers(1, 4), mbs=numbers, gbs=numbers
)
def test_every_degree_that_does_not_divide_is_reported(**degrees: int) -> None:
    layout = Layout(**degrees)  # type: ignore[arg-type]
    model = presets.preset("mixtral-8x7b")  # 32 layers, 32 heads, 8 key-value heads, 8 experts
    text = "\n".join(find_layout_problems(model, layout, 64, 4096))
    assert (f"{layout.gpus} GPUs, but there are 64" in text) == (layout.gpus != 64)
    assert ("gbs=" in text and "multiple" in text) == bool(layout.gbs % (layout.mbs * layout.dp))
    assert ("attention heads" in text) == bool(32 % layout.tp)
    assert ("hidden size" in text) == bool(4096 % layout.tp)
    assert (f"ep={layout.ep} does not divide the 8 experts" in text) == bool(8 % layout.ep)
    named = f"pp={layout.pp} is more" in text or f"pp={layout.pp} divides neither" in text
    assert named == (layout.pp > 32 or (32 % layout.pp != 0 and 34 % layout.pp != 0))
    assert (f"cp={layout.cp} needs" in text) == (layout.cp > 1 and bool(4096 % (2 * layout.cp)))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 12])
def test_the_default_batch_is_a_multiple_of_the_gpus(count: int) -> None:
    model = presets.preset("llama-2-7b")
    assert search.default_batch(model, 4096, 8 * count) % (8 * count) == 0
    assert search.search(
        training_task("llama-2-7b", count, gbs=search.default_batch(model, 4096, 8 * count)), SHIPPED
    ).ranked


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=4,ep=1,etp=2,dp=2,mbs=1,gbs=8,zero=1", "etp=2 splits spread experts, and ep=1 spreads none"),
        ("tp=4,ep=8,etp=4,dp=4,mbs=1,gbs=8,zero=1", "ep·etp = 32 does not divide the 16 GPUs"),
    ],
)
def test_expert_tensor_parallelism_must_divide(text: str, said: str) -> None:
    layout = parse_layout(text)
    assert any(
        said in problem for problem in find_layout_problems(presets.preset("mixtral-8x7b"), layout, 16, 4096)
    )
    fine = parse_layout("tp=4,ep=4,etp=4,dp=4,mbs=1,gbs=8,zero=1")
    assert parse_layout(str(fine)) == fine
    assert not find_layout_problems(presets.preset("mixtral-8x7b"), fine, 16, 4096)


def test_among_equally_fast_layouts_sharded_optimizer_states_rank_first() -> None:
    sharded, whole = (parse_layout(f"dp=16,mbs=1,gbs=64,zero={zero}") for zero in (1, 0))
    assert search.complexity(sharded) == search.complexity(whole)  # no more traffic, so the memory decides
    estimates = [estimator("llama-3.2-1b", 2).estimate(layout) for layout in (whole, sharded)]
    assert [item.layout.zero for item in search.rank(estimates)] == [1, 0]


def test_the_fastest_measured_layout_comes_first_unless_a_prediction_is_far_better() -> None:
    ranked = search.search(training_task("llama-3-8b", 2), SHIPPED).ranked[:5]
    assert search.rank_measured(ranked, {}, 1.2) == ranked
    predicted = [item.time.total for item in ranked]
    slow, fast = str(ranked[1].layout), str(ranked[2].layout)
    known = search.rank_measured(ranked, {slow: 1.15 * predicted[0], fast: 1.1 * predicted[0]}, 1.2)
    assert [str(item.layout) for item in known][:2] == [fast, str(ranked[0].layout)]
    best = known[0]
    assert best.time.total == pytest.approx(1.1 * predicted[0])
    assert best.predicted_s == pytest.approx(predicted[2])
    assert sum(best.time.terms.values()) == pytest.approx(best.time.total)
    assert best.tokens_per_s_per_gpu * best.time.total == pytest.approx(
        ranked[2].tokens_per_s_per_gpu * predicted[2]
    )
    far_better = search.rank_measured(ranked, {slow: 1.5 * predicted[0], fast: 1.4 * predicted[0]}, 1.2)
    assert str(far_better[0].layout) == str(ranked[0].layout)


def test_only_layouts_that_were_not_measured_are_to_be_run() -> None:
    ranked = search.search(training_task("llama-3-8b", 2), SHIPPED).ranked[:3]
    seconds = {str(item.layout): ranked[0].time.total for item in ranked[:2]}
    known = search.rank_measured(ranked, seconds, 1.5)
    ties = explain.find_ties(known, 1.5)
    assert ties == [3]  # the order of two measured layouts is known
    _, deciding = explain.tie_lines(known, ties, 1.5, 3)
    assert deciding.startswith("10 steps of 3 would decide")
    assert deciding.endswith("(--top 3 --probe SCRIPT)")
