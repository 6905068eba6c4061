"""The source of each value of a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtslurm.config import profiles, provenance

TEXT = """\
# source: The centre's guide (docs.example.org), 2026-08
# source: A user's script (git.example.org/me), 2024: slurm, node_types.big.memory
# source: nothing that is dated
title: X
"""


@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("login.host", "The centre's guide (docs.example.org), 2026-08"),
        ("slurm.partition", "A user's script (git.example.org/me), 2024"),
        ("slurmish", "The centre's guide (docs.example.org), 2026-08"),
        ("node_types.big.memory", "A user's script (git.example.org/me), 2024"),
        ("node_types.big.sockets", "The centre's guide (docs.example.org), 2026-08"),
    ],
)
def test_the_most_specific_source_applies_to_a_key(key: str, title: str) -> None:
    assert [source.title for source in provenance.find_sources(key, provenance.read(TEXT))] == [title]


def test_inherited_values_keep_their_sources_and_custom_values_have_none(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: perlmutter\nslurm:\n  account: m1\n")
    result = profiles.sources(str(tmp_path / "mine.yaml"), cwd=tmp_path, env={})
    assert result["slurm.qos"].startswith("NERSC, queues")
    assert "slurm.account" not in result


def test_fabric_settings_have_sources() -> None:
    result = profiles.sources("alps-clariden", cwd=Path("/"), env={})
    assert (
        "docs.cscs.ch/software/communication/nccl, 2026-08" in result["fabric.environment.NCCL_PROTO.value"]
    )
