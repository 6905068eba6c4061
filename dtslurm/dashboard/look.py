"""Colours: a theme for people who see them otherwise, and what a kind of text looks like in any theme."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rich.style import Style
from textual.app import App
from textual.color import Color
from textual.theme import Theme

# Okabe and Ito's palette, told apart with any kind of colour vision (Color Universal Design, 2008).
COLOUR_BLIND = Theme(
    name="colour-blind",
    primary="#56B4E9",
    secondary="#CC79A7",
    accent="#F0E442",
    success="#56B4E9",
    warning="#F0E442",
    error="#D55E00",
    foreground="#F2F2F2",
    background="#101418",
    surface="#161B20",
    panel="#20272E",
    dark=True,
    variables={"text-success": "#56B4E9", "text-warning": "#F0E442", "text-primary": "#56B4E9"},
)
# The themes' colours for text: those for areas are hard to read on dark grounds, or on light ones.
_VARIABLES = {
    "good": "text-success", "bad": "text-error", "warn": "text-warning", "accent": "text-primary",
}  # fmt: skip


def style(app: App[Any], kind: str) -> Style:
    """Return the look of a kind of text (`dtslurm.dashboard.words`) in the present theme."""
    variables = app.theme_variables
    name = _VARIABLES.get(kind)
    if name is None:
        return _plain(kind, str(variables.get("foreground", "")))
    return _coloured(str(variables[name]), kind == "bad")


@lru_cache(256)
def _plain(kind: str, foreground: str) -> Style:
    del foreground
    return Style(bold=kind == "bold", dim=kind == "dim")


@lru_cache(256)
def _coloured(value: str, bold: bool) -> Style:
    return Style(color=Color.parse(value).rich_color, bold=bold)


def ground(app: App[Any], name: str) -> Style:
    """Return a ground of the present theme: ``panel``, ``surface``, ``primary``."""
    return Style(bgcolor=Color.parse(str(app.theme_variables[name])).rich_color)


def on(ground: Style) -> str:
    """Return black or white, whichever reads on the ground."""
    colour = ground.bgcolor.get_truecolor() if ground.bgcolor is not None else None
    if colour is None:
        return "default"
    light = 0.299 * colour.red + 0.587 * colour.green + 0.114 * colour.blue
    return "#000000" if light > 140 else "#ffffff"
