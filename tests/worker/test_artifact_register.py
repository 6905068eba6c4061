"""The register of artifacts in the run directory: lists, pins and pruning."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.worker import artifacts


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with five checkpoints, the third the best, and an output."""
    for step, loss in enumerate((0.9, 0.8, 0.1, 0.7, float("nan"))):
        folder = tmp_path / f"checkpoints/step-{step}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(step + 1))
        path = f"checkpoints/step-{step}"
        artifacts.add(str(tmp_path), path=path, kind="checkpoint", step=step, metrics={"loss": loss})
    (tmp_path / "model.bin").write_bytes(b"model")
    artifacts.add(str(tmp_path), path="model.bin")
    return tmp_path


def ask(run: Path, op: str, **values: Any) -> dict[str, Any]:
    return artifacts.answer({"op": op, "run_dir": str(run), **values})


def prune(run: Path, **values: Any) -> list[str]:
    request = {"keep": 2, "best": "", "largest": False, "remove": False, **values}
    return [item["path"].rpartition("-")[2] for item in ask(run, "prune", **request)["removed"]]


def test_artifact_list_reports_current_files_and_pins(run: Path) -> None:
    (run / "checkpoints/step-0/weights").unlink()
    (run / "checkpoints/step-0").rmdir()
    (run / "checkpoints/step-1/more").write_bytes(b"12345")
    ask(run, "pin", paths=["checkpoints/step-2"])
    rows = {artifact["path"]: artifact for artifact in ask(run, "list", checksums=["model.bin"])["artifacts"]}
    gone, grown, pinned = (rows[f"checkpoints/step-{step}"] for step in range(3))
    assert (gone["there"], "now_bytes" in gone) == (False, False)
    assert (grown["now_bytes"], grown["files"], "now_sha256" in grown) == (7, 2, False)
    assert (pinned["pinned"], grown["pinned"]) == (True, False)
    assert rows["model.bin"]["kind"] == "output"
    assert rows["model.bin"]["now_sha256"] == artifacts.digest_of(str(run / "model.bin"))
    assert "now_sha256" not in ask(run, "list")["artifacts"][-1]


def test_pin_stays_until_unpin(run: Path) -> None:
    assert ask(run, "pin", paths=["b", "a"]) == {"pinned": ["a", "b"]}
    assert ask(run, "unpin", paths=["b", "c"]) == {"pinned": ["a"]}
    assert artifacts.pins(str(run)) == ["a"]


@pytest.mark.parametrize(
    ("more", "removed_paths"),
    [
        ({}, ["2", "1", "0"]),  # the newest two stay
        ({"keep": 9}, []),
        ({"keep": 1, "best": "loss"}, ["3", "1", "0"]),  # the best and the newest stay; NaN is no best
        ({"keep": 1, "best": "loss", "largest": True}, ["3", "2", "1"]),
        ({"keep": 1, "best": "accuracy"}, ["3", "2", "1", "0"]),
    ],
)
def test_prune_removes_superfluous_checkpoints_only_with_remove(
    run: Path, more: dict[str, Any], removed_paths: list[str]
) -> None:
    assert prune(run, **more) == removed_paths
    assert len(list((run / "checkpoints").iterdir())) == 5
    assert prune(run, remove=True, **more) == removed_paths
    left = {path.name.rpartition("-")[2] for path in (run / "checkpoints").iterdir()}
    assert left == set("01234") - set(removed_paths)
    assert (run / "model.bin").exists()


def test_prune_keeps_pinned_and_external_checkpoints(run: Path, tmp_path_factory: Any) -> None:
    far = tmp_path_factory.mktemp("far") / "step-7"
    far.mkdir()
    artifacts.add(str(run), path=str(far), kind="checkpoint", step=-7)
    ask(run, "pin", paths=["checkpoints/step-1"])
    assert prune(run, remove=True) == ["2", "0"]
    assert far.exists()


