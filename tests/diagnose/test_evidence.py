"""The hits that the worker program finds in logs of any content."""

from __future__ import annotations

import ast
import base64
import json
import os
import random
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm import assets
from dtslurm.remote.worker_program import inline_program
from dtslurm.services.observe.diagnose import EVIDENCE
from dtslurm.services.wiring.remote_query import SHARED
from dtslurm.worker.evidence import evidence, flight, log_stacks, search
from dtslurm.worker.evidence import hits as evidence_hits
from dtslurm.worker.evidence import lines as evidence_lines
from dtslurm.worker.lib.rank_files import encode_lines
from tests.diagnose.judge import SIGNATURES

OOM = b"RuntimeError: CUDA error: out of memory"


def log_findings(folder: Path, data: bytes, name: str = "rank-0.log") -> dict[str, Any]:
    logs = folder / "logs" / "0"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / name).write_bytes(data)
    request = {
        "run_dir": str(folder),
        "attempt": 0,
        "signatures": [{"words": item.words, "match": item.match} for item in SIGNATURES],
    }
    files = evidence.findings(request)["files"]
    log: dict[str, Any] = next(item for item in files if item["file"] == name)
    return log


def hits(log: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(SIGNATURES[key].cause, line, text) for key, line, text, *_ in log.get("hits", [])]


def test_a_hit_has_line_number_and_text(tmp_path: Path) -> None:
    log = log_findings(tmp_path, b"one\ntwo\n" + OOM + b"\nfour\n")
    assert hits(log) == [("gpu-out-of-memory", 3, OOM.decode())]
    assert log["tail"] == ["one", "two", OOM.decode(), "four"]


def test_the_ranks_of_a_node_are_searched_one_by_one(tmp_path: Path) -> None:
    lines = [
        encode_lines(0, b"one\n", 5.0),
        encode_lines(1, b"two\n" + OOM, 6.0),
        encode_lines(0, b"end\n", 7.0),
    ]
    folder = tmp_path / "logs" / "0"
    folder.mkdir(parents=True)
    (folder / "ranks-0.log").write_bytes(b"".join(lines))
    log = log_findings(tmp_path, b"three\n" + OOM, "rank-2.log")
    assert hits(log) == [("gpu-out-of-memory", 2, OOM.decode())]
    request = {
        "run_dir": str(tmp_path),
        "attempt": 0,
        "signatures": [{"words": item.words, "match": item.match} for item in SIGNATURES],
    }
    files = {log["file"]: log for log in evidence.findings(request)["files"]}
    assert list(files) == [f"rank-{rank}.log" for rank in (2, 0, 1)]
    assert files["rank-0.log"]["tail"] == ["one", "end"]
    assert [files[f"rank-{rank}.log"]["mtime"] for rank in (0, 1)] == [7.0, 6.0]
    assert hits(files["rank-1.log"]) == [("gpu-out-of-memory", 2, OOM.decode())]


def test_a_syntax_error_is_located_in_its_source_file(tmp_path: Path) -> None:
    log = log_findings(
        tmp_path,
        b"""Traceback (most recent call last):
  File "/home/me/train.py", line 1, in <module>
    import model
  File "/home/me/model.py", line 7
    x = (
        ^
SyntaxError: '(' was never closed
""",
    )
    frame = log["tracebacks"][0]["blocks"][0]["frame"]
    assert (frame["file"], frame["line"], frame["function"]) == ("/home/me/model.py", 7, "<module>")


def distinct_lines(count: int, dice: random.Random) -> bytes:
    """Lines of which no two are alike."""
    letters = "abcdefghijklmopqrstuvwyz"  # no n: it could make a nan
    return "".join("".join(dice.choices(letters, k=60)) + "\n" for _ in range(count)).encode()


@pytest.mark.parametrize("grep", [True, False])
def test_errors_among_distinct_lines_are_found_with_and_without_grep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grep: bool
) -> None:
    asked: list[list[str]] = []
    by_grep = search.by_grep

    def counted(paths: list[str], words: list[bytes]) -> dict[str, list[evidence_lines.Candidate]]:
        asked.append(paths)
        return by_grep(paths, words)

    monkeypatch.setattr(search, "by_grep", counted)
    if not grep:
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    dice = random.Random(3)
    data = (
        distinct_lines(9000, dice)
        + OOM
        + b"\n"
        + distinct_lines(9000, dice)
        + b"Loss is nan, stopping training\n"
    )
    assert [line for _, line, _ in hits(log_findings(tmp_path, data))] == [9001, 18002]
    assert len(asked) == 1


def test_an_error_with_numbers_is_found_among_lines_that_differ_only_in_numbers(tmp_path: Path) -> None:
    lines = [b"step %d loss %.3f" % (number, 1 / (number + 1)) for number in range(40_000)]
    lines[20_000] = b"OSError: [Errno 28] No space left on device"
    lines[30_000] = b"loss: inf"
    lines[31_000] = b"loss: 1.2"
    log = log_findings(tmp_path, b"\n".join(lines))
    assert (20_001, lines[20_000].decode()) in [(line, text) for _, line, text in hits(log)]


def test_a_line_across_two_read_blocks_is_found(tmp_path: Path) -> None:
    for pad in range(search.PIECE - 60, search.PIECE + 5, 7):
        log = log_findings(tmp_path, b"x" * pad + b"\n" + OOM + b"\nend")
        assert hits(log) == [("gpu-out-of-memory", 2, OOM.decode())]


