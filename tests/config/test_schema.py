from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dtslurm import assets
from dtslurm.config import schema

FILES = sorted(assets.cluster_profiles().glob("*.yaml"))


def schema_errors(document: Any) -> list[str]:
    checker = jsonschema.Draft202012Validator(schema.profile_schema())
    return [error.message for error in checker.iter_errors(document)]


def test_the_packaged_schema_is_up_to_date() -> None:
    shipped = (assets.cluster_profiles() / "schema.json").read_text(encoding="utf-8")
    assert shipped == schema.text(), "python -m dtslurm.config.schema > cluster_profiles/schema.json"


def test_the_profile_schema_is_a_valid_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema.profile_schema())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_packaged_profiles_match_the_schema_and_reference_the_schema(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=./schema.json\n")
    assert schema_errors(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    "document",
    [
        {"extends": "slurm", "slurm": {"max_nodes": 8, "exclusive": True, "max_time": "24:00:00"}},
        {"slurm": {"max_time": 90, "account": 12345, "qos": None, "default_mem": 494000}},
        {"node_types": {"a": None, "b": {"memory": "64G", "gpus": {"count": 8}}}},
        {"slurm": None, "environment": None, "fabric": None},
        {"fabric": {"environment": {"A": {"value": 1, "why": "w"}}}},
        {"environment": {"variables": {"A": "1", "B": 2, "C": None}}},
    ],
)
def test_valid_documents_match_the_schema(document: Any) -> None:
    assert schema_errors(document) == []


@pytest.mark.parametrize(
    "document",
    [
        {"sheduler": "slurm"},
        {"scheduler": "pbs"},
        {"slurm": {"max_nodes": "eight"}},
        {"slurm": {"extra_options": "--exclusive"}},
        {"slurm": {"gpu_request": None, "max_time": [1]}},
        {"node_types": {"a": {"gpus": {"cuont": 8}}}},
    ],
)
def test_invalid_documents_do_not_match_the_schema(document: Any) -> None:
    assert schema_errors(document)


def test_docstrings_are_descriptions_in_the_schema() -> None:
    properties = schema.profile_schema()["$defs"]["SlurmCustoms"]["properties"]
    assert "shortest time between two state queries" in properties["min_poll_s"]["description"]
    assert "default: 30.0" in properties["min_poll_s"]["description"]
    assert "minutes" in properties["max_time"]["description"]


def test_the_schema_module_prints_the_schema() -> None:
    command = [sys.executable, "-m", "dtslurm.config.schema"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert printed.stdout == schema.text()
    assert printed.stderr == ""
