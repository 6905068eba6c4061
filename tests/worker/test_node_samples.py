"""The newest sample of each node, and the sample a minute older that rates are computed against."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from dtslurm.worker.telemetry import nodes

KIB = 1 << 10


class CountingFile(io.BytesIO):
    """A file that adds up the bytes that are read from it."""

    bytes_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.bytes_read += len(data)
        return data


def node_file(times: list[float | None], size: int = 0) -> CountingFile:
    """Return a node's samples as a file, each of ``size`` bytes."""
    records = [{} if time is None else {"time": time} for time in times]
    lines = [json.dumps({"node": "n1", **record}).ljust(max(size - 1, 0)) for record in records]
    return CountingFile(("\n".join(lines) + "\n").encode())


def newest_times(file: CountingFile) -> tuple[Any, Any]:
    last, before = nodes.newest_of(file, len(file.getvalue()))
    return last.get("time"), before.get("time")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([100], (100, None)),
        ([100, 110], (110, 100)),
        ([100, 110, 120], (120, 100)),
        ([0, 40, 60], (60, 0)),
        ([0, 39, 40, 41, 100], (100, 40)),  # exactly a minute older
        ([0, 39, 41, 100], (100, 39)),
        ([110, 100], (100, None)),  # the clock was set back
        ([100, 100], (100, None)),
        ([None, 100], (100, None)),
    ],
)
def test_sample_a_minute_older_is_chosen_for_the_rates(
    times: list[float | None], expected: tuple[Any, Any]
) -> None:
    assert newest_times(node_file(times)) == expected


def test_file_without_complete_samples_has_none() -> None:
    for data in (b"", b"{", b'{"time": 1}', b"[]\n\n"):
        assert nodes.newest_of(io.BytesIO(data), len(data)) == ({}, {})


@pytest.mark.parametrize(
    ("size", "every", "before", "at_most"),
    [
        (256, 1.0, 938.0, 9 * KIB),  # 31 whole samples are in the first 8 KiB
        (1 * KIB, 5.0, 934.0, 12 * KIB),
        (4 * KIB, 10.0, 939.0, 53 * KIB),
        (6 * KIB, 70.0, 929.0, 41 * KIB),
        (20 * KIB, 30.0, 939.0, 170 * KIB),
    ],
)
def test_sample_a_minute_older_is_found_with_few_reads(
    size: int, every: float, before: float, at_most: int
) -> None:
    file = node_file([999.0 - number * every for number in reversed(range(200))], size)
    assert newest_times(file) == (999.0, before)
    assert file.bytes_read <= at_most


def test_rates_are_unknown_where_a_sample_is_longer_than_any_read() -> None:
    assert newest_times(node_file([1.0, 2.0], 600 * KIB)) == (2.0, 1.0)
    assert newest_times(node_file([1.0, 2.0], 1100 * KIB)) == (2.0, None)


def test_first_line_of_a_part_is_incomplete() -> None:
    data = b'{"a": 1}\n{"b": 2}\n{"c": 3}'
    assert nodes.whole_records(data, True) == [{"a": 1}, {"b": 2}]
    assert nodes.whole_records(data, False) == [{"b": 2}]


def test_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        samples = [{"time": time, "node": f"n{number}", "nics": {}, "gpus": []} for time in (1.0, 2.0)]
        text = "".join(json.dumps(sample) + "\n" for sample in samples[number == 2 :])
        (tmp_path / f"node-{number}.jsonl").write_text(text)
    (tmp_path / "node-3.jsonl").write_text("")
    (tmp_path / "node-4.jsonl").mkdir()
    (tmp_path / "node-x.jsonl").write_text('{"time": 1}\n')
    newest, older = nodes.samples(str(tmp_path))
    assert [(sample["node"], sample["time"], sample["gpus"]) for sample in newest] == [
        ("n0", 2.0, []),
        ("n2", 2.0, []),
        ("n10", 2.0, []),
    ]
    assert older == [{"time": 1.0, "node": "n0", "nics": {}}, {"time": 1.0, "node": "n10", "nics": {}}]