def test_several_processes_give_the_same_hits_as_a_single_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs" / "0"
    logs.mkdir(parents=True)
    for rank in range(100):
        (logs / f"rank-{rank}.log").write_bytes(b"step 1\n" * rank + OOM + b"\n")
    signatures = [
        evidence_hits.LogSignature(number, {"words": item.words, "match": item.match})
        for number, item in enumerate(SIGNATURES)
    ]
    paths = sorted(map(str, logs.iterdir()))
    alone = evidence_hits.scan(paths, signatures)
    monkeypatch.setattr(evidence_hits, "WORTHWHILE", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert evidence_hits.scan(paths, signatures) == alone
    assert [item["hits"][0][1] for item in alone] == [int(Path(path).stem[5:]) + 1 for path in paths]


@pytest.mark.slow
def test_f73_a_very_long_line_and_a_progress_bar_are_processed(tmp_path: Path) -> None:
    bar = b"\r".join(b"step %d of 9" % number for number in range(200_000))
    log = log_findings(tmp_path, b"a" * 10_000_000 + b"\n" + bar + b"\r" + OOM + b"\n")
    assert hits(log) == [("gpu-out-of-memory", 2, OOM.decode())]
    assert max(map(len, log["tail"])) <= evidence_lines.SHOWN


def test_f74_nul_bytes_and_invalid_utf_8_are_processed(tmp_path: Path) -> None:
    log = log_findings(tmp_path, b"\0\0\xff\xfe\n\x80" + OOM + b"\xc3\n\0")
    assert [cause for cause, _, _ in hits(log)] == ["gpu-out-of-memory"]
    json.dumps(log)


def test_f72_empty_and_missing_logs_give_no_hits(tmp_path: Path) -> None:
    assert hits(log_findings(tmp_path, b"")) == []
    gone = tmp_path / "logs" / "0" / "rank-1.log"
    gone.symlink_to(tmp_path / "nowhere")
    assert hits(log_findings(tmp_path, b"")) == []


def test_only_the_head_and_tail_of_a_very_large_log_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "WHOLE", 1000)
    monkeypatch.setattr(search, "HEAD", 300)
    monkeypatch.setattr(search, "TAIL", 300)
    log = log_findings(tmp_path, OOM + b"\n" + b"x\n" * 5000 + OOM + b"\nlast\n")
    assert [line for _, line, _ in hits(log)] == [1, 5002]


def test_the_last_error_of_a_log_with_many_errors_is_found(tmp_path: Path) -> None:
    log = log_findings(tmp_path, b"ImportError: no such thing, falling back\n" * 5000 + OOM + b"\n")
    assert ("gpu-out-of-memory", 5001, OOM.decode()) in hits(log)


def test_a_chain_of_exceptions_is_parsed_as_one_traceback(tmp_path: Path) -> None:
    text = (
        b'Traceback (most recent call last):\n  File "/home/me/a.py", line 3, in load\n    open(x)\n'
        b"FileNotFoundError: x\n\nThe above exception was the direct cause of the following exception:\n\n"
        b'Traceback (most recent call last):\n  File "/home/me/b.py", line 9, in main\n    load()\n'
        b'  File "/usr/lib/python3.11/site-packages/z.py", line 1, in z\n    y()\nRuntimeError: no data\n'
    )
    [chain] = log_findings(tmp_path, text)["tracebacks"]
    assert [block["error"] for block in chain["blocks"]] == ["FileNotFoundError: x", "RuntimeError: no data"]
    assert [block["frame"]["file"] for block in chain["blocks"]] == ["/home/me/a.py", "/home/me/b.py"]
    assert [block["link"] for block in chain["blocks"]] == ["", "cause"]
    assert [block["line"] for block in chain["blocks"]] == [4, 13]


def test_a_hit_records_whether_training_continued(tmp_path: Path) -> None:
    steps = b"".join(b"step %d loss 0.%d\n" % (number, number) for number in range(20))
    [went_on] = log_findings(tmp_path, steps + OOM + b"\n" + steps)["hits"]
    [final] = log_findings(tmp_path, steps + OOM + b"\nframe #0: abort\n")["hits"]
    assert (went_on[6], final[6]) == (True, False)


def test_a_pickled_flight_record_is_read_without_executing_code(tmp_path: Path) -> None:
    import pickle

    ranks = tmp_path / "ranks" / "0"
    ranks.mkdir(parents=True)
    entries = [
        {"collective_seq_id": number, "process_group": ("0", "default_pg"), "state": state, "frames": [],
         "profiling_name": "gloo:all_reduce", "is_p2p": False}
        for number, state in [(1, "completed"), (2, "scheduled")]
    ]  # fmt: skip
    (ranks / "flight_3").write_bytes(pickle.dumps({"entries": entries}))
    (ranks / "flight_4").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    log_findings(tmp_path, b"")
    [dump] = flight.flight_dumps(str(ranks))
    assert dump["rank"] == 3
    [group] = dump["groups"].values()
    assert (group["enqueued"], group["completed"], group["stuck"]["op"]) == (2, 1, "gloo:all_reduce")
    assert not Path("/tmp/never").exists()


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("torch.jit._pickle\nbuild_intlist", True),
        ("torch.jit._pickle\nother", False),
        ("os\nbuild_intlist", False),
    ],
)
def test_typed_lists_of_torch_are_the_only_class_in_a_flight_record(
    tmp_path: Path, name: str, is_read: bool
) -> None:
    (tmp_path / "flight_0").write_bytes(b"(dS'entries'\nc" + name.encode() + b"\n(]tRs.")
    dumps = flight.flight_dumps(str(tmp_path))
    assert dumps == ([{"rank": 0, "file": "flight_0", "groups": {}}] if is_read else [])


