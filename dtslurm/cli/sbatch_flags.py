"""Options of sbatch that dtslurm does not interpret, accepted under their own names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from dtslurm.model.jobs.sbatch_names import WITH_OPTIONAL_VALUE, WITH_VALUE, WITHOUT_VALUE

_FLAG_PREFIX = "sbatch_option_"


def sbatch_flags(own_options: Iterable[str]) -> list[click.Option]:
    """Return hidden options for all of sbatch's options except those in ``own_options``."""
    all_names = sorted(WITH_VALUE | WITHOUT_VALUE | WITH_OPTIONAL_VALUE)
    return [
        click.Option(
            [f"--{name}", _FLAG_PREFIX + name.replace("-", "_")],
            is_flag=name not in WITH_VALUE,
            multiple=name in WITH_VALUE,
            hidden=True,
        )
        for name in all_names
        if f"--{name}" not in own_options
    ]


def take_sbatch_flags(options: dict[str, Any]) -> tuple[str, ...]:
    """Remove the options of `sbatch_flags` from the parsed options, and return them as ``--name=value``."""
    flags = []
    for key in [key for key in options if key.startswith(_FLAG_PREFIX)]:
        value, name = options.pop(key), key.removeprefix(_FLAG_PREFIX).replace("_", "-")
        flags += [f"--{name}"] if value is True else [f"--{name}={item}" for item in value or ()]
    return tuple(flags)


def join_optional_value(argument: str) -> str:
    """Return ``--exclusive=user`` as ``--sbatch=--exclusive=user``: click has no optional values."""
    name, equals, _ = argument.partition("=")
    return (
        f"--sbatch={argument}"
        if equals and name[2:] in WITH_OPTIONAL_VALUE and name[:2] == "--"
        else argument
    )
