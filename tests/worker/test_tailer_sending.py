"""What the remote tailer sends, and in which order, as files grow, move and are deleted."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.worker.lib.rank_files import encode_lines
from dtslurm.worker.logtail import files, tailer
from dtslurm.worker.logtail import frames as wire
from tests.worker.tailing import Frames, Run, credit, nothing

RANK = "logs/0/rank-0.log"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


# ---- What is there, and what is added ----


def test_tailer_sends_existing_content_before_added_content(run: Run) -> None:
    run.write(RANK, b"one\n")

    def script() -> Iterator[Frames]:
        yield from nothing()
        run.add(RANK, b"two\n")
        yield from nothing()
        run.write("logs/0/rank-1.log", b"late\n")
        yield from nothing()

    reader = run.follow(script())
    assert reader.texts() == {RANK: b"one\ntwo\n", "logs/0/rank-1.log": b"late\n"}
    kinds = [kind for kind, _, _ in reader.sent if kind != wire.PING]
    assert kinds == [wire.FILE, wire.DATA, wire.CAUGHT_UP, wire.DATA, wire.FILE, wire.DATA, wire.END]
    assert reader.told(wire.CAUGHT_UP) == [{"first": {"": 0}}]


def test_tailer_without_following_sends_all_content_and_ends(run: Run) -> None:
    big = bytes(range(256)) * 1000
    run.write(RANK, big)
    run.write("logs/0/rank-1.log", b"small\n")
    for in_turn in (True, False):
        reader = run.follow(nothing(1000), follow=False, in_turn=in_turn)
        assert reader.texts() == {RANK: big, "logs/0/rank-1.log": b"small\n"}
        streams = [stream for kind, stream, _ in reader.sent if kind == wire.DATA]
        # In turn nobody waits for a large one; else one file comes after the other.
        assert streams == ([1, 2, 1, 1, 1] if in_turn else [1, 1, 1, 1, 2])


def test_tailer_sends_content_written_before_drain(run: Run) -> None:
    run.write(RANK, b"one\n")

    def script() -> Iterator[Frames]:
        yield from nothing()
        run.add(RANK, b"last words\n")
        run.write("logs/0/rank-7.log", b"last of all\n")
        yield [(wire.DRAIN, b"")]

    reader = run.follow(script())
    assert reader.texts() == {RANK: b"one\nlast words\n", "logs/0/rank-7.log": b"last of all\n"}


def test_tailer_sends_nothing_beyond_the_credit(run: Run) -> None:
    run.write(RANK, b"x" * 200_000)
    sent: list[int] = []

    def script() -> Iterator[Frames]:
        yield from nothing(3)
        sent.append(len(b"".join(run.side.pipe.payloads(wire.DATA))))  # type: ignore[attr-defined]
        yield credit(1)
        yield from nothing(3)
        sent.append(len(b"".join(run.side.pipe.payloads(wire.DATA))))  # type: ignore[attr-defined]
        yield [(wire.DRAIN, b"")]
        yield from nothing(2)
        while True:  # the reader of the rest takes a little at a time
            yield credit(70_000)

    reader = run.follow(script(), credit=0)
    assert sent == [0, files.BLOCK + wire.OFFSET.size]  # a piece is whole or not begun
    assert reader.texts() == {RANK: b"x" * 200_000}
    assert len(reader.payloads(wire.PING)) > 3  # it asks whether the reader is alive while it waits


def test_next_file_waits_when_the_credit_is_used(run: Run) -> None:
    run.write(RANK, b"one\n")
    run.write("logs/0/rank-1.log", b"two\n")
    sent: list[int] = []

    def script() -> Iterator[Frames]:
        yield from nothing(5)
        sent.append(len(run.side.pipe.payloads(wire.DATA)))  # type: ignore[attr-defined]
        yield credit(99)
        yield from nothing(5)

    reader = run.follow(script(), credit=4)
    assert sent == [1]
    assert reader.texts() == {RANK: b"one\n", "logs/0/rank-1.log": b"two\n"}


def test_line_limit_applies_only_to_existing_log_content(run: Run) -> None:
    run.write(RANK, b"1\n2\n3\n")
    run.write("events.jsonl", b"{}\n{}\n{}\n")
    run.write("metrics/0/train.jsonl", b'{"step": 1}\n{"step": 2}\n')

    def script() -> Iterator[Frames]:
        yield from nothing()
        run.write("logs/0/rank-1.log", b"a\nb\nc\n")
        yield from nothing()

    reader = run.follow(script(), lines=2, kinds=["rank", "events", "metrics"])
    assert reader.texts() == {
        RANK: b"2\n3\n",
        "logs/0/rank-1.log": b"a\nb\nc\n",
        "events.jsonl": b"{}\n{}\n{}\n",  # what a run did is wanted whole
        "metrics/0/train.jsonl": b'{"step": 2}\n',
    }


# ---- Files that are cut, moved and removed ----


def test_truncated_file_is_read_from_its_start(run: Run) -> None:
    path = run.write(RANK, b"a long first line\n")

    def script() -> Iterator[Frames]:
        yield from nothing()
        path.write_bytes(b"anew\n")
        yield from nothing()
        path.write_bytes(b"ANEW\nand longer than before\n")
        yield from nothing()

    reader = run.follow(script())
    assert [why for _, why in reader.files()] == ["new", "truncated", "replaced"]
    assert reader.texts()[RANK] == b"a long first line\nanew\nANEW\nand longer than before\n"


def test_moved_file_is_read_to_its_end_before_its_replacement(run: Run) -> None:
    path = run.write(RANK, b"old\n")

    def script() -> Iterator[Frames]:
        yield from nothing()
        path.rename(path.with_name("rank-0.log.1"))
        path.write_bytes(b"")
        yield from nothing()
        run.add(RANK + ".1", b"rest of the old\n")
        path.write_bytes(b"new\n")
        yield from nothing()

    reader = run.follow(script())
    assert reader.texts()[RANK] == b"old\nrest of the old\nnew\n"
    assert [why for _, why in reader.files()] == ["new", "replaced"]


@pytest.fixture(params=[False, True], ids=["local", "network"])
def any_file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's folder is on a local disk, and on one that others write to: there files are opened anew."""
    monkeypatch.setattr(files, "on_network", lambda _path: request.param)