@pytest.mark.slow
def test_a_flight_record_of_torch_is_read(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = """
import sys, time, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(2))
time.sleep(2)  # what is done is marked so a moment later
open(sys.argv[1], "wb").write(_dump_fr_trace(True, True, False))
dist.destroy_process_group()
"""
    path = tmp_path / "flight_0"
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    subprocess.run([sys.executable, "-c", program, path], env=env, check=True, timeout=600)
    [dump] = flight.flight_dumps(str(tmp_path))
    [group] = dump["groups"].values()
    assert (group["enqueued"], group["completed"], group["stuck"]) == (3, 3, None)


def test_the_worker_program_answers_in_one_marked_line(tmp_path: Path) -> None:
    (tmp_path / "logs" / "0").mkdir(parents=True)
    request = {"run_dir": str(tmp_path), "attempt": 0, "signatures": []}
    call = f"sys.modules['far.lib.answer'].tell('mark:', module.answer({request!r}))"
    program = inline_program([*SHARED, *EVIDENCE, "evidence.evidence"], call)
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=True)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("mark:")]
    document = json.loads(zlib.decompress(base64.b64decode(line[len("mark:") :])))
    assert document["schema"] == 1
    assert done.stderr == ""


@pytest.mark.parametrize(
    "name", [*EVIDENCE, "evidence.evidence", *SHARED, "stacks.readers", "stacks.stacks", "stacks.live"]
)
def test_the_worker_program_is_valid_python_3_6(name: str) -> None:
    ast.parse(assets.worker(name.replace(".", "/") + ".py").read_text(), feature_version=(3, 6))


# ---- Python stacks ----

BLOCK = 'Traceback (most recent call last):\n  File "/home/me/{0}.py", line {1}, in {0}\n    {0}()\n{2}\n'
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


def chains_of(folder: Path, text: str) -> list[dict[str, Any]]:
    chains: list[dict[str, Any]] = log_findings(folder, text.encode())["tracebacks"]
    return chains


def test_a_traceback_is_returned_with_its_position_message_and_frame(tmp_path: Path) -> None:
    text = "one\ntwo\n" + BLOCK.format("load", 7, "ValueError: bad\n  more\nand more") + "\nstep\n"
    assert chains_of(tmp_path, text) == [
        {
            "line": 3,
            "blocks": [
                {
                    "line": 6,
                    "error": "ValueError: bad",
                    "more": "  more\nand more",
                    "frame": {
                        "file": "/home/me/load.py",
                        "line": 7,
                        "function": "load",
                        "code": "load()",
                        "offset": 0,
                    },
                    "top": "load",
                    "frame_line": 4,
                    "link": "",
                }
            ],
            "ignored": False,
            "went_on": False,
            "after": len("  more\nand more\n\nstep\n"),
        }
    ]


def test_the_ends_of_a_long_chain_of_exceptions_are_returned(tmp_path: Path) -> None:
    blocks = [BLOCK.format(name, 1, f"ValueError: {name}") for name in "abcdefg"]
    [chain] = chains_of(tmp_path, CONTEXT.join(blocks[:4]) + CAUSE + CAUSE.join(blocks[4:]))
    assert [(block["error"][-1], block["link"]) for block in chain["blocks"]] == [
        ("a", ""),
        ("b", "context"),
        ("e", "cause"),
        ("f", "cause"),
        ("g", "cause"),
    ]


def test_the_last_four_chains_of_a_log_are_returned(tmp_path: Path) -> None:
    blocks = [BLOCK.format(name, 1, f"ValueError: {name}") + "\n" * 50 for name in "abcdef"]
    chains = chains_of(tmp_path, "".join(blocks))
    assert [chain["blocks"][0]["error"][-1] for chain in chains] == ["c", "d", "e", "f"]
    assert [chain["line"] for chain in chains] == [109, 163, 217, 271]


@pytest.mark.parametrize(
    ("above", "ignored"),
    [
        ("Exception ignored in: <f>\n", True),
        ("Exception ignored in: <f>\n\n", True),
        ("Error in atexit._run_exitfuncs:\n", True),
        ("Error in sys.excepthook:\n", True),
        ("Exception ignored in: <f>\nstep\n", False),
        ("Error in training\n", False),
        ("", False),
    ],
)
def test_a_traceback_that_python_ignores_is_marked(tmp_path: Path, above: str, ignored: bool) -> None:
    [chain] = chains_of(tmp_path, above + BLOCK.format("f", 1, "ValueError: x"))
    assert chain["ignored"] is ignored


@pytest.mark.parametrize("end", ["", "step 7 done\n", "  still a frame"])
def test_a_traceback_without_its_exception_is_left_out(tmp_path: Path, end: str) -> None:
    text = 'Traceback (most recent call last):\n  File "/home/me/a.py", line 3, in a\n    a()\n' + end
    assert chains_of(tmp_path, text) == []


