"""The parts of staging that need only one process."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtslurm import assets
from dtslurm.worker import artifacts
from dtslurm.worker.staging import copying, files, node, results
from dtslurm.worker.staging import main as staging_main
from dtslurm.worker.staging.request import Item, choose, expand, parse, shard
from dtslurm.worker.supervisor import slurm
from tests.conftest import skip_or_fail
from tests.lab.software import Software

PROGRAMS = [*sorted(assets.worker("staging").glob("*.py")), assets.worker("artifacts.py")]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_staging_programs_parse_as_python_3_6(path: Path) -> None:
    ast.parse(path.read_text(), str(path), feature_version=(3, 6))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("DTSLURM_RUN_DIR", str(folder))
    monkeypatch.setenv("DTSLURM_ATTEMPT", "0")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    for number in range(5):
        (folder / f"{number}.bin").write_bytes(bytes([number]) * 5000)
    (folder / "deep" / "-a 'name'.txt").write_text("x")
    (folder / "deep" / "up").symlink_to(folder)  # in a circle
    (folder / "link").symlink_to(folder / "0.bin")
    return folder


def bring(item: Item, method: str = "copy", packed: dict[str, str] | None = None) -> dict[str, object]:
    return node.bring(item, files.tree(item.source), method, packed or {}, 1, dict(os.environ))


# ---- What is written


def test_stage_item_defaults_are_derived_from_its_source() -> None:
    assert parse("/data/it-2.tar.gz", "/local/me") == Item(
        "/data/it-2.tar.gz", "/local/me/it-2.tar.gz", "it_2"
    )
    assert parse("/data/x.tar:$TMPDIR/:method=unpack").to == "$TMPDIR/x"
    item = parse("/data/x/:${TMPDIR}/y:shards=rank,name=Data")
    assert item == Item("/data/x", "${TMPDIR}/y", "data", "auto", "rank")
    assert item.variable == "DTSLURM_STAGED_DATA"
    assert parse(item.text) == item
    assert parse("$TMPDIR/out", is_stage_out=True).to == "out"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("data:/local/x", "absolute path of the source"),
        ("/data", "SRC:DST"),
        ("/data:local/x", "begins with /"),
        ("/data:/local/$(rm -rf x)", "begins with /"),
        ("/data:/local/../x", "folder of its own"),
        ("/data:${TMPDIR}", "folder of its own"),
        ("/data:/x:shards=gpu", "node, rank"),
        ("/data:/x:fast", "not one of"),
        ("/data:/x:name=1", "a name"),
        ("/d.tar:/x:shards=node,method=unpack", "no shards"),
    ],
)
def test_invalid_stage_items_are_refused_with_the_reason(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse(text)


def test_variables_expand_to_absolute_paths_with_the_node_environment() -> None:
    assert expand("$A/${B}x", {"A": "/a", "B": "b"}) == "/a/bx"
    with pytest.raises(ValueError, match=r"\$B is not set"):
        expand("/$B", {})
    with pytest.raises(ValueError, match="is not an absolute path there"):
        expand("$A", {"A": "a"})


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60), st.integers(1, 12))
def test_shards_contain_each_file_once_in_even_counts(sizes: list[int], shares: int) -> None:
    hands = shard(sizes, shares)
    assert sorted(index for hand in hands for index in hand) == list(range(len(sizes)))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    weights = [sum(sizes[index] for index in hand) for hand in hands]
    if len(sizes) % shares == 0 and len(set(sizes)) == 1:
        assert len(set(weights)) == 1


def test_staging_method_depends_on_size_and_file_count() -> None:
    auto = parse("/data:/x")
    assert choose(auto, 20_000, 2 << 30, 4, True, True) == "pack"
    assert choose(auto, 20_000, 2 << 30, 1, True, True) == "copy"
    assert choose(auto, 100, 2 << 30, 64, True, True) == "copy"
    assert choose(auto, 1, 2 << 30, 64, True, True) == "sbcast"
    assert choose(auto, 1, 2 << 30, 64, True, False) == "copy"
    assert choose(parse("/data:/x:method=sbcast"), 5000, 1, 4, False, True) == "pack"
    assert choose(parse("/data:/x:method=rsync"), 5000, 1, 4, False, True) == "rsync"


# ---- One node


@pytest.mark.parametrize("method", ["copy", "pack", "rsync"])
def test_staged_copy_equals_its_source_and_is_reused(
    run: Path, data: Path, tmp_path: Path, method: str
) -> None:
    if method == "rsync" and shutil.which("rsync") is None:
        pytest.skip("there is no rsync")
    packed = {"path": str(tmp_path / "p.tar"), "sha256": ""}
    if method == "pack":
        packed["sha256"] = copying.pack(str(data), files.tree(str(data)), packed["path"])
    item = parse(f"{data}:{tmp_path}/local/data")
    done = bring(item, method, packed)
    assert done["kept"] is False
    copy = tmp_path / "local" / "data"
    assert files.tree(str(copy)) == files.tree(str(data))
    assert (copy / "link").read_bytes() == bytes(5000)
    assert (copy / "deep" / "-a 'name'.txt").read_text() == "x"
    assert bring(item, method, packed)["kept"] is True
    (copy / "3.bin").write_bytes(b"short")  # what is not as it was staged is staged anew
    assert bring(item, method, packed)["kept"] is False
    assert (copy / "3.bin").stat().st_size == 5000
    last = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()][-1]
    assert (last["event"], last["node"], last["done"]) == ("staging", "n1", True)
    assert last["bytes"] == last["total"] == 30_001


def test_packed_data_with_a_wrong_checksum_is_refused(run: Path, data: Path, tmp_path: Path) -> None:
    archive = tmp_path / "p.tar"
    copying.pack(str(data), files.tree(str(data)), str(archive))
    item = parse(f"{data}:{tmp_path}/local")
    with pytest.raises(files.Failed, match=r"SHA-256 of .* differs from that of the packed data"):
        bring(item, "pack", {"path": str(archive), "sha256": "0" * 64})
    assert not (tmp_path / "local").exists()


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_tar_archive_is_unpacked_and_reused(run: Path, data: Path, tmp_path: Path, ending: str) -> None:
    archive = tmp_path / f"a.{ending}"
    with tarfile.open(archive, "w:gz" if ending == "tar.gz" else "w") as tar:
        tar.add(data / "1.bin", "one/1.bin")
    item = parse(f"{archive}:{tmp_path}/local:method=unpack")
    bring(item, "unpack")
    assert (tmp_path / "local/one/1.bin").read_bytes() == bytes([1]) * 5000
    assert bring(item, "unpack")["kept"] is True
    (tmp_path / "local/one/1.bin").unlink()
    assert bring(item, "unpack")["kept"] is False
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    shutil.rmtree(tmp_path / "local")
    with pytest.raises(files.Failed, match="tar could not unpack"):
        bring(item, "unpack")
    assert not (tmp_path / "local").exists()


@pytest.fixture
def squashfs(data: Path, tmp_path: Path, slurm_software: Software, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squashfs file of three files, one of them of zeros: it takes much less than they do."""
    programs = Path(slurm_software.which("mksquashfs")).parent
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    source = tmp_path / "squash"
    (source / "deep").mkdir(parents=True)
    shutil.copy(data / "1.bin", source / "deep")
    shutil.copy(data / "deep" / "-a 'name'.txt", source)
    (source / "zeros").write_bytes(bytes(9 << 20))
    archive = tmp_path / "images.sqsh"
    argv = ["mksquashfs", str(source), str(archive), "-quiet", "-no-progress"]
    subprocess.run(argv, check=True, capture_output=True)
    return archive


