"""Staging as the first node controls it: checks on all nodes, copies, and messages."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtslurm.worker.staging import files
from dtslurm.worker.staging import main as staging_main
from tests.worker.staging_cluster import Cluster

SBCAST = """\
#!/bin/sh
echo "$@" >>{folder}/sbcast.asked
[ -e {folder}/sbcast.refuses ] && echo "sbcast: error: no room" >&2 && exit 1
cp "$2" "$3"
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def test_staging_copies_to_all_nodes_and_reuses_the_copies(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.stage(f"{cluster.data}:$DISK/data") == 0
    for number in range(2):
        assert files.tree(str(cluster.disk(number) / "data")) == files.tree(str(cluster.data))
    out = capsys.readouterr().out
    assert f"staged {cluster.data} to {cluster.disk(0)}/data on 2 of 2 nodes by copy, 7.8 KiB in all" in out
    assert "staging took 0:00:00\n" in out
    assert cluster.stage(f"{cluster.data}:$DISK/data") == 0
    assert f"{cluster.data} is already on all nodes, at {cluster.disk(0)}/data" in capsys.readouterr().out
    assert [item["bytes"] for item in cluster.events("staged")] == [8002, 0]


def test_staging_copies_only_to_nodes_without_a_complete_copy(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.stage(f"{cluster.data}:$DISK/data") == 0
    (cluster.disk(1) / "data/2.bin").unlink()
    capsys.readouterr()
    assert cluster.stage(f"{cluster.data}:$DISK/data") == 0
    assert "on 1 of 2 nodes by copy" in capsys.readouterr().out
    assert (cluster.disk(1) / "data/2.bin").exists()


@pytest.mark.parametrize(("by", "hands"), [("node", 2), ("rank", 4)])
def test_staging_gives_each_node_its_shard_and_records_the_assignment(
    cluster: Cluster, by: str, hands: int
) -> None:
    words = ["--ranks-per-node=2", f"--stage={cluster.data}:$DISK/data:shards={by}"]
    assert cluster.ask("in", *words) == 0
    had = [{item[0] for item in files.tree(str(cluster.disk(number) / "data"))} for number in range(2)]
    assert had[0] | had[1] == {item[0] for item in files.tree(str(cluster.data))}
    assert had[0] & had[1] == set()
    document = json.loads((cluster.run / "staged/data.shards.json").read_text())
    assert (document["by"], document["nodes"], document["world_size"]) == (by, 2, 4)
    assert {file[by] for file in document["files"]} == set(range(hands))
    per_node = hands // 2
    assert all(file["path"] in had[file[by] // per_node] for file in document["files"])


def test_nodes_on_the_same_host_share_all_shards(cluster: Cluster) -> None:
    cluster.machines = lambda _number: "one"
    shared = cluster.disk(3)
    assert cluster.stage(f"{cluster.data}:{shared}/data:shards=node") == 0
    assert files.tree(str(shared / "data")) == files.tree(str(cluster.data))


def test_staging_packs_a_source_once_and_removes_the_archive(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []
    staged = cluster.run / "staged/0"
    cluster.before["bring", 0] = lambda: seen.append([path.name for path in staged.glob("*.tar")])
    assert cluster.stage(f"{cluster.data}:$DISK/data:method=pack") == 0
    assert seen == [["data.tar"]]
    assert list(staged.glob("*.tar")) == []
    assert files.tree(str(cluster.disk(1) / "data")) == files.tree(str(cluster.data))
    assert "on 2 of 2 nodes by pack" in capsys.readouterr().out


def test_staging_copies_files_when_packing_fails(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = cluster.folder / "bin" / "tar"
    tar.parent.mkdir()
    tar.write_text("#!/bin/sh\necho 'tar: it is broken' >&2\nexit 2\n")
    tar.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tar.parent}:{os.environ['PATH']}")
    assert cluster.stage(f"{cluster.data}:$DISK/data:method=pack") == 0
    out = capsys.readouterr().out
    assert "tar: it is broken; the data is copied file by file" in out
    assert "on 2 of 2 nodes by copy" in out
    assert (
        cluster.stage(f"{cluster.data}/1.bin:$DISK/one:method=pack,name=one") == 0
    )  # there is nothing to pack
    assert "on 2 of 2 nodes by copy" in capsys.readouterr().out


@pytest.fixture
def sbcast(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster of one node, where sbcast is."""
    program = cluster.folder / "bin" / "sbcast"
    program.parent.mkdir()
    program.write_text(SBCAST.format(folder=cluster.folder))
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    cluster.count = 1
    return cluster.folder / "sbcast.asked"


@pytest.mark.parametrize("single", [True, False])
def test_staging_sends_a_single_file_or_archive_with_sbcast(
    cluster: Cluster, sbcast: Path, capsys: pytest.CaptureFixture[str], single: bool
) -> None:
    source = cluster.data / "1.bin" if single else cluster.data
    to = cluster.disk(0) / "data"
    assert cluster.stage(f"{source}:{to}:method=sbcast,name=data") == 0
    sent = source if single else cluster.run / "staged/0/data.tar"
    assert sbcast.read_text() == f"--force {sent} {to.parent}/.data.dtslurm-sent\n"
    assert files.tree(str(to)) == files.tree(str(source))
    assert not (to.parent / ".data.dtslurm-sent").exists()
    assert "by sbcast" in capsys.readouterr().out
    assert source.exists()


def test_staging_reports_a_missing_sbcast(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster.stage(f"{cluster.data}:$DISK/data:method=sbcast") == 0
    assert f"dtslurm: {cluster.data}: sbcast is missing" in capsys.readouterr().out


def test_staging_copies_files_when_sbcast_fails(
    cluster: Cluster, sbcast: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cluster.folder / "sbcast.refuses").touch()
    assert cluster.stage(f"{cluster.data}:{cluster.disk(0)}/data:method=sbcast") == 0
    out = capsys.readouterr().out
    assert "sbcast failed: sbcast: error: no room" in out
    assert "on 1 of 1 nodes by copy" in out


def test_sbcast_is_not_used_for_a_part_of_the_job(
    cluster: Cluster, sbcast: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert cluster.stage(f"{cluster.data}:{cluster.disk(0)}/data:method=sbcast") == 0
    assert not sbcast.exists()
    assert "these nodes and shares; method=copy is used" in capsys.readouterr().out


@pytest.mark.parametrize(("free", "method"), [(9213, "pack"), (9212, "copy")])
def test_staging_packs_only_where_the_archive_fits(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free: int,
    method: str,
) -> None:
    real = os.statvfs

    def statvfs(path: str) -> object:
        is_shared = path.startswith(str(cluster.run))
        return SimpleNamespace(f_bavail=free, f_frsize=1) if is_shared else real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert cluster.stage(f"{cluster.data}:$DISK/data:method=pack") == 0
    assert f"on 2 of 2 nodes by {method}, " in capsys.readouterr().out


def test_staging_reports_the_method_and_the_size_of_each_item(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    one = cluster.data / "1.bin"
    assert cluster.stage(f"{cluster.data}:$DISK/data:method=pack", f"{one}:$DISK/one:name=one") == 0
    out = capsys.readouterr().out
    assert f"staged {cluster.data} to {cluster.disk(0)}/data on 2 of 2 nodes by pack, 7.8 KiB in all" in out
    assert f"staged {one} to {cluster.disk(0)}/one on 2 of 2 nodes by copy, 2.0 KiB in all" in out
    assert [item["bytes"] for item in cluster.events("staged")] == [8002 + 2000]


@pytest.mark.parametrize(
    ("srun", "late_s", "is_in_time"),
    [("true", 29, True), ("true", 31, False), ("false", 4, True), ("false", 6, False)],
)
def test_answers_that_the_file_system_shows_late_are_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, srun: str, late_s: float, is_in_time: bool
) -> None:
    clock = SimpleNamespace(now=0.0)

    def passes(seconds: float) -> None:
        clock.now += seconds
        for number, shown_at in enumerate([0, late_s]):
            if clock.now >= shown_at:
                (tmp_path / f"bring-{number}.json").write_text(f'{{"node": "n{number}"}}')

    own = SimpleNamespace(monotonic=lambda: clock.now, sleep=passes)
    monkeypatch.setattr(staging_main, "time", own)
    (tmp_path / "bring-1.json").write_text('{"node": "of an earlier attempt"}')
    first, second = staging_main.ask([srun], "bring", str(tmp_path), 2)
    assert first == {"node": "n0"}
    assert second["node"] == ("n1" if is_in_time else "node number 1")
    assert ("failed" in second) is not is_in_time


# ---- What cannot be


def test_staging_reports_a_problem_of_all_nodes_once(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    (cluster.folder / "mine").write_text("thesis")
    assert cluster.stage(f"{cluster.data}:{cluster.folder}/mine") == staging_main.FAILED
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "dtslurm: nothing was copied"
    assert out[1].startswith(
        f"dtslurm: staging failed: on all 2 nodes, for example n1: {cluster.folder}/mine already exists"
    )
    assert len(out) == 2
    [result] = cluster.events("staging_failed")
    assert len(result["problems"]) == 1


def test_staging_reports_the_node_of_a_single_problem(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    (cluster.disk(1) / "data").write_text("thesis")
    assert cluster.stage(f"{cluster.data}:$DISK/data") == staging_main.FAILED
    out = capsys.readouterr().out
    assert f"staging failed: n2: {cluster.disk(1)}/data already exists" in out
    assert "all 2 nodes" not in out
    assert not (cluster.disk(0) / "data").exists()


def test_staging_reports_a_variable_that_a_node_lacks(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.stage(f"{cluster.data}:$NOWHERE/data") == staging_main.FAILED
    assert "n1: $NOWHERE/data: $NOWHERE is not set there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("look", "n2 ended without an error message before it had checked its disk"),
        (
            "bring",
            "n2 ended without an error message while it copied the data; its incomplete copy is not used",
        ),
    ],
)
def test_staging_names_a_node_that_dies(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], verb: str, words: str
) -> None:
    cluster.silent.add((verb, 1))
    assert cluster.stage(f"{cluster.data}:$DISK/data") == staging_main.FAILED
    out = capsys.readouterr().out
    assert words.replace("n2", "node number 1" if verb == "look" else "n2") in out


def test_staging_reports_a_source_that_changes_during_the_copy(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cluster.data / "1.bin"

    def change() -> None:
        answer = path.stat()
        path.write_bytes(b"y" * answer.st_size)
        os.utime(path, ns=(answer.st_atime_ns, answer.st_mtime_ns))  # as some programs do

    cluster.before["bring", 1] = change
    assert cluster.stage(f"{cluster.data}:$DISK/data") == staging_main.FAILED
    assert "staging failed: data was read differently on n" in capsys.readouterr().out


def test_staging_reports_the_copy_error_of_a_node(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def remove() -> None:
        (cluster.data / "1.bin").unlink()

    cluster.before["bring", 0] = remove
    assert cluster.stage(f"{cluster.data}:$DISK/data") == staging_main.FAILED
    out = capsys.readouterr().out
    assert f"staging failed: n1: {cluster.data}/1.bin: No such file or directory" in out


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("{data}/none:$DISK/data", "{data}/none cannot be read on n1: No such file"),
        ("{data}/empty:$DISK/data", "there are no files in {data}/empty"),
        ("{data}:$DISK/data:method=unpack", "{data} is a folder; method=unpack is for one archive"),
        ("{data}/deep:$DISK/data:shards=node", "{data}/deep has 1 files, too few for 2 nodes"),
    ],
)
def test_staging_reports_an_invalid_source_before_a_node_runs(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    item: str,
    words: str,
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    (cluster.data / "empty").mkdir()
    cluster.before["look", 0] = lambda: pytest.fail("a node was asked")
    assert cluster.stage(item.format(data=cluster.data)) == staging_main.FAILED
    assert f"staging failed: {words.format(data=cluster.data)}" in capsys.readouterr().out


@pytest.mark.parametrize(("left", "said"), [(300, True), (7200, False)])
def test_staging_advises_more_time_near_the_time_limit(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    left: int,
    said: bool,
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left))
    assert cluster.stage(f"{cluster.data}/none:$DISK/data") == staging_main.FAILED
    assert ("request more --time, or stage less data" in capsys.readouterr().out) == said
    assert cluster.stage(f"{cluster.data}:$DISK/data") == 0
    assert "of the time limit are left" in capsys.readouterr().out