def test_the_stack_of_a_crash_ends_with_the_users_innermost_frame(tmp_path: Path) -> None:
    text = (
        "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 1 in wait\n'
        'Current thread 0x2 (most recent call first):\n  File "/x/site-packages/z.py", line 5 in z\n'
        '  File "/home/me/inner.py", line 9 in f\n  File "/home/me/outer.py", line 2 in <module>\n'
    )
    frame = {"file": "/home/me/inner.py", "line": 9, "function": "f", "code": "", "offset": 1}
    assert chains_of(tmp_path, text) == [{"line": 5, "crash": frame, "blocks": [], "after": 0}]


@pytest.mark.parametrize(
    ("message", "more"),
    [
        (["a", "", "b"], ["a"]),
        (["a", "b", "c", "d", "e", "f"], ["a", "b", "c", "d", "e"]),
        (["a", "b", "c", "d", "e", "  f", "\tg", "h"], ["a", "b", "c", "d", "e", "  f", "\tg"]),
        ([f" {number}" for number in range(20)], [f" {number}" for number in range(12)]),
        (["a", "Traceback (most recent call last):"], ["a"]),
        (["x" * 500], ["x" * 400]),
    ],
)
def test_the_message_of_an_exception_is_limited(message: list[str], more: list[str]) -> None:
    assert log_stacks.below(message) == more


def test_frames_of_boxed_tracebacks_and_syntax_errors_are_read() -> None:
    boxed = ["│ /home/me/a.py:3 in main    │", "│   1 x │", "| /home/me/b.py:14 in f |"]
    assert [(frame["file"], frame["line"], frame["function"], frame["code"], frame["offset"])
            for frame in log_stacks.frames_of(boxed, boxed=True)] == [
        ("/home/me/a.py", 3, "main", "", 0), ("/home/me/b.py", 14, "f", "", 2),
    ]  # fmt: skip
    plain = [
        '  File "/a.py", line 3',
        '  File "/b.py", line 4, in g',
        "    g()",
        '  File "/c.py", line 5 in h',
    ]
    assert [(frame["function"], frame["code"]) for frame in log_stacks.frames_of(plain)] == [
        ("<module>", ""),
        ("g", "g()"),
        ("h", ""),
    ]
    in_libraries = [
        '  File "/x/site-packages/a.py", line 1, in a',
        '  File "/usr/lib/python3.9/b.py", line 2, in b',
    ]
    assert (log_stacks.user_frame(log_stacks.frames_of(in_libraries)) or {})["function"] == "b"
    assert log_stacks.user_frame([]) is None


# ---- lines ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at 2026-03-04 05:06:07.123 x", (2026, 3, 4, 5, 6, 7)),
        ("2026-03-04T05:06:07Z", (2026, 3, 4, 5, 6, 7)),
        ("E0304 05:06:07.1 file.cc:1] x", (2001, 3, 4, 5, 6, 7)),
        ("[W1231 23:59:58 x]", (2001, 12, 31, 23, 59, 58)),
        ("x0304 05:06:07", None),
        ("step 5", None),
    ],
)
def test_the_time_stamp_of_a_line_is_local_time(text: str, expected: tuple[int, ...] | None) -> None:
    written_in_2001 = time.mktime((2001, 6, 1, 0, 0, 0, 0, 0, -1))
    local = None if expected is None else time.mktime((*expected, 0, 0, -1))  # type: ignore[arg-type]
    assert evidence_lines.stamp(text, written_in_2001) == local


def test_the_last_lines_of_a_log_are_not_blank(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 5000 + b"\n1\n\n2\r3\n  \n" + b"4" * 500 + b"\n\n")
    lines = evidence_lines.Lines(str(tmp_path / "log"))
    with lines.file:
        assert lines.size == 5513
        assert evidence_lines.last_lines(lines) == ["1", "2", "3", "4" * 400]
        assert evidence_lines.last_lines(lines, 1) == ["4" * 400]
        assert lines.around(-5, 3) == [b"xxx"]


@pytest.mark.parametrize(
    ("before", "after", "went_on"),
    [
        ([], ["step 1", "step 2", "step 3", "step 4"], False),
        ([], ["step 1", "step 2", "step 3", "step 4", "step 5"], True),
        ([], ["step 1"] * 5, False),
        (["x", "step 0"], ["step 1", "step 2", "step 3"], True),
        (["x", "step 0"], ["step 1", "step 2", "other"], False),
        (["x", "step 0"], ["step 1", "step 2"], False),
        (["x", "step 0"], ["step 1", "step 2", "warning 3", ""], False),
        (["x", "bye"], ["bye", "bye", "bye"], True),
        (["step 0"], ["step 1", "step 2", "step 3"], False),  # the first line before may be incomplete
    ],
)
def test_training_went_on_if_its_lines_continue(
    tmp_path: Path, before: list[str], after: list[str], went_on: bool
) -> None:
    head = "".join(f"{line}\n" for line in before)
    (tmp_path / "log").write_text(head + "ERROR\n" + "".join(f"{line}\n" for line in after))
    lines = evidence_lines.Lines(str(tmp_path / "log"))
    with lines.file:
        assert evidence_lines.training_went_on(lines, len(head), len(head) + 6) is went_on


# ---- flight records and records of ranks ----


def collective(sequence: int, state: str = "scheduled", **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": sequence,
        "process_group": "g",
        "state": state,
        "profiling_name": "op",
        **more,
    }


