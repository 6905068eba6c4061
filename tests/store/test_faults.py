"""Deliveries that are interrupted by a full disk, a broken connection or a killed process."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import DtslurmError, RunExists, StoreError, TransportError
from dtslurm.remote.remote_worker import RemoteWorker
from dtslurm.remote.worker_program import BOOT, worker_source
from dtslurm.store.delivery import MODULES, Delivery, SubmitCommand, _failure, deliver
from dtslurm.transport.base import Completed, Transport
from dtslurm.worker.delivery import install_run
from tests.disks import small_disk
from tests.store.trees import HERE, PYTHON, FarSide, git, repository, snap, write

FILES = {"job.json": b"{}" * 200, "script.sbatch": b"#!/bin/bash\n" * 200}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files: dict[str, str | bytes] = {
        f"d{number % 7}/{number}.py": f"x = {number}\n" * 90 for number in range(40)
    }
    return repository(tmp_path / "tree", files)


@pytest.fixture(params=["here", "far"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return HERE if request.param == "here" else FarSide()


def run_root_entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".objects") if root.exists() else []


def is_complete(run: Path, tree: Path) -> bool:
    """Tell whether every file of a run exists with its content."""
    files = [path.relative_to(tree) for path in tree.rglob("*.py")]
    return all((run / name).read_bytes() == content for name, content in FILES.items()) and all(
        (run / "code" / path).read_bytes() == (tree / path).read_bytes() for path in files
    )


@pytest.mark.parametrize("blocks", [1, 2, 4, 12, 20, 40, 48, 52, 56, 60, 64, 72])
def test_f16_a_full_disk_at_any_write_places_no_run(
    tmp_path: Path, tree: Path, transport: Transport, blocks: int
) -> None:
    taken = snap(tree)
    with small_disk(tmp_path / "disk", f"size={blocks * 4096}") as disk:
        parcel = Delivery(str(disk / "root" / "run"), str(disk / "root" / ".objects"), FILES, taken)
        marker = tmp_path / "queued"
        error: StoreError | None = None
        try:
            deliver(
                transport,
                parcel,
                SubmitCommand(["touch", str(marker)]),
                worker=RemoteWorker(transport, MODULES, PYTHON),
            )
        except StoreError as caught:
            error = caught
        assert error or blocks > 40
        if error:
            assert "disk full" in error.message
            assert str(disk) in error.message
            assert any(f"file system {disk}" in line for line in error.evidence)
            assert run_root_entries(disk / "root") == []
            assert not marker.exists()
            subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
            deliver(
                transport,
                parcel,
                SubmitCommand(["touch", str(marker)]),
                worker=RemoteWorker(transport, MODULES, PYTHON),
            )
        assert run_root_entries(disk / "root") == ["run"]
        assert is_complete(disk / "root" / "run", tree)
        assert marker.exists()


@pytest.mark.parametrize("inodes", [3, 6, 12, 30, 60, 68, 75])
def test_f16_a_disk_without_free_inodes_places_no_run(
    tmp_path: Path, tree: Path, transport: Transport, inodes: int
) -> None:
    taken = snap(tree)
    with small_disk(tmp_path / "disk", f"nr_inodes={inodes},size=64m") as disk:
        parcel = Delivery(str(disk / "root" / "run"), str(disk / "root" / ".objects"), FILES, taken)
        with pytest.raises(StoreError, match="disk full"):
            deliver(transport, parcel, worker=RemoteWorker(transport, MODULES, PYTHON))
        assert run_root_entries(disk / "root") == []
        subprocess.run(["mount", "-o", "remount,nr_inodes=5000", disk], check=True)
        deliver(transport, parcel, worker=RemoteWorker(transport, MODULES, PYTHON))
        assert is_complete(disk / "root" / "run", tree)


def test_f16_insufficient_space_is_reported_before_data_are_sent(tmp_path: Path, tree: Path) -> None:
    write(tree, {"big.bin": os.urandom(3_000_000)})
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        far = FarSide()
        parcel = Delivery(str(disk / "root" / "run"), str(disk / "root" / ".objects"), FILES, snap(tree))
        with pytest.raises(StoreError, match="disk full"):
            deliver(far, parcel, worker=RemoteWorker(far, MODULES, PYTHON))
        assert len(far.sent) == 1
        assert far.sent[0] < 50_000


def test_f16_an_exceeded_remote_quota_is_reported_with_its_numbers(tmp_path: Path) -> None:
    said = {"errno": errno.EDQUOT, "verb": "write", "path": "/far/run/job.json"}
    room = {"mount": "/far", "free": 2048, "total": 1 << 40, "files_free": 3, "files": 9}
    error = _failure({"disk": {**said, "room": room}})
    assert error.message == "quota exceeded: cannot write /far/run/job.json"
    assert "file system /far: 2.0 KiB of 1.0 TiB free, 3 of 9 files" in error.evidence


def test_f16_a_read_only_file_system_is_reported(tmp_path: Path, tree: Path, transport: Transport) -> None:
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        parcel = Delivery(str(disk / "root" / "run"), str(disk / "root" / ".objects"), FILES, snap(tree))
        with pytest.raises(StoreError, match="read-only"):
            deliver(transport, parcel, worker=RemoteWorker(transport, MODULES, PYTHON))


def test_objects_on_another_file_system_are_copied(tmp_path: Path, tree: Path, transport: Transport) -> None:
    with small_disk(tmp_path / "disk", "size=8m") as disk:
        parcel = Delivery(str(tmp_path / "root" / "run"), str(disk / "objects"), FILES, snap(tree))
        deliver(transport, parcel, worker=RemoteWorker(transport, MODULES, PYTHON))
        assert is_complete(tmp_path / "root" / "run", tree)
        assert {path.stat().st_nlink for path in (tmp_path / "root" / "run" / "code").rglob("*.py")} == {1}


def test_a_file_in_place_of_the_run_root_is_reported(
    tmp_path: Path, tree: Path, transport: Transport
) -> None:
    (tmp_path / "root").write_text("")
    parcel = Delivery(str(tmp_path / "root" / "run"), str(tmp_path / "root" / ".objects"), FILES, snap(tree))
    with pytest.raises(StoreError, match="not a folder"):
        deliver(transport, parcel, worker=RemoteWorker(transport, MODULES, PYTHON))


# Killed

# Stops itself dead at the n-th call to the system that changes a file; the rest is the real far side.
_KILLER = """
import os, signal
COUNT = [{count}]
def killing(act):
    def call(*words, **options):
        COUNT[0] -= 1
        if COUNT[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*words, **options)
    return call