@pytest.mark.usefixtures("any_file_system")
def test_deleted_file_is_read_again_when_recreated(run: Run) -> None:
    path = run.write(RANK, b"old\n")
    run.write("logs/0/rank-1.log", b"other\n")

    def script() -> Iterator[Frames]:
        yield from nothing()
        path.unlink()
        run.add("logs/0/rank-1.log", b"goes on\n")
        yield from nothing(60)
        path.write_bytes(b"back again\n")
        yield from nothing(60)

    reader = run.follow(script())
    assert reader.texts() == {RANK: b"old\nback again\n", "logs/0/rank-1.log": b"other\ngoes on\n"}
    assert reader.told(wire.TROUBLE) == []


@pytest.mark.usefixtures("any_file_system")
@pytest.mark.parametrize("again", [True, False])
def test_moved_file_is_read_further_with_or_without_a_replacement(run: Run, again: bool) -> None:
    path = run.write(RANK, b"old\n")

    def script() -> Iterator[Frames]:
        yield from nothing(40)
        path.rename(path.with_name("rank-0.log.1"))
        run.add(RANK + ".1", b"rest\n")
        if again:
            path.write_bytes(b"new\n")
        yield from nothing(40)
        run.add(RANK if again else RANK + ".1", b"more\n")
        yield from nothing(40)

    assert run.follow(script()).texts()[RANK] == b"old\nrest\n" + b"new\n" * again + b"more\n"


@pytest.mark.usefixtures("any_file_system")
def test_atomically_replaced_file_is_left_for_its_replacement(run: Run) -> None:
    path = run.write(RANK, b"old\n")

    def script() -> Iterator[Frames]:
        yield from nothing(40)
        path.with_name("draft").write_bytes(b"new\n")
        path.with_name("draft").replace(path)
        yield from nothing(40)

    reader = run.follow(script())
    assert reader.texts()[RANK] == b"old\nnew\n"
    assert [why for _, why in reader.files()] == ["new", "replaced"]


def test_fifo_is_reported_once_and_read_after_a_regular_file_replaces_the_fifo(run: Run) -> None:
    path = run.folder / RANK
    path.parent.mkdir(parents=True)
    os.mkfifo(path)

    def script() -> Iterator[Frames]:
        yield from nothing()
        path.unlink()
        path.write_bytes(b"text\n")
        yield from nothing()

    reader = run.follow(script())
    assert reader.told(wire.TROUBLE) == [{"message": f"cannot read {path}: it is not a regular file"}]
    assert reader.texts() == {RANK: b"text\n"}


# ---- A reader that comes back ----


def known(path: Path, offset: int) -> list[int]:
    before = path.read_bytes()[:offset]
    return [path.stat().st_ino, offset, len(before), zlib.crc32(before)]


def test_reconnected_client_receives_only_unread_content(run: Run) -> None:
    path = run.write(RANK, b"read\nnot yet\n")
    other = run.write("logs/0/rank-1.log", b"was rewritten meanwhile\n")
    positions = {RANK: known(path, 5), "logs/0/rank-1.log": [other.stat().st_ino, 4, 4, 1]}
    reader = run.follow(positions=positions, follow=False)
    assert reader.files("name", "why", "offset") == [
        (RANK, "resumed", 5),
        ("logs/0/rank-1.log", "replaced", 0),
    ]
    assert reader.texts() == {RANK: b"not yet\n", "logs/0/rank-1.log": b"was rewritten meanwhile\n"}