@pytest.mark.parametrize(
    ("entries", "enqueued", "completed", "stuck"),
    [
        ([], None, None, None),
        ([collective(1, "completed"), collective(2, "completed")], 2, 2, None),
        ([collective(1, "completed"), collective(2), collective(3)], 3, 1, 2),
        ([collective(3), collective(2)], 3, -1, 2),
        ([collective(2), collective(2, "completed")], 2, 2, None),
        ([collective(2), collective(3, "completed")], 3, 3, None),
        ([collective(3), collective(2, "completed")], 3, 2, 3),
        ([collective(2, "completed"), collective(1)], 2, 2, None),
        ([collective(2, "completed"), collective(2)], 2, 2, None),
        ([collective(1, retired=True, profiling_name="gloo:x")], 1, 1, None),
        ([collective(1, retired=True)], 1, -1, 1),
        ([collective(1, profiling_name="gloo:x")], 1, -1, 1),
        ([collective(5, is_p2p=True), {"collective_seq_id": "7"}, collective(1, "completed")], 1, 1, None),
    ],
)
def test_the_first_incomplete_collective_of_a_group_is_found(
    tmp_path: Path,
    entries: list[dict[str, Any]],
    enqueued: int | None,
    completed: int | None,
    stuck: int | None,
) -> None:
    (tmp_path / "flight_12").write_text(json.dumps({"entries": entries}))
    (tmp_path / "flight_13").write_text("{")
    (tmp_path / "flight_x").write_text(json.dumps({"entries": entries}))
    [dump] = flight.flight_dumps(str(tmp_path))
    assert (dump["rank"], dump["file"]) == (12, "flight_12")
    group = dump["groups"].get("g", {"enqueued": None, "completed": None, "stuck": None})
    assert (group["enqueued"], group["completed"]) == (enqueued, completed)
    assert (group["stuck"] or {"seq": None})["seq"] == stuck


def test_an_incomplete_collective_is_described(tmp_path: Path) -> None:
    frames = [{"filename": "/x/site-packages/t.py", "line": 1}, "?", {"filename": "/me/a.py", "line": 7}, {}]
    entries = [
        collective(1, "s" * 50, profiling_name="p" * 90, frames=frames),
        collective(1, process_group="h", frames=[{"filename": "/me/b.py"}]),
        collective(1, process_group="i", frames=[{"filename": "/" * 300, "line": 1}]),
    ]
    (tmp_path / "flight_0").write_text(json.dumps({"entries": entries}))
    [dump] = flight.flight_dumps(str(tmp_path / "none"), str(tmp_path))
    stuck = {name: group["stuck"] for name, group in dump["groups"].items()}
    assert stuck["g"] == {"seq": 1, "op": "p" * 80, "state": "s" * 40, "where": "/me/a.py:7"}
    assert stuck["h"]["where"] == ""
    assert stuck["i"]["where"] == "/" * 198 + ":1"


def test_a_very_large_flight_record_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"entries": [collective(1)]})
    (tmp_path / "flight_0").write_text(text)
    monkeypatch.setattr(flight, "LARGEST_DUMP", len(text))
    assert len(flight.flight_dumps(str(tmp_path))) == 1
    monkeypatch.setattr(flight, "LARGEST_DUMP", len(text) - 1)
    assert flight.flight_dumps(str(tmp_path)) == []


def test_records_of_ranks_have_their_errors_and_first_failures(tmp_path: Path) -> None:
    def write(name: str, value: Any) -> None:
        (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))

    for rank in (0, 1, 2, 3):
        write(f"{rank}.json", {"rank": rank})
    stack = '  File "/home/me/a.py", line 3, in f\n    f()\n'
    extra = {"timestamp": "5", "py_callstack": stack}
    write("0.error.json", {"message": {"message": "m" * 500, "extraInfo": extra}})
    write("1.error.json", {"message": "t" * 500})
    write("2.error.json", {"message": {"extraInfo": "none"}})
    write("3.error.json", {"message": ""})
    write("7.error.json", {"message": "of no rank"})
    write("3.earlier.json", {"message": "of another kind"})
    write("first-failure", "3 17")
    write("first-failure-1", "3 x")
    write("first-failure-2", "3 17 5")
    records, first_failures = evidence.rank_records(str(tmp_path))
    frame = {"file": "/home/me/a.py", "line": 3, "function": "f", "code": "f()", "offset": 0}
    assert {record["rank"]: record.get("error") for record in records} == {
        0: {"message": "m" * 400, "time": "5", "frame": frame},
        1: {"message": "t" * 400},
        2: {"message": "", "time": None, "frame": None},
        3: None,
    }
    assert first_failures == [[3, 17]]
    assert evidence.rank_records(str(tmp_path / "none")) == ([], [])


# ---- search ----


