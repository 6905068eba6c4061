"""The prebuilt tree for the next submission."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.store.delivery import MODULES, Delivery, deliver
from dtslurm.store.wire_format import objects_folder, request
from dtslurm.worker.delivery import prebuilt_tree, reclaim
from dtslurm.worker.delivery.install_run import place
from dtslurm.worker.delivery.objects import Objects
from dtslurm.worker.lib.disk import WorkerError, raw
from tests.store.trees import PYTHON, FarSide, snap, write
from tests.waiting import wait_until

FILES = {f"package/module{number % 5}/file{number}.py": f"print({number})\n" for number in range(20)}


class Site:
    """A far side, and runs placed there one after another from a folder here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.here, self.runs = folder, folder / "here", folder / "runs"
        self.count = 0
        write(self.here, FILES)

    def parcel(self) -> Delivery:
        self.count += 1
        snapshot = snap(self.here, self.folder / "cache")
        return Delivery(
            f"{self.runs}/{self.count}", objects_folder(str(self.runs)), {"job.json": b"{}"}, snapshot
        )

    def place(self) -> tuple[Path, bool]:
        """Place a run by a tree made ahead, if there is one; return its code and whether there was."""
        asked = request(self.parcel(), (), 1.0, {})
        objects, used = Objects(raw(asked["objects"])), []

        def made(staging: bytes, code: bytes) -> bool:
            used.append(prebuilt_tree.take_spare(asked, objects, staging, code))
            return used[-1]

        place(asked, objects, made)
        return Path(asked["run_dir"]) / "code", used == [True]

    def send(self) -> None:
        """Bring the contents over, with a run."""
        deliver(FarSide(), self.parcel(), worker=RemoteWorker(FarSide(), MODULES, PYTHON))

    def ahead(self) -> Path | None:
        asked = request(self.parcel(), (), 1.0, {})
        prebuilt_tree.make_spare(asked)
        folder = prebuilt_tree.folder_of(asked)
        assert folder is not None
        return Path(os.fsdecode(folder)) if Path(os.fsdecode(folder)).exists() else None


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(prebuilt_tree, "LEAST", 1)
    site = Site(tmp_path)
    site.send()
    assert site.ahead() is not None
    yield site
    assert list(site.runs.glob(".dtslurm-*")) == []  # nothing unfinished is left


def folder_contents(folder: Path) -> dict[str, str]:
    """Return the contents of a folder, including subfolders."""
    return {
        str(path.relative_to(folder)): (
            f"-> {path.readlink()}" if path.is_symlink() else "" if path.is_dir() else path.read_text()
        )
        for path in folder.rglob("*")
    }


def test_a_prebuilt_tree_becomes_the_code_of_the_next_run(site: Site) -> None:
    code, used = site.place()
    assert used
    assert folder_contents(code) == folder_contents(site.here)
    assert site.place()[1] is False  # it was for one run


def test_changes_since_the_prebuilt_tree_are_applied(site: Site) -> None:
    (site.here / "package/module0/file0.py").write_text("changed")
    (site.here / "package/module1/file1.py").unlink()
    (site.here / "package/module1/link.py").symlink_to("file6.py")
    for number in (2, 7, 12, 17):
        (site.here / f"package/module2/file{number}.py").unlink()
    (site.here / "package/module2").rmdir()
    (site.here / "package/module3/file3.py").chmod(0o755)
    write(site.here, {"other/deep/new.py": "new"})
    site.send()  # without a tree made ahead of its own: it is smaller than the least, over there
    code, used = site.place()
    assert used
    assert folder_contents(code) == folder_contents(site.here)
    assert os.access(code / "package/module3/file3.py", os.X_OK)


def test_a_folder_can_replace_a_file_and_a_file_a_folder(site: Site) -> None:
    for number in (2, 7, 12, 17):
        (site.here / f"package/module2/file{number}.py").unlink()
    (site.here / "package/module2").rmdir()
    (site.here / "package/module1/file1.py").unlink()
    write(site.here, {"package/module2": "a file", "package/module1/file1.py/inner.py": "in a folder"})
    site.send()
    code, _ = site.place()
    assert folder_contents(code) == folder_contents(site.here)


@pytest.mark.parametrize("harm", ["written to", "removed"])
def test_a_damaged_file_of_the_prebuilt_tree_is_replaced(site: Site, harm: str) -> None:
    folder = site.ahead()
    assert folder is not None
    path = folder / "tree/package/module0/file0.py"
    path.unlink()
    if harm == "written to":
        path.write_text("print(9)\n")  # as long as it was
    code, used = site.place()
    assert used
    assert folder_contents(code) == folder_contents(site.here)


@pytest.mark.parametrize("harm", ["no list", "a broken list", "no tree"])
def test_a_damaged_prebuilt_tree_is_not_used(site: Site, harm: str) -> None:
    folder = site.ahead()
    assert folder is not None
    if harm == "no tree":
        (folder / "tree").rename(site.folder / "elsewhere")
    else:
        (folder / "list").unlink()
    if harm == "a broken list":
        (folder / "list").write_bytes(b"x")
    code, used = site.place()
    assert not used
    assert folder_contents(code) == folder_contents(site.here)


def test_the_prebuilt_tree_is_kept_while_contents_are_missing(site: Site) -> None:
    (site.here / "package/module0/file0.py").write_text("not sent yet")
    with pytest.raises(WorkerError) as refused:
        site.place()
    assert refused.value.key == "missing"
    assert len(refused.value.value) == 1
    site.send()
    code, used = site.place()
    assert used
    assert folder_contents(code) == folder_contents(site.here)


def test_a_run_that_writes_into_its_code_changes_no_other_run(site: Site) -> None:
    first, _ = site.place()
    site.ahead()
    (first / "package/module0/output.txt").write_text("made by the job")
    (first / "package/module0/file0.py").unlink()
    second, used = site.place()
    assert used
    assert folder_contents(second) == folder_contents(site.here)


def test_clean_counts_and_removes_an_unused_prebuilt_tree_after_an_hour(site: Site) -> None:
    asked = {
        "root": str(site.runs),
        "objects": objects_folder(str(site.runs)),
        "runs": ["1"],
        "whole": True,
        "remove": False,
    }
    held = len(set(FILES.values()))
    soon = time.time() + 7200
    now = pytest.MonkeyPatch()
    try:
        assert reclaim.reclaim(asked)["objects"]["files"] == 0  # young
        now.setattr(time, "time", lambda: soon)
        assert reclaim.reclaim(asked)["objects"]["files"] == held
        reclaim.reclaim({**asked, "remove": True})
    finally:
        now.undo()
    assert [path.name for path in (site.runs / ".objects").rglob("*") if path.is_file()] == ["seals"]


def test_a_prebuilt_tree_is_made_after_a_large_delivery(tmp_path: Path) -> None:
    site = Site(tmp_path)
    write(site.here, {f"many/{number % 50}/{number}.txt": "same" for number in range(prebuilt_tree.LEAST)})
    site.send()
    folder = site.runs / ".objects" / "spare"
    wait_until(lambda: list(folder.glob("*/list")), limit=300)
    site.send()
    assert folder_contents(site.runs / "2" / "code") == folder_contents(site.here)
    # The next one is made by a process of its own, which must end before we do.
    wait_until(lambda: list(folder.glob("*/list")), limit=300)
