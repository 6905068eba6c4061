"""The logs of a run over one stream: real files, a real far side, and what may happen to either."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import _GeneratorContextManager as Generated
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtslurm.errors import StoreError, TransportError
from dtslurm.logs import frames
from dtslurm.logs.lines import LogBlock
from dtslurm.services import log_link, log_stream
from dtslurm.services.log_stream import LogStream, Mark, Record, Rewritten, Summed, Wanted
from dtslurm.transport.base import Stream
from dtslurm.transport.local import LocalTransport
from tests.services.log_reading import DEADLINE_S, Reader, Run, Writers


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@contextmanager
def following(run: Run, **wanted: Any) -> Iterator[Reader]:
    with LogStream(LocalTransport(), Wanted(str(run.path), **wanted)) as stream:
        yield Reader(stream)


def far_side() -> psutil.Process:
    """The one far side of this process."""
    mine = psutil.Process().children(recursive=True)
    (found,) = [item for item in mine if "module.main()" in " ".join(item.cmdline())]
    return found


def test_what_is_there_then_what_comes_then_the_end(run: Run) -> None:
    (run.path / "logs" / "batch.log").write_bytes(b"batch\n")
    run.write(0, b"zero\nhal")
    run.write(11, b"eleven\n")
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        assert [item.file.source for item in reader.items if isinstance(item, LogBlock)] == [
            "batch",
            "0",
            "11",
        ]
        assert reader.text(0) == b"zero\n"
        run.write(0, b"f\n")
        run.write(12, b"late\nno end")
        reader.until(lambda: reader.text(0) == b"zero\nhalf\n" and reader.text(12))
        reader.drained()
        assert reader.text(12) == b"late\nno end\n"


def test_without_following_it_ends_by_itself(run: Run) -> None:
    for rank in range(3):
        run.write(rank, b"line\n" * 50_000)
    for in_turn in (False, True):
        with following(run, follow=False, in_turn=in_turn) as reader:
            reader.until_mark(Mark.END)
            order = [item.file.rank for item in reader.items if isinstance(item, LogBlock)]
            assert all(reader.text(rank) == b"line\n" * 50_000 for rank in range(3))
            assert (order == sorted(order, key=str)) != in_turn


@pytest.mark.parametrize(
    ("lines", "told"),
    [(0, b""), (1, b"e\n"), (2, b"d\ne\n"), (9, b"a\nb\nc\nd\ne\n")],
)
def test_only_the_last_lines_at_first(run: Run, lines: int, told: bytes) -> None:
    run.write(0, b"a\nb\nc\nd\ne\n")
    with following(run, lines=lines) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        run.write(0, b"more\n")
        run.write(1, b"whole\nof it\n")
        reader.until(lambda: reader.text(0).endswith(b"more\n") and reader.text(1).endswith(b"of it\n"))
        assert reader.text(0) == told + b"more\n"
        assert reader.text(1) == b"whole\nof it\n"


def test_the_last_lines_of_a_long_file_without_an_end(run: Run) -> None:
    run.write(0, b"".join(b"line %d %s\n" % (number, b"x" * 1000) for number in range(1000)) + b"unfinished")
    with following(run, follow=False, lines=200) as reader:
        reader.until_mark(Mark.END)
        lines = reader.text(0).splitlines()
        assert (len(lines), lines[0][:9], lines[-1]) == (200, b"line 801 ", b"unfinished")


def test_the_next_attempt_is_followed_and_earlier_ones_are_left_out(run: Run) -> None:
    for attempt in range(3):
        run.write(0, b"attempt %d\n" % attempt, attempt)
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        run.write(0, b"next\n", 3)
        reader.until(lambda: reader.text(0, 3))
        assert [reader.text(0, attempt) for attempt in range(4)] == [b"", b"", b"attempt 2\n", b"next\n"]
    with following(run, attempt=1, follow=False) as reader:
        reader.until_mark(Mark.END)
        assert [reader.text(0, attempt) for attempt in range(4)] == [b"", b"attempt 1\n", b"", b""]


def test_ranks_and_nodes_can_be_chosen(run: Run) -> None:
    records = run.path / "ranks" / "0"
    records.mkdir(parents=True)
    for rank in range(4):
        run.write(rank, b"x\n")
        if rank < 3:
            (records / f"{rank}.json").write_text(f'{{"host": "gpu{rank // 2}.site.org"}}')
    (run.path / "logs" / "batch.log").write_bytes(b"batch\n")
    (run.log(0).parent / "node-0.log").write_bytes(b"node\n")
    with following(run, follow=False, ranks=((1, 1), (3, 9)), kinds=frozenset({"rank"})) as reader:
        reader.until_mark(Mark.END)
        assert {item.file.source for item in reader.items if isinstance(item, LogBlock)} == {"1", "3"}
    with following(run, nodes=frozenset({"gpu1"}), kinds=frozenset({"rank"})) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        assert {item.file.rank for item in reader.items if isinstance(item, LogBlock)} == {2}
        (records / "3.json").write_text('{"host": "gpu1.site.org"}')  # recorded after its log was begun
        reader.until(lambda: reader.text(3))


def test_array_tasks(run: Run) -> None:
    def write(task: int, attempt: int, text: bytes) -> None:
        folder = run.path / "tasks" / str(task) / "logs" / str(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rank-0.log").write_bytes(text)

    def told(reader: Reader) -> dict[tuple[str | None, int, str], bytes]:
        found: dict[tuple[str | None, int, str], bytes] = defaultdict(bytes)
        for item in reader.items:
            if isinstance(item, LogBlock):
                found[item.file.task, item.file.attempt, item.file.source] += item.data
        return found

    write(3, 0, b"three\n")
    (run.path / "logs" / "batch-3.log").write_bytes(b"batch of 3\n")
    with following(run, array=True) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        write(12, 0, b"twelve\n")
        write(3, 1, b"three again\n")
        reader.until(lambda: len(told(reader)) == 4)
        assert told(reader) == {
            ("3", 0, "batch"): b"batch of 3\n",
            ("3", 0, "0"): b"three\n",
            ("3", 1, "0"): b"three again\n",
            ("12", 0, "0"): b"twelve\n",
        }
    with following(run, array=True, task="12", follow=False) as reader:
        reader.until_mark(Mark.END)
        assert told(reader) == {("12", 0, "0"): b"twelve\n"}


def test_records_and_metrics_come_along(run: Run) -> None:
    run.write(0, b"x\n")
    (run.path / "events.jsonl").write_text('{"event": "started"}\n{"event": "en')
    metrics = run.path / "metrics" / "0" / "train.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    with following(run, kinds=frozenset({"rank", "events", "metrics"})) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        with (run.path / "events.jsonl").open("a") as file:
            file.write('ded"}\nnot json\n')
        reader.until(lambda: {"event": "ended"} in told_records(reader))
        assert told_records(reader) == [{"event": "started"}, {"step": 2}, {"event": "ended"}]


def told_records(reader: Reader) -> list[Any]:
    return [item.values for item in reader.items if isinstance(item, Record)]


def test_a_truncated_file_begins_again_and_says_so(run: Run) -> None:
    path = run.write(0, b"one\ntwo\nthree\nunfinished")
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        path.write_bytes(b"new\n")
        reader.until(lambda: b"new" in reader.text(0))
        assert reader.text(0) == b"one\ntwo\nthree\nunfinished\nnew\n"
        assert any("truncated" in text for text in reader.notices())


def test_a_file_rewritten_longer_than_before_begins_again(run: Run) -> None:
    path = run.write(0, b"one\ntwo\n")
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        path.write_bytes(b"other and much longer\nthan before\n")
        reader.until(lambda: b"than before" in reader.text(0))
        assert reader.text(0) == b"one\ntwo\nother and much longer\nthan before\n"


@pytest.mark.parametrize("kept_open", [True, False])
def test_rotation_by_rename_loses_nothing(run: Run, kept_open: bool, network: Callable[[], None]) -> None:
    if not kept_open:
        network()
    path = run.write(0, b"one\n")
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        for turn in range(5):
            run.write(0, b"last of %d\n" % turn)
            path.rename(path.with_name(f"rank-0.log.{turn}"))
            run.write(0, b"first after %d\n" % turn)
            time.sleep(0.01)
            reader.until(lambda turn=turn: b"first after %d" % turn in reader.text(0))  # type: ignore[misc]
        lines = reader.text(0).splitlines()
        assert len(lines) == len(set(lines)) == 11


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have the far side take every file system for one of the network."""

    def pretend() -> None:
        source = log_link.far_source

        def changed() -> bytes:
            text = zlib.decompress(source()).decode()
            assert "return kind not in LOCAL_FILE_SYSTEMS" in text
            return zlib.compress(
                text.replace("return kind not in LOCAL_FILE_SYSTEMS", "return True").encode()
            )

        monkeypatch.setattr(log_link, "far_source", changed)

    return pretend


