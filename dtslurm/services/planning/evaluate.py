"""Compares measured training runs in a CSV file with the planner's predictions."""

from __future__ import annotations

import csv
from pathlib import Path

from dtslurm.errors import RequestInvalid
from dtslurm.planner import constants
from dtslurm.planner.measured.evaluate import RowPrediction, evaluate

NEEDED = ("gpu", "gpus")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file.

    Raises:
        RequestInvalid: the file cannot be read, is empty, or lacks a column that every prediction needs.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            columns = reader.fieldnames or []
            rows = [
                {key: value or "" for key, value in row.items() if isinstance(key, str)} for row in reader
            ]
    except OSError as error:
        raise RequestInvalid([f"{path}: {(error.strerror or 'cannot be read').lower()}"]) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestInvalid([f"{path}: is not CSV text: {error}"]) from None
    missing_columns = [name for name in NEEDED if name not in columns]
    if missing_columns:
        raise RequestInvalid(
            [f"{path}: the first line does not name column {', '.join(missing_columns)}"],
            hint="docs/plan.md lists the columns of a file of measurements",
        )
    return rows


def evaluate_file(path: Path) -> list[RowPrediction]:
    """Return a prediction for every row of a file."""
    return evaluate(read_rows(path), constants.default())
