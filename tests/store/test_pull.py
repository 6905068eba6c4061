"""Pulled files: only new bytes are transferred, and changed files are detected."""

from __future__ import annotations

import io
import os
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import TransportError
from dtslurm.store.pull import Copied, PullSpec, copy
from dtslurm.transport.local import LocalTransport
from dtslurm.worker.delivery import code_files, send
from dtslurm.worker.delivery.objects import STAMP


@pytest.fixture
def remote_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "far"
    (folder / "logs" / "0").mkdir(parents=True)
    (folder / "code").mkdir()
    (folder / "logs" / "0" / "rank-0.log").write_bytes(b"one\n" * 1000)
    (folder / "job.json").write_text("{}")
    (folder / "code" / "train.py").write_text("pass")
    return folder


def pull(source: Path, *patterns: str, digests: bool = False) -> Copied:
    pull_spec = PullSpec(str(source), source.parent / "here", patterns or ("*",))
    return copy(LocalTransport(), [pull_spec], python=sys.executable, digests=digests)


def local_copy(source: Path, name: str) -> bytes:
    return (source.parent / "here" / name).read_bytes()


@pytest.mark.parametrize("digests", [False, True])
def test_only_new_bytes_are_transferred(remote_folder: Path, digests: bool) -> None:
    log = remote_folder / "logs" / "0" / "rank-0.log"
    assert pull(remote_folder, digests=digests).bytes == 4002
    assert pull(remote_folder, digests=digests).bytes == 0
    with log.open("ab") as file:
        file.write(b"two\n")
    copied = pull(remote_folder, digests=digests)
    assert (copied.bytes, [path.name for path in copied.files]) == (4, ["rank-0.log"])
    assert local_copy(remote_folder, "logs/0/rank-0.log") == log.read_bytes()
    assert not copied.mismatched


def test_code_and_unmatched_files_are_not_pulled(remote_folder: Path) -> None:
    pull(remote_folder, "logs/*")
    assert sorted(path.name for path in (remote_folder.parent / "here").rglob("*")) == [
        "0",
        "logs",
        "rank-0.log",
    ]


@pytest.mark.parametrize("text", [b"", b"x", b"other\n" * 500, b"other\n" * 5000])
def test_a_replaced_file_is_pulled_completely(remote_folder: Path, text: bytes) -> None:
    pull(remote_folder)
    log = remote_folder / "logs" / "0" / "rank-0.log"
    log.unlink()
    log.write_bytes(text)
    assert pull(remote_folder, digests=True).mismatched == []
    assert local_copy(remote_folder, "logs/0/rank-0.log") == text


@pytest.mark.parametrize("left", [0, 1, 255, 256, 257, 3999])
def test_an_interrupted_copy_is_continued(remote_folder: Path, left: int) -> None:
    pull(remote_folder)
    with (remote_folder.parent / "here" / "logs" / "0" / "rank-0.log").open("r+b") as file:
        file.truncate(left)
    copied = pull(remote_folder, digests=True)
    assert (copied.bytes, copied.mismatched) == (4000 - left, [])
    assert local_copy(remote_folder, "logs/0/rank-0.log") == b"one\n" * 1000


def test_a_locally_modified_copy_is_reported(remote_folder: Path) -> None:
    pull(remote_folder)
    path = remote_folder.parent / "here" / "job.json"
    then = path.stat()
    path.write_text("[]")
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert pull(remote_folder, digests=True).mismatched == [path]


def test_links_and_pipes_are_not_pulled(remote_folder: Path) -> None:
    os.mkfifo(remote_folder / "logs" / "pipe")
    (remote_folder / "logs" / "link").symlink_to("/etc/passwd")
    copied = pull(remote_folder)
    assert sorted(path.name for path in copied.files) == ["job.json", "rank-0.log"]


def test_a_missing_remote_folder_is_reported(remote_folder: Path) -> None:
    copied = pull(remote_folder / "nowhere")
    assert copied.unreadable == {str(remote_folder / "nowhere"): "No such file or directory"}


def test_files_with_unusual_names_are_pulled(remote_folder: Path) -> None:
    names = ["with space", "new\nline", "ü", "-rf", "a;b", os.fsdecode(b"latin-\xe9")]
    for name in names:
        (remote_folder / name).write_text(name.encode("utf-8", "replace").decode())
    pull(remote_folder)
    assert {path.name for path in (remote_folder.parent / "here").iterdir()} >= set(names)


class _Hostile(LocalTransport):
    """A far side that sends what it likes."""

    def __init__(self, program: str) -> None:
        self._program = program

    def stream(self, argv, *, stdin=b""):  # type: ignore[no-untyped-def]
        return super().stream([argv[0], "-c", self._program], stdin=stdin)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/../../evil", ""])