def test_prune_completes_an_interrupted_prune(run: Path) -> None:
    left = run / "checkpoints/.deleting-step-0"
    left.mkdir()
    (left / "weights").touch()
    link = run / "checkpoints/.deleting-step-1"
    link.symlink_to(run / "model.bin")
    assert prune(run, remove=True) == ["2", "1", "0"]
    assert sorted(os.listdir(run / "checkpoints")) == ["step-3", "step-4"]  # noqa: PTH208 - hidden ones, too
    assert (run / "model.bin").read_bytes() == b"model"


def test_register_refuses_a_missing_run_directory_and_a_damaged_pin_file(run: Path) -> None:
    assert ask(run / "none", "list") == {"refused": f"the run directory {run}/none no longer exists"}
    (run / artifacts.PINS).write_text("{half")
    answer = ask(run, "list")
    advice = "the file is damaged; repair it, or remove it and pin the artifacts again"
    assert answer == {"refused": f"{run}/pins.json: {advice}"}


# ---- The register ----


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("out/model.bin", "out/model.bin"),
        ("./out//model.bin", "out/model.bin"),
        ("/runs/one/out", "out"),
        ("/runs/one/../one/out", "out"),
        ("/runs/one-2/out", "/runs/one-2/out"),
        ("../two/out", "/runs/two/out"),
        ("/runs/one", "/runs/one"),
    ],
)
def test_path_in_the_register_is_relative_below_the_run_directory(path: str, name: str) -> None:
    assert artifacts.relative("/runs/one", path) == name
    assert artifacts.relative("/runs/one/", path) == name


@pytest.mark.parametrize(
    ("first", "second", "keeps_checksum"),
    [
        ({"step": 1}, {"metrics": {"f1": 0.5}}, True),
        ({"step": 1}, {"step": 1}, True),
        ({"step": 1}, {"step": 2}, False),
        ({}, {"step": 2}, False),
        ({"step": 1}, {"bytes": 3}, False),
        ({"step": 1}, {"bytes": None}, True),
    ],
)
def test_checksum_belongs_to_the_version_of_a_file(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], keeps_checksum: bool
) -> None:
    artifacts.add(str(tmp_path), path="a", sha256="0", metrics={"loss": 2}, **first)
    artifacts.add(str(tmp_path), path=str(tmp_path / "a"), **second)
    artifacts.add(str(tmp_path), path="a", metrics=[1], kind="model")
    artifacts.add(str(tmp_path), path="")
    artifacts.add(str(tmp_path), path=3)
    [entry] = artifacts.read_entries(str(tmp_path)).values()
    assert ("sha256" in entry) is keeps_checksum
    assert (entry["path"], entry["kind"], "schema" in entry) == ("a", "model", False)
    assert entry["metrics"] == {"loss": 2, **second.get("metrics", {})}


def test_line_of_the_register_has_the_time_and_belongs_to_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "time", SimpleNamespace(time=lambda: 1000.12345))
    artifacts.add(str(tmp_path), path="a")
    artifacts.add(str(tmp_path), path="b", time=5)
    file = tmp_path / artifacts.FILE
    assert list(map(json.loads, file.read_text().splitlines())) == [
        {"schema": 1, "time": 1000.123, "path": "a"},
        {"schema": 1, "time": 5, "path": "b"},
    ]
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["[]", "{}", '{"pinned": 3}', "{half"])
def test_damaged_pin_file_pins_an_unknown_set(tmp_path: Path, text: str) -> None:
    assert artifacts.pins(str(tmp_path)) == []
    (tmp_path / artifacts.PINS).write_text(text)
    with pytest.raises(OSError, match="the file is damaged"):
        artifacts.pins(str(tmp_path))


# ---- Sizes and checksums ----


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_checksum_of_a_folder_is_that_of_its_sorted_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/x").write_bytes(b"123")
    (tmp_path / "a").write_bytes(b"4")
    (tmp_path / "dangling").symlink_to("none")
    rows = f"{sha256(b'4')}  a\n{sha256(b'123')}  b/x\n".encode()
    assert artifacts.measure(str(tmp_path), checksum=True) == {"bytes": 4, "files": 2, "sha256": sha256(rows)}
    assert artifacts.measure(str(tmp_path), checksum=False) == {"bytes": 4, "files": 2}
    of_file = {"bytes": 3, "files": 1, "sha256": sha256(b"123")}
    assert artifacts.measure(str(tmp_path / "b/x"), checksum=True) == of_file
    assert artifacts.measure(str(tmp_path / "b/x"), checksum=False) == {"bytes": 3, "files": 1}


