"""Host lists on command lines, and the controller's clock on a node whose own clock is wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm.worker.localslurm import hostlist
from dtslurm.worker.supervisor import slurm
from dtslurm.worker.supervisor.attempts import Ledger


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_clock", {})


def config_text(seconds: float) -> str:
    """Return what scontrol shows where the controller's clock is ahead by so many seconds."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
    return f"Configuration data as of {stamp}\nAccountingStorageHost = lab\n"


@pytest.mark.parametrize("ahead", [50, -100])
def test_f66_supervisor_uses_the_clock_of_the_controller(site: Path, ahead: int) -> None:
    (site / "state").write_text(config_text(ahead))
    slurm.measure_clock()
    assert abs(slurm.now() - time.time() - ahead) < 5
    skew = slurm.clock_skew()
    assert skew is not None
    assert abs(skew + ahead) < 5


def test_f66_node_clock_is_used_until_a_silent_controller_answers(site: Path) -> None:
    (site / "state").write_text(config_text(50))
    (site / "silence").write_text("Unable to contact slurm controller\n")
    slurm.measure_clock()
    assert slurm.clock_skew() is None
    assert abs(slurm.now() - time.time()) < 5
    slurm.measure_clock()
    assert slurm.clock_skew() is not None


def test_f66_clock_of_a_controller_without_a_time_is_requested_once(site: Path) -> None:
    for _ in range(2):
        slurm.measure_clock()
    assert slurm.clock_skew() is None
    assert (site / "asked").read_text().count("show config") == 1


def test_f66_total_time_uses_the_clock_of_the_controller(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    assert ledger.seconds_since_first_start(1000.0) == 0
    ledger.event("attempt", 0, slurm_time=400.0)  # its node's clock tells another time
    ledger.event("attempt", 1, slurm_time=900.0)
    assert ledger.seconds_since_first_start(1000.0) == 600


# ---- Lists of nodes ----


def test_short_host_list_is_joined_with_commas() -> None:
    assert slurm.join_hostnames(["n1", "n2", "m3"]) == "n1,n2,m3"


def test_long_host_list_is_written_as_ranges() -> None:
    names = [f"frontier{number:05}" for number in range(12_500)]
    assert len(",".join(names)) > 131_072
    assert slurm.join_hostnames(names) == "frontier[00000-12499]"


@given(
    st.lists(
        st.one_of(
            st.integers(0, 130).map(lambda number: f"n{number}"),
            st.integers(0, 130).map(lambda number: f"n{number:03}"),
            st.sampled_from(["login", "a-1b", "a-1b7", "x2"]),
        ),
        max_size=40,
    )
)
def test_host_ranges_expand_to_the_same_nodes_in_order(names: list[str]) -> None:
    folded = ",".join(slurm._fold_hostnames(names))
    assert list(hostlist.expand(folded) if names else []) == names
