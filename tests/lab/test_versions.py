"""The table of Slurm versions in docs/tested.md matches the recorded results."""

from __future__ import annotations

import os
import stat
import xml.etree.ElementTree as ET

from tests.lab import versions


def test_page_shows_the_recorded_versions() -> None:
    record = versions.recorded()
    text = versions.PAGE.read_text()
    assert text == versions.in_page(text, record), "python -m tests.lab.versions writes it"
    for row in record.values():
        assert row["suite"] in versions.SUITES
        assert set(row["cells"]) <= set(versions.COLUMNS)
        missing = sum(cell["of"] - cell["passed"] for cell in row["cells"].values())
        assert missing == len(row["failed"])


def test_every_slurm_test_file_has_a_version_column() -> None:
    """A new file of end-to-end tests needs a column, or an entry here if Slurm's version is irrelevant."""
    elsewhere = {"test_containers", "test_images", "test_fault_matrix", "test_survival_torch"}
    elsewhere |= {"test_remote", "test_remote_artifacts", "test_remote_faults"}
    named = {name for names in versions.COLUMNS.values() for name in names}
    files = {path.stem for path in (versions.ROOT / "tests" / "e2e").glob("test_*.py")}
    assert files - elsewhere <= named
    assert len(versions.places(versions.COLUMNS)) == len(named)


def test_unpacked_slurm_programs_are_executable_by_everyone() -> None:
    folders = [folder for folder in versions.prefix_of("sid").parents if folder.exists()]
    assert os.geteuid() != 0 or all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)


def test_outcomes_count_the_last_try_and_ignore_skipped_tests() -> None:
    report = """<testsuites><testsuite>
      <testcase classname="tests.e2e.test_runs" name="test_a[slurm]"><failure message="x"/></testcase>
      <testcase classname="tests.e2e.test_runs" name="test_a[slurm]"/>
      <testcase classname="tests.e2e.test_runs" name="test_b[slurm]"><skipped message="no"/></testcase>
      <testcase classname="tests.e2e.test_discover" name="test_c"><error message="x"/></testcase>
    </testsuite></testsuites>"""
    cells, failed = versions.outcomes(ET.fromstring(report))
    assert cells == {
        "submit": {"passed": 1, "of": 1},
        "cluster discover, check": {"passed": 0, "of": 1},
    }
    assert failed == ["test_discover::test_c"]


def test_failed_tests_are_listed_below_the_table() -> None:
    row = {"suite": "sid", "cells": {"submit": {"passed": 1, "of": 2}}, "failed": ["test_runs::test_a"]}
    result = versions.table({"26.05.5": row})
    assert "| 26.05.5 | 1 of 2 | not run |" in result
    assert "Failed: 26.05.5: `test_runs::test_a`." in result


def test_rerun_columns_replace_recorded_columns() -> None:
    old = {
        "suite": "sid",
        "cells": {"submit": {"passed": 1, "of": 2}, "diagnose": {"passed": 0, "of": 1}},
        "failed": ["test_diagnose::a", "test_runs::b"],
    }
    new = {"suite": "sid", "cells": {"submit": {"passed": 2, "of": 2}}, "failed": []}
    assert versions.merged(old, new) == {
        "suite": "sid",
        "cells": {"submit": {"passed": 2, "of": 2}, "diagnose": {"passed": 0, "of": 1}},
        "failed": ["test_diagnose::a"],
    }