def test_lines_with_words_have_their_numbers_and_offsets() -> None:
    data = b"a\nred one\nb\nblue red\n\nred"
    expected = [(12, 102, b"red one"), (14, 112, b"blue red"), (16, 122, b"red")]
    assert search.lines_with(data, [b"red", b"blue"], 100, 11) == expected
    assert search.lines_with(data, [b"green"], 100, 11) == []


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_a_log_is_searched_in_blocks_of_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(search, "PIECE", piece)
    lines = [b"step %d" % number for number in range(40)]
    lines[3], lines[20], lines[39] = b"a word", b"x" * 100 + b"word", b"word"
    (tmp_path / "log").write_bytes(b"\n".join(lines))
    [matches] = search.Search([b"word"]).candidates([str(tmp_path / "log")]).values()
    offsets = [len(b"\n".join(lines[:index])) + 1 for index in (3, 20, 39)]
    assert matches == [(4, offsets[0], lines[3]), (21, offsets[1], lines[20]), (40, offsets[2], b"word")]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(12, range(12)), (13, [0, 1, *range(3, 13)]), (60, [0, 1, *range(50, 60)])],
)
def test_the_first_and_last_lines_with_a_word_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, expected: Any
) -> None:
    monkeypatch.setattr(search, "FIRST", 2)
    monkeypatch.setattr(search, "MANY", 10)
    monkeypatch.setattr(search, "PIECE", 64)
    (tmp_path / "log").write_bytes(b"".join(b"word %d\n" % number for number in range(count)))
    [matches] = search.Search([b"word"]).candidates([str(tmp_path / "log")]).values()
    assert [text for _, _, text in matches] == [b"word %d" % number for number in expected]


def test_only_whole_counts_of_lines_precede_an_offset(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a\nb\nc\n")
    with (tmp_path / "log").open("rb") as file:
        positions = [search.after_lines(file.fileno(), start) for start in (-1, 0, 1, 2, 4, 99)]
    assert positions == [(0, 1), (0, 1), (1, 1), (2, 2), (4, 3), (6, 4)]


def test_harmless_kinds_of_lines_are_searched_once() -> None:
    words = search.Search([b"E-5", b"bad"])
    assert words.words_in(b"step 1\nstep 2\n", 4) == ([], 2)
    assert words.harmless == {b"step ", b""}
    assert words.words_in(b"step 3\rstep 4\nbad 7\n", 4) == ([b"bad"], 2)
    assert words.words_in(b"E-5", 4) == ([b"E-5"], 0)
    assert words.harmless == {b"step ", b""}


def test_a_log_of_unlike_lines_is_given_up_after_some_blocks() -> None:
    data = b"\n".join(bytes([97 + number % 26]) * (number + 1) for number in range(120))
    words = search.Search([b"no such"])
    assert words.words_in(data[:1000], 0) == ([], data[:1000].count(b"\n"))  # a small block is no evidence
    assert words.unlike == 0
    assert words.words_in(data, 1)[0] == []
    assert words.unlike == 1
    assert words.words_in(data, 1)[0] == []  # its kinds are known now
    assert words.unlike == 1
    with pytest.raises(search.TooManyLineKinds):
        words.words_in(data.upper(), 1)
    assert words.words_in(data.swapcase().replace(b"A", b"?"), None)[0] == []


def words_at(path: Path, size: int, offsets: list[int]) -> list[tuple[int, int]]:
    """Write a log with a word at some offsets, and return the number and offset of each line found."""
    with path.open("wb") as file:
        for offset in offsets:
            file.seek(offset - 1 if offset else 0)
            file.write(b"\nword\n" if offset else b"word\n")
        file.truncate(size)  # of holes between the lines
    [matches] = search.Search([b"word"]).candidates([str(path)]).values()
    return [(number, offset) for number, offset, _ in matches]


def test_one_mib_of_the_head_and_16_of_the_tail_of_a_huge_log_are_searched(tmp_path: Path) -> None:
    mib, size = 1 << 20, (64 << 20) + 100
    offsets = [0, mib - 5, mib + 100, size - 17 * mib, size - 16 * mib + 1, size - 5]
    found = words_at(tmp_path / "log", size, offsets)
    assert found == [(1, 0), (3, offsets[1]), (9, offsets[4]), (11, offsets[5])]


@pytest.mark.parametrize(("whole", "numbers"), [(5000, [1, 3, 5]), (4999, [1, 5])])
def test_the_middle_of_a_log_is_searched_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int, numbers: list[int]
) -> None:
    monkeypatch.setattr(search, "WHOLE", whole)
    monkeypatch.setattr(search, "HEAD", 100)
    monkeypatch.setattr(search, "TAIL", 100)
    found = words_at(tmp_path / "log", 5000, [0, 2500, 4980])
    assert [number for number, _ in found] == numbers


def test_a_log_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"word\n")
    paths = [str(tmp_path / name) for name in ("none", "log")]
    assert search.Search([b"word"]).candidates(paths) == {paths[0]: [], paths[1]: [(1, 0, b"word")]}
    assert search.Search([b"word"]).search_tail(paths[0], 100) == []


def test_a_log_that_is_truncated_during_the_search_ends_it(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a\nword\n")
    with (tmp_path / "log").open("rb") as file:
        assert search.Search([b"word"]).within(file.fileno(), 0, 1000, 7) == [(8, 2, b"word")]


@pytest.mark.parametrize(
    ("count", "tail", "expected"),
    [
        (9, 1000, range(9)),
        (10, 1000, range(10)),
        (13, 1000, [0, 1, *range(3, 13)]),
        (300, 16, [0, 1, 298, 299]),
        (10, 0, [0, 1]),
    ],
)
def test_the_first_and_last_lines_that_grep_finds_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, tail: int, expected: Any
) -> None:
    monkeypatch.setattr(search, "FIRST", 2)
    monkeypatch.setattr(search, "MANY", 10)
    monkeypatch.setattr(search, "TAIL", tail)
    lines = [b"word%3d" % number for number in range(count)]
    (tmp_path / "log").write_bytes(b"\n".join(lines) + b"\n")
    [matches] = search.Search([b"word"]).of_unlike([str(tmp_path / "log")]).values()
    assert matches == [(number + 1, 8 * number, lines[number]) for number in expected]


