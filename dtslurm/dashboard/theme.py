"""Colors: a theme for colour-blind users, and the style of each kind of text in any theme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rich.style import Style
from textual.app import App
from textual.color import Color, ColorParseError
from textual.theme import Theme

# Okabe and Ito's palette, distinguishable with any kind of color vision (Color Universal Design, 2008).
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
# The themes' text variables; their area colors are hard to read on dark or on light backgrounds.
_TEXT_VARIABLES = {
    "good": "text-success", "bad": "text-error", "warn": "text-warning", "accent": "text-primary",
    "dim": "label-dim",
}  # fmt: skip
_HUES = ("#00a0a0", "#00a000", "#c050c0", "#5080ff", "#40c0c0", "#60c060", "#e080e0", "#80a0ff")
_DIM_BLEND = 0.35  # blend of a dim label from the foreground (0) to the background (1)


def style(app: App[Any], kind: str) -> Style:
    """Return the style of a kind of text (`dtslurm.dashboard.words`) in the active theme."""
    variables = app.theme_variables
    value = str(variables.get(_TEXT_VARIABLES.get(kind, "foreground"), ""))
    return _make_style(value if kind in _TEXT_VARIABLES else "", kind in {"bad", "bold"}, kind == "dim")


@lru_cache(256)
def _make_style(value: str, bold: bool, dim: bool) -> Style:
    if not value:
        return Style(bold=bold, dim=dim)
    try:
        return Style(color=Color.parse(value).rich_color, bold=bold)
    except ColorParseError:  # a color that the terminal defines
        return Style(bold=bold, dim=dim)


def exception(app: App[Any]) -> Style:
    """Return the style of a traceback's last line, the most visible style of a log."""
    background = ground(app, "error")
    return Style(color=choose_text_colour(background), bold=True) + background


def hue(app: App[Any], source: str) -> Style:
    """Return the color of a source of log lines; a source always has the same color in a theme."""
    number = sum(source.encode()) % len(_HUES)
    return _make_style(str(app.theme_variables.get(f"label-hue-{number}", "")), bold=False, dim=False)


def readable_labels(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a theme's variables with text colors of at least `LEAST_CONTRAST` on all backgrounds.

    Themes that leave colors to the terminal are unchanged.
    """
    adjusted = dict(variables)
    try:
        backgrounds = [Color.parse(adjusted[name]) for name in GROUNDS]
        if any(background.ansi is not None for background in backgrounds):
            return adjusted
        adjusted["label-dim"] = Color.parse(adjusted["foreground"]).blend(backgrounds[0], _DIM_BLEND).hex
    except (ColorParseError, KeyError):
        return adjusted
    adjusted |= {f"label-hue-{number}": value for number, value in enumerate(_HUES)}
    for name in (
        "foreground",
        *_TEXT_VARIABLES.values(),
        *(f"label-hue-{number}" for number in range(len(_HUES))),
    ):
        adjusted[name] = _adjust_contrast(adjusted[name], backgrounds)
    footer_backgrounds = [_parse_opaque(adjusted.get("footer-background", ""), backgrounds[-1])]
    for name in ("footer-foreground", "footer-key-foreground", "footer-description-foreground"):
        if name in adjusted:
            adjusted[name] = _adjust_contrast(adjusted[name], footer_backgrounds)
    return adjusted


def _parse_opaque(value: str, otherwise: Color) -> Color:
    try:
        colour = Color.parse(value)
    except ColorParseError:
        return otherwise
    return colour if colour.a == 1 else otherwise


def _adjust_contrast(value: str, grounds: Sequence[Color]) -> str:
    """Return the color, blended towards black or white as far as needed for `LEAST_CONTRAST`."""
    colour = _parse_opaque(value, grounds[0].get_contrast_text(1.0))
    extremes = (Color(0, 0, 0), Color(255, 255, 255))
    target = max(
        extremes,
        key=lambda colour_option: min(measure_contrast(colour_option, background) for background in grounds),
    )
    for step in range(21):
        blended = colour.blend(target, step / 20)
        if all(measure_contrast(blended, background) >= LEAST_CONTRAST for background in grounds):
            return blended.hex
    return target.hex


def measure_contrast(first: Color, second: Color) -> float:
    """Return the contrast ratio of two colors, 1 to 21, as defined by WCAG 2.1."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: Color) -> float:
    channels = [
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in colour.normalized
    ]
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


def ground(app: App[Any], name: str) -> Style:
    """Return a background style of the active theme: ``panel``, ``surface`` or ``primary``."""
    return Style(bgcolor=Color.parse(str(app.theme_variables[name])).rich_color)


def choose_text_colour(ground: Style) -> str:
    """Return black or white, whichever has more contrast on the background."""
    colour = ground.bgcolor.get_truecolor() if ground.bgcolor is not None else None
    if colour is None:
        return "default"
    background = Color(colour.red, colour.green, colour.blue)
    return max("#000000", "#ffffff", key=lambda name: measure_contrast(Color.parse(name), background))
