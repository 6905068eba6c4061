"""Attacks by checkpoints of other users: their index and values are pickles."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta  # noqa: E402

from dtslurm.train.checkpoint import Checkpointer, CheckpointFailed  # noqa: E402
from dtslurm.train.folder import Manifest, checksum  # noqa: E402
from dtslurm.train.foreign import PlainPlanner, PlainReader, _Plain, is_foreign  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HOW = ["the folder is open", "a file is open", "another user's"]


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


def give_away(checkpoint: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "the folder is open":
        checkpoint.chmod(0o777)
    elif how == "a file is open":
        (checkpoint / ".metadata").chmod(0o666)
    elif os.geteuid() == 0:
        os.chown(checkpoint / ".metadata", 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def save_net(folder: Path) -> Path:
    """Save a net, and return its checkpoint."""
    torch.manual_seed(1)
    net = torch.nn.Linear(3, 2)
    checkpoints = Checkpointer(folder)
    checkpoints.save(7, {"model": net}, wait=True)
    [path] = folder.glob("step-*")
    return path


def write_with_manifest(checkpoint: Path, name: str, data: bytes) -> None:
    """Write a file of a checkpoint as an attacker does: the manifest says that it is right."""
    (checkpoint / name).write_bytes(data)
    known = Manifest.read(checkpoint)
    files = tuple(checksum(checkpoint / file.name) for file in known.files)
    (checkpoint / "manifest.json").write_text(
        Manifest(known.step, known.attempt, known.world_size, files).text()
    )


class ByName:
    """Pickled as ``getattr(KIND, NAME)``, as Python 3.11.0 to 3.11.3 pickle members of enumerations."""

    def __init__(self, kind: Any, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.kind, self.name)


def test_enumeration_members_pickled_by_name_are_read() -> None:
    data = pickle.dumps(ByName(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT"))
    assert _Plain(io.BytesIO(data)).load() is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (StorageMeta, "__init__"),
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "__members__"),
        (_MEM_FORMAT_ENCODING, []),
    ],
)
def test_other_attributes_are_not_reachable_by_name(kind: Any, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="must not call getattr with"):
        _Plain(io.BytesIO(pickle.dumps(ByName(kind, name)))).load()


def restore_net(folder: Path) -> Any:
    torch.manual_seed(2)
    net = torch.nn.Linear(3, 2)
    return net if Checkpointer(folder).restore({"model": net}) else None


@pytest.mark.parametrize("how", HOW)
def test_valid_checkpoint_of_another_user_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = save_net(tmp_path / "checkpoints")
    assert not is_foreign(path)
    torch.manual_seed(1)
    wanted = torch.nn.Linear(3, 2)
    give_away(path, how, monkeypatch)
    assert is_foreign(path)
    assert torch.equal(restore_net(tmp_path / "checkpoints").weight, wanted.weight)


@pytest.mark.parametrize("how", HOW)
def test_checkpoint_index_that_calls_a_function_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path, proof = save_net(tmp_path / "checkpoints"), tmp_path / "proof"
    write_with_manifest(path, ".metadata", pickle.dumps(Evil(proof)))
    give_away(path, how, monkeypatch)
    with pytest.raises(CheckpointFailed) as failed:
        restore_net(tmp_path / "checkpoints")
    assert "must not contain posix.system" in str(failed.value)
    assert not proof.exists()


@pytest.mark.parametrize(
    "call", ["os system", "builtins eval", "torch load", "torch.hub load", "subprocess Popen"]
)
def test_function_calls_in_an_index_are_refused(tmp_path: Path, call: str) -> None:
    module, name = call.split()
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises(pickle.UnpicklingError, match="must not contain"):
        PlainReader(str(tmp_path)).read_metadata()


@pytest.mark.parametrize("name", ["../other.distcp", "/etc/passwd", "..", "a/b"])
def test_index_that_names_a_file_outside_the_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    path = save_net(tmp_path / "checkpoints")
    index = dcp.FileSystemReader(str(path)).read_metadata()
    for place in index.storage_data.values():
        place.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(pickle.UnpicklingError, match="refers to a file outside the checkpoint"):
        PlainReader(str(path)).read_metadata()


def test_checkpoint_value_that_calls_a_function_is_refused(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    dcp.save({"a": {"value": Evil(proof), "plain": 5}}, checkpoint_id=str(tmp_path / "c"))
    proof.unlink(missing_ok=True)
    wanted: dict[str, Any] = {"a": {"value": 1, "plain": 1}}
    reader = PlainReader(str(tmp_path / "c"))
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        dcp.load(wanted, storage_reader=reader, planner=PlainPlanner())
    assert not proof.exists()


def test_plain_values_and_tensors_are_restored(tmp_path: Path) -> None:
    values = {"a": {"n": 5, "s": "x", "f": 0.5, "l": [1, {"d": None}], "t": torch.arange(3)}}
    dcp.save(values, checkpoint_id=str(tmp_path / "c"))
    wanted = {"a": {"n": 0, "s": "", "f": 0.0, "l": [0, {"d": 1}], "t": torch.zeros(3, dtype=torch.int64)}}
    dcp.load(wanted, storage_reader=PlainReader(str(tmp_path / "c")), planner=PlainPlanner())
    assert (wanted["a"]["n"], wanted["a"]["s"], wanted["a"]["l"]) == (5, "x", [1, {"d": None}])
    assert torch.equal(wanted["a"]["t"], torch.arange(3))


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_saved_checkpoint_is_not_writable_by_other_users_with_any_umask(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        path = save_net(tmp_path / "checkpoints")
    finally:
        os.umask(old)
    assert not is_foreign(path)
    assert len([*path.iterdir()]) == 3


def test_checkpoint_is_saved_on_a_file_system_that_refuses_chmod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "chmod", refuse)
    old = os.umask(0)
    try:
        path = save_net(tmp_path / "checkpoints")
    finally:
        os.umask(old)
    assert is_foreign(path)
    assert restore_net(tmp_path / "checkpoints") is not None