for name in ("open", "write", "mkdir", "link", "rename", "fsync", "symlink", "unlink", "rmdir"):
    setattr(os, name, killing(getattr(os, name)))
"""


class Killed(FarSide):
    """A far side that kills itself at its n-th act on the disk."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        boot = _KILLER.format(count=self._count) + BOOT
        return super().run([word if word != BOOT else boot for word in argv], **options)


def count_system_calls(tmp_path: Path, tree: Path) -> int:
    """Return the number of system calls of a complete delivery, found by bisection."""
    low, high = 0, 4000
    while low < high:
        middle = (low + high) // 2
        root = tmp_path / f"probe{middle}"
        try:
            deliver(
                Killed(middle),
                Delivery(str(root / "run"), str(root / "o"), FILES, snap(tree)),
                worker=RemoteWorker(Killed(middle), MODULES, PYTHON),
            )
            high = middle
        except TransportError:
            low = middle + 1
    return low


@pytest.mark.slow
def test_f2_a_delivery_killed_at_any_point_leaves_nothing_or_a_complete_run(
    tmp_path: Path, tree: Path
) -> None:
    taken = snap(tree)
    needed = count_system_calls(tmp_path, tree)
    assert needed > 100
    chosen = random.Random(4)
    points = sorted({*range(8), *range(needed - 12, needed), *chosen.sample(range(needed), 25)})
    placed = 0
    for point in points:
        root = tmp_path / f"killed{point}"
        parcel = Delivery(str(root / "run"), str(root / ".objects"), FILES, taken)
        marker = tmp_path / f"queued{point}"
        with pytest.raises(TransportError):
            deliver(
                Killed(point),
                parcel,
                SubmitCommand(["touch", str(marker)]),
                worker=RemoteWorker(Killed(point), MODULES, PYTHON),
            )
        assert not marker.exists()
        if (root / "run").exists():
            placed += 1
            assert is_complete(root / "run", tree)
            with pytest.raises(RunExists):
                deliver(FarSide(), parcel, worker=RemoteWorker(FarSide(), MODULES, PYTHON))
        else:
            # A search for runs finds none in what was left.
            assert list(root.glob("*/job.json")) == []
            deliver(
                FarSide(),
                parcel,
                SubmitCommand(["touch", str(marker)]),
                worker=RemoteWorker(FarSide(), MODULES, PYTHON),
            )
            assert is_complete(root / "run", tree)
            assert marker.exists()
    assert 0 < placed < len(points)


