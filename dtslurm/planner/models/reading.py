"""Checked reading of values in a ``config.json``, and readers for parts that most architectures share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtslurm.planner.models.shapes import Attention

MOST_LAYERS, WIDEST = 100_000, 10_000_000
LONGEST = 1_000_000_000  # tokens of a context; Llama 4 Scout has ten million


class ConfigReader:
    """Reads and checks the values of a config, and collects problems instead of raising."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.problems: list[str] = []
        self.spoilt: set[str] = set()

    def size(self, *names: str, default: int | None = None, largest: int = WIDEST, smallest: int = 1) -> int:
        """Return the first named integer that is present, checked to be from ``smallest`` to ``largest``."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            if isinstance(value, bool) or not whole:
                self.problems.append(f"{name} should be a whole number, not {value!r}")
            elif not smallest <= value <= largest:
                self.problems.append(f"{name} should be {smallest} to {largest}, not {value!r}")
            else:
                return int(value)
            self.spoilt.add(name)
            return default or max(smallest, 1)
        if default is None:
            self.problems.append(f"{names[0]} is missing; it should be a whole number")
            self.spoilt.add(names[0])
            return max(smallest, 1)
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{name} should be true or false, not {value!r}")
            return default
        return value

    def number(self, name: str) -> float:
        """Return a positive number."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self.problems.append(f"{name} should be a positive number, not {value!r}")
            return 1.0
        return float(value)

    def layers(self, *names: str, default: int | None = None) -> int:
        """Return the number of layers under one of the names, by default ``num_hidden_layers``."""
        return self.size(*(names or ("num_hidden_layers",)), default=default, largest=MOST_LAYERS)

    def choice(self, *names: str) -> str:
        """Return the first named value that is present as text, empty if there is none."""
        return next((str(self.values[name]) for name in names if self.values.get(name) is not None), "")


def attention(
    config: ConfigReader,
    hidden_size: int,
    *,
    heads: tuple[str, ...] = ("num_attention_heads", "n_head", "n_heads"),
    qkv_bias: bool = False,
    out_bias: bool = False,
    causal: bool = True,
) -> Attention:
    """Read the usual attention: heads, fewer key-value heads, and the head width."""
    count = config.size(*heads)
    kv_heads = config.size("num_key_value_heads", default=count)
    if config.values.get("head_dim") is not None:
        head_width = config.size("head_dim")
    else:
        if hidden_size % count and "hidden_size" not in config.spoilt:
            hidden_divisors = [
                size for size in range(1, min(hidden_size, 4096) + 1) if hidden_size % size == 0
            ]
            nearest = min(hidden_divisors, key=lambda size: abs(size - count))
            config.problems.append(
                f"{heads[0]} {count} does not divide hidden_size {hidden_size}; {nearest} would, or give"
                " head_dim"
            )
        head_width = max(1, hidden_size // count)
    if count % kv_heads:
        config.problems.append(
            f"num_key_value_heads {kv_heads} does not divide {heads[0]} {count}; valid: {_divisors(count)}"
        )
    return Attention(
        count,
        kv_heads,
        head_width,
        head_width,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        causal=causal,
    )


def window(config: ConfigReader) -> int | None:
    """Return the sliding window in tokens, None if attention is always full."""
    size = config.values.get("sliding_window") if config.values.get("use_sliding_window", True) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _divisors(number: int) -> str:
    divisors = [str(count) for count in range(1, min(number, 4096) + 1) if number % count == 0]
    return ", ".join(divisors if len(divisors) <= 12 else [*divisors[:11], "…"])
