"""The bad-node list: nodes added from runs, shared with a team, and excluded from jobs."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import SlurmUnavailable
from dtslurm.model.diagnostics import Checked, notes
from dtslurm.model.jobs.job import JobRecord, Resources, TaskLayout
from dtslurm.model.nodes import ListedNode
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict
from dtslurm.scheduler.slurm import SlurmScheduler
from dtslurm.services.preflight import bad_nodes
from dtslurm.services.preflight.bad_nodes import choose_exclusion
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


def other_user(context: Context, tmp_path: Path) -> Context:
    """Another user of the same team."""
    return Context(
        cwd=context.cwd, env={**context.env, "XDG_STATE_HOME": str(tmp_path / "other")}, clock=context.clock
    )


def record(tmp_path: Path, *events: dict[str, Any], **more: Any) -> JobRecord:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
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


def exclusion_event(
    node: str, reason: str = "health: gpus: 7 of 8 GPUs answer", ago: float = 60
) -> dict[str, Any]:
    return {"time": NOW - ago, "event": "node_excluded", "node": node, "reason": reason}


def bad_node_names(context: Context, cluster: ActiveCluster) -> list[str]:
    return [note.node for note in bad_nodes.read_notes(context, cluster).notes]


def choose_nodes_to_exclude(
    context: Context, cluster: ActiveCluster, nodes: int = 1, spare: int = 0, **more: Any
) -> Checked[str | None]:
    own = {key: more.pop(key) for key in ("node_memory", "no_check") if key in more}
    request = JobRequest(script="train.py", spare_nodes=spare, **own)
    layout = TaskLayout(
        nodes=nodes, ranks_per_node=1, gpus_per_node=0, cpus_per_rank=None, mem=None, time=None
    )
    return choose_exclusion(context, cluster, request, Resources(**more), layout)


# ---- Learning ----


def test_a_node_excluded_by_a_run_is_added_to_the_bad_node_list_once(
    context: Context, cluster: ActiveCluster, tmp_path: Path
) -> None:
    run = record(
        tmp_path, exclusion_event("n2"), {"event": "node_excluded", "node": "n3"}, exclusion_event("n4; x")
    )
    for _ in range(3):
        bad_nodes.store_run_notes(context, run)
    [note] = bad_nodes.read_notes(context, cluster).notes
    assert (note.node, note.job, note.reason) == ("n2", "17", "health: gpus: 7 of 8 GPUs answer")
    assert note.expires == NOW - 60 + 3 * DAY
    assert len((tmp_path / "team.jsonl").read_text().splitlines()) == 1


def test_a_node_that_is_only_suspected_is_not_added(
    context: Context, cluster: ActiveCluster, tmp_path: Path
) -> None:
    run = record(tmp_path, {**exclusion_event("n2", "no rank wrote output for 60 s"), "suspected": True})
    bad_nodes.store_run_notes(context, run)
    assert bad_node_names(context, cluster) == []


def test_a_node_removed_manually_is_not_added_again(
    context: Context, cluster: ActiveCluster, tmp_path: Path
) -> None:
    bad_nodes.store_run_notes(context, record(tmp_path, exclusion_event("n2")))
    assert bad_nodes.remove(context, cluster, ["n2", "n9"]) == (["n2"], "")
    bad_nodes.store_run_notes(context, record(tmp_path, exclusion_event("n2")))
    assert bad_node_names(context, cluster) == []


def test_an_exclusion_older_than_its_expiry_is_not_added(
    context: Context, cluster: ActiveCluster, tmp_path: Path
) -> None:
    bad_nodes.store_run_notes(context, record(tmp_path, exclusion_event("n2", ago=4 * DAY)))
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
def test_a_confident_diagnosis_of_a_node_fault_adds_the_node(
    context: Context, cluster: ActiveCluster, tmp_path: Path, cause: str, blame: str, confidence: float,
    expected: list[str],
) -> None:  # fmt: skip
    line = EvidenceLine(rank=3, file="rank-3.log", line=7, text="NVRM: Xid 79")
    verdict = Verdict(cause=cause, summary="GPU 3 fell off the bus", node="n3", blame=blame,
                      confidence=confidence, evidence=(line,))  # fmt: skip
    bad_nodes.store_run_notes(context, record(tmp_path), verdict)
    bad_nodes.store_run_notes(context, record(tmp_path), verdict)
    assert bad_node_names(context, cluster) == expected
    if expected:
        assert bad_nodes.read_notes(context, cluster).notes[0].evidence == "NVRM: Xid 79"


def test_emulated_nodes_of_cluster_local_are_not_added(context: Context, tmp_path: Path) -> None:
    bad_nodes.store_run_notes(context, record(tmp_path, exclusion_event("local2"), cluster="local"))
    assert bad_node_names(context, context.cluster("local")) == []


def test_a_run_whose_profile_was_deleted_adds_no_node_and_no_error(context: Context, tmp_path: Path) -> None:
    bad_nodes.store_run_notes(context, record(tmp_path, exclusion_event("n2"), cluster="gone"))


# ---- The team ----


def test_a_team_shares_its_bad_node_list(context: Context, cluster: ActiveCluster, tmp_path: Path) -> None:
    second = other_user(context, tmp_path)
    bad_nodes.add(context, cluster, ["n1", "n2"], "PSU\x1b[31m fails", 7 * DAY)
    result = bad_nodes.read_notes(second, cluster)
    assert [note.node for note in result.notes] == ["n1", "n2"]
    assert result.shared == {"n1", "n2"}
    assert result.notes[0].reason.isprintable()
    bad_nodes.remove(second, cluster, ["n1"])
    assert bad_node_names(context, cluster) == ["n2"]
    assert [item["shared"] for item in bad_nodes.values(bad_nodes.read_notes(context, cluster))] == [True]


def test_an_unusable_team_file_is_reported_and_does_not_stop_a_submission(
    context: Context, cluster: ActiveCluster, tmp_path: Path
) -> None:
    (tmp_path / "team.jsonl").mkdir()
    notes, trouble = bad_nodes.add(context, cluster, ["n1"], "by hand", DAY)
    assert (notes[0].node, "team.jsonl: Is a directory" in trouble) == ("n1", True)
    nodes_to_exclude = choose_nodes_to_exclude(context, cluster)
    assert nodes_to_exclude.value == "n1"
    assert "cannot use the team's bad-node list" in nodes_to_exclude.notices[0]
    paths = replace(cluster.profile.paths, node_memory="$NOT_SET/nodes")
    unset = cluster.with_profile(replace(cluster.profile, paths=paths))
    assert "is not absolute on the login node" in bad_nodes.read_notes(context, unset).trouble


# ---- Leaving out ----


def test_an_empty_bad_node_list_causes_no_node_query(
    context: Context, cluster: ActiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SlurmScheduler, "nodes")
    monkeypatch.setattr(SlurmScheduler, "nodes", lambda *_: pytest.fail("it was asked"), raising=False)
    assert choose_nodes_to_exclude(context, cluster, exclude="n9") == Checked("n9")


def test_bad_nodes_are_excluded_and_named(context: Context, cluster: ActiveCluster, tmp_path: Path) -> None:
    bad_nodes.store_run_notes(context, record(tmp_path, exclusion_event("n2", "Xid 79")))
    bad_nodes.add(context, cluster, ["n3", "elsewhere"], "slow", 7 * DAY)
    nodes_to_exclude = choose_nodes_to_exclude(context, cluster)
    assert nodes_to_exclude.value == "n[2-3]"
    assert nodes_to_exclude.notices == [
        f"2 bad nodes excluded: n2 (Xid 79 on {THEN}), n3 (slow on {THEN}); --no-node-memory keeps bad nodes",
    ]
    assert choose_nodes_to_exclude(context, cluster, exclude="n4").value == "n4,n[2-3]"
    assert choose_nodes_to_exclude(context, cluster, exclude="n[1-2]").value == "n[1-2],n3"
    assert choose_nodes_to_exclude(context, cluster, node_memory=False) == Checked(None)
    assert choose_nodes_to_exclude(context, cluster, no_check=True) == Checked(None)


def test_nodelist_takes_precedence_over_the_bad_node_list(context: Context, cluster: ActiveCluster) -> None:
    bad_nodes.add(context, cluster, ["n1", "n2"], "slow", 7 * DAY)
    nodes_to_exclude = choose_nodes_to_exclude(context, cluster, nodelist="n[2-3]")
    assert nodes_to_exclude.value == "n1"
    assert (
        nodes_to_exclude.notices[0] == f"--nodelist requests nodes of the bad-node list: n2 (slow on {THEN})"
    )


def test_bad_nodes_are_not_excluded_if_too_few_nodes_would_remain(
    context: Context, cluster: ActiveCluster
) -> None:
    bad_nodes.add(context, cluster, ["n1", "n2"], "slow", 7 * DAY)
    assert choose_nodes_to_exclude(context, cluster, nodes=2).value == "n[1-2]"
    nodes_to_exclude = choose_nodes_to_exclude(context, cluster, nodes=3, spare=1)
    assert nodes_to_exclude.value is None
    assert nodes_to_exclude.notices[0].startswith(
        "nodes of the bad-node list are not excluded, because the job could not run without them: n1 (slow"
    )
    assert (
        choose_nodes_to_exclude(context, cluster, nodes=2, exclude="n[3-4]").value == "n[3-4]"
    )  # nor by both together
    assert choose_nodes_to_exclude(context, cluster, nodes=2, exclude="n4").value == "n4,n1"
    assert (
        choose_nodes_to_exclude(context, cluster, constraint="cpu").value is None
    )  # none of these nodes is meant


def test_no_node_is_excluded_if_slurm_does_not_answer(
    context: Context, cluster: ActiveCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(self: SlurmScheduler, partition: str | None) -> list[ListedNode]:
        raise SlurmUnavailable("sinfo did not answer")

    bad_nodes.add(context, cluster, ["n1"], "slow", 7 * DAY)
    monkeypatch.setattr(SlurmScheduler, "nodes", silent)
    assert choose_nodes_to_exclude(context, cluster) == Checked(
        None, notes(["no bad node is excluded: sinfo did not answer"])
    )


# ---- From supervisors ----


def write_supervisor_note(root: Path, node: str, cluster: str = "ours", ago: float = 60) -> Path:
    """Write a bad-node note as a supervisor does, and return the file."""
    root.mkdir(exist_ok=True)
    path = Path(supervisor_file(str(root)))
    exchange(str(path), [note_line(cluster, node, "node is DOWN", "17", NOW - ago)], is_own_file=True)
    return path


def test_a_node_recorded_by_a_supervisor_is_excluded_immediately(
    context: Context, cluster: ActiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(context.env, "DTSLURM_RUN_ROOT", str(tmp_path / "root"))
    write_supervisor_note(tmp_path / "root", "n2")
    write_supervisor_note(tmp_path / "root", "n3", cluster="another")
    write_supervisor_note(tmp_path / "root", "n4", ago=4 * DAY)
    nodes_to_exclude = choose_nodes_to_exclude(context, cluster)
    assert nodes_to_exclude.value == "n2"
    assert nodes_to_exclude.notices == [
        f"1 bad node excluded: n2 (node is DOWN on {THEN}); --no-node-memory keeps bad nodes",
    ]
    assert bad_nodes.remove(context, cluster, ["n2"]) == (["n2"], "")
    assert choose_nodes_to_exclude(context, cluster) == Checked(None)


def test_supervisor_notes_are_read_from_all_known_run_roots(
    context: Context, cluster: ActiveCluster, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    context.index.put(record(tmp_path / "one"))
    write_supervisor_note(tmp_path / "one", "n2")
    write_supervisor_note(tmp_path / "two", "n3")
    assert bad_node_names(context, cluster) == ["n2"]
    request = JobRequest(script="train.py", run_root=str(tmp_path / "two"))
    result = bad_nodes.read_notes(context, cluster, request)
    assert [note.node for note in result.notes] == ["n2", "n3"]


@pytest.mark.parametrize("fault", ["writable", "link", "foreign", "folder", "text"])
def test_supervisor_notes_that_other_users_could_write_are_ignored(
    context: Context, cluster: ActiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setitem(context.env, "DTSLURM_RUN_ROOT", str(tmp_path / "root"))
    path = write_supervisor_note(tmp_path / "root", "n2")
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
        assert bad_node_names(context, cluster) == []


def test_the_worker_program_reads_the_same_supervisor_notes(tmp_path: Path) -> None:
    write_supervisor_note(tmp_path / "root", "n2")
    lines = answer({"run_roots": [str(tmp_path / "root"), str(tmp_path / "none")]})["lines"]
    assert [json.loads(line)["node"] for line in lines] == ["n2"]


class LoginNode(LocalTransport):
    """This machine as if it were another."""

    local = False
    host = "login"


def test_supervisor_notes_are_read_on_the_login_node(
    context: Context, cluster: ActiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_supervisor_note(tmp_path / "home/dtslurm-runs", "n2")
    assert bad_node_names(context, replace(cluster, transport=LoginNode())) == ["n2"]
