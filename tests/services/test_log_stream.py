"""A log stream over real files and a real log follower."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import _GeneratorContextManager as Generated
from pathlib import Path

import pytest

from dtslurm.errors import CommandNotFound, StoreError
from dtslurm.logs.lines import LogBlock
from dtslurm.services.logs.log_stream import LogRequest, LogStream, Mark, OutputSummary
from dtslurm.transport.base import Stream
from dtslurm.transport.local import LocalTransport
from tests.services.log_reading import Reader, Run, follow_logs, record_values


def test_a_log_stream_sends_existing_lines_then_new_lines_then_the_end(run: Run) -> None:
    (run.path / "logs" / "batch.log").write_bytes(b"batch\n")
    run.write(0, b"zero\nhal")
    run.write(11, b"eleven\n")
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        assert [item.file.source for item in reader.items if isinstance(item, LogBlock)] == [
            "batch",
            "0",
            "11",
        ]
        assert reader.text(0) == b"zero\n"
        run.write(0, b"f\n")
        run.write(12, b"late\nno end")
        reader.wait_until(lambda: reader.text(0) == b"zero\nhalf\n" and reader.text(12))
        reader.drained()
        assert reader.text(12) == b"late\nno end\n"


def test_a_log_stream_without_follow_ends_after_the_existing_lines(run: Run) -> None:
    for rank in range(3):
        run.write(rank, b"line\n" * 50_000)
    for in_turn in (False, True):
        with follow_logs(run, follow=False, in_turn=in_turn) as reader:
            reader.until_mark(Mark.END)
            order = [item.file.rank for item in reader.items if isinstance(item, LogBlock)]
            assert all(reader.text(rank) == b"line\n" * 50_000 for rank in range(3))
            assert (order == sorted(order, key=str)) != in_turn


@pytest.mark.parametrize(
    ("lines", "last_lines"),
    [(0, b""), (1, b"e\n"), (2, b"d\ne\n"), (9, b"a\nb\nc\nd\ne\n")],
)
def test_a_log_stream_can_begin_with_the_last_lines(run: Run, lines: int, last_lines: bytes) -> None:
    run.write(0, b"a\nb\nc\nd\ne\n")
    with follow_logs(run, lines=lines) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        run.write(0, b"more\n")
        run.write(1, b"whole\nof it\n")
        reader.wait_until(lambda: reader.text(0).endswith(b"more\n") and reader.text(1).endswith(b"of it\n"))
        assert reader.text(0) == last_lines + b"more\n"
        assert reader.text(1) == b"whole\nof it\n"


def test_the_last_lines_include_an_unfinished_line(run: Run) -> None:
    run.write(0, b"".join(b"line %d %s\n" % (number, b"x" * 1000) for number in range(1000)) + b"unfinished")
    with follow_logs(run, follow=False, lines=200) as reader:
        reader.until_mark(Mark.END)
        lines = reader.text(0).splitlines()
        assert (len(lines), lines[0][:9], lines[-1]) == (200, b"line 801 ", b"unfinished")


def test_a_log_stream_follows_new_attempts_and_omits_earlier_attempts(run: Run) -> None:
    for attempt in range(3):
        run.write(0, b"attempt %d\n" % attempt, attempt)
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        run.write(0, b"next\n", 3)
        reader.wait_until(lambda: reader.text(0, 3))
        assert [reader.text(0, attempt) for attempt in range(4)] == [b"", b"", b"attempt 2\n", b"next\n"]
    with follow_logs(run, attempt=1, follow=False) as reader:
        reader.until_mark(Mark.END)
        assert [reader.text(0, attempt) for attempt in range(4)] == [b"", b"attempt 1\n", b"", b""]


def test_a_log_stream_can_be_limited_to_ranks_and_nodes(run: Run) -> None:
    records = run.path / "ranks" / "0"
    records.mkdir(parents=True)
    for rank in range(4):
        run.write(rank, b"x\n")
        if rank < 3:
            (records / f"{rank}.json").write_text(f'{{"host": "gpu{rank // 2}.site.org"}}')
    (run.path / "logs" / "batch.log").write_bytes(b"batch\n")
    (run.log(0).parent / "node-0.log").write_bytes(b"node\n")
    with follow_logs(run, follow=False, ranks=((1, 1), (3, 9)), kinds=frozenset({"rank"})) as reader:
        reader.until_mark(Mark.END)
        assert {item.file.source for item in reader.items if isinstance(item, LogBlock)} == {"1", "3"}
    with follow_logs(run, nodes=frozenset({"gpu1"}), kinds=frozenset({"rank"})) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        assert {item.file.rank for item in reader.items if isinstance(item, LogBlock)} == {2}
        (records / "3.json").write_text('{"host": "gpu1.site.org"}')  # recorded after its log was begun
        reader.wait_until(lambda: reader.text(3))


def test_a_log_stream_labels_and_selects_array_tasks(run: Run) -> None:
    def write(task: int, attempt: int, text: bytes) -> None:
        folder = run.path / "tasks" / str(task) / "logs" / str(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rank-0.log").write_bytes(text)

    def told(reader: Reader) -> dict[tuple[str | None, int, str], bytes]:
        answer: dict[tuple[str | None, int, str], bytes] = defaultdict(bytes)
        for item in reader.items:
            if isinstance(item, LogBlock):
                answer[item.file.task, item.file.attempt, item.file.source] += item.data
        return answer

    write(3, 0, b"three\n")
    (run.path / "logs" / "batch-3.log").write_bytes(b"batch of 3\n")
    with follow_logs(run, array=True) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        write(12, 0, b"twelve\n")
        write(3, 1, b"three again\n")
        reader.wait_until(lambda: len(told(reader)) == 4)
        assert told(reader) == {
            ("3", 0, "batch"): b"batch of 3\n",
            ("3", 0, "0"): b"three\n",
            ("3", 1, "0"): b"three again\n",
            ("12", 0, "0"): b"twelve\n",
        }
    with follow_logs(run, array=True, task="12", follow=False) as reader:
        reader.until_mark(Mark.END)
        assert told(reader) == {("12", 0, "0"): b"twelve\n"}


def test_a_log_stream_includes_events_and_metrics(run: Run) -> None:
    run.write(0, b"x\n")
    (run.path / "events.jsonl").write_text('{"event": "started"}\n{"event": "en')
    metrics = run.path / "metrics" / "0" / "train.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    with follow_logs(run, kinds=frozenset({"rank", "events", "metrics"})) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        with (run.path / "events.jsonl").open("a") as file:
            file.write('ded"}\nnot json\n')
        reader.wait_until(lambda: {"event": "ended"} in record_values(reader))
        assert record_values(reader) == [{"event": "started"}, {"step": 2}, {"event": "ended"}]


def test_a_log_stream_sends_summaries_until_a_rank_is_in_focus(run: Run) -> None:
    for rank in range(3):
        run.write(rank, b"step 1\nstep 2\n")
    with follow_logs(run, summary=True) as reader:
        reader.wait_until(
            lambda: len({item.file for item in reader.items if isinstance(item, OutputSummary)}) == 3
        )
        assert not any(isinstance(item, LogBlock) for item in reader.items)
        run.write(1, b"step 3\nValueError: no\nlast")
        reader.wait_until(
            lambda: any(isinstance(item, OutputSummary) and item.alarm for item in reader.items)
        )
        (result,) = [item for item in reader.items if isinstance(item, OutputSummary) and item.alarm]
        assert (result.file.rank, result.last, result.alarm, result.new_lines) == (
            1,
            "last",
            "ValueError: no",
            2,
        )
        assert result.size == run.log(1).stat().st_size
        reader.stream.focus([(1, 1)], 2)
        reader.wait_until(lambda: reader.text(1))
        run.write(1, b" line\n")
        run.write(2, b"unseen\n")
        reader.wait_until(lambda: b"last line" in reader.text(1))
        assert reader.text(1) == b"ValueError: no\nlast line\n"
        assert reader.text(2) == b""


def test_a_missing_run_directory_raises_an_error(tmp_path: Path) -> None:
    request = LogRequest(str(tmp_path / "no"))
    with (
        LogStream(LocalTransport(), request) as stream,
        pytest.raises(StoreError, match="there is no folder"),
    ):
        Reader(stream).until_mark(Mark.END)


class WithoutPython(LocalTransport):
    """A host on whose PATH there is a shell and nothing else."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        folder.mkdir()
        (folder / "sh").symlink_to("/bin/sh")

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Generated[Stream, None, None]:
        words = [word for word in argv if word not in {sys.executable, "/usr/bin/python3"}]
        return super().stream(["env", f"PATH={self.folder}", *words], stdin=stdin)


def test_a_host_without_python_raises_an_error_that_names_the_setting(run: Run, tmp_path: Path) -> None:
    transport = WithoutPython(tmp_path / "bin")
    with (
        LogStream(transport, LogRequest(str(run.path))) as stream,
        pytest.raises(CommandNotFound, match="no Python of version") as caught,
    ):
        Reader(stream).until_mark(Mark.END)
    assert "login.python" in caught.value.hint
