"""The calibrated constants of the planner: ``data/constants.json``, where each has its source or its rows.

A constant may have variants by framework, chip or fabric. The most specific variant that exists applies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from dtslurm.planner.hardware import DATA


class Constants:
    """Constants by name and variant; a user's calibration can override them."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self.values = dict(values)

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def of(self, name: str, *variants: str) -> float:
        """Return the constant ``name/variant`` of the first variant that exists, else ``name``."""
        for variant in variants:
            value = self.values.get(f"{name}/{variant}")
            if value is not None:
                return value
        return self.values[name]

    def but(self, values: Mapping[str, float]) -> Constants:
        """Return a copy with some constants replaced."""
        return Constants({**self.values, **values})


@cache
def entries() -> dict[str, dict[str, object]]:
    """Return every constant with its value and source."""
    constants: dict[str, dict[str, object]] = json.loads((DATA / "constants.json").read_text("utf-8"))
    return constants


@cache
def default() -> Constants:
    """Return the default constants, without a user's calibration."""
    return Constants({name: float(str(entry["value"])) for name, entry in entries().items()})