@pytest.mark.parametrize(("end", "is_late"), [(9.0, True), (10.0, False), (11.0, False)])
def test_checksum_must_be_complete_before_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: float, is_late: bool
) -> None:
    monkeypatch.setattr(artifacts, "time", SimpleNamespace(monotonic=lambda: 10.0))
    path = tmp_path / "a"
    path.write_bytes(bytes(9))
    monkeypatch.setattr(artifacts, "CHUNK", 4)
    if is_late:
        with pytest.raises(artifacts.DeadlinePassed):
            artifacts.digest_of(str(path), end)
    else:
        assert artifacts.digest_of(str(path), end) == sha256(bytes(9))


# ---- New files at the end of an attempt ----


@pytest.mark.parametrize(
    ("entry", "attempt", "modified", "is_registered"),
    [
        ({}, 0, 0, False),
        ({"sha256": ""}, 0, 0, False),
        ({"sha256": "0", "attempt": 1}, 1, 5000, True),
        ({"sha256": "0", "attempt": 0, "time": 1000}, 1, 939, True),
        ({"sha256": "0", "attempt": 0, "time": 1000}, 1, 940, False),  # the clocks may differ by a minute
        ({"sha256": "0", "attempt": 2, "time": 1000}, 1, 940, False),
        ({"sha256": "0", "kind": "output", "attempt": 0, "time": 1000}, 1, 5000, False),
        ({"sha256": "0", "kind": "checkpoint", "attempt": 0, "time": 1000}, 1, 5000, True),
        ({"sha256": "0", "attempt": 0, "time": "x"}, 1, 0, False),
        ({"sha256": "0", "attempt": 0}, 1, 5000, False),
    ],
)
def test_file_that_a_later_attempt_may_have_written_is_not_registered(
    tmp_path: Path, entry: dict[str, Any], attempt: int, modified: int, is_registered: bool
) -> None:
    for name, time_s in (("a", 0), ("b", modified), ("c", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time_s, time_s))
    assert artifacts.is_registered(str(tmp_path), entry, attempt) is is_registered


def test_empty_folder_of_an_earlier_attempt_is_registered(tmp_path: Path) -> None:
    entry: dict[str, Any] = {"sha256": "0", "attempt": 0, "time": 1000}
    assert artifacts.is_registered(str(tmp_path), entry, 1)
    assert not artifacts.is_registered(str(tmp_path), {**entry, "time": 60}, 1)


@pytest.mark.parametrize(("variable", "attempt"), [("3", 3), ("", 0), ("x", 0)])
def test_collect_registers_the_files_that_match(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    attempt: int,
) -> None:
    monkeypatch.setenv("DTSLURM_ATTEMPT", variable)
    run = tmp_path / "[run]"  # its name is no pattern
    (run / "out/deep").mkdir(parents=True)
    far = tmp_path_factory.mktemp("far")
    for path in (run / "out/b.bin", run / "out/a.bin", run / "out/deep/c.bin", run / "x.txt", far / "f.bin"):
        path.write_bytes(b"1")
    for name, kind in (("deleted", "checkpoint"), ("x.txt", "table")):
        artifacts.add(str(run), path=name, kind=kind)
    artifacts.collect(str(run), ["out/**/*.bin", f"{far}/*.bin", "out/a.bin", f"{artifacts.FILE}*", "none"])
    lines = list(artifacts.lines(str(run)))[2:]
    assert [(line["path"], line["kind"], line["attempt"]) for line in lines] == [
        ("out/a.bin", "output", attempt),
        ("out/b.bin", "output", attempt),
        ("out/deep/c.bin", "output", attempt),
        (f"{far}/f.bin", "output", attempt),
        ("x.txt", "table", attempt),
    ]
    assert {line["sha256"] for line in lines} == {sha256(b"1")}


