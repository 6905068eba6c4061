"""The answer about a running job: its attempts, ranks, records and first failure, from the job's files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.lib.rank_files import OpenLog, encode_lines
from dtslurm.worker.telemetry import failure, lines, telemetry

PATTERNS = [{"words": ["="], "values": {"step": r"\bstep=<number>", "loss": r"\bloss=<number>"}}]


@pytest.fixture(autouse=True)
def niceness(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the increments of the niceness, instead of slowing down the tests."""
    increments: list[int] = []
    monkeypatch.setattr(os, "nice", increments.append)
    return increments


def write(path: Path, *records: Any, written: float | None = None) -> Path:
    """Append lines, or records as JSON, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            file.write((record if isinstance(record, str) else json.dumps(record)) + "\n")
    if written is not None:
        os.utime(path, (written, written))
    return path


def ask(run: Path, **request: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(json.dumps(telemetry.answer({"run_dir": str(run), **request})))
    return answer


# ---- Tasks, attempts and what was read before


def test_run_without_files_has_no_attempt(tmp_path: Path, niceness: list[int]) -> None:
    answer = ask(tmp_path)
    assert answer.pop("now") > 1e9
    assert answer == {
        "schema": 1,
        "task": None,
        "tasks": [],
        "attempt": None,
        "attempts": [],
        "world_size": None,
        "ranks": {},
        "first_failure": None,
        "nodes": [],
        "nodes_before": [],
        "roles": [],
        "activity": [],
        "train": {"records": [], "offset": 0},
        "events": {"records": [], "offset": 0},
        "cursor": {"task": None, "attempt": None, "events": 0},
    }
    assert niceness == [10]


def test_answer_does_not_need_the_permission_to_change_the_niceness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "nice", lambda _: (_ for _ in ()).throw(PermissionError()))
    assert ask(tmp_path)["schema"] == 1


def test_newest_attempt_of_the_first_task_is_the_default(tmp_path: Path) -> None:
    for task, attempts in (("10", ("0",)), ("9", ("0", "2", "10")), ("x9", ("99",)), ("9x", ("99",))):
        for attempt in attempts:
            write(tmp_path / "tasks" / task / "ranks" / attempt / "world_size", f"{task}{attempt}")
            (tmp_path / "tasks" / task / "logs" / attempt).mkdir(parents=True)
    for attempt in ("0", "3"):
        (tmp_path / "logs" / attempt).mkdir(parents=True)
    chosen = [
        (answer["task"], answer["attempt"], answer["attempts"], answer["tasks"], answer["world_size"])
        for answer in (
            ask(tmp_path),
            ask(tmp_path, task=None, attempt=0),
            ask(tmp_path, task="9", attempt=2),
            ask(tmp_path, task="10"),
            ask(tmp_path, task="11"),
        )
    ]
    assert chosen == [
        ("9", 10, [0, 2, 10], ["9", "10"], 910),
        ("9", 0, [0, 2, 10], ["9", "10"], 90),
        ("9", 2, [0, 2, 10], ["9", "10"], 92),
        ("10", 0, [0], ["9", "10"], 100),
        ("11", None, [], ["9", "10"], None),
    ]


def test_only_new_events_follow_the_cursor_of_the_same_task(tmp_path: Path) -> None:
    for task in ("1", "2"):
        write(tmp_path / "tasks" / task / "events.jsonl", {"event": task})
    before = ask(tmp_path, task="1")
    assert before["events"] == {"records": [{"event": "1"}], "offset": 15}
    assert before["cursor"] == {"task": "1", "attempt": None, "events": 15}
    write(tmp_path / "tasks" / "1" / "events.jsonl", {"event": "n"})
    assert ask(tmp_path, task="1", after=before["cursor"])["events"] == {
        "records": [{"event": "n"}],
        "offset": 30,
    }
    assert ask(tmp_path, task="2", after=before["cursor"])["events"]["records"] == [{"event": "2"}]


def test_answer_has_the_last_events_of_many(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", *({"event": number} for number in range(telemetry.EVENTS + 2)))
    records = ask(tmp_path)["events"]["records"]
    assert len(records) == telemetry.EVENTS
    assert (records[0], records[-1]) == ({"event": 2}, {"event": telemetry.EVENTS + 1})


def test_only_new_records_follow_the_cursor_of_the_same_attempt(tmp_path: Path) -> None:
    for attempt in ("0", "1"):
        (tmp_path / "logs" / attempt).mkdir(parents=True)
        write(tmp_path / "metrics" / attempt / "train.jsonl", {"step": int(attempt)})
    before = ask(tmp_path, attempt=0)
    assert before["train"] == {"records": [{"step": 0}], "offset": 12}
    assert before["train_from"] == "file"
    assert before["cursor"] == {
        "task": None, "attempt": 0, "events": 0, "train": 12, "written": None, "logs": {}
    }  # fmt: skip
    write(tmp_path / "metrics" / "0" / "train.jsonl", {"step": 5})
    assert ask(tmp_path, attempt=0, after=before["cursor"])["train"]["records"] == [{"step": 5}]
    assert ask(tmp_path, attempt=1, after=before["cursor"])["train"]["records"] == [{"step": 1}]
    other_task = dict(before["cursor"], task="1")
    assert [record["step"] for record in ask(tmp_path, attempt=0, after=other_task)["train"]["records"]] == [
        0,
        5,
    ]


def test_roles_are_those_of_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "roles.json", {"roles": [{"name": "learner"}]})
    assert ask(tmp_path)["roles"] == [{"name": "learner"}]
    path.write_text('{"roles": null}')
    assert ask(tmp_path)["roles"] == []


# ---- One attempt


def test_training_records_are_thinned_to_the_requested_number(tmp_path: Path) -> None:
    (tmp_path / "logs" / "0").mkdir(parents=True)
    write(tmp_path / "metrics" / "0" / "train.jsonl", *({"step": step} for step in range(2001)))
    assert len(ask(tmp_path, train_limit=10)["train"]["records"]) == 10
    for request in ({}, {"train_limit": None}, {"train_limit": 0}):
        assert len(ask(tmp_path, **request)["train"]["records"]) == 2000


def test_training_records_of_logs_count_until_the_run_writes_its_own(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "0" / "rank-0.log", "step=1")
    write(tmp_path / "logs" / "0" / "rank-3.log", "no step")
    assert "train_from" not in ask(tmp_path)
    unsure = ask(tmp_path, patterns=PATTERNS)
    assert (unsure["train_from"], unsure["train"]) == ("", {"records": [{"step": 1}], "offset": 0})
    write(tmp_path / "logs" / "0" / "rank-3.log", "step=2 loss=4", written=1000)
    sure = ask(tmp_path, patterns=PATTERNS, after=unsure["cursor"])
    assert sure["train_from"] == "logs"
    assert sure["train"]["records"] == [{"step": 2, "loss": 4, "time": 1000}]
    assert sure["cursor"]["logs"]["source"] == "rank-3.log"
    write(tmp_path / "metrics" / "0" / "train.jsonl", {"step": 9})
    own = ask(tmp_path, patterns=PATTERNS, after=sure["cursor"])
    assert (own["train_from"], own["train"]["records"], own["cursor"]["logs"]) == ("file", [{"step": 9}], {})


def test_activity_of_each_node_has_the_time_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "logs" / "0").mkdir(parents=True)
    metrics = tmp_path / "metrics" / "0"
    write(metrics / "activity-3.json", {"ranks": [1]}, written=1000)
    write(metrics / "activity-4.json", "{}")
    write(metrics / "activity-x.json", {"ranks": [2]})
    assert ask(tmp_path)["activity"] == [{"ranks": [1], "written": 1000}]


@pytest.mark.parametrize(
    ("last_start", "manifest", "expected"),
    [
        ("8\n", 4, 8),
        (None, 4, 4),
        ("", 4, 4),
        ("many", 4, 4),
        (None, "4", None),
        (None, None, None),
    ],
)
def test_world_size_is_that_of_the_last_start_or_of_the_manifest(
    tmp_path: Path, last_start: str | None, manifest: Any, expected: int | None
) -> None:
    write(tmp_path / "logs" / "0" / "manifest.json", {} if manifest is None else {"world_size": manifest})
    if last_start is not None:
        (tmp_path / "ranks" / "0").mkdir(parents=True)
        (tmp_path / "ranks" / "0" / "world_size").write_text(last_start)
    assert ask(tmp_path)["world_size"] == expected


def test_rank_without_output_has_not_spoken(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "0" / "rank-0.log", "hello", written=1000.26)
    (tmp_path / "logs" / "0" / "rank-1.log").touch()
    write(tmp_path / "ranks" / "0" / "2.json", {"pid": 7, "exit_code": 0, "argv": ["train"]}, written=2000)
    answer = ask(tmp_path)
    assert answer["ranks"] == {
        "0": {"bytes": 6, "spoke": 1000.3},
        "1": {"bytes": 0, "spoke": None},
        "2": {"bytes": 0, "spoke": None, "pid": 7, "exit_code": 0},
    }
    assert answer["cursor"]["written"] == 2000


def test_only_recent_records_of_ranks_are_read_again(tmp_path: Path) -> None:
    (tmp_path / "logs" / "0").mkdir(parents=True)
    for rank, written in enumerate((1000.0, 879.0, 881.0)):
        write(tmp_path / "ranks" / "0" / f"{rank}.json", {"pid": rank}, written=written)
    before = ask(tmp_path)
    assert before["cursor"]["written"] == 1000
    after = ask(tmp_path, after=before["cursor"])  # nodes' clocks may differ by two minutes
    assert {rank: state["pid"] for rank, state in after["ranks"].items()} == {"0": 0, "2": 2}
    assert after["cursor"]["written"] == 1000
    write(tmp_path / "ranks" / "0" / "3.json", {"pid": 9}, written=1500)
    assert ask(tmp_path, after=after["cursor"])["cursor"]["written"] == 1500


# ---- The first failure


def failed(tmp_path: Path, log: str, code: int = 1) -> dict[str, Any]:
    """Return the first failure of rank 2 with a log."""
    write(tmp_path / "ranks" / "0" / "first-failure", f"2 {code}")
    (tmp_path / "logs" / "0").mkdir(parents=True)
    (tmp_path / "logs" / "0" / "rank-2.log").write_text(log)
    result: dict[str, Any] = ask(tmp_path)["first_failure"]
    return result


TRACEBACK = 'Traceback (most recent call last):\n  File "/w/train.py", line 6, in main\n    run()\n'


@pytest.mark.parametrize(
    ("log", "error", "file", "line"),
    [
        ("", "", "", None),
        ("step 1\nno error here\n", "", "", None),
        ("ValueError: bad\n", "ValueError: bad", "", None),
        ("ValueError: bad\nstep 2\n", "ValueError: bad", "", None),
        ("KeyboardInterrupt\n", "KeyboardInterrupt", "", None),
        ("Exception\n", "Exception", "", None),
        ("an Error: bad\n", "", "", None),
        (f"{TRACEBACK}torch.AcceleratorError: full\n", "torch.AcceleratorError: full", "/w/train.py", 6),
        (f"{TRACEBACK}StopTraining: enough\nbye\n", "StopTraining: enough", "/w/train.py", 6),
        (f"{TRACEBACK}\nStopTraining: enough\n", "StopTraining: enough", "/w/train.py", 6),
        (f"{TRACEBACK}    more\n", "", "", None),
        (f"ValueError: 1\n{TRACEBACK}TypeError: 2\nOSError: 3\n", "OSError: 3", "/w/train.py", 6),
        (f"[rank2]: {TRACEBACK}[rank2]: ValueError: bad\r\n", "ValueError: bad", "/w/train.py", 6),
        (f"ValueError: {'x' * 400}\n", f"ValueError: {'x' * 288}", "", None),
    ],
)  # fmt: skip
def test_first_failure_has_the_last_exception_of_the_log(
    tmp_path: Path, log: str, error: str, file: str, line: int | None
) -> None:
    expected = {"rank": 2, "exit_code": 1, "error": error, "file": file, "line": line}
    assert failed(tmp_path, log) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("/w/a.py", "/w/b.py"), ("/w/b.py", 1)),  # the innermost call
        (("/w/a.py", "/v/lib/python3.11/site-packages/torch/x.py"), ("/w/a.py", 0)),
        (("/w/a.py", "/usr/lib64/python3/threading.py"), ("/w/a.py", 0)),
        (("/w/a.py", "/v/dist-packages/x.py"), ("/w/a.py", 0)),
        (("/w/a.py", "<frozen runpy>"), ("/w/a.py", 0)),
        (("/v/site-packages/a.py", "/v/site-packages/b.py"), ("/v/site-packages/b.py", 1)),
    ],
)
def test_line_of_the_first_failure_is_the_innermost_of_user_code(
    tmp_path: Path, files: tuple[str, ...], expected: tuple[str, int]
) -> None:
    frames = "".join(f'  File "{file}", line {number}, in main\n    x\n' for number, file in enumerate(files))
    other = 'Traceback (most recent call last):\n  File "/w/other.py", line 99, in main\nOSError: 1\n'
    found = failed(tmp_path, f"{other}Traceback (most recent call last):\n{frames}ValueError: 2\n")
    assert (found["error"], found["file"], found["line"]) == ("ValueError: 2", *expected)


def test_exception_is_searched_in_the_end_of_a_long_log(tmp_path: Path) -> None:
    early, late = tmp_path / "early", tmp_path / "late"
    assert failed(early, "ValueError: early\n" + "x" * failure.TAIL)["error"] == ""
    assert failed(late, "x" * 2 * failure.TAIL + "\nValueError: late\n")["error"] == "ValueError: late"


def test_rank_whose_log_is_in_that_of_its_node_has_its_exception(tmp_path: Path) -> None:
    write(tmp_path / "ranks" / "0" / "first-failure", "3 1")
    (tmp_path / "logs" / "0").mkdir(parents=True)
    text = encode_lines(2, b"OSError: 2\n", 5.0) + encode_lines(3, b"OSError: 3\n", 5.0)
    (tmp_path / "logs" / "0" / "ranks-2.log").write_bytes(text)
    assert ask(tmp_path)["first_failure"]["error"] == "OSError: 3"


@pytest.mark.parametrize("words", ["2", "2 1 1", "x 1", "2 x", "-1 1", "2 0", "2 85"])
def test_only_a_rank_and_an_error_code_are_a_first_failure(tmp_path: Path, words: str) -> None:
    (tmp_path / "logs" / "0").mkdir(parents=True)
    write(tmp_path / "ranks" / "0" / "first-failure", words)
    assert ask(tmp_path)["first_failure"] is None


def test_failure_without_a_log_has_its_exit_code_unless_the_rank_was_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "logs" / "0").mkdir(parents=True)
    ranks = tmp_path / "ranks" / "0"
    write(ranks / "first-failure", "2 143")
    assert ask(tmp_path)["first_failure"] == {
        "rank": 2, "exit_code": 143, "error": "", "file": "", "line": None
    }  # fmt: skip
    write(ranks / "2.json", {"told_to_end": True})
    assert ask(tmp_path)["first_failure"] is None


def test_earliest_failure_is_the_first_without_a_file_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "logs" / "0").mkdir(parents=True)
    ranks = tmp_path / "ranks" / "0"
    for name, text in (
        ("0.failure", "1000 0 7"),
        ("1.failure", "999 1 8"),  # as text, it would follow 1000
        ("2.failure", "500 2"),
        ("3.failure", "x 3 1"),
        ("4.failure", ""),
        ("x5.failure", "1 5 1"),
        ("6.failure.draft", "1 6 1"),
    ):
        write(ranks / name, text)
    (ranks / "7.failure").mkdir()
    assert (ask(tmp_path)["first_failure"]["rank"], ask(tmp_path)["first_failure"]["exit_code"]) == (1, 8)
    write(ranks / "first-failure", "0 7")
    assert ask(tmp_path)["first_failure"]["rank"] == 0


# ---- New lines of growing files


def test_new_lines_follow_the_offset(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert lines.read_new_lines(str(path), 5, 100) == ([], 0)
    path.write_bytes(b"one\ntwo\nthr")
    for offset in (None, 0, -1, "4", 12):  # of a file that is shorter than the offset, all lines are new
        assert lines.read_new_lines(str(path), offset, 100) == ([b"one", b"two"], 8)
    assert lines.read_new_lines(str(path), 4, 100) == ([b"two"], 8)
    assert lines.read_new_lines(str(path), 8, 100) == ([], 8)
    assert lines.read_new_lines(str(path), 11, 100) == ([], 11)
    path.write_bytes(b"one\ntwo\nthree\n")
    assert lines.read_new_lines(str(path), 8, 100) == ([b"three"], 14)


def test_last_whole_lines_of_many_new_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one\ntwo\nthr")
    assert lines.read_new_lines(str(path), 0, 11) == ([b"one", b"two"], 8)
    assert lines.read_new_lines(str(path), 0, 10) == ([b"two"], 8)
    assert lines.read_new_lines(str(path), 4, 7) == ([b"two"], 8)
    assert lines.read_new_lines(str(path), 4, 6) == ([], 8)
    assert lines.read_new_lines(str(path), 4, 2) == ([], 9)


def test_incomplete_line_is_read_later_unless_it_is_very_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE", 5)
    path = tmp_path / "x"
    path.write_bytes(b"one\n12345")
    assert lines.read_new_lines(str(path), 0, 100) == ([b"one"], 4)
    path.write_bytes(b"one\n123456")
    assert lines.read_new_lines(str(path), 0, 100) == ([b"one"], 10)


class UnreadableLog(OpenLog):
    """A log on a file system that fails after the log was opened."""

    closed = False

    def size(self) -> int:
        return 10

    def read(self, size: int, offset: int) -> bytes:
        raise OSError("stale file handle")

    def written(self) -> float:
        return 5.0

    def close(self) -> None:
        self.closed = True


def test_log_that_cannot_be_read_has_no_lines_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    log = UnreadableLog()
    assert lines.read_new_lines_of(lambda: log, 3, 100) == ([], 0, None)
    assert log.closed
    log = UnreadableLog()
    monkeypatch.setattr(failure, "open_rank_log", lambda _folder, _rank: log)
    assert failure.tail_lines("", 0) == []
    assert log.closed


def test_new_objects_are_the_last_of_many(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": 1}, "[1]", {"a": 2}, {"a": 3})
    end = path.stat().st_size
    assert lines.read_new_objects(str(path), None, None) == ([{"a": 1}, {"a": 2}, {"a": 3}], end)
    assert lines.read_new_objects(str(path), None, 2) == ([{"a": 2}, {"a": 3}], end)
    assert lines.read_new_objects(str(path), end, 2) == ([], end)


def test_entries_are_the_files_with_matching_names(tmp_path: Path) -> None:
    assert list(lines.entries(str(tmp_path / "none"), r"^n-([0-9]+)$")) == []
    write(tmp_path / "n-07", "abc", written=1000)
    write(tmp_path / "m-8", "abc")
    (tmp_path / "n-9").symlink_to(tmp_path / "gone")
    found = list(lines.entries(str(tmp_path), r"^n-([0-9]+)$"))
    assert found == [("7", str(tmp_path / "n-07"), 4, 1000.0)]


def test_thinned_records_keep_the_newest_values_and_those_that_are_not_finite() -> None:
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 3.0, "lr": 1},
        {"step": 2, "loss": math.inf},
        {"step": 3, "loss": 1.0},
        {"step": 4, "loss": 2},
        {"step": 5, "loss": 1.0},
    ]
    assert lines.thinned(records, 5) is records
    assert lines.thinned(records, 2) == [
        {"step": 2, "loss": math.inf, "lr": 1},
        {"step": 5, "loss": 1.0},
    ]
    assert lines.thinned(records, 1) == [{"step": 5, "loss": math.inf, "lr": 1}]
