"""Every fault of the table has a test with its number, or a reason."""

from __future__ import annotations

from tests.faults import faults, numbered


def test_every_fault_has_a_test_or_a_reason() -> None:
    rows = [fault for chapter in faults().values() for fault in chapter]
    assert [fault.number for fault in rows if not fault.tests and not fault.why] == []
    assert [fault.number for fault in rows if fault.tests and fault.why] == []
    assert set(numbered()) <= {fault.number for fault in rows}
