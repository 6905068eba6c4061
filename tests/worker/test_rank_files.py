"""The logs and records of ranks, in files of their own or in those of their nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtslurm.worker.lib import rank_files
from dtslurm.worker.lib.rank_collector import RankCollector
from dtslurm.worker.lib.rank_files import (
    NodeLog,
    decode_lines,
    decoded_size,
    encode_lines,
    encode_totals,
    find_node_log,
    list_rank_logs,
    open_rank_log,
    read_record,
    read_records,
)

OUTPUT = st.lists(
    st.sampled_from(
        [b"\n", b"17: ", b"17+ ", b"= 1 1 1.0\n", b"# 17 1.0\n", b"\r", b"step 1", b"\xff\x00", b"1"]
    ),
    max_size=30,
).map(b"".join)


UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine


def text_of(node_log: NodeLog, rank: int) -> bytes:
    return node_log.read(rank, 1 << 30, 0)


@pytest.fixture
def node(tmp_path: Path) -> RankCollector:
    """A collector of a node's ranks, with folders for all files."""
    for name in ("node", "logs", "ranks"):
        (tmp_path / name).mkdir()
    return RankCollector(*(str(tmp_path / name) for name in ("node", "logs", "ranks")))


def write(node: RankCollector, rank: int, text: bytes) -> None:
    with Path(node.folder, f"{rank}.log").open("ab") as file:
        file.write(text)


def record(node: RankCollector, rank: int, code: int | None = None) -> None:
    text = json.dumps({"schema": 1, "rank": rank, "pid": 7, "exit_code": code})
    draft = Path(node.folder, f".{rank}")
    draft.write_text(text + "\n")
    draft.replace(Path(node.folder, f"{rank}.json"))


@UNHURRIED
@given(data=OUTPUT.filter(bool))
def test_a_ranks_bytes_survive_the_log_of_its_node(data: bytes) -> None:
    lines = encode_lines(17, data, 1.5).partition(b"\n")[2]
    assert decode_lines(17, lines) == data
    assert decoded_size(17, lines) == len(data)
    assert all(line.startswith((b"17: ", b"17+ ")) for line in lines.split(b"\n")[:-1])


@UNHURRIED
@given(
    pieces=st.lists(st.tuples(st.integers(16, 18), OUTPUT.filter(bool)), max_size=12),
    size=st.integers(1, 40),
)
def test_each_rank_is_read_from_any_position(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, bytes]], size: int
) -> None:
    path = tmp_path_factory.mktemp("logs") / "ranks-16.log"
    node_log = NodeLog(str(path))
    expected: dict[int, bytes] = {}
    for rank, data in pieces:
        expected[rank] = expected.get(rank, b"") + data
        totals = {rank: (len(text), 2.0) for rank, text in expected.items()}
        with path.open("ab") as file:
            file.write(encode_lines(rank, data, 2.0) + encode_totals(totals) * (len(data) % 2))
        node_log.look()
    for rank, text in expected.items():
        assert text_of(node_log, rank) == text
        assert b"".join(node_log.read(rank, size, start) for start in range(0, len(text), size)) == text
        assert b"".join(node_log.iterate(rank)) == text


def test_long_logs_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "PIECE", 50)
    monkeypatch.setattr(rank_files, "LARGEST_GROUP", 200)
    data = b"".join(b"line %d\n" % number for number in range(100)) + b"x" * 300
    (tmp_path / "ranks-0.log").write_bytes(encode_lines(3, data, 1.0))
    node_log = NodeLog(str(tmp_path / "ranks-0.log"))
    node_log.look()
    assert text_of(node_log, 3) == data
    assert len(node_log.groups[3].ranges) > 3


def test_an_incomplete_line_of_the_node_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "ranks-0.log"
    path.write_bytes(encode_lines(0, b"whole\n", 1.0) + b"0: ha")
    node_log = NodeLog(str(path))
    node_log.look()
    assert text_of(node_log, 0) == b"whole\n"
    path.write_bytes(encode_lines(0, b"whole\n", 1.0) + b"0: half\n")
    node_log.look()
    assert text_of(node_log, 0) == b"whole\nhalf\n"


def test_a_rank_is_found_whatever_the_distribution(tmp_path: Path) -> None:
    for first in (0, 1, 2):  # cyclic: each node has every third rank
        lines = b"".join(encode_lines(rank, b"rank %d\n" % rank, 1.0) for rank in range(first, 12, 3))
        (tmp_path / f"ranks-{first}.log").write_bytes(lines)
    for rank in range(12):
        assert open_rank_log(str(tmp_path), rank).read(100, 0) == b"rank %d\n" % rank
    assert find_node_log(str(tmp_path), 12) is None
    with pytest.raises(FileNotFoundError):
        open_rank_log(str(tmp_path), 12)


