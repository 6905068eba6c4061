"""The short fuzz test: recorded seeds, inputs kept by ``make fuzz``, and mutations of seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_kept_inputs_cause_no_error(name: str) -> None:
    target = TARGETS[name]
    contents = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    seeds = list(target.seeds())
    assert seeds
    for data in [*seeds, *contents]:
        target.run(data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_mutated_seeds_cause_no_error(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    seed = data.draw(st.sampled_from(list(target.seeds())))[:2000]
    start = data.draw(st.integers(0, len(seed)))
    stop = data.draw(st.integers(start, len(seed)))
    target.run(seed[:start] + data.draw(st.binary(max_size=40)) + seed[stop:])