def test_squashfs_file_is_unpacked_and_reused(run: Path, squashfs: Path, tmp_path: Path) -> None:
    item = parse(f"{squashfs}:{tmp_path}/local:method=unpack")
    bring(item, "unpack")
    assert (tmp_path / "local/deep/1.bin").read_bytes() == bytes([1]) * 5000
    assert (tmp_path / "local/-a 'name'.txt").read_text() == "x"
    assert (tmp_path / "local/zeros").stat().st_size == 9 << 20
    assert bring(item, "unpack")["kept"] is True
    (tmp_path / "local/zeros").unlink()
    assert bring(item, "unpack")["kept"] is False
    shutil.rmtree(tmp_path / "local")
    squashfs.write_bytes(squashfs.read_bytes()[:150])
    with pytest.raises(files.Failed, match="unsquashfs ended with"):
        bring(item, "unpack")
    assert not (tmp_path / "local").exists()


def test_space_for_a_squashfs_file_is_its_unpacked_size(
    run: Path, squashfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = parse(f"{squashfs}:{tmp_path}/local:method=unpack")
    asked = [(item, files.tree(str(squashfs)), "unpack")]
    assert squashfs.stat().st_size < 1 << 20
    assert node.needed(*asked[0]) == (9 << 20) + 8192 + 4096
    assert node.look(asked, {})["problems"] == []
    real = os.statvfs(tmp_path)
    few = (5 << 20) // real.f_frsize
    values = [few if index in (3, 4) else value for index, value in enumerate(real)]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    assert "9.0 MiB do not fit on" in node.look(asked, {})["problems"][0]


@pytest.mark.parametrize(
    ("ending", "method", "tool"),
    [("sqsh", "unpack", "unsquashfs"), ("tar", "unpack", "tar"), ("x", "rsync", "rsync")],
)
def test_missing_program_is_reported_before_the_copy(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, method: str, tool: str
) -> None:
    source = tmp_path / f"a.{ending}"
    source.write_bytes(b"hsqs" if ending == "sqsh" else b"text")
    real = shutil.which
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/tar" if name != tool else real(name))
    item = parse(f"{source}:{tmp_path}/local:method={method}")
    [problem] = node.look([(item, files.tree(str(source)), method)], {})["problems"]
    assert problem.startswith("n1: ")
    assert tool in problem


def test_existing_unstaged_directory_is_not_changed(run: Path, data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    item = parse(f"{data}:{mine}")
    result = node.look([(item, files.tree(str(data)), "copy")], {})
    assert "was not staged" in result["problems"][0]
    with pytest.raises(files.Failed, match="was not staged"):
        bring(item)
    assert (mine / "thesis.tex").exists()


def test_insufficient_space_is_reported_before_the_copy(run: Path, tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 43)  # of holes
    item = parse(f"{huge}:{tmp_path}/local/huge")
    result = node.look([(item, files.tree(str(huge)), "copy")], {})
    assert "8.0 TiB do not fit on" in result["problems"][0]
    assert not (tmp_path / "local").exists()


def test_shared_file_systems_are_not_local_disks() -> None:
    assert files.is_shared("nfs4")
    assert files.is_shared("lustre")
    assert not files.is_shared("xfs")
    assert not files.is_shared("tmpfs")


_BRING = """
import os, sys
sys.path.insert(0, sys.argv[1])
from worker.staging import files, node
from worker.staging.request import parse
item = parse(sys.argv[2])
node.bring(item, files.tree(item.source), "copy", {}, 1, dict(os.environ))
"""


def test_killed_copy_leaves_only_a_partial_directory_that_the_next_copy_replaces(
    run: Path, tmp_path: Path
) -> None:
    source = tmp_path / "data"
    source.mkdir()
    (source / "a.bin").write_bytes(b"a" * 1000)
    with (source / "big.bin").open("wb") as file:
        file.truncate(1 << 36)  # takes minutes to write
    local = tmp_path / "local"
    package = str(assets.worker("staging").parents[1])
    argv = [sys.executable, "-c", _BRING, package, f"{source}:{local}/data"]
    with subprocess.Popen(argv) as process:
        draft, end = local / ".data.dtslurm-part", time.monotonic() + 120
        while not (draft / "big.bin").exists() or not (draft / "a.bin").exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (local / "data").exists()
    assert (draft / "big.bin").stat().st_size < 1 << 36
    with (source / "big.bin").open("wb") as file:
        file.truncate(3000)
    bring(parse(f"{source}:{local}/data"))
    assert files.tree(str(local / "data")) == files.tree(str(source))
    assert not draft.exists()


def test_silent_nodes_are_awaited_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: passed[0], sleep=lambda seconds: passed.append(passed.pop() + seconds)
    )
    monkeypatch.setattr(staging_main, "time", clock)
    with pytest.raises(files.Failed, match="no node could be checked: srun ended with exit code 1"):
        staging_main.ask(["false"], "look", str(tmp_path), 1000)
    assert passed[0] < 60


def test_failed_pack_leaves_no_archive(run: Path, data: Path, tmp_path: Path) -> None:
    listed = files.tree(str(data))
    (data / "3.bin").unlink()
    with pytest.raises(files.Failed, match="tar could not pack"):
        copying.pack(str(data), listed, str(tmp_path / "data.tar"))
    assert not list(tmp_path.glob("data.tar*"))


def test_staging_reports_a_disk_error_without_a_traceback(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "staged").write_text("in the way")
    monkeypatch.setattr(sys, "argv", ["staging", "in", "--stage", f"{tmp_path}:/tmp/x", "--", "false"])
    with pytest.raises(SystemExit) as ended:
        staging_main.main()
    assert ended.value.code == staging_main.FAILED
    assert f"staging failed: {run}/staged" in capsys.readouterr().out


# ---- Results


def test_results_are_copied_completely_and_registered(run: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    (local / "sub").mkdir(parents=True)
    (local / "sub" / "a.txt").write_text("one")
    item = parse(f"{local}:out", is_stage_out=True)
    assert results.bring_back(item, final=False)["bytes"] == 3
    assert json.loads((run / "out/node-0.json").read_text())["final"] is False
    artifacts.register_results(str(run), str(run / "out"))
    assert artifacts.read_entries(str(run)) == {}  # it is not all yet
    before = (run / "out/node-0/sub/a.txt").stat().st_ino
    (local / "b.txt").write_text("four")
    assert results.bring_back(item, final=True)["bytes"] == 4
    assert (run / "out/node-0/sub/a.txt").stat().st_ino == before
    document = json.loads((run / "out/node-0.json").read_text())
    assert (document["final"], document["complete"], sorted(document["files"])) == (
        True,
        True,
        ["b.txt", "sub/a.txt"],
    )
    artifacts.register_results(str(run), str(run / "out"))
    entry = artifacts.read_entries(str(run))["out/node-0"]
    assert (entry["bytes"], entry["files"]) == (7, 2)
    assert entry["sha256"] == artifacts.measure(str(run / "out/node-0"), checksum=True)["sha256"]
    assert not list((run / "out").rglob("*dtslurm-part"))


def test_late_early_copy_does_not_overwrite_the_final_results(run: Path, tmp_path: Path) -> None:
    source = tmp_path / "out"
    source.mkdir()
    (source / "a.txt").write_text("all of it")
    item = parse(f"{source}:results", is_stage_out=True)
    results.bring_back(item, final=True)
    record = run / "results" / "node-0.json"
    text = record.read_text()
    assert json.loads(text)["final"] is True
    (source / "a.txt").write_text("something of afterwards")
    results.bring_back(item, final=False)
    assert record.read_text() == text


def test_vanished_result_file_does_not_stop_the_other_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "out"
    source.mkdir()
    for name in ("a.tmp", "b.txt", "c.tmp"):
        (source / name).write_text(name)
    real = files.tree

    def listed(path: str) -> list[files.Listed]:
        outcome = real(path)
        (source / "a.tmp").unlink()  # as a program that renames what it has written
        return outcome

    monkeypatch.setattr(results, "tree", listed)
    result = results.bring_back(parse(f"{source}:results", is_stage_out=True), final=True)
    assert (result["absent"], result["files"]) == (False, 2)
    record = json.loads((run / "results" / "node-0.json").read_text())
    assert (record["complete"], sorted(record["files"])) == (True, ["b.txt", "c.tmp"])


def test_file_listing_skips_vanished_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    real = os.scandir

    def scandir(path: str) -> Any:
        entries = contextlib.nullcontext(list(real(path)))
        (tmp_path / "a").unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(os, "scandir", scandir)
    assert [item[0] for item in files.tree(str(tmp_path))] == ["b"]


def test_node_without_results_is_not_a_failure(run: Path, tmp_path: Path) -> None:
    assert results.bring_back(parse(f"{tmp_path}/none:out", is_stage_out=True), final=True)["absent"] is True


# ---- Decisions


@pytest.mark.parametrize(
    ("options", "count", "size", "nodes", "same_place", "sbcast", "method"),
    [
        ("", 1000, 1000 * (4 << 20) - 1, 2, True, True, "pack"),
        ("", 1000, 1000 * (4 << 20), 2, True, True, "copy"),
        ("", 999, 1, 2, True, True, "copy"),
        ("", 1000, 1, 1, True, True, "copy"),
        (":shards=node", 1000, 1, 2, True, True, "copy"),
        ("", 1, 64 << 20, 16, True, True, "sbcast"),
        ("", 1, (64 << 20) - 1, 16, True, True, "copy"),
        ("", 1, 64 << 20, 15, True, True, "copy"),
        ("", 2, 64 << 20, 16, True, True, "copy"),
        ("", 1, 64 << 20, 16, False, True, "copy"),
        ("", 0, 0, 16, True, True, "copy"),
        (":method=sbcast", 1, 1, 1, True, True, "sbcast"),
        (":method=sbcast", 999, 1, 2, True, False, "copy"),
        (":method=sbcast", 1000, 1, 2, False, True, "pack"),
        (":method=sbcast,shards=rank", 1, 1, 2, True, True, "copy"),
        (":method=pack", 1, 1, 1, True, True, "pack"),
    ],
)  # fmt: skip
def test_method_is_chosen_at_exact_limits(
    options: str, count: int, size: int, nodes: int, same_place: bool, sbcast: bool, method: str
) -> None:
    assert choose(parse(f"/data:/x{options}"), count, size, nodes, same_place, sbcast) == method


@pytest.mark.parametrize(
    ("sizes", "shares", "expected"),
    [
        ([5, 1, 4, 2], 2, [[0, 1], [2, 3]]),
        ([9, 1, 1, 1, 1], 2, [[0, 4], [1, 2, 3]]),
        ([3, 3, 3], 2, [[0, 2], [1]]),
        ([7], 3, [[0], [], []]),
        ([], 2, [[], []]),
        ([1, 2, 3, 4, 5, 6], 3, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_shards_balance_the_bytes(sizes: list[int], shares: int, expected: list[list[int]]) -> None:
    assert shard(sizes, shares) == expected


@pytest.mark.parametrize(
    ("method", "source", "entries", "squashed", "size"),
    [
        ("copy", "/d", [("a", 1), ("b", 2)], 0, 1 << 13),
        ("sbcast", "/d", [("", 5000)], 0, 1 << 13),
        ("sbcast", "/d", [("a", 5000)], 0, 1 << 14),
        ("sbcast", "/d", [("a", 1), ("b", 2)], 0, 1 << 14),
        ("unpack", "/d.tar", [("", 5000)], 0, 1 << 13),
        ("unpack", "/d.tar.gz", [("", 5000)], 0, 1 << 14),
        ("unpack", "/d.sqsh", [("", 5000)], 77, 77),
    ],
)
def test_needed_space_depends_on_the_method(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    source: str,
    entries: list[tuple[str, int]],
    squashed: int,
    size: int,
) -> None:
    monkeypatch.setattr(copying, "squashed", lambda _source: squashed)
    listed = [(name, length, 0) for name, length in entries]
    assert node.needed(parse(source + ":/x"), listed, method) == size


def test_progress_is_reported_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    events: list[tuple[int, bool]] = []
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(files, "event", lambda _name, **more: events.append((more["bytes"], more["done"])))
    progress = files.Progress("n1", "/data", 99)
    for clock.now in (100.0, 101.9, 102.0, 103.9, 104.0, 105.9, 106.5):
        progress.add(10)
    assert events == [(30, False), (50, False), (70, False)]
    assert [files.Progress("n1", "/data", 99, nodes).every for nodes in (1, 40, 41, 1000)] == [2, 2, 2.05, 50]


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0:00:00"), (59.9, "0:00:59"), (3661, "1:01:01"), (36_000 + 600, "10:10:00")]
)
def test_duration_is_shown_in_hours(seconds: float, text: str) -> None:
    assert files.clock(seconds) == text


@pytest.mark.parametrize(
    ("text", "mtime", "is_reused"), [("same", 500, True), ("same", 501, False), ("longer", 500, False)]
)
def test_finished_file_of_a_draft_is_reused(tmp_path: Path, text: str, mtime: int, is_reused: bool) -> None:
    source, draft = tmp_path / "source", tmp_path / "draft"
    source.write_text("SAME")
    draft.write_text(text)
    os.utime(source, (500, 500))
    os.utime(draft, (mtime, mtime))
    added: list[int] = []
    progress: Any = SimpleNamespace(add=added.append)
    copying._copy_file(str(source), str(draft), ("", 4, 500), progress)
    assert draft.read_text() == ("same" if is_reused else "SAME")
    assert (added, int(draft.stat().st_mtime)) == ([4], 500)


@pytest.mark.parametrize(("size", "mtime"), [(0, 500), (3, 500), (5, 500), (4, 499)])
def test_file_that_changes_during_its_copy_is_refused(tmp_path: Path, size: int, mtime: int) -> None:
    source = tmp_path / "source"
    source.write_text("SAME")
    os.utime(source, (500, 500))
    progress: Any = SimpleNamespace(add=lambda _size: None)
    with pytest.raises(files.Failed, match="changed while it was copied"):
        copying._copy_file(str(source), str(tmp_path / "draft"), ("", size, mtime), progress)


@pytest.mark.parametrize(
    ("draft_is_folder", "entries", "method", "is_kept"),
    [
        (True, [("a", 1)], "copy", True),
        (True, [("", 1)], "copy", False),
        (False, [("", 1)], "copy", True),
        (False, [("a", 1)], "copy", False),
        (True, [("", 1)], "unpack", True),
        (True, [], "copy", True),
    ],
)
def test_draft_of_another_kind_is_removed(
    tmp_path: Path, draft_is_folder: bool, entries: list[tuple[str, int]], method: str, is_kept: bool
) -> None:
    draft = tmp_path / "draft"
    if draft_is_folder:
        draft.mkdir()
    else:
        draft.touch()
    item_paths: Any = SimpleNamespace(draft=str(draft), to=str(tmp_path / "none"))
    node._make_room(item_paths, [(name, size, 0) for name, size in entries], method)
    assert draft.exists() is is_kept


@pytest.mark.parametrize(("free", "is_kept"), [(-1, False), (1, True)])
def test_outdated_copy_stays_while_both_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, is_kept: bool
) -> None:
    copy = tmp_path / "copy"
    copy.touch()
    listed = [("", 100 << 20, 0)]
    item = parse("/data:/x")
    blocks = int(node.needed(item, listed, "copy") * node.HEADROOM) // 1024 + free
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=blocks, f_frsize=1024))
    item_paths: Any = SimpleNamespace(draft=f"{copy}-draft", to=str(copy), folder=str(tmp_path), item=item)
    node._make_room(item_paths, listed, "copy")
    assert copy.exists() is is_kept


@pytest.mark.parametrize(
    ("mode", "staged"), [(0o777, 0o755), (0o466, 0o644), (0o640, 0o640), (0o500, 0o700), (0o664, 0o644)]
)
def test_staged_files_are_writable_by_their_user_only(
    run: Path, tmp_path: Path, mode: int, staged: int
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "f").write_text("x")
    (source / "f").chmod(mode)
    bring(parse(f"{source}:{tmp_path}/local"))
    assert (tmp_path / "local/f").stat().st_mode & 0o7777 == staged
    assert (tmp_path / "local").stat().st_mode & 0o022 == 0
    assert (tmp_path / "local").stat().st_mode & 0o700 == 0o700


@pytest.mark.parametrize("path", ["local", "local.dtslurm.json"])
def test_copy_that_another_user_may_change_is_staged_anew(
    run: Path, data: Path, tmp_path: Path, path: str
) -> None:
    item = parse(f"{data}:{tmp_path}/local")
    bring(item)
    assert bring(item)["kept"] is True
    (tmp_path / path).chmod((tmp_path / path).stat().st_mode | 0o022)
    assert bring(item)["kept"] is False
    assert (tmp_path / path).stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("checksum", ["0" * 64, "f" * 64])
def test_archive_with_another_checksum_is_refused(data: Path, tmp_path: Path, checksum: str) -> None:
    archive = str(tmp_path / "p.tar")
    digest = copying.pack(str(data), files.tree(str(data)), archive)
    counted: list[int] = []
    progress: Any = SimpleNamespace(add=counted.append)
    assert copying.unpack(archive, str(tmp_path / "draft"), progress, digest) == digest
    assert sum(counted) == (tmp_path / "p.tar").stat().st_size
    with pytest.raises(files.Failed, match=r"^the SHA-256 of .* differs from that of the packed data$"):
        copying.unpack(archive, str(tmp_path / "draft"), progress, checksum)


def test_unpacked_size_is_that_of_the_listed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = (
        b"Parallel unsquashfs\n"
        b"drwxr-xr-x 0/0    50 2025-01-31 12:00 squashfs-root\n"
        b"-rw-r--r-- 0/0  5000 2025-01-31 12:00 squashfs-root/a b\n"
        b"-rw-r--r-- 0/0  4096 2025-01-31 12:00 squashfs-root/c\n"
        b"-rw-r--r-- 0/0     0 2025-01-31 12:00 squashfs-root/d\n"
        b"-rw-r--r-- 0/0     x 2025-01-31 12:00 squashfs-root/e\n-rw-r--r-- 0/0 7\n"
    )
    result = SimpleNamespace(returncode=0, stdout=listing, stderr=b"\n" + b"e" * 400 + b"\n")
    monkeypatch.setattr(subprocess, "run", lambda _words, **_more: result)
    archive = tmp_path / "a.sqsh"
    archive.write_bytes(b"hsqs...")
    assert copying.squashed(str(archive)) == 8192 + 4096
    result.returncode = 1
    with pytest.raises(files.Failed, match=f"^{archive} cannot be read: {'e' * 300}$"):
        copying.squashed(str(archive))
    archive.write_bytes(b"other")
    assert copying.squashed(str(archive)) == 0


def test_items_are_written_as_they_are_parsed() -> None:
    for text in ("/d:/x:name=a", "/d:/x:name=a,method=copy", "/d:/x:name=a,method=unpack",
                 "/d:/x:name=a,method=rsync,shards=node"):  # fmt: skip
        assert parse(text).text == text


@pytest.mark.parametrize("is_single_file", [True, False])
def test_data_that_sbcast_has_sent_becomes_the_copy(
    run: Path, data: Path, tmp_path: Path, is_single_file: bool
) -> None:
    source = data / "3.bin" if is_single_file else data
    item = parse(f"{source}:{tmp_path}/local/x:name=x")
    sent = Path(node.ItemPaths(item, {}).sent)
    sent.parent.mkdir()
    if is_single_file:
        shutil.copyfile(source, sent)
        digest = artifacts.digest_of(str(sent))
    else:
        digest = copying.pack(str(data), files.tree(str(data)), str(sent))
    assert bring(item, "sbcast", {"sha256": digest})["kept"] is False
    assert files.tree(f"{tmp_path}/local/x") == files.tree(str(source))
    assert sorted(path.name for path in sent.parent.iterdir() if "lock" not in path.name) == [
        "x",
        "x.dtslurm.json",
    ]


# ---- What a node says and checks


def test_a_node_without_a_name_of_slurm_has_the_short_name_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "n7.cluster.example")
    assert node.name() == "n7"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        ((1 << 20) - 1, "1024.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes_are_shown_with_a_unit(size: int, text: str) -> None:
    assert files.human(size) == text


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [
        ("lustre", True),
        ("fuse.glusterfs", True),
        ("fuse.sshfs", False),
        ("ext4", False),
        ("xnfs", False),
        ("", False),
    ],
)
def test_file_systems_of_all_nodes_are_known(kind: str, is_shared: bool) -> None:
    assert files.is_shared(kind) is is_shared


