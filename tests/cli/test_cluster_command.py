"""``dtslurm cluster list``, ``show`` and ``schema``, and ``dtslurm doctor``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtslurm.presentation.quantities import format_bytes
from tests.cli.conftest import Run
from tests.cli.sample_runs import Runs
from tests.cli.slurm_programs import Programs

PROFILE = """\
extends: h100x8-ib
title: Ours
slurm: {partition: main, account: ""}
"""


@pytest.fixture
def custom_profile(folder: Path) -> Path:
    path = folder / "cluster_profiles" / "ours.yaml"
    path.parent.mkdir()
    path.write_text(PROFILE)
    path.chmod(0o644)
    return path


def table_rows(text: str) -> dict[str, list[str]]:
    """Rows of a table by their first cell."""
    words = [re.split(r" {2,}", line.strip()) for line in text.splitlines()[1:]]
    return {cells[0]: cells[1:] for cells in words}


def test_cluster_list_marks_the_default_cluster_and_its_reason(
    invoke: Run, custom_profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTSLURM_CLUSTER", "ours")
    done = invoke("cluster", "list", code=0)
    result = table_rows(done.stdout)
    assert result["ours *"][0] == "Ours"
    assert result["ours *"][1].endswith("cluster_profiles/ours.yaml")
    assert result["perlmutter"][1:] == ["packaged", "documentation 2026-08"]
    assert result["ours *"][2] == "-"  # that of the profile it extends holds for other clusters
    assert done.stderr == "* the default here: $DTSLURM_CLUSTER\n"
    document = json.loads(invoke("cluster", "list", "--json", code=0).stdout)
    assert (document["default"], document["default_because"]) == ("ours", "$DTSLURM_CLUSTER")
    places = {entry["name"]: entry["path"] for entry in document["clusters"]}
    assert {"ours", "local", "perlmutter"} <= places.keys()
    assert places["ours"] == str(custom_profile)


def test_cluster_list_shows_the_mistake_of_an_invalid_profile(invoke: Run, custom_profile: Path) -> None:
    custom_profile.write_text("titel: x\n")
    [cells] = [
        cells
        for name, cells in table_rows(invoke("cluster", "list", code=0).stdout).items()
        if name == "ours"
    ]
    assert cells[0] == "-"
    assert "titel" in cells[1]


@pytest.mark.usefixtures("custom_profile")
def test_cluster_show_prints_each_value_with_its_origin(invoke: Run) -> None:
    shown = invoke("cluster", "show", "ours", code=0).stdout
    result = table_rows(shown)
    assert result["title"] == ["Ours", "cluster_profiles/ours.yaml:2"]
    assert result["slurm.partition"] == ["main", "cluster_profiles/ours.yaml:3"]
    assert "slurm.account" not in result  # nothing is said there
    assert not re.search(r"^\[1\]", shown, re.MULTILINE)
    document = json.loads(invoke("cluster", "show", "ours", "--json", code=0).stdout)
    assert document["profile"]["slurm"]["partition"] == "main"
    assert document["origins"]["title"] == "cluster_profiles/ours.yaml:2"


def test_cluster_show_with_sources_numbers_the_documents(invoke: Run) -> None:
    shown = invoke("cluster", "show", "perlmutter", "--sources", code=0).stdout
    numbers = re.findall(r"^\[(\d+)\] NERSC", shown, re.MULTILINE)
    assert numbers == ["1", "2", "3"]
    assert any(cells[-1].endswith("[1]") for cells in table_rows(shown).values())


@pytest.mark.usefixtures("slurm")
def test_cluster_show_live_adds_values_of_slurm(invoke: Run) -> None:
    assert "max_time" not in invoke("cluster", "show", "slurm", code=0).stdout
    result = table_rows(invoke("cluster", "show", "slurm", "--live", code=0).stdout)
    assert result["slurm.partitions.main.max_time"][0] == "1-00:00:00"


@pytest.mark.parametrize("kind", ["profile", "job"])
def test_cluster_schema_prints_json(invoke: Run, kind: str) -> None:
    assert json.loads(invoke("cluster", "schema", kind, code=0).stdout)["type"] == "object"


# ---- Doctor ----


def test_doctor_prints_a_table_of_checks(invoke: Run, runs: Runs) -> None:
    runs.add("train", "7")
    done = invoke("doctor", "--cluster", "local", code=0)
    result = {cells[0]: cells[1] for cells in map(str.split, done.stdout.splitlines()[1:])}
    assert done.stdout.splitlines()[0].split() == ["WHAT", "FOUND"]
    assert result.keys() >= {"ok", "-"}
    assert re.search(r"^ok +index of runs +1 run$", done.stdout, re.MULTILINE)
    assert "local (--cluster)" in done.stdout
    assert "GiB free)" in done.stdout


def test_doctor_fails_for_an_unknown_cluster(invoke: Run) -> None:
    done = invoke("doctor", "--cluster", "perlmuter", code=1)
    assert re.search(r"^FAIL  cluster .*; did you mean 'perlmutter'", done.stdout, re.MULTILINE)
    document = json.loads(invoke("doctor", "--cluster", "perlmuter", "--json", code=1).stdout)
    assert (document["ok"], document["findings"][-1]["ok"]) == (False, False)


def test_doctor_shows_the_slurm_programs_and_version(invoke: Run, slurm: Programs) -> None:
    done = invoke("doctor", "--cluster", "slurm", code=0)
    assert f"{slurm.folder}/squeue" in done.stdout
    assert re.search(r"^- +version +slurm 24\.11\.5", done.stdout, re.MULTILINE)
    assert re.search(r"^ok +scheduler +answers; ", done.stdout, re.MULTILINE)
    findings = json.loads(invoke("doctor", "--cluster", "slurm", "--json").stdout)["findings"]
    assert {item["what"]: item["ok"] for item in findings}["sbatch"] is True


def test_doctor_fails_if_slurm_does_not_answer(invoke: Run, slurm: Programs) -> None:
    slurm.say(
        "scontrol show config", "slurm_load_ctl_conf error: Unable to contact slurm controller\n", code=1
    )
    done = invoke("doctor", "--cluster", "slurm", code=1)
    assert re.search(r"^FAIL +scheduler ", done.stdout, re.MULTILINE)


def test_doctor_fails_if_the_run_root_has_an_unset_variable(
    invoke: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTSLURM_RUN_ROOT", "$NOWHERE/runs")
    done = invoke("doctor", "--cluster", "local", code=1)
    assert re.search(r"^FAIL +run root .*\$NOWHERE", done.stdout, re.MULTILINE)


# ---- Words that many commands share ----


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**40, "1.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_format_bytes_chooses_the_unit(amount: float, words: str) -> None:
    assert format_bytes(amount) == words


def test_doctor_checks_the_run_root_like_submit(
    invoke: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DTSLURM_RUN_ROOT", str(tmp_path / "file" / "runs"))
    done = invoke("doctor", "--cluster", "local", code=1)
    assert f"{tmp_path}/file/runs is not writable: {tmp_path}/file; set another" in done.stdout
    monkeypatch.setenv("DTSLURM_RUN_ROOT", "/proc/runs")
    [result] = [
        line for line in invoke("doctor", "--cluster", "local").stdout.splitlines() if "/proc/runs" in line
    ]
    assert "GiB free" not in result
