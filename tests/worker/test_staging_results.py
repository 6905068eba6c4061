"""Results copied from the disks of several nodes: at the early signal, and after training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtslurm.worker import artifacts
from dtslurm.worker.staging import files, results
from dtslurm.worker.staging import main as staging_main
from tests.worker.staging_cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


@pytest.fixture
def target(cluster: Cluster) -> Path:
    """Results on the disks of both nodes; where they come to."""
    for number in range(2):
        (cluster.disk(number) / "out").mkdir()
        (cluster.disk(number) / "out/result.txt").write_text(f"of {number}")
    return cluster.run / "results"


def test_results_of_all_nodes_are_copied_and_registered(
    cluster: Cluster, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.ask("out", "--from=$DISK/out:results") == 0
    assert [(target / f"node-{number}/result.txt").read_text() for number in range(2)] == ["of 0", "of 1"]
    assert f"copied 8 B from 2 of 2 nodes to {target}" in capsys.readouterr().out
    assert sorted(artifacts.read_entries(str(cluster.run))) == ["results/node-0", "results/node-1"]


def test_result_copy_counts_nodes_without_results_and_reports_missing_results(
    cluster: Cluster, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cluster.disk(1) / "out/result.txt").unlink()
    (cluster.disk(1) / "out").rmdir()
    assert cluster.ask("out", "--from=$DISK/out:results", "--from=$DISK/none:more") == 0
    out = capsys.readouterr().out
    assert f"copied 4 B from 1 of 2 nodes to {target}" in out
    assert "no node has $DISK/none" in out


def test_result_copy_reports_changing_results_and_copies_the_other_nodes(
    cluster: Cluster, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = files.tree

    def growing(source: str) -> list[files.Listed]:
        answer = listed(source)
        if source == f"{cluster.disk(1)}/out":
            with (cluster.disk(1) / "out/result.txt").open("a") as file:
                file.write("more")
        return answer

    monkeypatch.setattr(results, "tree", growing)
    assert cluster.ask("out", "--from=$DISK/out:results") == staging_main.FAILED
    out = capsys.readouterr().out
    assert f"staging failed: n2: {cluster.disk(1)}/out changed while it was copied: result.txt" in out
    assert list(artifacts.read_entries(str(cluster.run))) == ["results/node-0"]
    assert not (target / "node-1/result.txt").exists()  # half a result is none


def test_result_copy_reports_a_variable_that_a_node_lacks(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.ask("out", "--from=$NOWHERE/out:results") == staging_main.FAILED
    assert "n1: $NOWHERE/out: $NOWHERE is not set there" in capsys.readouterr().out


@pytest.fixture
def signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_results_are_copied_at_the_early_signal_while_ranks_run(
    cluster: Cluster, target: Path, monkeypatch: pytest.MonkeyPatch, signals: None, name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("DISK", str(cluster.disk(0)))
    with subprocess.Popen(["sleep", "600"]) as ranks:
        looks = iter(range(9))
        brought: list[bool] = []

        def passes(_seconds: float) -> None:
            look = next(looks)
            brought.append((target / "node-0/result.txt").exists())
            if look == 1:
                os.kill(os.getpid(), getattr(signal, "SIG" + name))
            if look == 3:
                ranks.kill()
                ranks.wait()

        monkeypatch.setattr(results, "time", SimpleNamespace(sleep=passes, time=time.time))
        words = ["watch", str(ranks.pid), name, "--from=$DISK/out:results", "--from=$NOWHERE/x:more"]
        assert cluster.ask(*words) == 0
    assert brought == [False, False, True, True]  # not before the signal; it ends with the ranks
    assert json.loads((target / "node-0.json").read_text())["final"] is False
    assert "dtslurm: $NOWHERE/x: $NOWHERE/x: $NOWHERE is not set there\n" in capsys.readouterr().err


def test_matching_artifacts_are_registered(cluster: Cluster) -> None:
    (cluster.run / "model.bin").write_bytes(b"model")
    assert cluster.ask("artifacts", "*.bin") == 0
    assert artifacts.read_entries(str(cluster.run))["model.bin"]["bytes"] == 5