def test_reconnected_client_receives_the_rest_of_a_moved_file(run: Run) -> None:
    path = run.write(RANK, b"read\nrest\n")
    position = known(path, 5)
    path.rename(path.with_name("rank-0.log.1"))
    path.write_bytes(b"new\n")
    reader = run.follow(positions={RANK: position}, follow=False)
    assert reader.texts() == {RANK: b"rest\nnew\n"}
    path.with_name("rank-0.log.1").write_bytes(b"something else now\n")
    assert run.follow(positions={RANK: position}, follow=False).texts() == {RANK: b"new\n"}


# ---- Ranks that are only summed up ----


def test_summary_mode_sends_a_row_per_rank_and_the_last_lines_of_a_selected_rank(run: Run) -> None:
    run.write(RANK, b"step 1\nValueError: no\nstep 2\r50 %\rstep 3\n")
    run.write("logs/0/rank-1.log", b"1\n2\n3\n")

    def script() -> Iterator[Frames]:
        yield from nothing()
        yield [(wire.FOCUS, b'{"ranks": [[1, 1]], "lines": 1}')]
        run.add("logs/0/rank-1.log", b"4\n")
        run.add(RANK, b"step 4\n")
        yield from nothing()

    reader = run.follow(script(), summary=True)
    rows = [row for rows in reader.told(wire.SUMMARY) for row in rows]
    assert [row for row in rows if row[0] == 1] == [
        [1, 41, 3, "step 3", "ValueError: no"],
        [1, 48, 1, "step 4", ""],
    ]
    assert [row for row in rows if row[0] == 2] == [[2, 6, 3, "3", ""]]
    assert reader.texts() == {RANK: b"", "logs/0/rank-1.log": b"3\n4\n"}
    assert ("logs/0/rank-1.log", "skipped") in reader.files()


def test_summary_of_a_fast_rank_reads_only_the_end_of_its_log(run: Run) -> None:
    path = run.write(RANK, b"begin\n")

    def script() -> Iterator[Frames]:
        yield from nothing()
        path.write_bytes(b"begin\n" + b"x" * (6 << 20) + b"\nend\n")
        yield from nothing(40)

    rows = run.follow(script(), summary=True).told(wire.SUMMARY)
    assert rows[-1][0][1] == path.stat().st_size
    assert rows[-1][0][3] == "end"


# ---- Which files are wanted ----


def test_array_tasks_are_followed_as_separate_runs(run: Run) -> None:
    for task in (0, 1, 10):
        run.write(f"tasks/{task}/logs/0/rank-0.log", b"%d\n" % task)
        run.write(f"logs/batch-{task}.log", b"batch %d\n" % task)
    run.write("logs/batch.log", b"of no task\n")
    run.write("tasks/x/logs/0/rank-0.log", b"of no task\n")
    reader = run.follow(array=True, follow=False)
    assert {(name, task) for name, task in reader.files("name", "task")} == {
        (name.format(task), str(task))
        for task in (0, 1, 10)
        for name in ("tasks/{}/logs/0/rank-0.log", "logs/batch-{}.log")
    }
    assert reader.told(wire.CAUGHT_UP) == [{"first": {"0": 0, "1": 0, "10": 0}}]
    result = run.follow(array=True, task="10", follow=False)
    assert result.texts() == {"tasks/10/logs/0/rank-0.log": b"10\n", "logs/batch-10.log": b"batch 10\n"}


def test_latest_attempt_is_followed_unless_an_attempt_is_selected(run: Run) -> None:
    for attempt in (0, 1, 2):
        run.write(f"logs/{attempt}/rank-0.log", b"%d\n" % attempt)
    assert list(run.follow(follow=False).texts()) == ["logs/2/rank-0.log"]
    assert list(run.follow(follow=False, attempt=1).texts()) == ["logs/1/rank-0.log"]
    since = run.follow(follow=False, since={"": 1})
    assert sorted(since.texts()) == ["logs/1/rank-0.log", "logs/2/rank-0.log"]


def test_file_of_an_old_attempt_is_closed(run: Run) -> None:
    run.write(RANK, b"0\n")
    kept: list[bool] = []

    def script() -> Iterator[Frames]:
        yield from nothing()
        kept.append(run.side.finder.logs[str(run.folder / RANK)].file is not None)
        run.write("logs/1/rank-0.log", b"1\n")
        yield from nothing(20)
        run.now += tailer.RETIRED_S
        yield from nothing(20)
        kept.append(run.side.finder.logs[str(run.folder / RANK)].file is not None)
        kept.append(run.side.finder.logs[str(run.folder / "logs/1/rank-0.log")].file is not None)

    run.follow(script())
    assert kept == [True, False, True]