def test_the_file_system_of_a_path_is_that_of_its_innermost_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    lines = ["a / xfs rw", f"b {tmp_path}/my\\040disk ext4 rw", f"c {tmp_path} nfs4 rw", "d /mnt btrfs rw"]
    mounts.write_text("".join(f"{line} 0 0\n" for line in lines))
    monkeypatch.setattr(files, "open", lambda _path: mounts.open(), raising=False)
    paths = [f"{tmp_path}/my disk", f"{tmp_path}/my disk/x", f"{tmp_path}/my disks", "/mntx", "/mnt/x"]
    assert [files.file_system(path) for path in paths] == ["ext4", "ext4", "nfs4", "xfs", "btrfs"]
    mounts.write_text("broken\n")
    assert files.file_system("/mnt") == ""
    mounts.unlink()
    assert files.file_system("/mnt") == ""


def test_an_event_that_cannot_be_written_is_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTSLURM_ATTEMPT", "none")
    files.event("first", value=1)
    record = json.loads((run / "events.jsonl").read_text())
    assert (record["event"], record["attempt"], record["value"]) == ("first", 0, 1)
    monkeypatch.setenv("DTSLURM_RUN_DIR", f"{run}/none")
    files.event("second")
    assert not (run / "none").exists()


def test_all_bytes_are_written_by_partial_writes() -> None:
    written: list[bytes] = []

    def write(view: memoryview) -> int:
        written.append(bytes(view[:3]))
        return len(written[-1])

    copying.write_all(SimpleNamespace(write=write), b"12345678")
    assert written == [b"123", b"456", b"78"]


