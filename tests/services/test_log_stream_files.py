"""Log files that are truncated, replaced, renamed or deleted while they are followed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from dtslurm.logs.lines import LogBlock
from dtslurm.services.logs.log_stream import Mark, Rewritten
from tests.services.log_reading import Run, follow_logs


def test_f72_a_truncated_log_is_read_from_its_start_with_a_notice(run: Run) -> None:
    path = run.write(0, b"one\ntwo\nthree\nunfinished")
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        path.write_bytes(b"new\n")
        reader.wait_until(lambda: b"new" in reader.text(0))
        assert reader.text(0) == b"one\ntwo\nthree\nunfinished\nnew\n"
        assert any("truncated" in text for text in reader.notices())


def test_f72_a_log_that_is_rewritten_longer_is_read_from_its_start(run: Run) -> None:
    path = run.write(0, b"one\ntwo\n")
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        path.write_bytes(b"other and much longer\nthan before\n")
        reader.wait_until(lambda: b"than before" in reader.text(0))
        assert reader.text(0) == b"one\ntwo\nother and much longer\nthan before\n"


@pytest.mark.slow
@pytest.mark.parametrize("kept_open", [True, False])
def test_f72_log_rotation_by_rename_loses_no_line(
    run: Run, kept_open: bool, pretend_all_file_systems_are_remote: Callable[[], None]
) -> None:
    if not kept_open:
        pretend_all_file_systems_are_remote()
    path = run.write(0, b"one\n")
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        for turn in range(5):
            run.write(0, b"last of %d\n" % turn)
            path.rename(path.with_name(f"rank-0.log.{turn}"))
            run.write(0, b"first after %d\n" % turn)
            time.sleep(0.01)
            reader.wait_until(lambda turn=turn: b"first after %d" % turn in reader.text(0))  # type: ignore[misc]
        lines = reader.text(0).splitlines()
        assert len(lines) == len(set(lines)) == 11


@pytest.mark.parametrize("kept_open", [True, False])
def test_f72_a_replaced_log_is_read_from_its_start(
    run: Run, kept_open: bool, pretend_all_file_systems_are_remote: Callable[[], None]
) -> None:
    if not kept_open:
        pretend_all_file_systems_are_remote()
    path = run.write(0, b"one\ntwo\n")
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        temp = path.with_name("temp")
        temp.write_bytes(b"one\ntwo\n")  # the very same content and size: only the inode tells
        temp.replace(path)
        run.write(0, b"three\n")
        reader.wait_until(lambda: b"three" in reader.text(0))
        assert reader.text(0) == b"one\ntwo\none\ntwo\nthree\n"
        assert any("replaced" in text for text in reader.notices())


def test_a_log_that_was_deleted_and_created_again_is_followed(run: Run) -> None:
    path = run.write(0, b"one\n")
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        path.unlink()
        time.sleep(0.3)
        run.write(0, b"two\n")
        reader.wait_until(lambda: reader.text(0) == b"one\ntwo\n")


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 3000 + b"\n",
        b"\xff\xfe broken \x80\n",
        b"\x1b]52;c;Zm9v\x07\x1b[2J\n",
        b"x" * (10 << 20) + b"\n",
        bytes(range(256)) * 100 + b"\n",
    ],
    ids=["nul", "not utf-8", "escapes", "10 MB line", "all bytes"],
)
def test_f74_arbitrary_bytes_in_a_log_are_passed_through(run: Run, data: bytes) -> None:
    run.write(0, data)
    with follow_logs(run, follow=False) as reader:
        reader.until_mark(Mark.END)
        if len(data) < 1 << 20:
            assert reader.text(0) == data
        else:
            assert reader.text(0).replace(b"\n", b"") == data[:-1]  # in pieces
            assert max(map(len, reader.text(0).splitlines())) <= 1 << 16


def test_f73_a_very_long_line_is_split_between_characters(run: Run) -> None:
    run.write(0, "€".encode() * 100_000)
    with follow_logs(run, follow=False) as reader:
        reader.until_mark(Mark.END)
        assert reader.text(0).decode().replace("\n", "") == "€" * 100_000


def test_f73_a_progress_bar_is_one_line_with_its_latest_state(run: Run) -> None:
    run.write(0, b"begin\n 1%|\r 2%|")
    with follow_logs(run) as reader:
        reader.wait_until(lambda: any(isinstance(item, Rewritten) for item in reader.items))
        assert [item.text for item in reader.items if isinstance(item, Rewritten)] == [" 2%|"]
        run.write(0, b"\r 3%|" * 50_000 + b"\r100%|\nend\n")
        reader.wait_until(lambda: b"end" in reader.text(0))
        texts = [text for item in reader.items if isinstance(item, LogBlock) for text in item.texts()]
        assert texts == ["begin", "100%|", "end"]


def test_f15_a_fifo_or_folder_in_place_of_a_log_is_skipped_with_a_notice(run: Run) -> None:
    os.mkfifo(run.log(0))
    run.log(1).mkdir()
    run.write(2, b"fine\n")
    with follow_logs(run, follow=False) as reader:
        reader.until_mark(Mark.END)
        assert reader.text(2) == b"fine\n"
        assert sum("cannot read" in text for text in reader.notices()) == 2