@pytest.mark.parametrize("kept_open", [True, False])
def test_a_replaced_file_begins_again(run: Run, kept_open: bool, network: Callable[[], None]) -> None:
    if not kept_open:
        network()
    path = run.write(0, b"one\ntwo\n")
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        temp = path.with_name("temp")
        temp.write_bytes(b"one\ntwo\n")  # the very same content and size: only the inode tells
        temp.replace(path)
        run.write(0, b"three\n")
        reader.until(lambda: b"three" in reader.text(0))
        assert reader.text(0) == b"one\ntwo\none\ntwo\nthree\n"
        assert any("replaced" in text for text in reader.notices())


def test_a_removed_file_may_come_back(run: Run) -> None:
    path = run.write(0, b"one\n")
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        path.unlink()
        time.sleep(0.3)
        run.write(0, b"two\n")
        reader.until(lambda: reader.text(0) == b"one\ntwo\n")


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
def test_any_bytes_are_harmless(run: Run, data: bytes) -> None:
    run.write(0, data)
    with following(run, follow=False) as reader:
        reader.until_mark(Mark.END)
        if len(data) < 1 << 20:
            assert reader.text(0) == data
        else:
            assert reader.text(0).replace(b"\n", b"") == data[:-1]  # in pieces
            assert max(map(len, reader.text(0).splitlines())) <= 1 << 16