@pytest.mark.parametrize("end", ["kill -9 $$", "exit 3"])
def test_logs_are_searched_without_a_grep_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    (tmp_path / "grep").write_text(f"#!/bin/sh\ncat >/dev/null\n{end}\n")
    (tmp_path / "grep").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(search, "WHOLE", 7)
    (tmp_path / "log").write_bytes(b"word 1\nword 2\n")
    path = str(tmp_path / "log")
    assert search.Search([b"word"]).of_unlike([path]) == {path: [(2, 7, b"word 2")]}


def test_grep_finds_any_text_in_logs_of_any_name(tmp_path: Path) -> None:
    names = ["-e:1:x", "none", os.fsdecode(b"\xff\n"[:1]), "without"]
    paths = [str(tmp_path / name) for name in names]
    Path(paths[0]).write_bytes(b"a\n\0 1:2:red:\xff\nblue")
    Path(paths[2]).write_bytes(b"red\n")
    Path(paths[3]).write_bytes(b"green\n")
    expected = {paths[0]: [(2, 2, b"\0 1:2:red:\xff"), (3, 14, b"blue")], paths[2]: [(1, 0, b"red")]}
    assert search.by_grep(paths, [b"red", b"blue"]) == expected
    everything = search.Search([b"red", b"blue"]).of_unlike(paths)
    assert everything == {**expected, paths[1]: [], paths[3]: []}


def test_a_line_with_several_words_is_found_once() -> None:
    expected = [(1, 0, b"red blue red"), (3, 14, b"blue")]
    assert search.lines_with(b"red blue red\n\nblue", [b"blue", b"red"], 0, 1) == expected


def test_a_limited_number_of_harmless_kinds_of_lines_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "KNOWN", 3)
    words = search.Search([b"word"])
    for data in (b"a\n", b"b\nc\n", b"d\n"):
        assert words.words_in(data, None)[0] == []
    assert words.harmless == {b"", b"a", b"b", b"c"}


@pytest.mark.parametrize(("length", "unlike"), [(1142, 0), (1143, 1)])
def test_a_block_is_unlike_if_its_new_kinds_exceed_a_share(length: int, unlike: int) -> None:
    words = search.Search([b"word"])
    assert words.words_in(b"x" * length, None) == ([], 0)
    assert words.unlike == unlike
    words.words_in(b"y" * 100, None)
    assert words.unlike == unlike


def test_a_new_log_is_not_judged_by_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PIECE", 4000)
    monkeypatch.setattr(search, "by_grep", lambda *_: pytest.fail("the logs were given up"))
    paths = [str(tmp_path / name) for name in "ab"]
    for path, letters in zip(paths, ("abcd", "efgh"), strict=True):
        text = "".join(f"{letter}" * 3999 + "\n" for letter in letters)
        Path(path).write_text(text)
    assert search.Search([b"word"]).candidates(paths) == {path: [] for path in paths}
    with Path(paths[1]).open("a") as file:
        file.write("".join(letter * 3999 + "\n" for letter in "ijklm"))
    with pytest.raises(search.TooManyLineKinds):
        search.Search([b"word"]).of_file(paths[1])


def test_only_lines_between_two_offsets_are_searched(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"".join(b"word %d\n" % number for number in range(9)))
    with (tmp_path / "log").open("rb") as file:
        matches = search.Search([b"word"]).within(file.fileno(), 14, 28, 3)
    assert matches == [(3, 14, b"word 2"), (4, 21, b"word 3")]


# ---- hits of signatures ----


def signature_hits(folder: Path, data: bytes, *patterns: str) -> list[list[Any]]:
    """Return the hits in a log of signatures with the word ``bad``."""
    (folder / "rank-0.log").write_bytes(data)
    signatures = [
        evidence_hits.LogSignature(number, {"words": ["bad"], "match": pattern.split("&")})
        for number, pattern in enumerate(patterns)
    ]
    [log] = evidence_hits.scan([str(folder / "rank-0.log")], signatures)
    rows: list[list[Any]] = log.get("hits", [])
    return rows


def test_a_hit_has_all_that_is_known_of_its_line(tmp_path: Path) -> None:
    data = b"one\n[rank3]: 2026-03-04 05:06:07 bad  disk \xff on n1\nlast\n"
    stamp = time.mktime((2026, 3, 4, 5, 6, 7, 0, 0, -1))
    text = "2026-03-04 05:06:07 bad  disk \ufffd on n1"
    [hit] = signature_hits(tmp_path, data, r"^never$&bad (?P<what>.*) on (?P<node>\w+)(?P<more>x?)")
    rest = len(data) - 4 - len(text)
    assert hit == [0, 2, text, {"what": "disk \ufffd", "node": "n1"}, stamp, 1, False, rest]


def test_the_first_and_the_last_two_hits_of_a_signature_are_returned_with_their_count(tmp_path: Path) -> None:
    data = b"".join(b"bad %d\nnot bad\n" % number for number in range(6))
    rows = signature_hits(tmp_path, data, "^bad", "bad 3")
    assert [(key, line, count) for key, line, _, _, _, count, *_ in rows] == [
        (0, 1, 6), (1, 7, 1), (0, 9, 6), (0, 11, 6),
    ]  # fmt: skip


