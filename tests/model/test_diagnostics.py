"""Diagnostics of a request as text."""

from __future__ import annotations

from dtslurm.model.diagnostics import Checked, Diagnostic, Diagnostics, errors, notes


def test_the_hint_of_a_diagnostic_is_part_of_its_text() -> None:
    checked = Checked(7, [*errors(["no such cluster"], "see cluster list"), *notes(["two nodes excluded"])])
    diagnostics = Diagnostics()
    assert diagnostics.take(checked) == 7
    assert diagnostics.problems == ["no such cluster (see cluster list)"]
    assert diagnostics.notices == ["two nodes excluded"]
    assert str(Diagnostic("note", "a node is slow")) == "a node is slow"