def test_c25_a_file_for_another_path_is_refused(tmp_path: Path, name: str) -> None:
    head = f'{{"run": 0, "path": "{name}", "offset": 0, "length": 1, "size": 1, "mtime_ns": 0}}'
    hostile = _Hostile(f"print('{head}'); print('x', end='')")
    with pytest.raises(TransportError, match="another path"):
        copy(hostile, [PullSpec("/far", tmp_path / "here", ("*",))], python=sys.executable)
    assert not (tmp_path / "evil").exists()


def test_c25_a_planted_link_is_not_followed(remote_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "logs").symlink_to(tmp_path / "outside")
    with pytest.raises(TransportError, match="a symbolic link"):
        pull(remote_folder)
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize(
    "program", ["", "print('hello')", "print('{\"end\": 1')", 'print(\'{"run": 0, "length": 9\')']
)
def test_c14_a_malformed_frame_is_an_error(tmp_path: Path, program: str) -> None:
    with pytest.raises(TransportError):
        copy(_Hostile(program), [PullSpec("/far", tmp_path / "here", ("*",))], python=sys.executable)


# ---- The sender's decisions ----


@pytest.mark.parametrize(
    ("have", "offset"),
    [
        (None, 0),
        ([1000, 0, 7], None),
        ([1000, 1, 0], 0),
        ([1000, 1, zlib.crc32(b"b" * 256)], 1000),
        ([744, 0, zlib.crc32(b"a" * 256)], 744),
        ([745, 0, zlib.crc32(b"a" * 256)], 0),
        ([100, 0, zlib.crc32(b"a" * 100)], 100),
        ([1001, 0, zlib.crc32(b"b" * 256)], 0),
        ([0, 5, 0], 0),
    ],
)
def test_a_copy_is_continued_only_if_its_end_is_the_same(have: list[int] | None, offset: int | None) -> None:
    status: Any = SimpleNamespace(st_size=1000, st_mtime_ns=0)
    assert send.start(io.BytesIO(b"a" * 744 + b"b" * 256), status, have) == offset


@pytest.mark.parametrize(
    ("path", "with_hidden", "without_hidden"),
    [
        ("a/b", False, False),
        (".git/hooks", True, True),
        ("a/.GIT/config", True, True),
        ("a/.hidden", False, True),
        (".a/b", False, True),
        ("a.git", False, False),
    ],
)
def test_hidden_files_and_repositories_are_withheld(
    path: str, with_hidden: bool, without_hidden: bool
) -> None:
    words = path.split("/")
    assert send.is_withheld(words, sends_hidden=True) is with_hidden
    assert send.is_withheld(words, sends_hidden=False) is without_hidden


def test_files_that_are_not_sent_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "MOST_NAMES", 2)
    for name in ("a.log", "b.txt", "code/x.log", "tasks/1/c.log", "tasks/1/ray-token", "logs/ray-token",
                 ".git/1.log", ".git/2.log", ".git/3.log", "ray-token"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link.log").symlink_to("a.log")
    (tmp_path / "folder.log").symlink_to("logs")
    run = {"path": str(tmp_path), "patterns": ["*.log", "*ray-token", "code"], "skip": ["code", "b.txt"]}
    unsent = send.WithheldFiles(run)
    assert sorted(send.files(run, unsent)) == ["a.log", "logs/ray-token", "tasks/1/c.log"]
    counts = unsent.counts
    assert (counts["skipped"], counts["not_files"], counts["hidden"]) == (["code"], 2, 3)
    assert (len(counts["names"]), len(counts["hidden_names"]), counts["outputs"]) == (2, 2, 0)


def test_outputs_of_a_job_are_sent_without_its_snapshot_and_byte_code(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "__pycache__").mkdir(parents=True)
    for name in ("same", "changed", "out.txt", "out.bin", "a.pyc", "__pycache__/b"):
        (code / name).write_text("xx")
    os.utime(code / "same", (STAMP, STAMP))
    (code / "link").symlink_to("same")
    (code / "moved").symlink_to("elsewhere")
    tree = [("same", "object", 2), ("changed", "object", 2), ("link", None, "same"), ("moved", None, "same")]
    (tmp_path / "snapshot.list").write_bytes(code_files.encode_list(tree))
    groups = code_files.CodeFiles(os.fsencode(tmp_path))
    assert [file.path for file in groups.delivered] == [b"link", b"same"]
    assert [file.path for file in groups.byte_code] == [b"__pycache__/b", b"a.pyc"]
    assert [file.path for file in groups.outputs] == [b"changed", b"moved", b"out.bin", b"out.txt"]
    run = {
        "path": str(tmp_path),
        "patterns": ["code/*.txt", "code/*same", "code/*.pyc"],
        "outputs_only": True,
    }
    unsent = send.WithheldFiles(run)
    assert list(send.files(run, unsent)) == ["code/out.txt"]
    assert {name: unsent.counts[name] for name in ("snapshot", "byte_code", "outputs")} == {
        "snapshot": 1,
        "byte_code": 1,
        "outputs": 2,
    }
