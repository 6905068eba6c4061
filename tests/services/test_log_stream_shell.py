"""Following logs where there is no Python: a shell does it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import _GeneratorContextManager as Generated
from pathlib import Path

import pytest

from dtslurm.errors import StoreError, TransportError
from dtslurm.services.logs.log_stream import LogRequest, LogStream, Mark
from dtslurm.transport.base import Stream
from dtslurm.transport.local import LocalTransport
from tests.services.log_reading import Reader, Run, told_records


class Bare(LocalTransport):
    """A machine without Python, cut off when it is told to be."""

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Generated[Stream, None, None]:
        return super().stream(
            ["env", f"PATH={self.path}", *(word for word in argv if word != sys.executable)], stdin=stdin
        )

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        path.mkdir()
        for name in ("sh", "wc", "ls", "tail", "head", "od", "sed"):
            found = shutil.which(name)
            assert found is not None
            (path / name).symlink_to(found)


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    return Bare(tmp_path / "bin")


def test_without_python_a_shell_does(run: Run, bare: Bare) -> None:
    data = bytes(range(256)) * 3000 + b"\n"
    (run.path / "logs" / "batch.log").write_bytes(b"batch\n")
    (run.path / "events.jsonl").write_text('{"event": "started"}\n')
    run.write(0, b"old\n", 0)
    run.write(0, data, 1)
    kinds = frozenset({"batch", "rank", "events"})
    with LogStream(bare, LogRequest(str(run.path), kinds=kinds)) as stream:
        reader = Reader(stream)
        reader.until_mark(Mark.CAUGHT_UP)
        assert reader.notices() == [
            "there is no Python 3.6 or later: a shell looks every second, at 64 log files at most"
        ]
        assert reader.text(0, 1) == data
        assert reader.text(0, 0) == b""
        assert told_records(reader) == [{"event": "started"}]
        run.write(0, b"more\nunfinished", 1)
        run.write(5, b"late\n", 1)
        run.write(0, b"next\n", 2)
        reader.drained()
        assert reader.text(0, 1) == data + b"more\nunfinished\n"
        assert reader.text(5, 1) == b"late\n"
        assert reader.text(0, 2) == b"next\n"


def test_a_shell_resumes_truncates_and_gives_the_last_lines(run: Run, bare: Bare) -> None:
    path = run.write(0, b"a\nb\nc\nd")
    with LogStream(bare, LogRequest(str(run.path), lines=2)) as stream:
        reader = Reader(stream)
        reader.until_mark(Mark.CAUGHT_UP)
        assert reader.text(0) == b"c\n"
        for number in range(3):
            reader.stream._link.close()  # type: ignore[union-attr]
            run.write(0, b"%d\n" % number)
            reader.wait_until(lambda number=number: reader.text(0).endswith(b"%d\n" % number))  # type: ignore[misc]
        assert reader.text(0) == b"c\nd0\n1\n2\n"
        path.write_bytes(b"new\n")
        reader.wait_until(lambda: reader.text(0) == b"c\nd0\n1\n2\nnew\n")
        reader.stream._link.close()  # type: ignore[union-attr]
        path.write_bytes(b"newer\nand longer\n")
        reader.drained()
        assert reader.text(0) == b"c\nd0\n1\n2\nnew\nnewer\nand longer\n"


def test_a_shell_sends_no_gigabyte_for_the_last_lines(run: Run, bare: Bare) -> None:
    path = run.write(0, b"begin\n")
    os.truncate(path, 1 << 30)
    run.write(0, b"end\n")
    with LogStream(bare, LogRequest(str(run.path), lines=5, follow=False)) as stream:
        reader = Reader(stream)
        reader.until_mark(Mark.END)
        assert reader.text(0).endswith(b"end\n")
        assert len(reader.text(0)) < 2 << 20


def test_a_shell_follows_a_limited_number_of_files_and_says_so(run: Run, bare: Bare) -> None:
    for rank in range(70):
        run.write(rank, b"x\n")
    with LogStream(bare, LogRequest(str(run.path), follow=False)) as stream:
        reader = Reader(stream)
        reader.until_mark(Mark.END)
        assert [rank for rank in range(70) if reader.text(rank)] == list(range(64))
        assert sum("only 64 log files" in text for text in reader.notices()) == 1


def test_a_shell_cannot_choose_by_node(run: Run, bare: Bare) -> None:
    wanted = LogRequest(str(run.path), nodes=frozenset({"a"}))
    with LogStream(bare, wanted) as stream, pytest.raises(TransportError, match="cannot be chosen by node"):
        Reader(stream).until_mark(Mark.END)


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    bare = Bare(tmp_path / "bin")
    for transport in (LocalTransport(), bare):
        wanted = LogRequest(str(tmp_path / "no"))
        with LogStream(transport, wanted) as stream, pytest.raises(StoreError, match="there is no folder"):
            Reader(stream).until_mark(Mark.END)
