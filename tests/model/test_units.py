from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.model.units import Memory, Walltime


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("2:30", 150),
        ("2:30:00", 9000),
        ("1-00", 86400),
        ("1-02:30", 95400),
        ("7-00:00:00", 604800),
        ("2h30m", 9000),
        ("90m", 5400),
        ("1d", 86400),
        ("45s", 45),
        ("12:30:45", 45045),
    ],
)
def test_durations_are_parsed_like_slurm_time_limits(text: str, seconds: int) -> None:
    assert Walltime.parse(text).seconds == seconds


@pytest.mark.parametrize(
    "text", ["", "x", "0", "0:00", "-5", "1:2:3:4", "1-", "2h30", "h", "1.5h", "30 minutes", "٣"]
)
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a duration|a duration of 0"):
        Walltime.parse(text)


@given(st.integers(min_value=1, max_value=10**8))
def test_a_printed_duration_can_be_parsed(seconds: int) -> None:
    assert Walltime.parse(str(Walltime(seconds))) == Walltime(seconds)


def test_unlimited_time_is_parsed_as_none() -> None:
    assert Walltime.parse_limit("UNLIMITED") is None
    assert Walltime.parse_limit("infinite") is None
    assert Walltime.parse_limit("1-00:00:00") == Walltime(86400)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("480G", 491520),
        ("494000M", 494000),
        ("1T", 1048576),
        ("1.5G", 1536),
        ("512", 512),
        ("2048K", 2),
        ("0", 0),
    ],
)
def test_memory_sizes_are_parsed_in_slurm_units(text: str, mib: int) -> None:
    assert Memory.parse(text).mib == mib


@pytest.mark.parametrize("text", ["", "G", "12X", "-1G", "1G2", "lots"])
def test_invalid_memory_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="memory size"):
        Memory.parse(text)


@given(st.integers(min_value=0, max_value=10**9))
def test_a_printed_memory_size_can_be_parsed(mib: int) -> None:
    assert Memory.parse(str(Memory(mib))) == Memory(mib)
