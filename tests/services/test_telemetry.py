"""The telemetry of a running job, read on the host that holds its files."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.telemetry import FirstFailure
from dtslurm.services.observe.telemetry import RunPart, read_telemetry
from dtslurm.services.wiring.context import Context
from dtslurm.worker.lib.rank_files import encode_lines, encode_totals
from tests.e2e.conftest import far_profile
from tests.sshd.fixtures import Login


class RunFiles:
    """A run's files, written as its job would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = 0

    def file(self, kind: str, name: str) -> Path:
        path = self.folder / kind / str(self.attempt) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def start(self, world_size: int) -> None:
        self.file("logs", "manifest.json").write_text(json.dumps({"schema": 1, "world_size": world_size}))

    def rank(self, rank: int, log: bytes = b"hello\n", **record: Any) -> None:
        self.file("logs", f"rank-{rank}.log").write_bytes(log)
        values = {"schema": 1, "rank": rank, "local_rank": rank % 8, "node_rank": rank // 8, "host": "n1"}
        values |= {"pid": 100 + rank, "started": 1000, "ended": None, "exit_code": None, "signal": None}
        self.file("ranks", f"{rank}.json").write_text(json.dumps({**values, **record}))

    def lines(self, name: str, *records: Any) -> None:
        with self.file("metrics", name).open("a") as file:
            for record in records:
                file.write((record if isinstance(record, str) else json.dumps(record)) + "\n")

    def events(self, *records: Any) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def run_files(tmp_path: Path) -> RunFiles:
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    return RunFiles(folder)


def record_of(run_files: RunFiles, **values: Any) -> JobRecord:
    known = {
        "token": "t",
        "cluster": "local",
        "name": "n",
        "phase": "submitted",
        "created_at": 0,
        "job_id": "7",
    }
    return JobRecord(**{**known, "run_dir": str(run_files.folder), **values})


def test_telemetry_combines_ranks_logs_and_records(run_files: RunFiles) -> None:
    run_files.start(3)
    run_files.rank(0)
    run_files.rank(1, log=b"", ended=1010, exit_code=1)
    os.utime(run_files.file("logs", "rank-0.log"), (time.time() - 90,) * 2)
    telemetry = read_telemetry(Context(), record_of(run_files))
    assert (telemetry.attempt, telemetry.attempts, telemetry.world_size, set(telemetry.ranks)) == (
        0,
        (0,),
        3,
        {0, 1},
    )
    first, second = telemetry.ranks[0], telemetry.ranks[1]
    assert (first.bytes, first.host, first.pid, first.running) == (6, "n1", 100, True)
    assert 89 <= (telemetry.silent_s(0) or 0) < 200
    assert (second.last_output_at, second.exit_code, second.running) == (None, 1, False)
    assert telemetry.silent_s(1) is None
    assert telemetry.silent_s(2) is None


def test_the_files_of_nodes_make_the_same_picture(run_files: RunFiles) -> None:
    run_files.start(4)
    written = round(time.time() - 90, 3)
    log = encode_lines(2, b"one\nValueError: bad\n", written) + encode_totals({2: (20, written), 3: (0, 0.0)})
    run_files.file("logs", "ranks-2.log").write_bytes(log)
    common = {"host": "n2", "node_rank": 1, "started": 1000, "ended": None, "exit_code": None}
    records = [{"rank": 2, "pid": 7, **common}, {"rank": 3, "pid": 8, **common}]
    records.append({**records[0], "ended": 1010, "exit_code": 1})
    run_files.file("ranks", "ranks-2.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    run_files.file("ranks", "first-failure").write_text("2 1\n")
    telemetry = read_telemetry(Context(), record_of(run_files))
    assert (telemetry.ranks[2].bytes, telemetry.ranks[2].exit_code, telemetry.ranks[2].host) == (20, 1, "n2")
    assert 89 <= (telemetry.silent_s(2) or 90) < 200
    assert (telemetry.ranks[3].bytes, telemetry.ranks[3].last_output_at, telemetry.ranks[3].running) == (
        0,
        None,
        True,
    )
    assert telemetry.first_failure == FirstFailure(rank=2, exit_code=1, error="ValueError: bad")


def test_a_second_read_returns_only_new_records(run_files: RunFiles) -> None:
    run_files.start(1)
    run_files.rank(0)
    run_files.events({"time": 1, "event": "started", "attempt": 0})
    run_files.lines("train.jsonl", {"step": 1, "loss": 2.5, "mine": "x"}, {"step": 2, "loss": 2.25})
    first = read_telemetry(Context(), record_of(run_files))
    assert [(item.step, item.loss) for item in first.train] == [(1, 2.5), (2, 2.25)]
    assert first.train[0].other == {"mine": "x"}
    assert [event["event"] for event in first.events] == ["started"]

    run_files.lines("train.jsonl", {"step": 3})
    with run_files.file("metrics", "train.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    second = read_telemetry(Context(), record_of(run_files), previous_telemetry=first)
    assert ([item.step for item in second.train], second.events) == ([3], ())
    with run_files.file("metrics", "train.jsonl").open("a") as file:
        file.write('ss": 1.0}\n')
    run_files.events({"time": 2, "event": "ended", "attempt": 0, "exit_code": 0})
    third = read_telemetry(Context(), record_of(run_files), previous_telemetry=second)
    assert [(item.step, item.loss) for item in third.train] == [(4, 1.0)]
    assert [event["event"] for event in third.events] == ["ended"]


def test_unchanged_rank_records_are_kept_from_the_previous_read(run_files: RunFiles) -> None:
    run_files.start(2)
    run_files.rank(0)
    run_files.rank(1)
    old = time.time() - 1000
    os.utime(run_files.file("ranks", "0.json"), (old, old))
    first = read_telemetry(Context(), record_of(run_files))
    run_files.file("ranks", "0.json").write_text("never looked at again")
    os.utime(run_files.file("ranks", "0.json"), (old, old))
    run_files.file("logs", "rank-0.log").write_bytes(b"more\nand more\n")
    run_files.rank(1, ended=2000, exit_code=0)
    second = read_telemetry(Context(), record_of(run_files), previous_telemetry=first)
    assert (second.ranks[0].pid, second.ranks[0].bytes) == (100, 14)
    assert second.ranks[1].exit_code == 0


def test_a_new_attempt_resets_the_telemetry(run_files: RunFiles) -> None:
    run_files.start(1)
    run_files.rank(0)
    run_files.lines("train.jsonl", {"step": 1}, {"step": 2})
    first = read_telemetry(Context(), record_of(run_files))
    run_files.attempt = 1
    run_files.start(1)
    run_files.file("logs", "rank-0.log").write_bytes(b"")
    run_files.lines("train.jsonl", {"step": 2})
    second = read_telemetry(Context(), record_of(run_files), previous_telemetry=first)
    assert (second.attempt, second.attempts, [item.step for item in second.train]) == (1, (0, 1), [2])
    assert second.ranks[0].pid is None
    assert len(read_telemetry(Context(), record_of(run_files), RunPart(attempt=0)).train) == 2


SAMPLE: dict[str, Any] = {
    "schema": 1,
    "node": "n1",
    "gpus": [
        {"index": 0, "uuid": "GPU-1", "util": 97, "memory_used": 80 << 30, "throttle": ["power"], "xid": [79]}
    ],
    "cpu_percent": 12.5,
    "nics": {"mlx5_0": {"rx_bytes": 0, "tx_bytes": 0, "errors": 0}},
    "disks": {"/tmp": {"used": 1, "total": 2}},
}


def write_samples(run_files: RunFiles, rank: int, count: int, every: float = 5.0, padding: int = 0) -> None:
    for number in range(count):
        nics = {"mlx5_0": {"rx_bytes": number * 5000, "tx_bytes": number * 10_000, "errors": 0}}
        run_files.lines(
            f"node-{rank}.jsonl",
            {**SAMPLE, "node_rank": rank, "time": 1e9 + number * every, "nics": nics, "x": "x" * padding},
        )


@pytest.mark.parametrize("padding", [0, 3000, 20_000])
def test_telemetry_contains_the_newest_sample_of_each_node_and_its_rates(
    run_files: RunFiles, padding: int
) -> None:
    run_files.start(16)
    for rank in (0, 1, 10):
        write_samples(run_files, rank, 200, padding=padding)
    telemetry = read_telemetry(Context(), record_of(run_files))
    assert [item.node_rank for item in telemetry.nodes] == [0, 1, 10]
    assert telemetry.nodes[0].time == 1e9 + 199 * 5
    gpu = telemetry.nodes[0].gpus[0]
    assert (gpu.util, gpu.memory_used, gpu.throttle, gpu.xid) == (97, 80 << 30, ("power",), (79,))
    assert (gpu.temperature_c, telemetry.nodes[0].load, telemetry.nodes[0].cgroup_limit) == (None, None, None)
    assert 55 <= telemetry.nodes[0].time - telemetry.nodes_before[0].time <= 75
    assert telemetry.rates(10) == {"mlx5_0": (1000.0, 2000.0)}


def test_a_single_sample_has_no_rate(run_files: RunFiles) -> None:
    run_files.start(1)
    write_samples(run_files, 0, 1)
    telemetry = read_telemetry(Context(), record_of(run_files))
    assert (len(telemetry.nodes), telemetry.nodes_before, telemetry.rates(0)) == (1, (), {})


def test_counters_or_clocks_that_decrease_have_no_rate(run_files: RunFiles) -> None:
    run_files.start(1)
    nics = [{"a": {"rx_bytes": 9, "tx_bytes": 9}}, {"a": {"rx_bytes": 1, "tx_bytes": 10}}]
    run_files.lines("node-0.jsonl", *({**SAMPLE, "time": 100 + 60 * k, "nics": nics[k]} for k in (0, 1)))
    assert read_telemetry(Context(), record_of(run_files)).rates(0) == {}
    run_files.lines("node-0.jsonl", {**SAMPLE, "time": 50, "nics": {"a": {"rx_bytes": 100, "tx_bytes": 100}}})
    telemetry = read_telemetry(Context(), record_of(run_files))
    assert (telemetry.nodes[0].time, telemetry.rates(0)) == (50, {})


def test_malformed_telemetry_files_are_skipped(run_files: RunFiles) -> None:
    run_files.start(2)
    run_files.file("logs", "manifest.json").write_text('{"world_size": "many"')
    run_files.rank(0)
    run_files.file("ranks", "0.json").write_bytes(b"\xff\0[")
    run_files.file("ranks", "1.json").write_text(
        '{"rank": 1, "pid": "x", "ended": [], "started": 1e308, "host": 3}'
    )
    run_files.file("logs", "rank-x.log").write_text("not a rank")
    run_files.lines(
        "node-0.jsonl", "[]", "null", '{"time": NaN, "gpus": [1, {"util": 1e309}], "nics": 5, "disks": []}'
    )
    run_files.lines("node-1.jsonl", '{"time": 1e308, "node_rank": 1e308, "gpus": null}', '{"half')
    deep = "[" * 100_000
    run_files.lines(
        "train.jsonl",
        deep, "9" * 6000, "\0", '{"loss": NaN, "step": 5, "grad_norm": Infinity}',
        '{"loss": 1e308, "step": "six", "time": "late", "learning_rate": true}',
        '{"loss": "nan", "step": 1e400}',
    )  # fmt: skip
    (run_files.folder / "events.jsonl").write_bytes(b'\xff{"event": 1}\n{"event": "ended"}\n{"ev')
    telemetry = read_telemetry(Context(), record_of(run_files))
    assert (telemetry.world_size, set(telemetry.ranks)) == (None, {0, 1})
    assert (telemetry.ranks[1].started, telemetry.ranks[1].pid, telemetry.ranks[1].host) == (None, None, "")
    assert [(item.node_rank, item.nics) for item in telemetry.nodes] == [(0, {}), (0, {})]
    assert telemetry.nodes[0].gpus[0].util is None
    lost, huge, text = telemetry.train
    assert lost.loss is not None
    assert math.isnan(lost.loss)
    assert (lost.step, lost.grad_norm) == (5, math.inf)
    assert (huge.loss, huge.step, huge.time, huge.learning_rate) == (1e308, None, None, None)
    assert text.loss is not None
    assert math.isnan(text.loss)
    assert text.step is None
    assert [event["event"] for event in telemetry.events] == ["ended"]


def test_telemetry_of_a_run_without_files_is_empty(run_files: RunFiles) -> None:
    telemetry = read_telemetry(Context(), record_of(run_files))
    assert (telemetry.attempt, telemetry.ranks, telemetry.nodes, telemetry.train) == (None, {}, (), ())
    with pytest.raises(RequestInvalid, match="7 has no attempt 3: the run has not started"):
        read_telemetry(Context(), record_of(run_files), RunPart(attempt=3))
    gone = read_telemetry(Context(), record_of(run_files, run_dir=str(run_files.folder / "gone")))
    assert gone.attempt is None


def test_a_replaced_metrics_file_is_read_from_its_start(run_files: RunFiles) -> None:
    run_files.start(1)
    run_files.lines("train.jsonl", *({"step": step} for step in range(100)))
    first = read_telemetry(Context(), record_of(run_files))
    run_files.file("metrics", "train.jsonl").write_text('{"step": 1000}\n')
    assert [
        item.step for item in read_telemetry(Context(), record_of(run_files), previous_telemetry=first).train
    ] == [1000]


def test_many_training_records_are_thinned_and_nan_losses_are_kept(run_files: RunFiles) -> None:
    run_files.start(1)
    values = [{"step": step, "loss": math.nan if step == 777 else 1.0} for step in range(10_000)]
    values[4321] = {"step": 4321, "eval_loss": 3.0}
    run_files.lines("train.jsonl", *values)
    telemetry = read_telemetry(Context(), record_of(run_files), points=100)
    assert len(telemetry.train) == 100
    assert [item.step for item in telemetry.train][::33] == [99, 3399, 6699, 9999]
    assert sum(item.loss is not None and math.isnan(item.loss) for item in telemetry.train) == 1
    assert sum("eval_loss" in item.other for item in telemetry.train) == 1


def test_telemetry_of_ten_thousand_ranks_fits_into_one_answer(run_files: RunFiles) -> None:
    run_files.start(10_000)
    for rank in range(10_000):
        run_files.rank(rank)
    first = read_telemetry(Context(), record_of(run_files))
    assert len(first.ranks) == 10_000
    assert {first.ranks[rank].node_rank for rank in (0, 9_999)} == {0, 1249}
    assert read_telemetry(Context(), record_of(run_files), previous_telemetry=first).ranks == first.ranks


def test_telemetry_is_read_per_array_task(run_files: RunFiles) -> None:
    for task in ("3", "12"):
        result = RunFiles(run_files.folder / "tasks" / task)
        result.start(1)
        result.rank(0, pid=int(task))
    record = record_of(run_files, array="3-12")
    assert read_telemetry(Context(), record).ranks[0].pid == 3
    telemetry = read_telemetry(Context(), record, RunPart(task="12"))
    assert (telemetry.ranks[0].pid, telemetry.task, telemetry.tasks) == (12, "12", ("3", "12"))
    for task, said in (
        ("4", "task 4 of 7 has not started"),
        ("../..", "not the index"),
        ("٣", "not the index"),
    ):
        with pytest.raises(RequestInvalid, match=said):
            read_telemetry(Context(), record, RunPart(task=task))


def test_a_host_without_a_working_python_causes_a_transport_error(
    run_files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(TransportError, match="could not be read"):
        read_telemetry(Context(), record_of(run_files))


@pytest.mark.slurm
@pytest.mark.parametrize("transport", ["openssh", "paramiko"])
def test_telemetry_is_read_over_ssh(
    run_files: RunFiles, tmp_path: Path, sshd_login: Login, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    for name, value in sshd_login.env.items():
        monkeypatch.setenv(name, value)
    far_profile(tmp_path, sshd_login.host, transport)
    run_files.start(1)
    run_files.rank(0)
    write_samples(run_files, 0, 30)
    run_files.lines("train.jsonl", {"step": 1, "loss": math.nan})
    record = record_of(run_files, cluster="far", mirror=str(tmp_path / "mirror"))
    context = Context(cwd=tmp_path)
    telemetry = read_telemetry(context, record)
    assert (telemetry.ranks[0].host, telemetry.rates(0), telemetry.train[0].step) == (
        "n1",
        {"mlx5_0": (1000.0, 2000.0)},
        1,
    )
    assert read_telemetry(context, record, previous_telemetry=telemetry).train == ()


TRACEBACK = b"""[rank2]: Traceback (most recent call last):
[rank2]:   File "/w/fail.py", line 6, in <module>
[rank2]:     batch["label"]
[rank2]:   File "/venv/lib/python3.11/site-packages/torch/x.py", line 99, in get
[rank2]: KeyError: 'label'
"""


def write_failed_rank(run_files: RunFiles, rank: int = 2, **record: Any) -> None:
    run_files.start(4)
    run_files.rank(0, ended=1010, exit_code=143, signal=15, told_to_end=True)
    run_files.rank(rank, log=b"step 1\n" + TRACEBACK, ended=1009, exit_code=1, **record)


def test_the_first_failure_has_its_exception_and_the_line_of_user_code(run_files: RunFiles) -> None:
    write_failed_rank(run_files)
    assert read_telemetry(Context(), record_of(run_files)).first_failure is None
    run_files.file("ranks", "first-failure").write_text("2 1\n")
    telemetry = read_telemetry(Context(), record_of(run_files))
    assert telemetry.first_failure == FirstFailure(
        rank=2, exit_code=1, error="KeyError: 'label'", file="/w/fail.py", line=6
    )
    assert (telemetry.ranks[0].told_to_end, telemetry.ranks[2].told_to_end) == (True, False)


def test_the_earliest_recorded_failure_is_the_first_failure(run_files: RunFiles) -> None:
    write_failed_rank(run_files)
    run_files.file("ranks", "0.failure").write_text("1000000000000000200 0 143\n")
    run_files.file("ranks", "2.failure").write_text("1000000000000000100 2 1\n")
    run_files.file("ranks", "3.failure").write_text("half writ")
    first_failure = read_telemetry(Context(), record_of(run_files)).first_failure
    assert first_failure is not None
    assert first_failure.rank == 2


@pytest.mark.parametrize("words", ["", "nonsense", "2 85", "2 0", "-1 1"])
def test_malformed_and_successful_records_are_not_a_first_failure(run_files: RunFiles, words: str) -> None:
    write_failed_rank(run_files)
    run_files.file("ranks", "first-failure").write_text(words)
    assert read_telemetry(Context(), record_of(run_files)).first_failure is None


def test_a_terminated_rank_is_not_the_first_failure(run_files: RunFiles) -> None:
    write_failed_rank(run_files, told_to_end=True)
    run_files.file("ranks", "first-failure").write_text("2 143")
    assert read_telemetry(Context(), record_of(run_files)).first_failure is None


def test_a_first_failure_without_an_exception_has_its_exit_code(run_files: RunFiles) -> None:
    write_failed_rank(run_files)
    run_files.file("ranks", "first-failure").write_text("3 9")
    assert read_telemetry(Context(), record_of(run_files)).first_failure == FirstFailure(rank=3, exit_code=9)
