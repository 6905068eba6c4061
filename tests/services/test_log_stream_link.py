"""Failures of the log follower and of its connection."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import _GeneratorContextManager as Generated

import pytest

from dtslurm.errors import TransportError
from dtslurm.logs import frames
from dtslurm.remote.worker_program import BOOT
from dtslurm.services.logs import log_link, log_stream
from dtslurm.services.logs.log_stream import LogRequest, LogStream, Mark
from dtslurm.transport.base import Stream
from dtslurm.transport.local import LocalTransport
from tests.services.log_reading import DEADLINE_S, Reader, Run, Writers, follow_logs, log_follower_process
from tests.waiting import busyness


@pytest.mark.slow
def test_a_slow_reader_uses_no_extra_memory_and_loses_no_line(run: Run) -> None:
    for rank in range(20):
        run.write(rank, b"y" * 99 + b"\n")
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        far = log_follower_process()
        for rank in range(20):  # ten times what may be on the way
            run.write(rank, (b"y" * 99 + b"\n") * 20_000)
        peak = 0
        for _ in range(20):
            time.sleep(0.05)
            peak = max(peak, far.memory_info().rss)
        assert peak < 40 << 20
        reader.wait_until(lambda: sum(len(reader.text(rank)) for rank in range(20)) == 20 * 2_000_100)


def test_a_rank_with_much_output_does_not_delay_other_ranks(run: Run) -> None:
    run.write(0, (b"z" * 99 + b"\n") * 300_000)
    for rank in range(1, 5):
        run.write(rank, b"quiet\n")
    with follow_logs(run) as reader:
        reader.wait_until(lambda: all(reader.text(rank) for rank in range(1, 5)))
        assert len(reader.text(0)) < 10 << 20


def test_f60_the_log_follower_ends_with_its_reader(run: Run, log_follower_patch: pytest.MonkeyPatch) -> None:
    log_follower_patch.undo()  # with its own priority
    run.write(0, b"x\n")
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        far = log_follower_process()
        assert far.nice() == 19
    far.wait(timeout=DEADLINE_S * busyness())


def test_f60_the_log_follower_ends_when_its_input_is_closed(run: Run) -> None:
    """As under sshd, whose pipes are closed when the link is lost; nothing kills the program itself."""
    source = log_link.far_source()
    argv = [sys.executable, "-I", "-S", "-c", BOOT, str(len(source))]
    request = frames.request(LogRequest(str(run.path)).values())
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(source + request)
    process.stdin.flush()
    assert process.stdout.read(10)
    process.stdin.close()
    assert process.wait(timeout=DEADLINE_S * busyness()) == 0
    process.stdout.close()


def test_f60_the_log_follower_ends_after_a_silent_period_of_its_reader(run: Run) -> None:
    """As on a laptop that sleeps: nothing tells the login node, and nothing must stay there."""
    text = zlib.decompress(log_link.far_source()).decode()
    assert "SILENCE_S = 120.0" in text
    source = zlib.compress(text.replace("SILENCE_S = 120.0", "SILENCE_S = 0.5").encode())
    argv = [sys.executable, "-I", "-S", "-c", BOOT, str(len(source))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(source + frames.request(LogRequest(str(run.path)).values()))
        process.stdin.flush()
        assert process.wait(timeout=DEADLINE_S * busyness()) == 0


def test_f57_a_silent_log_follower_is_replaced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write(0, b"one\n")
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        log_follower_process().suspend()
        run.write(0, b"two\n")
        monkeypatch.setattr(log_link, "_SILENCE_S", 0.5)
        reader.wait_until(lambda: any("no data arrived" in text for text in reader.notices()))
        monkeypatch.undo()
        reader.wait_until(lambda: reader.text(0) == b"one\ntwo\n")


class Noisy(LocalTransport):
    """A machine whose shell greets everybody."""

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Generated[Stream, None, None]:
        return super().stream(
            ["sh", "-c", 'echo "Welcome to the cluster"; exec "$@"', "sh", *argv], stdin=stdin
        )


def test_f19_a_login_banner_does_not_disturb_the_log_stream(run: Run) -> None:
    run.write(0, b"x\n")
    with LogStream(Noisy(), LogRequest(str(run.path), follow=False)) as stream:
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
    ("script", "message"),
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
def test_c14_malformed_output_of_a_log_follower_is_an_error(run: Run, script: str, message: str) -> None:
    with (
        LogStream(Babbling(script), LogRequest(str(run.path))) as stream,
        pytest.raises(TransportError, match=message),
    ):
        Reader(stream).until_mark(Mark.END)


@pytest.mark.parametrize("seed", range(4))
def test_f57_no_log_line_is_lost_torn_or_repeated_over_broken_connections(
    run: Run,
    seed: int,
    pretend_all_file_systems_are_remote: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writers that write half lines, a far side that is killed again and again, rotation in between."""
    if seed % 2:
        pretend_all_file_systems_are_remote()
    monkeypatch.setattr(log_stream, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(log_stream, "_MOST_SHORT_LIVES", 1000)
    dice = random.Random(seed)
    kills = 0
    with follow_logs(run) as reader:
        with Writers(run, seed) as writers:
            while writers.busy() or kills < 8:
                writers.note(reader.read())
                if dice.random() < 0.1 and reader.stream.connected and reader.items:
                    reader.stream._link.close()  # type: ignore[union-attr]
                    kills += 1
        reader.drained()
    lost = [text for text in reader.notices() if "connection lost" in text]
    assert len(lost) <= kills, lost  # none of its own accord
    writers.check(reader)


def test_a_resumed_log_stream_continues_with_the_same_attempts(run: Run) -> None:
    for attempt in range(3):
        run.write(0, b"earlier\nattempt %d\n" % attempt, attempt)
    with follow_logs(run, lines=1) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        reader.stream._link.close()  # type: ignore[union-attr]
        run.write(0, b"a\nb\nc\n", 3)
        run.write(0, b"more\n", 2)
        reader.drained()
        assert [reader.text(0, attempt) for attempt in range(4)] == [
            b"", b"", b"attempt 2\nmore\n", b"a\nb\nc\n",
        ]  # fmt: skip
        assert sum("connection lost" in text for text in reader.notices()) == 1


def test_f72_a_log_replaced_during_a_broken_connection_is_read_from_its_start(run: Run) -> None:
    path = run.write(0, b"one\ntwo\n")
    with follow_logs(run) as reader:
        reader.until_mark(Mark.CAUGHT_UP)
        reader.stream._link.close()  # type: ignore[union-attr]
        path.write_bytes(b"other content that is longer\n")
        reader.drained()
        assert reader.text(0) == b"one\ntwo\nother content that is longer\n"
        assert any("replaced" in text for text in reader.notices())
