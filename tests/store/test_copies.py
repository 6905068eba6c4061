"""Copies of far files: only news travels, whatever became of the file or of the last copy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dtslurm.errors import TransportError
from dtslurm.store.pull import Copied, PullSpec, copy
from dtslurm.transport.local import LocalTransport


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "far"
    (folder / "logs" / "0").mkdir(parents=True)
    (folder / "code").mkdir()
    (folder / "logs" / "0" / "rank-0.log").write_bytes(b"one\n" * 1000)
    (folder / "job.json").write_text("{}")
    (folder / "code" / "train.py").write_text("pass")
    return folder


def bring(source: Path, *patterns: str, digests: bool = False) -> Copied:
    wanted = PullSpec(str(source), source.parent / "here", patterns or ("*",))
    return copy(LocalTransport(), [wanted], python=sys.executable, digests=digests)


def here(source: Path, name: str) -> bytes:
    return (source.parent / "here" / name).read_bytes()


@pytest.mark.parametrize("digests", [False, True])
def test_only_news_travels(source: Path, digests: bool) -> None:
    log = source / "logs" / "0" / "rank-0.log"
    assert bring(source, digests=digests).bytes == 4002
    assert bring(source, digests=digests).bytes == 0
    with log.open("ab") as file:
        file.write(b"two\n")
    copied = bring(source, digests=digests)
    assert (copied.bytes, [path.name for path in copied.files]) == (4, ["rank-0.log"])
    assert here(source, "logs/0/rank-0.log") == log.read_bytes()
    assert not copied.wrong


def test_code_and_what_matches_nothing_stay_there(source: Path) -> None:
    bring(source, "logs/*")
    assert sorted(path.name for path in (source.parent / "here").rglob("*")) == ["0", "logs", "rank-0.log"]


@pytest.mark.parametrize("text", [b"", b"x", b"other\n" * 500, b"other\n" * 5000])
def test_a_file_that_was_replaced_comes_whole(source: Path, text: bytes) -> None:
    bring(source)
    log = source / "logs" / "0" / "rank-0.log"
    log.unlink()
    log.write_bytes(text)
    assert bring(source, digests=True).wrong == []
    assert here(source, "logs/0/rank-0.log") == text


@pytest.mark.parametrize("left", [0, 1, 255, 256, 257, 3999])
def test_a_copy_that_was_cut_off_goes_on(source: Path, left: int) -> None:
    bring(source)
    with (source.parent / "here" / "logs" / "0" / "rank-0.log").open("r+b") as file:
        file.truncate(left)
    copied = bring(source, digests=True)
    assert (copied.bytes, copied.wrong) == (4000 - left, [])
    assert here(source, "logs/0/rank-0.log") == b"one\n" * 1000


def test_a_copy_that_was_changed_here_is_told(source: Path) -> None:
    bring(source)
    path = source.parent / "here" / "job.json"
    then = path.stat()
    path.write_text("[]")
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert bring(source, digests=True).wrong == [path]


def test_links_and_pipes_are_left_alone(source: Path) -> None:
    os.mkfifo(source / "logs" / "pipe")
    (source / "logs" / "link").symlink_to("/etc/passwd")
    copied = bring(source)
    assert sorted(path.name for path in copied.files) == ["job.json", "rank-0.log"]


def test_a_folder_that_is_gone_is_told(source: Path) -> None:
    copied = bring(source / "nowhere")
    assert copied.gone == {str(source / "nowhere"): "No such file or directory"}


def test_names_of_any_kind(source: Path) -> None:
    names = ["with space", "new\nline", "ü", "-rf", "a;b", os.fsdecode(b"latin-\xe9")]
    for name in names:
        (source / name).write_text(name.encode("utf-8", "replace").decode())
    bring(source)
    assert {path.name for path in (source.parent / "here").iterdir()} >= set(names)


class _Hostile(LocalTransport):
    """A far side that sends what it likes."""

    def __init__(self, program: str) -> None:
        self._program = program

    def stream(self, argv, *, stdin=b""):  # type: ignore[no-untyped-def]
        return super().stream([argv[0], "-c", self._program], stdin=stdin)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/../../evil", ""])
def test_c25_a_file_for_another_place_is_refused(tmp_path: Path, name: str) -> None:
    head = f'{{"run": 0, "path": "{name}", "offset": 0, "length": 1, "size": 1, "mtime_ns": 0}}'
    hostile = _Hostile(f"print('{head}'); print('x', end='')")
    with pytest.raises(TransportError, match="another path"):
        copy(hostile, [PullSpec("/far", tmp_path / "here", ("*",))], python=sys.executable)
    assert not (tmp_path / "evil").exists()


def test_c25_a_planted_link_is_not_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "logs").symlink_to(tmp_path / "outside")
    with pytest.raises(TransportError, match="a symbolic link"):
        bring(source)
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize(
    "program", ["", "print('hello')", "print('{\"end\": 1')", 'print(\'{"run": 0, "length": 9\')']
)
def test_c14_what_is_no_frame_is_an_error(tmp_path: Path, program: str) -> None:
    with pytest.raises(TransportError):
        copy(_Hostile(program), [PullSpec("/far", tmp_path / "here", ("*",))], python=sys.executable)
