"""Options that go by another name now: the old one is still taken for a while, and says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


class RetiredOption(click.Option):
    """An old name of an option: not shown, warned of, and its value given to the new one."""

    def __init__(self, names: Sequence[str], *, instead: str, until: str, **attributes: Any) -> None:
        super().__init__(names, **{**attributes, "hidden": True, "expose_value": False})
        self.instead, self.until = instead, until

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Hand the value on; what was given on the command line comes before all that was not."""
        assert self.name is not None  # noqa: S101 - options have names
        if self.name not in opts:
            return None, args
        [new] = [one for one in ctx.command.params if self.instead in one.opts + one.secondary_opts]
        assert new.name is not None  # noqa: S101
        if new.name in opts:
            raise click.UsageError(f"{self.opts[0]} is the old name of {self.instead}: give one of them", ctx)
        opts[new.name] = opts[self.name]  # type: ignore[index]  # a dictionary that click makes for this call
        click.echo(
            f"Warning: {self.opts[0]} is now {self.instead}; the old name goes away with {self.until}.",
            err=True,
        )
        return None, args


def retired_option(
    old: str, *, instead: str, until: str, **attributes: Any
) -> Callable[[_Command], _Command]:
    """Keep the name OLD of an option until a version.

    Args:
        old: the name that was documented before.
        instead: the name to use.
        until: the first version without the old name, two minor versions on at least.
        attributes: what tells the parser how to read it: `is_flag`, `multiple`, `nargs`.
    """
    return click.option(old, cls=RetiredOption, instead=instead, until=until, **attributes)
