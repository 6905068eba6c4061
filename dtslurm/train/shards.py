"""Data that the job staged on this node's disk: its path, and the files that belong to this rank."""

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
    """Return the local path of the data that was staged under a name.

    Raises:
        RequestInvalid: no data was staged under that name.
    """
    env = os.environ if environ is None else environ
    path = env.get(f"DTSLURM_STAGED_{name.upper()}")
    if not path:
        names = sorted(key[15:].lower() for key in env if key.startswith("DTSLURM_STAGED_"))
        raise RequestInvalid(
            [f"no data was staged as {name!r}; staged data: {', '.join(names) or 'none'}"],
            hint="submit with --stage SRC:DST:name=NAME, or stage_in in the job file",
        )
    return Path(path)


def shards(
    name: str, environ: Mapping[str, str] | None = None, *, place: RankInfo | None = None
) -> list[Path]:
    """Return this rank's files of the staged data, sorted; each file belongs to exactly one rank.

    With ``shards=rank`` the job distributed the files to the ranks. With ``shards=node`` the job distributed
    the files to the nodes, and this function divides a node's files among its ranks. Data that was staged
    whole is divided among all ranks. WebDataset accepts the paths::

        paths = [str(path) for path in train.shards("data")]
        wds.WebDataset(paths, shardshuffle=100, nodesplitter=None)  # the files are already split

    Raises:
        RequestInvalid: no data was staged under that name, a file of this rank is missing, there are fewer
            files than ranks, or the assignment of files to ranks cannot be read.
    """
    env = os.environ if environ is None else environ
    folder = staged(name, env)
    ranks = find_place(env) if place is None else place
    owners = _read_assignment(name, env)
    if owners is None:
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]
        own_files = files[ranks.rank :: ranks.world_size]
    elif owners["by"] == "rank":
        if owners["world_size"] != ranks.world_size:
            raise RequestInvalid(
                [
                    (
                        f"the shards were distributed to {owners['world_size']} ranks, but this job has "
                        f"{ranks.world_size}"
                    )
                ],
                hint="stage the data with shards=node if the number of ranks may change",
            )
        own_files = sorted(folder / entry["path"] for entry in owners["files"] if entry["rank"] == ranks.rank)
    else:
        node_files = sorted(
            folder / entry["path"] for entry in owners["files"] if entry["node"] == ranks.node_rank
        )
        own_files = node_files[ranks.local_rank :: ranks.local_world_size]
    if not own_files:
        raise RequestInvalid([f"{folder} has fewer files than there are ranks"])
    if missing := [path for path in own_files if not path.exists()]:
        raise RequestInvalid(
            [
                f"{missing[0]} does not exist",
                f"{len(missing)} of this rank's {len(own_files)} files are missing",
            ]
        )
    return own_files


def _read_assignment(name: str, env: Mapping[str, str]) -> dict[str, Any] | None:
    run_dir = env.get("DTSLURM_RUN_DIR")
    if not run_dir:
        return None
    path = Path(run_dir) / "staged" / f"{name.lower()}.shards.json"
    try:
        assignment = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RequestInvalid([f"{path} is damaged: {error}"]) from error
    if not isinstance(assignment, dict):  # dividing this node's files would omit the files of other nodes
        raise RequestInvalid([f"{path} is damaged: it does not assign files to ranks"])
    return assignment


def samples(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar shard in WebDataset's layout.

    Consecutive files form a sample if their paths are equal up to the first dot of the file name.

    Yields:
        ``__key__`` (the common part of the path) and the bytes of each file by its extension, for example
            ``{"jpg": ...}``.
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