def test_the_sizes_of_the_logs_are_in_the_last_line_of_the_nodes_log(
    node: RankCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (8, 9, 10):
        write(node, rank, b"" if rank == 10 else b"x\n" * 100_000)
    node.collect(final=True)
    write(node, 8, b"= 8 1 1.0\n# 8 1.0")
    node.collect(final=True)
    times = {rank: Path(node.folder, f"{rank}.log").stat().st_mtime for rank in (8, 9)}
    with monkeypatch.context() as patch:
        patch.setattr(rank_files.NodeLog, "look", None)  # the whole file is not read
        logs = list_rank_logs(node.logs)
    assert {rank: size for rank, (size, _) in logs.items()} == {8: 200_017, 9: 200_000, 10: 0}
    assert {rank: round(written, 3) for rank, (_, written) in logs.items()} == {
        8: round(times[8], 3), 9: round(times[9], 3), 10: 0.0
    }  # fmt: skip
    log = Path(node.logs, "ranks-8.log")
    log.write_bytes(log.read_bytes()[:-5])  # the agent was killed as it wrote
    assert list_rank_logs(node.logs)[8][0] == 200_017
    assert open_rank_log(node.logs, 8).read(1 << 20, 0) == b"x\n" * 100_000 + b"= 8 1 1.0\n# 8 1.0"


def test_a_log_of_its_own_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "ranks-0.log").write_bytes(encode_lines(0, b"part\n", 1.0) + encode_lines(1, b"one\n", 9.5))
    (tmp_path / "rank-0.log").write_bytes(b"part and rest\n")
    assert open_rank_log(str(tmp_path), 0).read(100, 0) == b"part and rest\n"
    logs = list_rank_logs(str(tmp_path))
    assert (logs[0][0], logs[1]) == (14, (4, 9.5))


def test_records_of_ranks_and_of_nodes_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text('{"rank": 0, "exit_code": 0}')
    lines = [
        '{"rank": 1, "exit_code": null}',
        '{"rank": 2, "exit_code": 3}',
        '{"rank": 1, "exit_code": 0}',
        '{"ra',
    ]
    (tmp_path / "ranks-1.jsonl").write_text("\n".join(lines))
    (tmp_path / "step.json").write_text('{"exit_code": 0}')
    codes = {rank: values["exit_code"] for rank, values in read_records(str(tmp_path)).items()}
    assert codes == {0: 0, 1: 0, 2: 3}
    assert [read_record(str(tmp_path), rank).get("exit_code") for rank in range(4)] == [0, 0, 3, None]