def test_f18_of_twenty_concurrent_deliveries_only_one_places_the_run(tmp_path: Path, tree: Path) -> None:
    taken = snap(tree)
    parcel = Delivery(str(tmp_path / "root" / "run"), str(tmp_path / "root" / ".objects"), FILES, taken)
    log = tmp_path / "log"
    outcomes: list[object] = []

    def one(transport: Transport) -> None:
        try:
            outcomes.append(
                deliver(
                    transport,
                    parcel,
                    SubmitCommand(["sh", "-c", f"echo x >> '{log}'"]),
                    worker=RemoteWorker(transport, MODULES, PYTHON),
                )
            )
        except DtslurmError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=one, args=(FarSide() if n % 4 else HERE,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([item for item in outcomes if isinstance(item, Completed)]) == 1
    assert len([item for item in outcomes if isinstance(item, RunExists)]) == 19
    assert log.read_text() == "x\n"
    assert is_complete(tmp_path / "root" / "run", tree)
    assert run_root_entries(tmp_path / "root") == ["run"]


def test_a_client_killed_while_sending_leaves_no_run(tmp_path: Path, tree: Path) -> None:
    source = worker_source(*MODULES)
    process = subprocess.Popen(
        [PYTHON, "-I", "-S", "-c", BOOT, str(len(source)), "mark:"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(source[: len(source) // 2])
    process.stdin.close()
    assert process.wait(60) != 0
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.slow
def test_a_tree_of_many_files_is_delivered(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    tree = tmp_path / "tree"
    folders = 500 if pytestconfig.option.everything else 50
    for folder in range(folders):
        (tree / f"d{folder}").mkdir(parents=True)
        for number in range(200):
            (tree / f"d{folder}" / f"{number}.py").write_text(f"x = {folder * 200 + number}")
    git(tree, "init", "-q")
    (tree / "loop").symlink_to(".")
    taken = snap(tree)
    assert len(taken.files) == 200 * folders + 1
    assert not taken.problems
    far = FarSide()
    parcel = Delivery(str(tmp_path / "root" / "run"), str(tmp_path / "root" / ".objects"), FILES, taken)
    deliver(far, parcel, worker=RemoteWorker(far, MODULES, PYTHON))
    assert (tmp_path / "root" / "run" / "code" / "d49" / "199.py").read_text() == "x = 9999"


def test_a_slow_file_system_is_accessed_in_parallel_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = repository(
        tmp_path / "tree", {f"d{number % 9}/{number}.py": f"x = {number}" for number in range(300)}
    )
    monkeypatch.setattr(install_run, "SLOW_S", -1.0)
    parcel = Delivery(str(tmp_path / "root" / "run"), str(tmp_path / "root" / ".objects"), FILES, snap(tree))
    deliver(HERE, parcel)
    assert is_complete(tmp_path / "root" / "run", tree)
    for path in (tmp_path / "root" / ".objects").rglob("0*"):
        if path.is_file():
            path.unlink()
    gone = Delivery(str(tmp_path / "root" / "two"), parcel.objects, FILES, parcel.snapshot)
    deliver(HERE, gone)
    assert is_complete(tmp_path / "root" / "two", tree)