def test_collect_skips_a_file_that_cannot_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = artifacts.measure

    def fail(path: str, *more: Any) -> dict[str, Any]:
        if path.endswith("a.bin"):
            raise PermissionError
        return measure(path, *more)

    for name in ("a.bin", "b.bin"):
        (run / name).touch()
    monkeypatch.setattr(artifacts, "measure", fail)
    artifacts.collect(str(run), ["?.bin"])
    paths = [line["path"] for line in artifacts.lines(str(run))]
    assert "a.bin" not in paths
    assert "b.bin" in paths


@pytest.mark.parametrize(
    ("times", "has_checksum"), [([0, 59, 59], True), ([0, 60], False), ([0, 59, 61], False)]
)
def test_collect_spends_a_minute_on_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: list[int], has_checksum: bool
) -> None:
    (tmp_path / "a").write_bytes(b"1")
    ticks = iter(times)
    fake = SimpleNamespace(monotonic=lambda: next(ticks), time=lambda: 1000.0)
    monkeypatch.setattr(artifacts, "time", fake)
    artifacts.collect(str(tmp_path), ["a"])
    [line] = artifacts.lines(str(tmp_path))
    assert (line["bytes"], "sha256" in line) == (1, has_checksum)


def test_results_of_a_node_are_registered_once_they_are_complete(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    files = {"b": {"sha256": "2", "bytes": 5}, "a": {"sha256": "1", "bytes": 3}}
    records: dict[str, dict[str, Any]] = {
        "node-0.json": {"final": True, "complete": True, "node": "n1"},
        "node-1.json": {"final": False, "complete": True},
        "node-2.json": {"final": True, "complete": False},
        "node-4.json": {"final": True, "complete": True},
        "other.json": {"final": True, "complete": True},
    }
    for name, values in records.items():
        (folder / name).write_text(json.dumps({"files": files, **values}))
    (folder / "node-3").mkdir()
    artifacts.register_results(str(tmp_path), str(folder))
    first, second = artifacts.lines(str(tmp_path))
    assert {key: value for key, value in first.items() if key not in {"schema", "time"}} == {
        "path": "results/node-0", "kind": "results", "bytes": 8, "files": 2, "node": "n1",
        "sha256": sha256(b"1  a\n2  b\n"),
    }  # fmt: skip
    assert (second["path"], second["node"]) == ("results/node-4", None)


# ---- Pruning and requests ----


def test_checkpoints_without_a_step_are_the_oldest_and_ordered_by_time(tmp_path: Path) -> None:
    rows = [("c", None, 5), ("a", 0, 1), ("d", "x", None), ("b", None, 9), ("e", 0, 2)]
    for name, step, time_s in rows:
        (tmp_path / name).mkdir()
        artifacts.add(str(tmp_path), path=name, kind="checkpoint", step=step, time=time_s)
    removed = ask(tmp_path, "prune", keep=1, best="", largest=False, remove=False)["removed"]
    assert [row["path"] for row in removed] == ["a", "b", "c", "d"]


def test_prune_removes_a_checkpoint_that_is_a_single_file(tmp_path: Path) -> None:
    for step in range(3):
        (tmp_path / f"step-{step}.pt").write_bytes(b"1")
        artifacts.add(str(tmp_path), path=f"step-{step}.pt", kind="checkpoint", step=step)
    (tmp_path / ".deleting-step-0.pt").touch()
    assert prune(tmp_path, remove=True) == ["0.pt"]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["step-1.pt", "step-2.pt"]
    assert not (tmp_path / ".deleting-step-0.pt").exists()


def test_list_states_registered_sizes_and_the_present_ones(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    artifacts.add(str(tmp_path), path="a", bytes=2, files=7, kind="model")
    [row] = ask(tmp_path, "list")["artifacts"]
    assert (row["bytes"], row["files"], row["now_bytes"], row["kind"]) == (2, 7, 3, "model")