def test_ranks_of_a_node_are_sent_after_their_record_names_the_node(run: Run) -> None:
    for rank in range(4):
        run.write(f"logs/0/rank-{rank}.log", b"%d\n" % rank)
    run.write("ranks/0/0.json", b'{"host": "n1"}')
    run.write("ranks/0/1.json", b'{"host": "n2.site.example"}')
    run.write("ranks/0/2.json", b"half a rec")

    def script() -> Iterator[Frames]:
        yield from nothing()
        run.write("ranks/0/2.json", b'{"host": "n2"}')
        yield from nothing()

    reader = run.follow(script(), nodes=["n2"])
    assert reader.texts() == {"logs/0/rank-1.log": b"1\n", "logs/0/rank-2.log": b"2\n"}
    some = run.follow(follow=False, ranks=[[0, 0], [3, 9]])
    assert sorted(some.texts()) == [RANK, "logs/0/rank-3.log"]


# ---- Logs of nodes ----


def node_lines(rank: int, text: bytes) -> bytes:
    return encode_lines(rank, text, 1.0)


def test_the_ranks_of_a_node_are_followed_in_the_log_of_the_node(run: Run) -> None:
    run.write("logs/0/ranks-0.log", node_lines(0, b"one\n") + node_lines(1, b"half"))
    run.write("logs/0/ranks-2.log", node_lines(2, b"of another node\n"))

    def script() -> Iterator[Frames]:
        yield from nothing()
        run.add(
            "logs/0/ranks-0.log", node_lines(1, b" whole\n") + node_lines(0, b"two\n") + b"# 0 2.0\n0: th"
        )
        yield from nothing(20)
        run.add("logs/0/ranks-0.log", b"ree\n")
        run.write("logs/0/ranks-4.log", node_lines(4, b"late\n") + node_lines(5, b"later\n"))
        yield from nothing(40)

    reader = run.follow(script())
    assert reader.texts() == {
        "logs/0/rank-0.log": b"one\ntwo\nthree\n",
        "logs/0/rank-1.log": b"half whole\n",
        "logs/0/rank-2.log": b"of another node\n",
        "logs/0/rank-4.log": b"late\n",
        "logs/0/rank-5.log": b"later\n",
    }


def test_only_the_logs_of_nodes_with_selected_ranks_are_read(run: Run) -> None:
    for first in (0, 2, 4):
        run.write(f"logs/0/ranks-{first}.log", node_lines(first, b"a\n") + node_lines(first + 1, b"b\n"))
    reader = run.follow(nothing(1000), follow=False, ranks=[[3, 3]])
    assert reader.texts() == {"logs/0/rank-3.log": b"b\n"}
    assert [Path(path).name for path in run.side.finder.node_logs] == ["ranks-2.log"]


def test_a_reader_resumes_in_the_log_of_a_node(run: Run) -> None:
    run.write(
        "logs/0/ranks-0.log", node_lines(0, b"one\n") + node_lines(1, b"other\n") + node_lines(0, b"two\n")
    )
    inode = (run.folder / "logs/0/ranks-0.log").stat().st_ino
    known = {"logs/0/rank-0.log": [inode, 4, 4, zlib.crc32(b"one\n")]}
    reader = run.follow(nothing(1000), follow=False, positions=known)
    assert (RANK, "resumed") in reader.files()
    assert reader.texts() == {RANK: b"two\n", "logs/0/rank-1.log": b"other\n"}


def test_the_nodes_of_ranks_are_known_from_the_records_of_the_node(run: Run) -> None:
    run.write("logs/0/ranks-0.log", node_lines(0, b"a\n"))
    run.write("logs/0/ranks-1.log", node_lines(1, b"b\n"))
    run.write("ranks/0/ranks-0.jsonl", b'{"rank": 0, "host": "n1"}\n')
    run.write("ranks/0/ranks-1.jsonl", b'{"rank": 1, "host": "n2"}\n')
    assert run.follow(nothing(1000), follow=False, nodes=["n2"]).texts() == {"logs/0/rank-1.log": b"b\n"}


def test_the_last_lines_and_the_summary_of_a_rank_come_from_the_log_of_its_node(run: Run) -> None:
    run.write(
        "logs/0/ranks-0.log", node_lines(0, b"one\ntwo\nthree\n") + node_lines(1, b"first\nValueError: x\n")
    )
    assert run.follow(nothing(1000), follow=False, lines=2, ranks=[[0, 0]]).texts() == {RANK: b"two\nthree\n"}
    reader = run.follow(nothing(1000), follow=False, summary=True)
    rows = [row for summary in reader.told(wire.SUMMARY) for row in summary]
    assert [row[1:] for row in sorted(rows)] == [
        [14, 3, "three", ""],
        [20, 2, "ValueError: x", "ValueError: x"],
    ]
