"""Nodes that were found bad: learned from runs, told to a team, and left out of what is submitted."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import SlurmUnavailable
from dtslurm.model.jobs.job import JobRecord, Resources, TaskLayout
from dtslurm.model.nodes import ListedNode
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict
from dtslurm.scheduler.slurm import SlurmScheduler
from dtslurm.services.preflight import bad_nodes
from dtslurm.services.preflight.bad_nodes import NodeExclusion, choose_exclusion
from dtslurm.services.request.request import JobRequest
from dtslurm.services.wiring.context import ActiveCluster, Context
from dtslurm.transport.local import LocalTransport
from dtslurm.worker.lib.node_blocklist import (
    answer,
    exchange,
    note_line,
    read_supervisor_notes,
    supervisor_file,
)

NOW = 1_700_000_000.0
DAY = 86400.0
THEN = time.strftime("%d %b", time.localtime(NOW - 60))


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(cwd=tmp_path, clock=lambda: NOW)


@pytest.fixture
def cluster(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ActiveCluster:
    """A Slurm of four nodes, of which a team keeps notes."""

    def nodes(self: SlurmScheduler, partition: str | None) -> list[ListedNode]:
        del self, partition
        return [
            ListedNode(name=f"n{number}", usable=True, features=frozenset({"gpu"})) for number in range(1, 5)
        ]

    monkeypatch.setattr(SlurmScheduler, "nodes", nodes)
    folder = tmp_path / "config/dtslurm/cluster_profiles"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text(f"extends: slurm\npaths:\n  node_memory: {tmp_path}/team.jsonl\n")
    return context.cluster("ours", "local")


def other(context: Context, tmp_path: Path) -> Context:
    """Another user of the same team."""
    return Context(
        cwd=context.cwd, env={**context.env, "XDG_STATE_HOME": str(tmp_path / "other")}, clock=context.clock
    )


def record(tmp_path: Path, *events: dict[str, Any], **more: Any) -> JobRecord:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    (run / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    values = {
        "token": "t",
        "script_hash": "",
        "cluster": "ours",
        "name": "train",
        "run_dir": str(run),
        "transport": "local",
    }
    return JobRecord(
        **{
            "mirror": "",
            "phase": "submitted",
            "created_at": NOW,
            "profile": "",
            "job_id": "17",
            **values,
            **more,
        }
    )


def excluded(node: str, reason: str = "health: gpus: 7 of 8 GPUs answer", ago: float = 60) -> dict[str, Any]:
    return {"time": NOW - ago, "event": "node_excluded", "node": node, "reason": reason}


def names(context: Context, cluster: ActiveCluster) -> list[str]:
    return [one.node for one in bad_nodes.read_notes(context, cluster).notes]


def asked(
    context: Context, cluster: ActiveCluster, nodes: int = 1, spare: int = 0, **more: Any
) -> NodeExclusion:
    own = {key: more.pop(key) for key in ("node_memory", "no_check") if key in more}
    request = JobRequest(script="train.py", spare_nodes=spare, **own)
    layout = TaskLayout(
        nodes=nodes, ranks_per_node=1, gpus_per_node=0, cpus_per_rank=None, mem=None, time=None
    )
    return choose_exclusion(context, cluster, request, Resources(**more), layout)


# ---- Learning ----


def test_what_a_run_left_out_is_learned_once(
    context: Context, cluster: ActiveCluster, tmp_path: Path
) -> None:
    run = record(tmp_path, excluded("n2"), {"event": "node_excluded", "node": "n3"}, excluded("n4; x"))
    for _ in range(3):
        bad_nodes.store_run_notes(context, run)
    [found] = bad_nodes.read_notes(context, cluster).notes
    assert (found.node, found.job, found.reason) == ("n2", "17", "health: gpus: 7 of 8 GPUs answer")
    assert found.expires == NOW - 60 + 3 * DAY
    assert len((tmp_path / "team.jsonl").read_text().splitlines()) == 1


def test_what_was_removed_by_hand_is_not_learned_again(
    context: Context, cluster: ActiveCluster, tmp_path: Path
) -> None:
    bad_nodes.store_run_notes(context, record(tmp_path, excluded("n2")))
    assert bad_nodes.remove(context, cluster, ["n2", "n9"]) == (["n2"], "")
    bad_nodes.store_run_notes(context, record(tmp_path, excluded("n2")))
    assert names(context, cluster) == []


def test_old_news_is_no_news(context: Context, cluster: ActiveCluster, tmp_path: Path) -> None:
    bad_nodes.store_run_notes(context, record(tmp_path, excluded("n2", ago=4 * DAY)))
    assert not (tmp_path / "team.jsonl").exists()


@pytest.mark.parametrize(
    ("cause", "blame", "confidence", "expected"),
    [
        ("gpu-fault", "node", 0.9, ["n3"]),
        ("disk-full", "node", 0.9, ["n3"]),
        ("gpu-fault", "node", 0.4, []),
        ("gpu-fault", "code", 0.9, []),
        ("port-in-use", "node", 0.95, []),  # it is free again when the job is over
        ("staging", "node", 0.95, []),
        ("python-exception", "node", 0.95, []),
    ],
)
def test_a_sure_verdict_that_a_node_is_bad_for_any_job_is_learned(
    context: Context, cluster: ActiveCluster, tmp_path: Path, cause: str, blame: str, confidence: float,
    expected: list[str],
) -> None:  # fmt: skip
    line = EvidenceLine(rank=3, file="rank-3.log", line=7, text="NVRM: Xid 79")
    verdict = Verdict(cause=cause, summary="GPU 3 fell off the bus", node="n3", blame=blame,
                      confidence=confidence, evidence=(line,))  # fmt: skip
    bad_nodes.store_run_notes(context, record(tmp_path), verdict)
    bad_nodes.store_run_notes(context, record(tmp_path), verdict)
    assert names(context, cluster) == expected
    if expected:
        assert bad_nodes.read_notes(context, cluster).notes[0].evidence == "NVRM: Xid 79"


def test_nothing_is_learned_of_this_machines_emulated_nodes(context: Context, tmp_path: Path) -> None:
    bad_nodes.store_run_notes(context, record(tmp_path, excluded("local2"), cluster="local"))
    assert names(context, context.cluster("local")) == []


def test_a_run_whose_profile_is_gone_is_no_trouble(context: Context, tmp_path: Path) -> None:
    bad_nodes.store_run_notes(context, record(tmp_path, excluded("n2"), cluster="gone"))


# ---- The team ----


def test_a_team_shares_what_it_knows(context: Context, cluster: ActiveCluster, tmp_path: Path) -> None:
    second = other(context, tmp_path)
    bad_nodes.add(context, cluster, ["n1", "n2"], "PSU\x1b[31m fails", 7 * DAY)
    found = bad_nodes.read_notes(second, cluster)
    assert [one.node for one in found.notes] == ["n1", "n2"]
    assert found.shared == {"n1", "n2"}
    assert found.notes[0].reason.isprintable()
    bad_nodes.remove(second, cluster, ["n1"])
    assert names(context, cluster) == ["n2"]
    assert [one["shared"] for one in bad_nodes.values(bad_nodes.read_notes(context, cluster))] == [True]


def test_a_teams_file_that_cannot_be_used_is_told_and_no_more(
    context: Context, cluster: ActiveCluster, tmp_path: Path
) -> None:
    (tmp_path / "team.jsonl").mkdir()
    notes, trouble = bad_nodes.add(context, cluster, ["n1"], "by hand", DAY)
    assert (notes[0].node, "team.jsonl: Is a directory" in trouble) == ("n1", True)
    found = asked(context, cluster)
    assert found.exclude == "n1"
    assert "cannot use the team's bad-node list" in found.notices[0]
    paths = replace(cluster.profile.paths, node_memory="$NOT_SET/nodes")
    unset = cluster.with_profile(replace(cluster.profile, paths=paths))
    assert "is not absolute on the login node" in bad_nodes.read_notes(context, unset).trouble


# ---- Leaving out ----


def test_without_notes_slurm_is_not_asked(
    context: Context, cluster: ActiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SlurmScheduler, "nodes")
    monkeypatch.setattr(SlurmScheduler, "nodes", lambda *_: pytest.fail("it was asked"), raising=False)
    assert asked(context, cluster, exclude="n9") == NodeExclusion("n9")


def test_bad_nodes_are_left_out_and_named(context: Context, cluster: ActiveCluster, tmp_path: Path) -> None:
    bad_nodes.store_run_notes(context, record(tmp_path, excluded("n2", "Xid 79")))
    bad_nodes.add(context, cluster, ["n3", "elsewhere"], "slow", 7 * DAY)
    found = asked(context, cluster)
    assert found.exclude == "n[2-3]"
    assert found.notices == (
        f"2 bad nodes excluded: n2 (Xid 79 on {THEN}), n3 (slow on {THEN}); --no-node-memory keeps bad nodes",
    )
    assert asked(context, cluster, exclude="n4").exclude == "n4,n[2-3]"
    assert asked(context, cluster, exclude="n[1-2]").exclude == "n[1-2],n3"
    assert asked(context, cluster, node_memory=False) == NodeExclusion(None)
    assert asked(context, cluster, no_check=True) == NodeExclusion(None)


def test_who_names_a_node_gets_it(context: Context, cluster: ActiveCluster) -> None:
    bad_nodes.add(context, cluster, ["n1", "n2"], "slow", 7 * DAY)
    found = asked(context, cluster, nodelist="n[2-3]")
    assert found.exclude == "n1"
    assert found.notices[0] == f"--nodelist requests nodes of the bad-node list: n2 (slow on {THEN})"


def test_a_job_is_not_kept_from_running(context: Context, cluster: ActiveCluster) -> None:
    bad_nodes.add(context, cluster, ["n1", "n2"], "slow", 7 * DAY)
    assert asked(context, cluster, nodes=2).exclude == "n[1-2]"
    found = asked(context, cluster, nodes=3, spare=1)
    assert found.exclude is None
    assert found.notices[0].startswith(
        "nodes of the bad-node list are not excluded, because the job could not run without them: n1 (slow"
    )
    assert asked(context, cluster, nodes=2, exclude="n[3-4]").exclude == "n[3-4]"  # nor by both together
    assert asked(context, cluster, nodes=2, exclude="n4").exclude == "n4,n1"
    assert asked(context, cluster, constraint="cpu").exclude is None  # none of these nodes is meant


def test_a_slurm_that_does_not_answer_leaves_nothing_out(
    context: Context, cluster: ActiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(self: SlurmScheduler, partition: str | None) -> list[ListedNode]:
        raise SlurmUnavailable("sinfo did not answer")

    bad_nodes.add(context, cluster, ["n1"], "slow", 7 * DAY)
    monkeypatch.setattr(SlurmScheduler, "nodes", silent)
    assert asked(context, cluster) == NodeExclusion(None, ("no bad node is excluded: sinfo did not answer",))


# ---- From supervisors ----


def noted(root: Path, node: str, cluster: str = "ours", ago: float = 60) -> Path:
    """Note a node as the supervisor of a run does, and return the file."""
    root.mkdir(exist_ok=True)
    path = Path(supervisor_file(str(root)))
    exchange(str(path), [note_line(cluster, node, "node is DOWN", "17", NOW - ago)], own=True)
    return path


def test_what_a_supervisor_noted_counts_before_anybody_looks_at_its_run(
    context: Context, cluster: ActiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(context.env, "DTSLURM_RUN_ROOT", str(tmp_path / "root"))
    noted(tmp_path / "root", "n2")
    noted(tmp_path / "root", "n3", cluster="another")
    noted(tmp_path / "root", "n4", ago=4 * DAY)
    found = asked(context, cluster)
    assert found.exclude == "n2"
    assert found.notices == (
        f"1 bad node excluded: n2 (node is DOWN on {THEN}); --no-node-memory keeps bad nodes",
    )
    assert bad_nodes.remove(context, cluster, ["n2"]) == (["n2"], "")
    assert asked(context, cluster) == NodeExclusion(None)


def test_run_roots_of_earlier_runs_and_of_the_request_count_too(
    context: Context, cluster: ActiveCluster, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    context.index.put(record(tmp_path / "one"))
    noted(tmp_path / "one", "n2")
    noted(tmp_path / "two", "n3")
    assert names(context, cluster) == ["n2"]
    request = JobRequest(script="train.py", run_root=str(tmp_path / "two"))
    found = bad_nodes.read_notes(context, cluster, request)
    assert [one.node for one in found.notes] == ["n2", "n3"]


@pytest.mark.parametrize("fault", ["writable", "link", "foreign", "folder", "text"])
def test_notes_that_others_can_have_written_count_for_nothing(
    context: Context, cluster: ActiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setitem(context.env, "DTSLURM_RUN_ROOT", str(tmp_path / "root"))
    path = noted(tmp_path / "root", "n2")
    if fault == "writable":
        path.chmod(0o620)
    elif fault == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif fault == "foreign":
        uid = os.geteuid()
        path.rename(path.with_name(path.name.replace(str(uid), str(uid + 1))))
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    elif fault == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(b"\0\xff{}\n[]\n")
    assert read_supervisor_notes([str(tmp_path / "root")]) == [] or fault == "text"
    if fault != "foreign":
        assert names(context, cluster) == []


def test_the_program_for_a_login_node_reads_the_same_notes(tmp_path: Path) -> None:
    noted(tmp_path / "root", "n2")
    lines = answer({"run_roots": [str(tmp_path / "root"), str(tmp_path / "none")]})["lines"]
    assert [json.loads(one)["node"] for one in lines] == ["n2"]


class LoginNode(LocalTransport):
    """This machine as if it were another."""

    local = False
    host = "login"


def test_notes_of_supervisors_are_read_on_the_login_node(
    context: Context, cluster: ActiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    noted(tmp_path / "home/dtslurm-runs", "n2")
    assert names(context, replace(cluster, transport=LoginNode())) == ["n2"]
