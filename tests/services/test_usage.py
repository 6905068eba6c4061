"""GPU-hours from accounting and samples."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.cli.commands.usage import describe_idle_time
from dtslurm.errors import RequestInvalid, TransportError
from dtslurm.model.cluster import ClusterProfile, Gpus, NodeType
from dtslurm.model.runs.usage import GpuTime, JobUse
from dtslurm.services.observe import usage as service
from dtslurm.services.observe.usage import GROUPS, AccountedJob, Usage, _period, price, rows, total
from dtslurm.services.wiring.context import Context
from dtslurm.slurm import accounting
from dtslurm.slurm.fields import FIELD_END
from dtslurm.worker.telemetry import gpu_time

HOUR = 3600
NOW = 1_800_000_000


def sacct_line(**values: str) -> str:
    known = {
        "JobID": "17", "User": "me", "Account": "proj", "Submit": str(NOW - 9000), "Start": str(NOW - 7200),
        "End": str(NOW - 3600), "TimelimitRaw": "120", "AllocCPUS": "32",
        "ReqTRES": "billing=32,cpu=32,gres/gpu=8,mem=1G,node=2", "Comment": "", "JobName": "train",
        "AllocTRES": "billing=32,cpu=32,gres/gpu:a100=8,gres/gpu=8,mem=1G,node=2",
    }  # fmt: skip
    return FIELD_END.join({**known, **values}[name] for name in accounting.COLUMNS)


def test_an_accounting_row_is_parsed() -> None:
    (use,) = accounting.read(sacct_line() + "\n")
    assert use == JobUse(
        job_id="17", user="me", account="proj", name="train", submit=NOW - 9000, start=NOW - 7200,
        end=NOW - 3600, limit_s=7200, gpus_asked=8, gpus=8, gpu_type="a100", cpus=32,
    )  # fmt: skip


def test_unusual_accounting_rows_are_parsed_or_skipped() -> None:
    output = "\n".join(
        [
            sacct_line(JobID="18_3", JobName="two\nlines|and more"),
            sacct_line(JobID="19", Start="Unknown", End="Unknown", TimelimitRaw="UNLIMITED", AllocTRES=""),
            sacct_line(JobID="7nonsense"),
            sacct_line(JobID="20", AllocTRES="gres/gpu:a100=2,gres/gpu:h100=3"),
        ]
    )
    first, second, third = accounting.read(output)
    assert (first.job_id, first.name) == ("18_3", "two\nlines|and more")
    assert (second.start, second.end, second.limit_s, second.gpus) == (None, None, None, 0)
    assert (third.gpus, third.gpu_type) == (5, "")
    assert accounting.read("") == []


def test_usage_is_reported_without_samples_if_they_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(ok=True, stdout=sacct_line() + "\n", stderr="")
    cluster = SimpleNamespace(
        name="a",
        profile=SimpleNamespace(scheduler="slurm", node_types={}),
        transport=SimpleNamespace(run=lambda *_, **__: answer),
    )

    def lost(*_: object) -> None:
        raise TransportError("the files of the run could not be read on the login node")

    monkeypatch.setattr(service, "recent", lambda *_: [])
    monkeypatch.setattr(service, "_clusters", lambda *_: [cluster])
    monkeypatch.setattr(service, "_samples", lost)
    seen = service.usage(Context(clock=lambda: NOW))
    assert [item.use.job_id for item in seen.held] == ["17"]
    assert seen.trouble == ("a: the files of the run could not be read on the login node",)


def accounted_job(
    gpu_time: GpuTime | None = None,
    cluster: str = "a",
    price: float | None = None,
    currency: str = "",
    **values: Any,
) -> AccountedJob:
    known = {
        "job_id": "1",
        "start": NOW - 2 * HOUR,
        "end": NOW - HOUR,
        "gpus": 4,
        "gpus_asked": 4,
        "limit_s": 7200,
    }
    use = JobUse(**{**known, "cpus": 8, "account": "x", "user": "me", "name": "n", **values})
    return AccountedJob(cluster, use, gpu_time, price, currency)


def usage_of(*items: AccountedJob, since: float = NOW - 30 * 86400) -> Usage:
    return Usage(since, NOW, items)


def test_hours_are_counted_within_the_period() -> None:
    row = total("all", [accounted_job()], usage_of())
    assert (row.gpu_hours_asked, row.gpu_hours_held, row.cpu_hours_held, row.gpu_hours_known) == (8, 4, 8, 0)
    assert total("all", [accounted_job(end=None)], usage_of()).gpu_hours_held == 8  # it still runs
    assert total("all", [accounted_job(start=None, end=None)], usage_of()).gpu_hours_held == 0
    assert total("all", [accounted_job()], usage_of(since=NOW - 1.5 * HOUR)).gpu_hours_held == 2
    assert (
        total("all", [accounted_job(start=NOW, end=NOW - HOUR)], usage_of()).gpu_hours_held == 0
    )  # a clock went back


def test_groups_are_sorted_by_idle_gpu_hours() -> None:
    idle = accounted_job(GpuTime(used=0.1, idle=0.75, power_w=100), account="wasteful")
    busy = accounted_job(GpuTime(used=0.9, idle=0.0, power_w=700), account="busy", job_id="2", gpus=64)
    unknown = accounted_job(account="unknown", job_id="3", gpus=128)
    result = rows(usage_of(unknown, busy, idle), "account")
    assert [row.group for row in result] == ["wasteful", "unknown", "busy"]
    assert (result[0].gpu_hours_idle, result[0].gpu_hours_used, result[0].gpu_kwh) == (3, 0.4, 0.4)
    assert (result[2].gpu_hours_used, result[2].gpu_kwh) == (57.6, 44.8)
    whole = total("all", [unknown, busy, idle], usage_of())
    assert describe_idle_time(whole) == "3.0 of 68.0 GPU-hours were idle (4%); no samples of 128.0 more"


def test_energy_and_price_are_given_only_if_known_for_all_jobs() -> None:
    idle, busy = GpuTime(used=0.1, idle=0.75, power_w=100), GpuTime(used=0.9, idle=0.0)
    whole = total(
        "all", [accounted_job(idle, price=2.0), accounted_job(busy, price=3.0, job_id="2")], usage_of()
    )
    assert (whole.gpu_kwh, whole.price, whole.price_idle) == (0.4, 20, 6)
    assert describe_idle_time(whole) == "3.0 of 8.0 GPU-hours were idle (38%), for 6.00 of 20.00"
    unpriced = total("all", [accounted_job(busy, price=2.0), accounted_job(busy, job_id="2")], usage_of())
    assert (unpriced.gpu_kwh, unpriced.price, unpriced.price_idle) == (None, None, None)
    euros, dollars = (accounted_job(busy, price=2.0, currency=name) for name in ("EUR", "USD"))
    assert (total("all", [euros, euros], usage_of()).currency, total("all", [euros], usage_of()).price) == (
        "EUR",
        8,
    )
    assert total("all", [euros, dollars], usage_of()).price is None
    without_gpus = total("all", [accounted_job(price=2.0), accounted_job(gpus=0, job_id="2")], usage_of())
    assert (without_gpus.price, without_gpus.price_idle) == (8, None)
    assert total("all", [accounted_job(gpus=0)], usage_of()).price is None


def test_the_price_is_that_of_the_allocated_gpu_type() -> None:
    a100 = NodeType(gpus=Gpus(model="A100", count=4, slurm_type="a100", price=1.5, currency="EUR"))
    h100 = NodeType(gpus=Gpus(model="H100", count=4, slurm_type="h100", price=3.0))
    both = ClusterProfile(name="x", node_types={"a": a100, "h": h100, "cpu": NodeType()})
    assert price(both, "h100") == (3.0, "")
    assert price(both, "") is None
    assert price(both, "v100") is None
    cluster_profile = ClusterProfile(name="x", node_types={"a": a100, "cpu": NodeType()})
    assert (
        price(cluster_profile, ""),
        price(cluster_profile, "a100"),
        price(ClusterProfile(name="x"), "a100"),
    ) == (
        (1.5, "EUR"),
        (1.5, "EUR"),
        None,
    )


def test_usage_can_be_grouped_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    items = usage_of(
        accounted_job(),
        accounted_job(job_id="2", cluster="b", user="you", account="", start=NOW - 15 * 86400, end=NOW),
    )
    groups = {by: [row.group for row in rows(items, by)] for by in GROUPS}
    assert groups["cluster"] == ["b", "a"]
    assert groups["account"] == ["(none)", "x"]
    assert groups["user"] == ["you", "me"]
    assert groups["name"] == ["n"]
    assert groups["week"] == ["2026-W53", "2027-W02"]


def test_restarts_of_a_job_count_as_one_job() -> None:
    row = total("all", [accounted_job(), accounted_job(start=NOW - HOUR, end=NOW)], usage_of())
    assert (row.jobs, row.gpu_hours_held) == (1, 8)


def test_components_of_a_heterogeneous_job_count_as_one_job_and_array_tasks_do_not() -> None:
    components = [accounted_job(job_id="17+0"), accounted_job(job_id="17+1", gpus=2)]
    row = total("all", components, usage_of())
    assert (row.jobs, row.gpu_hours_held) == (1, 6)
    assert total("all", [accounted_job(job_id=f"17_{task}") for task in range(2)], usage_of()).jobs == 2


def test_samples_of_a_heterogeneous_job_belong_to_all_its_components(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(
        ok=True, stdout=sacct_line(JobID="17+0") + "\n" + sacct_line(JobID="17+1") + "\n", stderr=""
    )
    cluster = SimpleNamespace(
        name="a",
        profile=SimpleNamespace(scheduler="slurm", node_types={}),
        transport=SimpleNamespace(run=lambda *_, **__: answer),
    )
    monkeypatch.setattr(service, "recent", lambda *_: [])
    monkeypatch.setattr(service, "_clusters", lambda *_: [cluster])
    gpu_time = GpuTime(used=0.5, idle=0.1, power_w=None)
    monkeypatch.setattr(service, "_samples", lambda *_: {"17": gpu_time})
    seen = service.usage(Context(clock=lambda: NOW))
    assert [item.gpu_time for item in seen.held] == [gpu_time, gpu_time]


def test_the_since_option_accepts_durations_and_dates() -> None:
    assert _period("30d", NOW) == (NOW - 30 * 86400, "now-30days")
    assert _period("12h", NOW) == (NOW - 12 * HOUR, "now-12hours")
    assert _period("2026-01-31", NOW)[1] == "2026-01-31"
    for wrong in ("yesterday", "30", "2026-13-01", "-1d", "now", "30d;x"):
        with pytest.raises(RequestInvalid, match="--since"):
            _period(wrong, NOW)


# ---- What samples tell ----


def write_samples(folder: Path, name: str, lines: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(f"{line}\n" for line in lines))


def test_samples_of_all_nodes_attempts_and_tasks_are_summed(tmp_path: Path) -> None:
    run = tmp_path / "run [1]"
    busy = json.dumps({"gpus": [{"util": 90, "power_w": 600}, {"util": 2}]})
    write_samples(
        run / "metrics" / "0",
        "node-0.jsonl",
        [busy, busy, '{"gpus": 5}', "{", '{"gpus": [1, {"util": "x"}]}'],
    )
    write_samples(run / "metrics" / "1", "node-1.jsonl", ['{"gpus": [{"util": 0, "power_w": 1e300}]}'])
    write_samples(
        run / "tasks" / "3" / "metrics" / "0",
        "node-0.jsonl",
        ['{"gpus": [{"util": 50}]}', '{"gpus": [{"util": NaN}]}'],
    )
    assert gpu_time.summed(str(run)) == [6, 234, 3, 2, 1200]
    assert gpu_time.summed(str(tmp_path / "none")) == [0] * 5


def test_a_long_sample_file_is_read_in_parts(tmp_path: Path) -> None:
    line = json.dumps({"gpus": [{"util": 40}], "padding": "x" * 500})
    write_samples(tmp_path / "metrics" / "0", "node-0.jsonl", [line] * 10_000)
    count, util, *_ = gpu_time.summed(str(tmp_path))
    assert 1000 < count < 2500
    assert util / count == 40


def test_only_possible_values_of_samples_are_summed(tmp_path: Path) -> None:
    utils = [-1, 0, 4.9, 5, 100, 101]
    powers = [-1, 0, 99_999, 1e5, None, "x"]
    gpus = [{"util": util} for util in utils] + [{"util": 50, "power_w": power} for power in powers]
    write_samples(tmp_path / "metrics" / "0", "node-0.jsonl", [json.dumps({"gpus": gpus})])
    assert gpu_time.answer({"runs": [str(tmp_path)]}) == {
        "schema": 1,
        "runs": [[10, 409.9, 2, 2, 99_999]],
    }


@pytest.mark.parametrize(
    ("samples", "utils"), [(8, [0, 1, 2, 3, 4, 5, 6, 7]), (9, [0, 1, 3, 5, 8]), (20, [0, 1, 7, 13, 19])]
)
def test_blocks_of_a_long_sample_file_are_at_even_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int, utils: list[int]
) -> None:
    monkeypatch.setattr(gpu_time, "PIECES", 4)
    monkeypatch.setattr(gpu_time, "PIECE", 100)
    lines = [json.dumps({"gpus": [{"util": number}]}).ljust(49) for number in range(samples)]
    write_samples(tmp_path, "node-0.jsonl", lines)
    assert [gpu["util"] for gpu in gpu_time.gpus(str(tmp_path / "node-0.jsonl"))] == utils


def test_usage_csv_can_be_parsed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from dtslurm.cli.commands import usage

    monkeypatch.setattr(
        usage, "find_usage", lambda *_, **__: usage_of(accounted_job(name='a "name", indeed'))
    )
    answer = CliRunner().invoke(usage.usage, ["--csv", "--by", "name"])
    assert answer.exit_code == 0, answer.output
    table = list(csv.DictReader(io.StringIO(answer.output)))
    assert (table[0]["name"], table[0]["gpu_hours_held"]) == ('a "name", indeed', "4.0")
