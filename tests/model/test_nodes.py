"""Bad-node notes: parsing, expiry, exclusion of nodes, and the shared file."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from dtslurm.model import nodes
from dtslurm.model.nodes import (
    ListedNode,
    NodeNote,
    choose_exclusions,
    format_note,
    parse_notes,
    select_newest_notes,
)
from dtslurm.slurm import parse
from dtslurm.worker.lib import node_blocklist
from dtslurm.worker.lib.node_blocklist import exchange

NOW = 1_700_000_000.0
DAY = 86400.0


def node_note(node: str, ago: float = 60.0, **more: Any) -> NodeNote:
    values = {"reason": "Xid 79", "when": NOW - ago, "expires": NOW - ago + 3 * DAY, **more}
    return NodeNote(node=node, cluster="c", **values)


def test_written_notes_are_read_back_unchanged() -> None:
    there = [
        node_note("n1"),
        node_note("n2", job="17", evidence="a line", by="me"),
        node_note("n3", removed=True),
    ]
    assert parse_notes(map(format_note, there), NOW) == there


@pytest.mark.parametrize(
    "text",
    [
        "",
        "half of {",
        "[]",
        "[" * 100_000,
        '{"node": "n1"}',
        '{"node": "n1", "when": "yesterday", "expires": 1}',
        '{"node": "n1", "when": NaN, "expires": 1}',
        '{"node": "n1", "when": 1, "expires": Infinity}',
        '{"node": "n1; rm -rf ~", "when": 1, "expires": 2}',
        '{"node": "n[1-9]", "when": 1, "expires": 2}',
        '{"node": "-n", "when": 1, "expires": 2}',
        '{"node": ["n1"], "when": 1, "expires": 2}',
        json.dumps({"node": "n1", "when": NOW + 1e6, "expires": NOW + 2e6}),
    ],
)
def test_malformed_notes_are_ignored(text: str) -> None:
    assert parse_notes([text, format_note(node_note("n7"))], NOW) == [node_note("n7")]


def test_texts_and_expiry_of_foreign_notes_are_limited() -> None:
    text = json.dumps(
        {"node": "n1", "reason": "\x1b[2Jgone\nfor\x07 good" + "!" * 999, "when": NOW, "expires": 9e99}
    )
    [note] = parse_notes([text], NOW)
    assert note.reason.isprintable()
    assert len(note.reason) <= 300
    assert note.expires == NOW + 90 * DAY


def test_the_newest_valid_note_of_a_node_counts() -> None:
    old, new = node_note("n1", 7200, reason="old"), node_note("n1", reason="new")
    assert select_newest_notes([new, old], NOW) == [new]
    assert select_newest_notes([node_note("n1", 4 * DAY)], NOW) == []
    assert select_newest_notes([node_note("n1", 100), node_note("n1", 50, removed=True)], NOW) == []
    again = node_note("n1", 10)
    assert select_newest_notes([node_note("n1", 100), again, node_note("n1", 50, removed=True)], NOW) == [
        again
    ]


def listed_nodes(*names: str, down: tuple[str, ...] = ()) -> list[ListedNode]:
    return [ListedNode(name=name, usable=name not in down) for name in names]


@pytest.mark.parametrize(
    ("needed", "down", "out", "kept"),
    [
        (2, (), ["n1", "n2"], []),
        (3, (), ["n2"], ["n1"]),  # the newest goes first
        (4, (), [], ["n1", "n2"]),
        (2, ("n3",), ["n2"], ["n1"]),
        (3, ("n2",), ["n2"], ["n1"]),  # which is down anyway, so that it is no loss
        (4, ("n2",), [], ["n1", "n2"]),  # or the job could not run when it is up again
    ],
)
def test_no_more_nodes_are_excluded_than_the_job_can_spare(
    needed: int, down: tuple[str, ...], out: list[str], kept: list[str]
) -> None:
    said = [node_note("n1", 500), node_note("n2", 50), node_note("gone")]
    exclusions = choose_exclusions(said, listed_nodes("n1", "n2", "n3", "n4", down=down), needed)
    assert tuple([item.node for item in part] for part in exclusions) == (out, kept)


def test_the_node_list_of_sinfo_is_parsed() -> None:
    text = "n1|debug*|idle|gpu,a100\nn2|debug*|mix|gpu\nn2|long|mix|gpu\nn3|debug*|down*|gpu\n"
    text += "n4|long|drng@|(null)\nn5|debug*|idle~|x\nn6|debug*|idle*|x\nbroken\n"
    names = {node.name: node.usable for node in parse.node_list(text)}
    assert names == {"n1": True, "n2": True, "n3": False, "n5": True, "n6": False}
    assert parse.node_list(text)[0].features == {"gpu", "a100"}
    assert {node.name for node in parse.node_list(text, "debug,long")} == {"n1", "n2", "n3", "n4", "n5", "n6"}


# ---- The file ----


def test_several_threads_can_append_notes(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"

    def write(number: int) -> None:
        for count in range(20):
            exchange(str(path), [format_note(node_note(f"n{number}-{count}", reason="x" * 200))])

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(parse_notes(exchange(str(path), []), NOW)) == 80


def test_a_truncated_line_does_not_affect_other_notes(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(format_note(node_note("n1")) + "\n" + '{"node": "n2", "wh')
    assert [note.node for note in parse_notes(exchange(str(path), [format_note(node_note("n3"))]), NOW)] == [
        "n1",
        "n3",
    ]


def test_a_team_file_is_writable_by_the_group(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    before = os.umask(0o077)
    try:
        exchange(str(path), [format_note(node_note("n1"))], 0o664)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    assert exchange(str(tmp_path / "none"), []) == []
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(OSError, match=r".+"):
            exchange(str(tmp_path / name), ["x"])
    assert not (tmp_path / "elsewhere").exists()


def test_only_the_end_of_a_very_large_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtslurm.worker.lib.node_blocklist.MOST", 500)
    path = tmp_path / "notes.jsonl"
    exchange(str(path), [format_note(node_note(f"n{number}")) for number in range(1, 9)])
    notes = parse_notes(exchange(str(path), []), NOW)
    assert notes[-1].node == "n8"
    assert 0 < len(notes) < 8


def test_plain_returns_one_line() -> None:
    assert nodes.make_printable(" a\t b\n") == "a b"
    assert nodes.make_printable(None) == ""


def test_a_file_that_has_notes_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("old\n")
    path.chmod(0o640)
    assert exchange(str(path), ["new", "newer"], 0o664) == ["old", "new", "newer"]
    assert path.read_text() == "old\nnew\nnewer\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(("mode", "lines"), [(0o600, ["x"]), (0o644, ["x"]), (0o620, []), (0o602, [])])
def test_supervisor_notes_are_read_only_where_no_other_user_writes(
    tmp_path: Path, mode: int, lines: list[str]
) -> None:
    path = tmp_path / f".bad-nodes-{os.geteuid()}.jsonl"
    path.write_text("x\n")
    path.chmod(mode)
    roots = [str(tmp_path / "none"), str(tmp_path)]
    assert node_blocklist.answer({"run_roots": roots}) == {"schema": 1, "lines": lines}


def test_the_answer_has_the_lines_or_the_problem(tmp_path: Path) -> None:
    request = {"path": str(tmp_path / "notes.jsonl"), "lines": ["x"]}
    assert node_blocklist.answer(request) == {"schema": 1, "lines": ["x"]}
    assert stat.S_IMODE((tmp_path / "notes.jsonl").stat().st_mode) == 0o600
    problem = {"schema": 1, "problem": "No such file or directory"}
    assert node_blocklist.answer({**request, "path": str(tmp_path / "none/notes")}) == problem


def test_a_note_of_a_run_is_valid_for_its_time() -> None:
    line = node_blocklist.note_line("c", "n1", "Xid 79", "17", NOW)
    [note] = parse_notes([line], NOW)
    assert note == NodeNote(
        node="n1", cluster="c", reason="Xid 79", evidence="", job="17", by="dtslurm", when=NOW,
        expires=NOW + node_blocklist.HOLDS_S, removed=False,
    )  # fmt: skip
