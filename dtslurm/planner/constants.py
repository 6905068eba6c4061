"""The measured numbers of the model: ``data/constants.json``, where each names its source or its rows.

A constant may differ by framework, chip or fabric; the most specific entry counts, then the plain name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from dtslurm.planner.hardware import DATA


class Constants:
    """Numbers by name and variant, with a user's own calibration laid over them."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self.values = dict(values)

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def of(self, name: str, *variants: str) -> float:
        """Return ``name/variant`` of the first variant that has a value of its own, else ``name``."""
        for variant in variants:
            value = self.values.get(f"{name}/{variant}")
            if value is not None:
                return value
        return self.values[name]

    def but(self, values: Mapping[str, float]) -> Constants:
        """Return the same numbers with some replaced."""
        return Constants({**self.values, **values})


@cache
def entries() -> dict[str, dict[str, object]]:
    """Return every constant with its value and source."""
    found: dict[str, dict[str, object]] = json.loads((DATA / "constants.json").read_text("utf-8"))
    return found


@cache
def default() -> Constants:
    """Return the constants as shipped."""
    return Constants({name: float(str(entry["value"])) for name, entry in entries().items()})
