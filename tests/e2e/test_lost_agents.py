"""The agent of a healthy node is killed or frozen: its ranks continue, and no node is reported as lost."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from dtslurm.store.rundir import RunDir
from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli, events_of

TRAIN = Path(__file__).with_name("surviving_train.py")
SMALL: tuple[str, ...] = ()
LARGE = ("--env", "DTSLURM_PLAIN_NODES=1")  # the heartbeats of a job of more than 64 nodes: over TCP


def train(cli: Cli, *words: str) -> tuple[str, RunDir]:
    """Start ranks on two nodes, and wait until the agents of both have given signs of life."""
    shutil.copy(TRAIN, cli.folder / "train.py")
    options = ["-N2", "-l", "srun", "--max-restarts", "2", "--env", "PACE=0.5", "--env", "STEPS=50", *words]
    job = cli.submit(*options, "--python", sys.executable, "train.py")
    run = cli.run_dir(job)
    cli.wait_until(lambda: len(nodes_with_heartbeats(run)) == 2)
    cli.wait_until(lambda: len(run.metrics(0)) > 2)
    return job, run


def nodes_with_heartbeats(run: RunDir) -> list[str]:
    """Return the nodes that have given a sign of life, in a file or over the network."""
    folder = run.path / "ranks/0/beats"
    if (folder / "supervisor.json").exists():
        return (folder / "members").read_text().split() if (folder / "members").exists() else []
    return [path.stem for path in folder.glob("*.json")]


def agent_processes(run: RunDir, node: str) -> list[int]:
    """Return the processes that give a node's signs of life."""
    result = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            env = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        own = f"{run.path}/supervisor".encode()
        if own in words and b"srun" not in words[0] and words[words.index(own) + 1] == b"node":
            result += [int(folder.name)] if f"SLURMD_NODENAME={node}".encode() in env else []
    return result


def strike(run: RunDir, number: signal.Signals, place: int) -> str:
    """Kill or freeze the agent of a node; return the node."""
    node: str = events_of(run, "attempt")[0]["nodes"][place]
    [agent] = agent_processes(run, node)
    os.kill(agent, number)
    return node


@pytest.mark.sampled(2)
@WITHOUT_SSH
@pytest.mark.parametrize("layout", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("number", "place"), [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 0), (signal.SIGSTOP, 1)]
)
def test_f87_ranks_continue_training_when_an_agent_is_killed_or_frozen(
    cli: Cli, number: signal.Signals, place: int, layout: tuple[str, ...]
) -> None:
    job, run = train(cli, *layout)
    files = {path.name for path in (run.path / "ranks/0/beats").iterdir() if not path.match("*.json.*")}
    assert ("supervisor.json" in files, len(files)) == (layout == LARGE, 2)
    node = strike(run, number, place)
    assert cli.wait_for_end(job, 300)["statuses"][0]["state"] == "COMPLETED"
    assert [event["cause"] for event in events_of(run, "attempt_ended")] == ["done"]
    assert events_of(run, "node_excluded") == []
    assert [event["node"] for event in events_of(run, "agent_restarted")] == [node]
    cli.wait_until(lambda: agent_processes(run, node) == [])
    assert [path for path in run.logs(0).glob("rank*.log") if "Killed" in path.read_text()] == []


@ON_SLURM
def test_f87_node_without_an_agent_is_not_blamed_for_the_failure_of_another_rank(cli: Cli) -> None:
    job, run = train(cli)
    strike(run, signal.SIGKILL, 1)
    os.kill(run.ranks(0)[0].pid, signal.SIGKILL)
    assert cli.wait_for_end(job, 300)["statuses"][0]["state"] == "COMPLETED"
    assert [event["cause"] for event in events_of(run, "attempt_ended")] == ["killed", "done"]
    assert events_of(run, "node_excluded") == []
