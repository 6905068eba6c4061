"""Each rank's files of what was staged."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from dtslurm.errors import RequestInvalid

pytest.importorskip("torch")

from dtslurm import train


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "local"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.tar").touch()
    (tmp_path / "run" / "staged").mkdir(parents=True)
    return {"DTSLURM_STAGED_DATA": str(folder), "DTSLURM_RUN_DIR": str(tmp_path / "run")}


def place(rank: int, world_size: int = 4, local: int = 2) -> train.RankInfo:
    return train.RankInfo(rank, world_size, rank % local, local, rank // local)


def of_all(env: dict[str, str], world_size: int = 4) -> list[str]:
    found = [train.shards("data", env, place=place(rank, world_size)) for rank in range(world_size)]
    assert {len(one) for one in found} == {8 // world_size}
    return sorted(path.name for one in found for path in one)


def manifest(env: dict[str, str], by: str, hands: int) -> None:
    rows = [{"path": f"{number}.tar", "bytes": 0, by: number % hands} for number in range(8)]
    told = {"schema": 1, "by": by, "nodes": 2, "world_size": 4, "files": rows}
    (Path(env["DTSLURM_RUN_DIR"]) / "staged" / "data.shards.json").write_text(json.dumps(told))


ALL = [f"{number}.tar" for number in range(8)]


def test_all_ranks_together_have_each_file_once(env: dict[str, str]) -> None:
    assert of_all(env) == ALL
    manifest(env, "node", 2)
    assert of_all(env) == ALL
    manifest(env, "rank", 4)
    assert of_all(env) == ALL


def test_what_does_not_fit_is_said(env: dict[str, str]) -> None:
    manifest(env, "rank", 4)
    with pytest.raises(RequestInvalid, match="distributed to 4 ranks"):
        train.shards("data", env, place=place(0, 2))
    with pytest.raises(RequestInvalid, match="nothing was staged as 'other'"):
        train.shards("other", env)
    (Path(env["DTSLURM_STAGED_DATA"]) / "0.tar").unlink()
    with pytest.raises(RequestInvalid, match="does not exist"):
        train.shards("data", env, place=place(0))
    (Path(env["DTSLURM_RUN_DIR"]) / "staged" / "data.shards.json").unlink()
    with pytest.raises(RequestInvalid, match="has fewer files than there are ranks"):
        train.shards("data", env, place=place(9, 10))


@pytest.mark.parametrize("text", ['{"by": "no', "[]", "null", ""])
def test_where_it_cannot_be_read_whose_files_are_none_are_dealt_out(env: dict[str, str], text: str) -> None:
    path = Path(env["DTSLURM_RUN_DIR"]) / "staged" / "data.shards.json"
    path.write_text(text)
    with pytest.raises(RequestInvalid, match=f"{path} is damaged"):
        train.shards("data", env, place=place(0))


def test_without_a_run_around_all_that_is_there_is_dealt_out(env: dict[str, str]) -> None:
    alone = {"DTSLURM_STAGED_DATA": env["DTSLURM_STAGED_DATA"]}
    assert of_all(alone) == ALL
    one = {"DTSLURM_STAGED_DATA": str(Path(env["DTSLURM_STAGED_DATA"]) / "3.tar")}
    assert [path.name for path in train.shards("data", one)] == ["3.tar"]


def test_an_archive_of_folders_alone_has_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as archive:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    assert list(train.samples(path)) == []


def test_samples_are_files_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("a/1.jpg", "a/1.seg.png", "a/2.jpg"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(name[-3:].encode()))
    found = list(train.samples(path))
    assert found == [{"__key__": "a/1", "jpg": b"jpg", "seg.png": b"png"}, {"__key__": "a/2", "jpg": b"jpg"}]