def test_output_is_copied_in_few_writes(node: RankCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for rank in (8, 9):
        write(node, rank, b"begin\n")
    node.collect()
    assert list_rank_logs(node.logs) == {}
    now[0] += 5.0
    node.collect()
    assert {rank: size for rank, (size, _) in list_rank_logs(node.logs).items()} == {8: 6, 9: 6}
    write(node, 9, b"Traceback (most recent call last):\n")
    now[0] += 1.0
    node.collect()
    assert list_rank_logs(node.logs)[9][0] == 41
    write(node, 8, b"10 %")
    node.collect()
    now[0] += 5.0
    node.collect()
    write(node, 8, b" 20 %\nend\n")
    node.collect()
    now[0] += 5.0
    node.collect()
    lines = Path(node.logs, "ranks-8.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("8")] == ["8: begin", "8+ 10 %", "8:  20 %", "8: end"]
    assert open_rank_log(node.logs, 8).read(100, 0) == b"begin\n10 % 20 %\nend\n"


def test_the_end_of_a_rank_is_copied_at_once_and_confirmed(node: RankCollector) -> None:
    record(node, 8)
    write(node, 8, b"no newline")
    write(node, 9, b"of another\n")
    node.collect()
    assert not Path(node.folder, "8.collected").exists()
    record(node, 8, 3)
    node.collect()
    assert Path(node.folder, "8.collected").exists()
    assert open_rank_log(node.logs, 8).read(100, 0) == b"no newline"
    assert read_record(node.ranks, 8)["exit_code"] == 3


def test_another_agent_continues_where_a_killed_one_stopped(node: RankCollector) -> None:
    write(node, 8, b"one\n")
    record(node, 8)
    node.collect(final=True)
    log = Path(node.logs, "ranks-8.log")
    records = Path(node.ranks, "ranks-8.jsonl")
    log.write_bytes(log.read_bytes() + b"# 8 5.0\n8: tw")  # killed while it wrote
    records.write_bytes(records.read_bytes() + b'{"rank": 8, "ex')
    write(node, 8, b"two\n")
    record(node, 8, 0)
    other = RankCollector(node.folder, node.logs, node.ranks)
    other.collect()
    node.collect(final=True)  # the first one was only stopped
    assert open_rank_log(node.logs, 8).read(100, 0) == b"one\ntwo\n"
    assert [json.loads(line)["exit_code"] for line in records.read_text().splitlines()] == [None, 0]


def test_a_full_disk_leaves_no_incomplete_line(node: RankCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    write(node, 8, b"one\n")
    record(node, 8, 0)
    original = os.write

    def fail(descriptor: int, data: bytes) -> int:
        if len(data) > 8:
            return original(descriptor, data[:8])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    node.collect()
    assert not Path(node.folder, "8.collected").exists()
    monkeypatch.setattr(os, "write", original)
    node.collect()
    assert Path(node.folder, "8.collected").exists()
    assert open_rank_log(node.logs, 8).read(100, 0) == b"one\n"
    assert len(Path(node.ranks, "ranks-8.jsonl").read_text().splitlines()) == 1


def test_the_files_keep_their_names_after_the_first_rank_has_ended(node: RankCollector) -> None:
    for rank in (8, 9):
        write(node, rank, b"begin\n")
    node.collect(final=True)
    Path(node.folder, "8.log").unlink()
    write(node, 9, b"end\n")
    RankCollector(node.folder, node.logs, node.ranks).collect(final=True)
    assert [path.name for path in Path(node.logs).iterdir()] == ["ranks-8.log"]
    assert open_rank_log(node.logs, 9).read(100, 0) == b"begin\nend\n"


def test_a_pipe_in_the_place_of_a_record_does_not_block_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ranks-0.jsonl")
    os.mkfifo(tmp_path / "7.json")
    code = (
        "import sys; from dtslurm.worker.lib.rank_files import read_records; print(read_records(sys.argv[1]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=600, check=True
    )
    assert answer.stdout == "{}\n"


def test_lines_of_a_node_have_the_documented_form() -> None:
    assert encode_lines(17, b"a\nb\nc", 5.0) == b"# 17 5.000\n17: a\n17: b\n17+ c\n"
    assert encode_lines(17, b"a\n", 5.0) == b"# 17 5.000\n17: a\n"
    assert encode_lines(17, b"a", 5.0) == b"# 17 5.000\n17+ a\n"
    assert encode_totals({17: (4096, 2.5), 16: (0, 0.0)}) == b"= 16 0 0.000 17 4096 2.500\n"


@pytest.mark.parametrize(
    ("lines", "output"),
    [
        (b"17+ a\n17: b\n17+ c\n", b"ab\nc"),
        (b"17+ a\n17+ b\n17: \n", b"ab\n"),
        (b"17: 17+ a\n17: b\n", b"17+ a\nb\n"),
        (b"17: a\n17+ 17: b\n", b"a\n17: b"),
    ],
)
def test_unfinished_lines_of_a_rank_are_joined(lines: bytes, output: bytes) -> None:
    assert (decode_lines(17, lines), decoded_size(17, lines)) == (output, len(output))


def test_neighbouring_lines_of_a_rank_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "LARGEST_GROUP", 30)
    groups = rank_files.LineGroups()
    for start, end, size in [(0, 10, 6), (10, 30, 7), (30, 31, 1), (40, 50, 5)]:
        groups.add(start, end, size)
    assert (groups.ranges, groups.starts, groups.size) == ([(0, 30), (30, 31), (40, 50)], [0, 13, 14], 19)


def test_a_rank_that_ends_while_another_agent_confirms_it_leaves_no_files(node: RankCollector) -> None:
    """After its agent was killed, each rank of a node that ends collects for all of them."""
    collectors = [RankCollector(node.folder, node.logs, node.ranks) for _ in range(2)]
    for rank in range(400):
        write(node, rank, b"end\n")
        record(node, rank, 0)
        threads = [threading.Thread(target=collector.collect) for collector in collectors]
        for thread in threads:
            thread.start()
        collected = Path(node.folder, f"{rank}.collected")
        while any(thread.is_alive() for thread in threads) and not collected.exists():
            pass
        assert collected.exists()
        for path in Path(node.folder).glob(f"{rank}.*"):
            path.unlink(missing_ok=True)
        for thread in threads:
            thread.join()
        assert not list(Path(node.folder).glob(f"{rank}.*"))
