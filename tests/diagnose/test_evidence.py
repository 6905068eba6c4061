"""The hits that the worker program finds in logs of any content."""

from __future__ import annotations

import ast
import base64
import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from dtslurm import assets
from dtslurm.remote.worker_program import inline_program
from dtslurm.services.observe.diagnose import EVIDENCE
from dtslurm.services.wiring.remote_query import SHARED
from dtslurm.worker.evidence import evidence, flight, search
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