def test_a_line_longer_than_memory_likes_is_cut_between_characters(run: Run) -> None:
    run.write(0, "€".encode() * 100_000)
    with following(run, follow=False) as reader:
        reader.until_mark(Mark.END)
        assert reader.text(0).decode().replace("\n", "") == "€" * 100_000


def test_a_progress_bar_is_one_line_and_shows_while_it_runs(run: Run) -> None:
    run.write(0, b"begin\n 1%|\r 2%|")
    with following(run) as reader:
        reader.until(lambda: any(isinstance(item, Rewritten) for item in reader.items))
        assert [item.text for item in reader.items if isinstance(item, Rewritten)] == [" 2%|"]
        run.write(0, b"\r 3%|" * 50_000 + b"\r100%|\nend\n")
        reader.until(lambda: b"end" in reader.text(0))
        texts = [text for item in reader.items if isinstance(item, LogBlock) for text in item.texts()]
        assert texts == ["begin", "100%|", "end"]


def test_a_fifo_and_a_folder_of_that_name_do_not_stop_it(run: Run) -> None:
    os.mkfifo(run.log(0))
    run.log(1).mkdir()
    run.write(2, b"fine\n")
    with following(run, follow=False) as reader:
        reader.until_mark(Mark.END)
        assert reader.text(2) == b"fine\n"
        assert sum("cannot read" in text for text in reader.notices()) == 2


def test_a_reader_that_stops_costs_no_memory_and_loses_nothing(run: Run) -> None:
    for rank in range(20):
        run.write(rank, b"y" * 99 + b"\n")
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        far = far_side()
        for rank in range(20):  # ten times what may be on the way
            run.write(rank, (b"y" * 99 + b"\n") * 20_000)
        peak = 0
        for _ in range(20):
            time.sleep(0.05)
            peak = max(peak, far.memory_info().rss)
        assert peak < 40 << 20
        reader.until(lambda: sum(len(reader.text(rank)) for rank in range(20)) == 20 * 2_000_100)


def test_one_chatty_rank_does_not_starve_the_others(run: Run) -> None:
    run.write(0, (b"z" * 99 + b"\n") * 300_000)
    for rank in range(1, 5):
        run.write(rank, b"quiet\n")
    with following(run) as reader:
        reader.until(lambda: all(reader.text(rank) for rank in range(1, 5)))
        assert len(reader.text(0)) < 10 << 20