def test_all_signatures_that_match_a_line_are_hits(tmp_path: Path) -> None:
    rows = signature_hits(tmp_path, b"bad a\nbad b\n", "bad b", "never", "bad", "b$&a$")
    assert [(key, line) for key, line, *_ in rows] == [(2, 1), (3, 1), (0, 2), (2, 2), (3, 2)]


def test_lines_about_excluded_nodes_are_no_hits(tmp_path: Path) -> None:
    data = b"dtslurm: health: node n1 is bad\nbad\n dtslurm: health: node bad\n"
    assert [line for _, line, *_ in signature_hits(tmp_path, data, "bad")] == [2, 3]


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        (b"x" * 1996 + b" bad", True),
        (b"x" * 1997 + b" bad", False),
        (b"\r".join([b"step bad", *[b"step"] * 199]), True),
        (b"\r".join([b"step bad", *[b"step"] * 200]), False),
        (b"step\r" + b"x" * 1996 + b" bad\rstep", True),
        (b"step\r" + b"x" * 1997 + b" bad\rstep", False),
    ],
)
def test_a_limited_part_of_a_line_is_matched(tmp_path: Path, line: bytes, is_found: bool) -> None:
    assert bool(signature_hits(tmp_path, line + b"\n", " bad")) is is_found


def test_a_rank_with_a_log_of_its_own_is_not_read_from_the_log_of_its_node(tmp_path: Path) -> None:
    lines = [encode_lines(rank, b"bad of node\n", 5.0) for rank in (0, 1, 2)]
    (tmp_path / "ranks-0.log").write_bytes(b"".join(lines))
    (tmp_path / "ranks-1.log").symlink_to("nowhere")
    (tmp_path / "rank-1.log").write_bytes(b"bad of rank\n")
    (tmp_path / "supervisor.log").write_bytes(b"bad\n")
    paths = [str(tmp_path / name) for name in ("ranks-1.log", "ranks-0.log", "rank-1.log", "supervisor.log")]
    signature = evidence_hits.LogSignature(0, {"words": ["bad"], "match": ["bad"]})
    logs = evidence_hits.scan([*paths, str(tmp_path / "gone.log")], [signature])
    assert [(log["rank"], [hit[2] for hit in log.get("hits", [])]) for log in logs] == [
        (1, ["bad of rank"]), (None, ["bad"]), (None, []), (0, ["bad of node"]), (2, ["bad of node"]),
    ]  # fmt: skip


@pytest.mark.parametrize("error", [OSError, ImportError])
def test_logs_are_read_by_one_process_where_no_others_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(evidence_hits, "WORTHWHILE", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    context = SimpleNamespace(Pool=refuse)
    monkeypatch.setattr(evidence_hits, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
    assert [line for _, line, *_ in signature_hits(tmp_path, b"bad\n", "bad")] == [1]


@pytest.mark.parametrize(
    ("cpus", "mib", "workers"),
    [(8, 127.9, []), (8, 128, [2]), (8, 255.9, [3]), (8, 900, [4]), (2, 900, [2]), (1, 900, [])],
)
def test_logs_of_64_mib_are_worth_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, mib: float, workers: list[int]
) -> None:
    started: list[int] = []

    def pool(count: int, *_: object) -> None:
        started.append(count)
        raise OSError

    monkeypatch.setattr(evidence_hits, "size_of", lambda _: int(mib * (1 << 20)))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cpus)))
    context = SimpleNamespace(Pool=pool)
    monkeypatch.setattr(evidence_hits, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
    signature_hits(tmp_path, b"bad\n", "bad")
    assert started == workers


# ---- all evidence of an attempt ----


def test_all_that_an_attempt_left_is_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda _: None)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=300, f_frsize=4096))
    run = tmp_path / "run[1]"
    for folder in ("logs/2", "logs/1", "ranks/2"):
        (run / folder).mkdir(parents=True)
    for name in ("logs/2/b.log", "logs/2/a.log", "logs/2/c.txt", "logs/1/d.log"):
        (run / name).touch()
    (run / "logs/2/manifest.json").write_text('{"nodes": 2}')
    (run / "events.jsonl").write_text('{"event": "a"}\n{"event": "b"}\n')
    (tmp_path / "slurm.out").touch()
    extra = [str(tmp_path / "none"), str(tmp_path / "slurm.out")]
    request = {"run_dir": str(run), "attempt": 2, "signatures": [], "extra": extra}
    before = time.time()
    answer = evidence.answer(request)
    assert before <= answer["now"] <= time.time()
    assert [log["file"] for log in answer["files"]] == ["a.log", "b.log", "slurm.out"]
    assert (answer["schema"], answer["manifest"], answer["free"]) == (1, {"nodes": 2}, 300 * 4096)
    assert [record["event"] for record in answer["events"]] == ["a", "b"]


def test_free_space_of_a_missing_folder_is_unknown(tmp_path: Path) -> None:
    assert evidence.free_bytes(str(tmp_path / "none")) is None


def test_a_first_failure_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "first-failure").symlink_to("nowhere")
    for name, text in [("first-failure-1", "x 5"), ("first-failure-2", "4"), ("first-failure-3", "0 9\n")]:
        (tmp_path / name).write_text(text)
    assert evidence.rank_records(str(tmp_path)) == ([], [[0, 9]])
