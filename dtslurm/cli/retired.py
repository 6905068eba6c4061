"""Renamed options: the old name is accepted with a warning for some versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


class RetiredOption(click.Option):
    """An option's old name: hidden, with a warning, and its value is passed to the new option."""

    def __init__(
        self, names: Sequence[str], *, new_name: str, removal_version: str, **attributes: Any
    ) -> None:
        super().__init__(names, **{**attributes, "hidden": True, "expose_value": False})
        self.new_name, self.removal_version = new_name, removal_version

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Pass the value on to the new option; command-line options are processed before defaults."""
        assert self.name is not None  # noqa: S101 - options have names
        if self.name not in opts:
            return None, args
        [new_option] = [
            param for param in ctx.command.params if self.new_name in param.opts + param.secondary_opts
        ]
        assert new_option.name is not None  # noqa: S101
        if new_option.name in opts:
            raise click.UsageError(
                f"{self.opts[0]} is the old name of {self.new_name}: give only one of them", ctx
            )
        # Click creates this dictionary for the call.
        opts[new_option.name] = opts[self.name]  # type: ignore[index]
        click.echo(
            f"Warning: {self.opts[0]} is now {self.new_name}; the old name will be removed in "
            f"{self.removal_version}.",
            err=True,
        )
        return None, args


def retired_option(
    old_name: str, *, new_name: str, removal_version: str, **attributes: Any
) -> Callable[[_Command], _Command]:
    """Keep accepting an option's old name until a version.

    Args:
        old_name: the name that was documented before.
        new_name: the new name.
        removal_version: the first version without the old name, at least two minor versions later.
        attributes: click's attributes for parsing the option: `is_flag`, `multiple`, `nargs`.
    """
    return click.option(
        old_name, cls=RetiredOption, new_name=new_name, removal_version=removal_version, **attributes
    )