FITS = 53_248 * 1.01  # bytes on a disk that the data of these tests needs


@pytest.mark.parametrize(
    ("copies", "draft", "free", "fits"),
    [
        (1, 0, int(FITS) + 1, True),
        (1, 0, int(FITS), False),
        (2, 0, int(2 * FITS) + 1, True),
        (2, 0, int(2 * FITS), False),
        (1, 5000, int(FITS) + 1 - 8192, True),
        (1, 5000, int(FITS) - 8192, False),
    ],
)
def test_the_needs_of_all_items_must_fit_on_a_disk(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    copies: int, draft: int, free: int, fits: bool,
) -> None:  # fmt: skip
    if draft:
        (tmp_path / ".x0.dtslurm-part").write_bytes(bytes(draft))
    status = SimpleNamespace(f_bavail=free, f_frsize=1, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    listed = files.tree(str(data))
    items = [
        (parse(f"{data}:{tmp_path}/x{number}:name=x{number}"), listed, "copy") for number in range(copies)
    ]
    problems = node.look(items, {})["problems"]
    sizes = ["52.0 KiB", "104.0 KiB"][copies - 1]
    expected = (
        f"n1: {sizes} do not fit on {tmp_path}, where {files.human(free + (8192 if draft else 0))} are free"
    )
    assert problems == ([] if fits else [expected])


@pytest.mark.parametrize(("room", "most", "fits"), [(7, 100, True), (6, 100, False), (0, 0, True)])
def test_the_files_of_an_item_must_fit_on_a_disk(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, most: int, fits: bool
) -> None:
    status = SimpleNamespace(f_bavail=1 << 30, f_frsize=4096, f_files=most, f_favail=room)
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    problems = node.look([(parse(f"{data}:{tmp_path}/x"), files.tree(str(data)), "copy")], {})["problems"]
    expected = f"n1: 7 files do not fit on {tmp_path}, which has room for {room} more"
    assert problems == ([] if fits else [expected])


def test_a_problem_of_one_item_does_not_hide_those_of_the_others(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = SimpleNamespace(f_bavail=0, f_frsize=1, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    (tmp_path / "mine").touch()
    archive = tmp_path / "a.sqsh"
    archive.write_bytes(b"hsqs")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError))
    texts = [
        f"{data}:$NOWHERE/x",
        f"{archive}:{tmp_path}/s:method=unpack",
        f"{data}:{tmp_path}/mine",
        f"{data}:{tmp_path}/d",
    ]
    items = [parse(text) for text in texts]
    asked = [
        (item, files.tree(item.source), "unpack" if item.method == "unpack" else "copy") for item in items
    ]
    problems = node.look(asked, {})["problems"]
    words = ["$NOWHERE is not set there", "unsquashfs", "was not staged", "do not fit on"]
    assert [word in problem for word, problem in zip(words, problems, strict=True)] == [True] * 4


def test_space_that_is_reused_is_that_of_the_draft_and_the_outdated_copy(tmp_path: Path) -> None:
    paths = node.ItemPaths(parse(f"/data:{tmp_path}/x"), {})
    assert paths.kept([]) == 0
    Path(paths.to).write_bytes(bytes(5000))
    Path(paths.draft).write_bytes(b"1")
    assert paths.kept([]) == 8192 + 4096
    Path(paths.draft).unlink()
    Path(paths.draft).symlink_to("nowhere")
    assert paths.kept([]) == 8192


# ---- Copies that end early, and other ways to copy


@pytest.mark.parametrize(
    ("number", "is_kept"),
    [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, True), (errno.EPERM, True)],
)
def test_the_draft_of_a_failed_copy_is_kept_unless_the_disk_is_full(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_kept: bool
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, "it failed", "/a/file")

    monkeypatch.setattr(copying, "write_all", fail)
    with pytest.raises(files.Failed, match=r"^/a/file: it failed$"):
        bring(parse(f"{data}:{tmp_path}/local/data"))
    assert (tmp_path / "local/.data.dtslurm-part").exists() is is_kept
    assert not (tmp_path / "local/data").exists()


