"""Attacks by other users of a node: copies, drafts and links planted at a staging target."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from dtslurm.worker.staging import files, node
from dtslurm.worker.staging.request import Item

PARTS = [
    "{}",
    "{}.dtslurm.json",
    ".{}.dtslurm-part",
    ".{}.dtslurm-old",
    ".{}.dtslurm-lock",
    ".{}.dtslurm-sent",
]


@pytest.fixture
def item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Item:
    """Data of five files, to be brought to a folder that everybody may write to, as /tmp."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("DTSLURM_RUN_DIR", str(tmp_path))
    data, disk = tmp_path / "data", tmp_path / "disk"
    data.mkdir()
    disk.mkdir()
    disk.chmod(0o1777)
    for number in range(5):
        (data / f"{number}.bin").write_bytes(bytes([number]) * 500)
    return Item(source=str(data), to=str(disk / "copy"), name="data", method="copy")


def bring(item: Item) -> dict[str, object]:
    return node.bring(item, files.tree(item.source), "copy", {}, 1, dict(os.environ))


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let something, and all below it, be another user's; only root can do so really."""
    if os.geteuid() == 0:
        for entry in [path, *(path.rglob("*") if path.is_dir() else ())]:
            os.chown(entry, 65534, 65534, follow_symlinks=False)
        return
    known = {path.lstat().st_ino}
    own = files.is_own
    monkeypatch.setattr(node, "is_own", lambda entry: own(entry) and os.lstat(entry).st_ino not in known)


def test_staged_copy_prepared_by_another_user_is_refused(item: Item, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(item)
    copy = Path(item.to)
    times = (copy / "0.bin").stat()
    (copy / "0.bin").write_bytes(b"\x07" * 500)  # of the right size and time
    os.utime(copy / "0.bin", (times.st_atime, int(times.st_mtime)))
    assert bring(item)["kept"] is True  # nothing but its owner tells
    for path in (copy, Path(f"{copy}.dtslurm.json")):
        give_away(path, monkeypatch)
    with pytest.raises(files.Failed, match="belongs to another user, or is a link"):
        bring(item)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_files_and_links_planted_at_the_staging_target_are_refused(
    item: Item, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, kind: str
) -> None:
    place = tmp_path / "disk" / part.format("copy")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    if kind == "folder":
        place.mkdir()
    elif kind == "file":
        place.write_text("{}")
    else:
        place.symlink_to(precious)
    if kind != "link":
        give_away(place, monkeypatch)
    with pytest.raises(files.Failed, match="belongs to another user, or is a link"):
        bring(item)
    assert precious.read_text() == "mine"
    result = node.look([(item, files.tree(item.source), "copy")], dict(os.environ))
    assert "belongs to another user, or is a link" in result["problems"][0]


def test_staged_copy_writable_by_other_users_is_replaced(item: Item) -> None:
    assert bring(item)["kept"] is False
    Path(item.to).chmod(0o777)
    assert bring(item)["kept"] is False
    assert Path(item.to).stat().st_mode & 0o022 == 0
    assert bring(item)["kept"] is True


def test_unpacked_archive_is_not_writable_by_other_users(item: Item, tmp_path: Path) -> None:
    archive = tmp_path / "data.tar"
    shutil.chown(item.source, os.geteuid())
    Path(item.source).chmod(0o777)
    with tarfile.open(archive, "w") as result:
        result.add(item.source, ".")
    packed = Item(source=str(archive), to=item.to, name="data", method="unpack")
    listed = files.tree(packed.source)
    assert node.bring(packed, listed, "unpack", {}, 1, dict(os.environ))["kept"] is False
    assert Path(item.to).stat().st_mode & 0o022 == 0
    assert node.bring(packed, listed, "unpack", {}, 1, dict(os.environ))["kept"] is True
