"""Colours: a theme for people who see them otherwise, and what a kind of text looks like in any theme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rich.style import Style
from textual.app import App
from textual.color import Color, ColorParseError
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
LEAST_CONTRAST = 4.5  # of WCAG 2.1, level AA, for text of any size
GROUNDS = ("background", "surface", "panel")
# The themes' variables for text: their colours for areas are hard to read on dark grounds, or on light ones.
_VARIABLES = {
    "good": "text-success", "bad": "text-error", "warn": "text-warning", "accent": "text-primary",
    "dim": "label-dim",
}  # fmt: skip
_HUES = ("#00a0a0", "#00a000", "#c050c0", "#5080ff", "#40c0c0", "#60c060", "#e080e0", "#80a0ff")
_DIM = 0.35  # how far a dim label is from the other text on the way to the ground


def style(app: App[Any], kind: str) -> Style:
    """Return the look of a kind of text (`dtslurm.dashboard.words`) in the present theme."""
    variables = app.theme_variables
    value = str(variables.get(_VARIABLES.get(kind, "foreground"), ""))
    return _coloured(value if kind in _VARIABLES else "", kind in {"bad", "bold"}, kind == "dim")


@lru_cache(256)
def _coloured(value: str, bold: bool, dim: bool) -> Style:
    if not value:
        return Style(bold=bold, dim=dim)
    try:
        return Style(color=Color.parse(value).rich_color, bold=bold)
    except ColorParseError:  # the terminal's own colours
        return Style(bold=bold, dim=dim)


def exception(app: App[Any]) -> Style:
    """Return the look of a traceback's last line, the most visible one of a log."""
    below = ground(app, "error")
    return Style(color=on(below), bold=True) + below


def hue(app: App[Any], source: str) -> Style:
    """Return the colour of a source of log lines, always the same one in a theme."""
    number = sum(source.encode()) % len(_HUES)
    return _coloured(str(app.theme_variables.get(f"label-hue-{number}", "")), bold=False, dim=False)


def readable_labels(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a theme's variables with labels that have `LEAST_CONTRAST` on every ground below them.

    Themes that leave colours to the terminal stay as they are.
    """
    found = dict(variables)
    try:
        grounds = [Color.parse(found[name]) for name in GROUNDS]
        if any(ground.ansi is not None for ground in grounds):
            return found
        found["label-dim"] = Color.parse(found["foreground"]).blend(grounds[0], _DIM).hex
    except (ColorParseError, KeyError):
        return found
    found |= {f"label-hue-{number}": value for number, value in enumerate(_HUES)}
    for name in (
        "foreground",
        *_VARIABLES.values(),
        *(f"label-hue-{number}" for number in range(len(_HUES))),
    ):
        found[name] = _readable(found[name], grounds)
    footer = [_parsed(found.get("footer-background", ""), grounds[-1])]
    for name in ("footer-foreground", "footer-key-foreground", "footer-description-foreground"):
        if name in found:
            found[name] = _readable(found[name], footer)
    return found


def _parsed(value: str, otherwise: Color) -> Color:
    try:
        colour = Color.parse(value)
    except ColorParseError:
        return otherwise
    return colour if colour.a == 1 else otherwise


def _readable(value: str, grounds: Sequence[Color]) -> str:
    """Return the colour, moved towards black or white as far as its contrast needs."""
    colour = _parsed(value, grounds[0].get_contrast_text(1.0))
    ends = (Color(0, 0, 0), Color(255, 255, 255))
    end = max(ends, key=lambda one: min(contrast(one, ground) for ground in grounds))
    for step in range(21):
        moved = colour.blend(end, step / 20)
        if all(contrast(moved, ground) >= LEAST_CONTRAST for ground in grounds):
            return moved.hex
    return end.hex


def contrast(one: Color, other: Color) -> float:
    """Return the contrast of two colours, 1 to 21, as WCAG 2.1 defines it."""
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: Color) -> float:
    parts = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour.normalized
    ]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def ground(app: App[Any], name: str) -> Style:
    """Return a ground of the present theme: ``panel``, ``surface``, ``primary``."""
    return Style(bgcolor=Color.parse(str(app.theme_variables[name])).rich_color)


def on(ground: Style) -> str:
    """Return black or white, whichever has more contrast on the ground."""
    colour = ground.bgcolor.get_truecolor() if ground.bgcolor is not None else None
    if colour is None:
        return "default"
    below = Color(colour.red, colour.green, colour.blue)
    return max("#000000", "#ffffff", key=lambda one: contrast(Color.parse(one), below))
