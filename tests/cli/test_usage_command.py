"""``dtslurm usage``: headline, table, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from dtslurm.cli.commands.usage import _format_cells, describe_idle_time
from dtslurm.model.runs.usage import UsageRow
from dtslurm.slurm import accounting
from dtslurm.slurm.fields import FIELD_END
from tests.cli.conftest import Run
from tests.cli.slurm_programs import Programs


def usage_row(**values: object) -> UsageRow:
    known: dict[str, object] = {
        "group": "proj",
        "jobs": 3,
        "gpu_hours_asked": 200.0,
        "gpu_hours_held": 100.0,
        "gpu_hours_known": 80.0,
        "gpu_hours_used": 60.0,
        "gpu_hours_idle": 20.0,
        "gpu_kwh": None,
        "cpu_hours_held": 5.0,
        **values,
    }
    return UsageRow(**known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "20.0 of 80.0 GPU-hours were idle (25%); no samples of 20.0 more"),
        ({"gpu_hours_known": 100.0}, "20.0 of 100.0 GPU-hours were idle (20%)"),
        (
            {"gpu_hours_known": 100.0, "price": 250.0, "price_idle": 50.0},
            "20.0 of 100.0 GPU-hours were idle (20%), for 50.00 of 250.00",
        ),
        ({"gpu_hours_held": 0.0}, "no GPU-hours; 5.0 CPU-hours allocated"),
        ({"gpu_hours_known": 0.0}, "100.0 GPU-hours allocated; no samples show how many were idle"),
    ],
)
def test_the_headline_states_the_idle_gpu_hours(values: dict[str, object], said: str) -> None:
    assert describe_idle_time(usage_row(**values)) == said


def test_hours_without_samples_are_shown_as_unknown() -> None:
    assert _format_cells(usage_row())[2:4] == ["20.0 h", "60.0 h"]
    assert _format_cells(usage_row(gpu_hours_known=0.0))[2:4] == ["?", "?"]
    assert _format_cells(usage_row(gpu_hours_known=0.0, gpu_hours_held=0.0))[2:4] == ["-", "-"]


def sacct_output(*accounts: str) -> str:
    """Return sacct output with a job per account: an hour on eight GPUs."""
    lines = []
    for number, account in enumerate(accounts):
        known = {
            "JobID": str(number),
            "User": "me",
            "Account": account,
            "Submit": "1751328000",
            "Start": "1751328000",
            "End": "1751331600",
            "TimelimitRaw": "120",
            "AllocCPUS": "32",
            "Comment": "",
            "JobName": "train",
            "ReqTRES": "gres/gpu=8",
            "AllocTRES": "gres/gpu:a100=8,gres/gpu=8",
        }
        lines.append(FIELD_END.join(known[name] for name in accounting.COLUMNS) + "\n")
    return "".join(lines)


USAGE = ("usage", "--cluster", "slurm", "--since", "2025-06-30")


def test_usage_prints_a_row_per_account_and_a_sum(invoke: Run, slurm: Programs) -> None:
    slurm.say("sacct", sacct_output("vision", "speech", "speech"))
    first, heads, *rows = invoke(*USAGE, code=0).stdout.splitlines()
    assert first == "24.0 GPU-hours allocated; no samples show how many were idle"
    assert heads.split() == ["ACCOUNT", "JOBS", "IDLE", "USED", "ALLOCATED", "REQUESTED", "CPU", "ALLOCATED"]
    assert [line.split()[:2] for line in rows] == [["speech", "2"], ["vision", "1"], ["all", "3"]]
    assert re.split(r" {2,}", rows[0]) == ["speech", "2", "?", "?", "16.0 h", "32.0 h", "64.0 h"]


def test_usage_with_one_group_prints_no_sum(invoke: Run, slurm: Programs) -> None:
    slurm.say("sacct", sacct_output("vision"))
    *_, last = invoke(*USAGE, "--by", "name", code=0).stdout.splitlines()
    assert last.split()[0] == "train"


def test_usage_prints_csv_and_json(invoke: Run, slurm: Programs) -> None:
    slurm.say("sacct", sacct_output("vision", "speech"))
    rows = list(csv.DictReader(io.StringIO(invoke(*USAGE, "--csv", code=0).stdout)))
    assert [(row["account"], row["gpu_hours_held"]) for row in rows] == [("speech", "8.0"), ("vision", "8.0")]
    document = json.loads(invoke(*USAGE, "--json", code=0).stdout)
    assert (document["by"], document["total"]["jobs"], document["total"]["gpu_hours_held"]) == (
        "account",
        2,
        16.0,
    )


def test_usage_reports_that_accounting_has_no_jobs(invoke: Run, slurm: Programs) -> None:
    slurm.say("sacct", "")
    done = invoke(*USAGE, code=0)
    assert done.stdout == ""
    assert "accounting has no jobs in the requested time (--since 2025-06-30)" in done.stderr


@pytest.mark.usefixtures("slurm")
def test_usage_reports_that_accounting_does_not_answer(invoke: Run) -> None:
    done = invoke(*USAGE)
    assert "slurm" in done.stderr
    assert "refused" in done.stderr


@pytest.mark.usefixtures("slurm")
def test_usage_refuses_an_invalid_time(invoke: Run) -> None:
    assert "--since" in invoke("usage", "--since", "yesterday-ish", code=2).stderr