@pytest.mark.parametrize(
    ("cpus", "count", "workers"), [(1, 20, 2), (None, 20, 2), (3, 20, 6), (64, 20, 8), (64, 3, 3), (64, 0, 1)]
)
def test_a_few_files_are_copied_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int | None, count: int, workers: int
) -> None:
    started: list[int] = []

    def executor(workers: int) -> ThreadPoolExecutor:
        started.append(workers)
        return ThreadPoolExecutor(1)

    futures = SimpleNamespace(ThreadPoolExecutor=executor)
    monkeypatch.setattr(copying, "concurrent", SimpleNamespace(futures=futures))
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(count):
        (source / str(number)).touch()
    progress: Any = SimpleNamespace(add=lambda _size: None)
    listed = files.tree(str(source))
    copying.copy(str(source), str(tmp_path / "draft"), listed, progress)
    assert started == [workers]
    assert not count or files.tree(str(tmp_path / "draft")) == listed


def test_files_of_an_older_draft_do_not_become_part_of_the_copy(
    run: Path, data: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "local/.data.dtslurm-part"
    draft.mkdir(parents=True)
    (draft / "old.bin").touch()
    bring(parse(f"{data}:{tmp_path}/local/data"))
    assert files.tree(f"{tmp_path}/local/data") == files.tree(str(data))


def test_a_copy_that_lacks_files_is_refused(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(_source: str, draft: str, *_: object) -> str:
        Path(draft).mkdir()
        return ""

    monkeypatch.setitem(copying.WAYS, "copy", copy)
    with pytest.raises(files.Failed, match=f"lacks files of {data}$"):
        bring(parse(f"{data}:{tmp_path}/local"))
    assert not (tmp_path / "local").exists()


@pytest.mark.parametrize(("mode", "program"), [("w:bz2", "bzip2"), ("w:xz", "xz"), ("w:gz", "gzip")])
def test_compressed_archives_are_unpacked(tmp_path: Path, mode: Any, program: str) -> None:
    if shutil.which(program) is None:
        skip_or_fail(program)
    (tmp_path / "a.txt").write_text("text")
    archive = tmp_path / "archive"
    with tarfile.open(archive, mode) as tar:
        tar.add(tmp_path / "a.txt", "sub/a.txt")
    added: list[int] = []
    progress: Any = SimpleNamespace(add=added.append)
    digest = copying.unpack(str(archive), str(tmp_path / "draft"), progress)
    assert digest == artifacts.digest_of(str(archive))
    assert (tmp_path / "draft/sub/a.txt").read_text() == "text"
    assert sum(added) == archive.stat().st_size


def test_the_checksum_includes_what_follows_the_end_of_an_archive(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CHUNK", 1 << 16)
    archive = tmp_path / "a.tar"
    copying.pack(str(data), files.tree(str(data)), str(archive))
    with archive.open("ab") as file:
        file.truncate(4 << 20)  # tar ends at its mark, and its pipe with it
    progress: Any = SimpleNamespace(add=lambda _size: None)
    digest = artifacts.digest_of(str(archive))
    assert copying.unpack(str(archive), str(tmp_path / "draft"), progress, digest) == digest
    assert files.tree(str(tmp_path / "draft")) == files.tree(str(data))


RSYNC = """\
#!/bin/sh
echo "$@" >>"{folder}/asked"
cat >"{folder}/names"
[ -e "{folder}/fails" ] && cat "{folder}/fails" >&2 && exit 23
while [ $# -gt 2 ]; do shift; done
case "$1" in */) cp -rp "$1." "$2";; *) cp -p "$1" "$2";; esac
"""


def test_rsync_is_given_the_names_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, draft = tmp_path / "source", tmp_path / "new/draft"
    (source / "deep").mkdir(parents=True)
    (source / "a").write_text("12")
    (source / "deep/b").write_text("3")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    added: list[int] = []
    progress: Any = SimpleNamespace(add=added.append)
    listed = files.tree(str(source))
    with pytest.raises(files.Failed, match=r"^rsync cannot be run: No such file or directory$"):
        copying.rsync(str(source), str(draft), listed, progress)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/rsync").write_text(RSYNC.format(folder=tmp_path))
    (tmp_path / "bin/rsync").chmod(0o700)
    copying.rsync(str(source), str(draft), listed, progress)
    assert files.tree(str(draft)) == listed
    assert (tmp_path / "names").read_bytes() == b"a\0deep/b"
    copying.rsync(str(source / "a"), f"{draft}-a", files.tree(str(source / "a")), progress)
    assert Path(f"{draft}-a").read_text() == "12"
    options = "--times --perms --copy-links --partial --chmod=u+rw,go-w"
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"{options} --from0 --files-from=- {source}/ {draft}/",
        f"{options} {source}/a {draft}-a",
    ]
    assert added == [3, 2]
    (tmp_path / "fails").write_text(f"first {'e' * 300}\n")
    with pytest.raises(files.Failed, match=f"^rsync ended with 23: {'e' * 300}$"):
        copying.rsync(str(source), str(draft), listed, progress)


def test_the_last_words_of_a_failed_tar_are_reported(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = tmp_path / "bin/tar"
    tar.parent.mkdir()
    tar.write_text(f"#!/bin/sh\ncat >/dev/null\necho 'first {'e' * 300}' >&2\nexit 2\n")
    tar.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tar.parent}:/usr/bin:/bin")
    with pytest.raises(files.Failed, match=f"^tar could not pack {data}: {'e' * 300}$"):
        copying.pack(str(data), files.tree(str(data)), str(tmp_path / "a.tar"))
    (tmp_path / "a.tar").write_bytes(b"no archive")
    progress: Any = SimpleNamespace(add=lambda _size: None)
    with pytest.raises(files.Failed, match=f"^tar could not unpack {tmp_path}/a.tar: {'e' * 300}$"):
        copying.unpack(str(tmp_path / "a.tar"), str(tmp_path / "draft"), progress)


@pytest.mark.parametrize(
    ("end_time", "by_scontrol", "remaining_s"),
    [
        ("150", "", 50),
        ("90", "", -10),
        ("", "1970-01-01T00:05:00", 200),
        ("", "Unknown", None),
        ("soon", "", None),
    ],
)
def test_the_remaining_time_is_that_of_the_controllers_clock(
    monkeypatch: pytest.MonkeyPatch, end_time: str, by_scontrol: str, remaining_s: float | None
) -> None:
    measured: list[bool] = []
    monkeypatch.setenv("SLURM_JOB_END_TIME", end_time)
    monkeypatch.setattr(slurm, "measure_clock", lambda: measured.append(True))
    monkeypatch.setattr(slurm, "now", lambda: 100.0 if measured else 0.0)
    monkeypatch.setattr(slurm, "show_job", lambda: {"EndTime": by_scontrol})
    monkeypatch.setattr(slurm, "seconds_of", {"1970-01-01T00:05:00": 300.0}.get)
    assert files.remaining() == remaining_s


def test_a_result_that_is_one_file_keeps_its_name_mode_and_time(run: Path, tmp_path: Path) -> None:
    source = tmp_path / "model.bin"
    source.write_bytes(b"model")
    source.chmod(0o640)
    os.utime(source, (500, 500))
    item = parse(f"{source}:results", is_stage_out=True)
    for expected in (5, 0):
        assert results.bring_back(item, final=True)["bytes"] == expected
    copy = run / "results/node-0/model.bin"
    assert (copy.read_bytes(), copy.stat().st_mode & 0o777, copy.stat().st_mtime) == (b"model", 0o640, 500)
    copy.write_bytes(b"mod")  # as of a disk that lost it
    assert results.bring_back(item, final=True)["bytes"] == 5
    os.utime(source, (501, 501))
    assert results.bring_back(item, final=True)["bytes"] == 5


def test_results_of_the_next_attempt_are_copied_before_its_end(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "out"
    source.mkdir()
    (source / "a.txt").write_text("first")
    (source / ".b.txt.dtslurm-part").write_text("half")
    item = parse(f"{source}:results", is_stage_out=True)
    results.bring_back(item, final=True)
    monkeypatch.setenv("DTSLURM_ATTEMPT", "1")
    (source / "a.txt").write_text("second")
    assert results.bring_back(item, final=False) == {"node": "n1", "files": 1, "bytes": 6, "absent": False}
    assert (run / "results/node-0/a.txt").read_text() == "second"
