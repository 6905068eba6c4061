"""Numbers in the cells of a measured row, and the reasons why a row cannot be predicted."""

from __future__ import annotations

from dtslurm.planner.measured.guesses import Row


class RowImpossible(ValueError):
    """The row's layout cannot run; the message gives the reason."""


class RowUnanswerable(ValueError):
    """The row lacks a value that the estimate depends on; the message names the value."""


# texts that mean an empty cell
MISSING = {"", "-", "?", "na", "n/a", "nan", "none", "null", "unknown", "auto", "0"}
COUNTS = (
    "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gpus", "micro_batch", "global_batch",
    "tp", "pp", "cp", "ep", "vp", "dp",
)  # fmt: skip


def clear_missing_counts(row: Row) -> Row:
    """Return a row with empty counts where the cell has 0 or a word for a missing value."""
    cleared = {key: "" for key in COUNTS if (row.get(key) or "").strip().lower() in MISSING}
    return {**row, **cleared}


def parse_count(row: Row, key: str, default: int | None = None) -> int:
    """Parse a positive whole number in a row.

    The number may have commas between thousands, or a suffix as in ``8k``, which is 8192.

    Raises:
        RowUnanswerable: the value is missing without a default, or is not a positive whole number.
    """
    text = (row.get(key) or "").strip()
    if not text:
        if default is None:
            raise RowUnanswerable(f"{key} is not given")
        return default
    plain = text.replace(",", "").strip("~*≈ ").lower()
    try:
        value = float(plain.removesuffix("k")) * (1024 if plain.endswith("k") else 1)
    except ValueError:
        raise RowUnanswerable(f"{key} should be a number, not {text!r}") from None
    if not 1 <= value < 1e9 or value != int(value):
        raise RowUnanswerable(f"{key} should be a positive whole number, not {text!r}")
    return int(value)


def real(row: Row, key: str) -> float | None:
    """Parse a positive number in a row; return None if the cell is empty or not a positive number."""
    try:
        value = float(row.get(key) or "")
    except ValueError:
        return None
    return value if 0 < value < 1e18 else None
