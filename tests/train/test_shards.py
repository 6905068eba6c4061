"""The staged files of each rank."""

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


def rank_info(rank: int, world_size: int = 4, local: int = 2) -> train.RankInfo:
    return train.RankInfo(rank, world_size, rank % local, local, rank // local)


def shards_of_all_ranks(env: dict[str, str], world_size: int = 4) -> list[str]:
    result = [train.shards("data", env, place=rank_info(rank, world_size)) for rank in range(world_size)]
    assert {len(item) for item in result} == {8 // world_size}
    return sorted(path.name for item in result for path in item)


def manifest(env: dict[str, str], by: str, hands: int) -> None:
    rows = [{"path": f"{number}.tar", "bytes": 0, by: number % hands} for number in range(8)]
    result = {"schema": 1, "by": by, "nodes": 2, "world_size": 4, "files": rows}
    (Path(env["DTSLURM_RUN_DIR"]) / "staged" / "data.shards.json").write_text(json.dumps(result))


ALL = [f"{number}.tar" for number in range(8)]


def test_ranks_together_get_each_shard_once(env: dict[str, str]) -> None:
    assert shards_of_all_ranks(env) == ALL
    manifest(env, "node", 2)
    assert shards_of_all_ranks(env) == ALL
    manifest(env, "rank", 4)
    assert shards_of_all_ranks(env) == ALL


def test_unsuitable_shards_are_refused_with_the_reason(env: dict[str, str]) -> None:
    manifest(env, "rank", 4)
    with pytest.raises(RequestInvalid, match="distributed to 4 ranks"):
        train.shards("data", env, place=rank_info(0, 2))
    with pytest.raises(RequestInvalid, match="no data was staged as 'other'"):
        train.shards("other", env)
    (Path(env["DTSLURM_STAGED_DATA"]) / "0.tar").unlink()
    with pytest.raises(RequestInvalid, match="does not exist"):
        train.shards("data", env, place=rank_info(0))
    (Path(env["DTSLURM_RUN_DIR"]) / "staged" / "data.shards.json").unlink()
    with pytest.raises(RequestInvalid, match="has fewer files than there are ranks"):
        train.shards("data", env, place=rank_info(9, 10))


@pytest.mark.parametrize("text", ['{"by": "no', "[]", "null", ""])
def test_damaged_shard_list_is_refused(env: dict[str, str], text: str) -> None:
    path = Path(env["DTSLURM_RUN_DIR"]) / "staged" / "data.shards.json"
    path.write_text(text)
    with pytest.raises(RequestInvalid, match=f"{path} is damaged"):
        train.shards("data", env, place=rank_info(0))


def test_shards_outside_a_run_distribute_all_staged_files(env: dict[str, str]) -> None:
    alone = {"DTSLURM_STAGED_DATA": env["DTSLURM_STAGED_DATA"]}
    assert shards_of_all_ranks(alone) == ALL
    result = {"DTSLURM_STAGED_DATA": str(Path(env["DTSLURM_STAGED_DATA"]) / "3.tar")}
    assert [path.name for path in train.shards("data", result)] == ["3.tar"]


def test_archive_with_only_directories_has_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as archive:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    assert list(train.samples(path)) == []


def test_samples_group_files_by_their_name(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("a/1.jpg", "a/1.seg.png", "a/2.jpg"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(name[-3:].encode()))
    result = list(train.samples(path))
    assert result == [{"__key__": "a/1", "jpg": b"jpg", "seg.png": b"png"}, {"__key__": "a/2", "jpg": b"jpg"}]