def test_the_far_side_dies_with_its_reader(run: Run) -> None:
    run.write(0, b"x\n")
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        far = far_side()
        assert far.nice() == 19
    far.wait(timeout=DEADLINE_S)


def test_the_far_side_dies_when_nobody_is_at_the_other_end(run: Run) -> None:
    """As under sshd, whose pipes are closed when the link is lost; nothing kills the program itself."""
    source = log_link.far_source()
    argv = [sys.executable, "-I", "-S", "-c", log_link._BOOT, str(len(source))]
    request = frames.request(Wanted(str(run.path)).values())
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(source + request)
    process.stdin.flush()
    assert process.stdout.read(10)
    process.stdin.close()
    assert process.wait(timeout=DEADLINE_S) == 0
    process.stdout.close()


def test_the_far_side_dies_when_its_reader_says_nothing(run: Run) -> None:
    """As on a laptop that sleeps: nothing tells the login node, and nothing must stay there."""
    text = zlib.decompress(log_link.far_source()).decode()
    assert "SILENCE_S = 120.0" in text
    source = zlib.compress(text.replace("SILENCE_S = 120.0", "SILENCE_S = 0.5").encode())
    argv = [sys.executable, "-I", "-S", "-c", log_link._BOOT, str(len(source))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(source + frames.request(Wanted(str(run.path)).values()))
        process.stdin.flush()
        assert process.wait(timeout=DEADLINE_S) == 0


def test_a_far_side_without_a_sign_of_life_is_left_for_a_new_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(0, b"one\n")
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        far_side().suspend()
        run.write(0, b"two\n")
        monkeypatch.setattr(log_link, "_SILENCE_S", 0.5)
        reader.until(lambda: any("no sign of life" in text for text in reader.notices()))
        monkeypatch.undo()
        reader.until(lambda: reader.text(0) == b"one\ntwo\n")


def test_summaries_until_a_rank_is_looked_at(run: Run) -> None:
    for rank in range(3):
        run.write(rank, b"step 1\nstep 2\n")
    with following(run, summary=True) as reader:
        reader.until(lambda: len({item.file for item in reader.items if isinstance(item, Summed)}) == 3)
        assert not any(isinstance(item, LogBlock) for item in reader.items)
        run.write(1, b"step 3\nValueError: no\nlast")
        reader.until(lambda: any(isinstance(item, Summed) and item.alarm for item in reader.items))
        (found,) = [item for item in reader.items if isinstance(item, Summed) and item.alarm]
        assert (found.file.rank, found.last, found.alarm, found.new_lines) == (1, "last", "ValueError: no", 2)
        assert found.size == run.log(1).stat().st_size
        reader.stream.focus([(1, 1)], 2)
        reader.until(lambda: reader.text(1))
        run.write(1, b" line\n")
        run.write(2, b"unseen\n")
        reader.until(lambda: b"last line" in reader.text(1))
        assert reader.text(1) == b"ValueError: no\nlast line\n"
        assert reader.text(2) == b""


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    bare = Bare(tmp_path / "bin")
    for transport in (LocalTransport(), bare):
        wanted = Wanted(str(tmp_path / "no"))
        with LogStream(transport, wanted) as stream, pytest.raises(StoreError, match="there is no folder"):
            Reader(stream).until_mark(Mark.END)


class Noisy(LocalTransport):
    """A machine whose shell greets everybody."""

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Generated[Stream, None, None]:
        return super().stream(
            ["sh", "-c", 'echo "Welcome to the cluster"; exec "$@"', "sh", *argv], stdin=stdin
        )


def test_a_banner_does_not_matter(run: Run) -> None:
    run.write(0, b"x\n")
    with LogStream(Noisy(), Wanted(str(run.path), follow=False)) as stream:
        reader = Reader(stream)
        reader.until_mark(Mark.END)
        assert reader.text(0) == b"x\n"


class Babbling(LocalTransport):
    """A machine that answers something else."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = script

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Generated[Stream, None, None]:
        del argv, stdin
        return super().stream([sys.executable, "-c", self.script])


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("print('what?')", "ended"),
        ("import os\nwhile 1: os.write(1, b'y' * 65536)", "megabyte"),
        (r"import os, time; os.write(1, b'\0dtslurm tailer\0' + b'\xff' * 99); time.sleep(99)", "frame of"),
        (
            r"import os, time; os.write(1, b'\0dtslurm tailer\0\0\0\0\2\2\0\0\0\1{}'); time.sleep(99)",
            "unknown kind",
        ),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_a_far_side_that_talks_nonsense_is_an_error(run: Run, script: str, told: str) -> None:
    with (
        LogStream(Babbling(script), Wanted(str(run.path))) as stream,
        pytest.raises(TransportError, match=told),
    ):
        Reader(stream).until_mark(Mark.END)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_torn_or_doubled_when_links_break(
    run: Run, seed: int, network: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers that write half lines, a far side that is killed again and again, rotation in between."""
    if seed % 2:
        network()
    monkeypatch.setattr(log_stream, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(log_stream, "_MOST_SHORT_LIVES", 1000)
    dice = random.Random(seed)
    kills = 0
    with following(run) as reader:
        with Writers(run, seed) as writers:
            while writers.busy() or kills < 8:
                writers.note(reader.read())
                if dice.random() < 0.1 and reader.stream.connected and reader.items:
                    reader.stream._link.close()  # type: ignore[union-attr]
                    kills += 1
        reader.drained()
    assert sum("link lost" in text for text in reader.notices()) <= kills  # none of its own accord
    writers.check(reader)


def test_a_resumed_stream_goes_on_with_the_attempts_it_began_with(run: Run) -> None:
    for attempt in range(3):
        run.write(0, b"earlier\nattempt %d\n" % attempt, attempt)
    with following(run, lines=1) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        reader.stream._link.close()  # type: ignore[union-attr]
        run.write(0, b"a\nb\nc\n", 3)
        run.write(0, b"more\n", 2)
        reader.drained()
        assert [reader.text(0, attempt) for attempt in range(4)] == [
            b"", b"", b"attempt 2\nmore\n", b"a\nb\nc\n",
        ]  # fmt: skip
        assert sum("link lost" in text for text in reader.notices()) == 1


def test_a_cut_file_is_noticed_on_the_way_back(run: Run) -> None:
    path = run.write(0, b"one\ntwo\n")
    with following(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        reader.stream._link.close()  # type: ignore[union-attr]
        path.write_bytes(b"other content that is longer\n")
        reader.drained()
        assert reader.text(0) == b"one\ntwo\nother content that is longer\n"
        assert any("replaced" in text for text in reader.notices())


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
    with LogStream(bare, Wanted(str(run.path), kinds=kinds)) as stream:
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
    with LogStream(bare, Wanted(str(run.path), lines=2)) as stream:
        reader = Reader(stream)
        reader.until_mark(Mark.CAUGHT_UP)
        assert reader.text(0) == b"c\n"
        for number in range(3):
            reader.stream._link.close()  # type: ignore[union-attr]
            run.write(0, b"%d\n" % number)
            reader.until(lambda number=number: reader.text(0).endswith(b"%d\n" % number))  # type: ignore[misc]
        assert reader.text(0) == b"c\nd0\n1\n2\n"
        path.write_bytes(b"new\n")
        reader.until(lambda: reader.text(0) == b"c\nd0\n1\n2\nnew\n")
        reader.stream._link.close()  # type: ignore[union-attr]
        path.write_bytes(b"newer\nand longer\n")
        reader.drained()
        assert reader.text(0) == b"c\nd0\n1\n2\nnew\nnewer\nand longer\n"


def test_a_shell_follows_a_limited_number_of_files_and_says_so(run: Run, bare: Bare) -> None:
    for rank in range(70):
        run.write(rank, b"x\n")
    with LogStream(bare, Wanted(str(run.path), follow=False)) as stream:
        reader = Reader(stream)
        reader.until_mark(Mark.END)
        assert [rank for rank in range(70) if reader.text(rank)] == list(range(64))
        assert sum("only 64 log files" in text for text in reader.notices()) == 1


def test_a_shell_cannot_choose_by_node(run: Run, bare: Bare) -> None:
    wanted = Wanted(str(run.path), nodes=frozenset({"a"}))
    with LogStream(bare, wanted) as stream, pytest.raises(TransportError, match="cannot be chosen by node"):
        Reader(stream).until_mark(Mark.END)
