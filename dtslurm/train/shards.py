"""Data that the job brought to this node's disk: where it lies, and which files of it are this rank's."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dtslurm.errors import RequestInvalid
from dtslurm.train.place import RankInfo, find_place


def staged(name: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return where this node has what was staged under a name.

    Raises:
        RequestInvalid: nothing of that name was.
    """
    env = os.environ if environ is None else environ
    found = env.get(f"DTSLURM_STAGED_{name.upper()}")
    if not found:
        known = sorted(key[15:].lower() for key in env if key.startswith("DTSLURM_STAGED_"))
        raise RequestInvalid(
            [f"nothing was staged as {name!r} (there is: {', '.join(known) or 'nothing'})"],
            hint="submit with --stage SRC:DST:name=NAME, or stage_in in the job file",
        )
    return Path(found)


def shards(
    name: str, environ: Mapping[str, str] | None = None, *, place: RankInfo | None = None
) -> list[Path]:
    """Return this rank's files of what was staged, sorted; together the ranks have each file once.

    By ``shards=rank`` the job dealt them out to ranks; by ``shards=node`` to nodes, and here the ranks of a
    node share its files; staged whole, all ranks share all. WebDataset takes the paths as they are::

        paths = [str(path) for path in train.shards("data")]
        wds.WebDataset(paths, shardshuffle=100, nodesplitter=None)  # they are dealt out already

    Raises:
        RequestInvalid: nothing was staged by that name, a file of this rank is not there, there are too few
            files for each rank to have one, or it cannot be read whose they are.
    """
    env = os.environ if environ is None else environ
    folder = staged(name, env)
    here = find_place(env) if place is None else place
    told = _manifest(name, env)
    if told is None:
        whole = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]
        mine = whole[here.rank :: here.world_size]
    elif told["by"] == "rank":
        if told["world_size"] != here.world_size:
            raise RequestInvalid(
                [f"the shards were dealt to {told['world_size']} ranks, and there are {here.world_size}"],
                hint="stage them by shards=node where the ranks of a node may change",
            )
        mine = sorted(folder / one["path"] for one in told["files"] if one["rank"] == here.rank)
    else:
        own = sorted(folder / one["path"] for one in told["files"] if one["node"] == here.node_rank)
        mine = own[here.local_rank :: here.local_world_size]
    if not mine:
        raise RequestInvalid([f"there are too few files in {folder} for each rank to have one"])
    if gone := [path for path in mine if not path.exists()]:
        raise RequestInvalid([f"{gone[0]} is not there", f"{len(gone)} of this rank's {len(mine)} files"])
    return mine


def _manifest(name: str, env: Mapping[str, str]) -> dict[str, Any] | None:
    run = env.get("DTSLURM_RUN_DIR")
    if not run:
        return None
    path = Path(run) / "staged" / f"{name.lower()}.shards.json"
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RequestInvalid([f"{path} is damaged: {error}"]) from error
    if not isinstance(value, dict):  # dealing all that is here out anew would leave out what other nodes have
        raise RequestInvalid([f"{path} is damaged: it does not say which files are whose"])
    return value


def samples(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar shard as WebDataset lays them out.

    Neighbouring files whose names are alike up to the first dot of the last part are one sample.

    Yields:
        ``__key__`` (what is alike) and the bytes of each file by the rest of its name, as ``{"jpg": ...}``.
    """
    sample: dict[str, Any] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if not member.isfile():
                continue
            folder, slash, base = member.name.rpartition("/")
            stem, _, extension = base.partition(".")
            key = f"{folder}{slash}{stem}"
            if sample and sample["__key__"] != key:
                yield sample
                sample = {}
            file = archive.extractfile(member)
            sample = sample or {"__key__": key}
            sample[extension] = file.read() if file else b""
    if sample:
        yield sample
