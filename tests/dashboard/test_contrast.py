"""Every label can be read in every theme: contrast of at least 4.5 to 1 (WCAG 2.1, AA)."""

from __future__ import annotations

import asyncio

import pytest
from rich.style import Style
from textual.color import Color
from textual.theme import BUILTIN_THEMES

from dtslurm.dashboard import theme as look
from tests.dashboard.samples import app_of
from tests.dashboard.screen import wait_until_stable
from tests.dashboard.test_screens import SCREENS

NO_TEXT = " ·─│╭╮╰╯┌┐└┘├┤▁▂▃▄▅▆▇█▊▔▎"
KINDS = ("", "good", "bad", "warn", "accent", "dim", "bold")
THEMES = [look.COLOUR_BLIND.name, *(name for name in BUILTIN_THEMES if not name.startswith("ansi-"))]


def colour(style: Style, otherwise: str) -> Color:
    """Return the colour of a style's text; dim text is drawn half way to the ground."""
    assert not style.dim
    if style.color is None:
        return Color.parse(otherwise)
    return Color(*style.color.get_truecolor())


@pytest.mark.parametrize("theme", THEMES)
def test_labels_have_enough_contrast_on_every_background(theme: str) -> None:
    async def measure() -> dict[str, float]:
        app = app_of()
        app.requested_theme = theme
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            variables = app.theme_variables
            grounds = {name: Color.parse(variables[name]) for name in look.GROUNDS}
            texts = {kind: look.style(app, kind) for kind in KINDS}
            texts |= {f"source {number}": look.hue(app, str(number)) for number in range(8)}
            answer = {
                f"{kind or 'text'} on {name}": look.measure_contrast(
                    colour(style, variables["foreground"]), ground
                )
                for kind, style in texts.items()
                for name, ground in grounds.items()
            }
            chosen = look.ground(app, "primary")
            assert chosen.bgcolor is not None
            below = Color(*chosen.bgcolor.get_truecolor())
            answer["chosen row"] = look.measure_contrast(Color.parse(look.choose_text_colour(chosen)), below)
            return answer

    low = {name: round(value, 2) for name, value in asyncio.run(measure()).items() if value < 4.5}
    assert low == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("theme", THEMES)
def test_all_drawn_text_has_enough_contrast(theme: str) -> None:
    async def measure(keys: tuple[str, ...]) -> dict[str, float]:
        app = app_of()
        app.requested_theme = theme
        answer = {}
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until_stable(pilot)
            for key in keys:
                await pilot.press(key)
                await wait_until_stable(pilot)
            for strip in app.screen._compositor.render_strips():
                for text, style, _ in strip:
                    shown = style and style.color and style.bgcolor and text.strip(NO_TEXT)
                    if style is None or style.color is None or style.bgcolor is None or not shown:
                        continue
                    above, below = (Color(*item.get_truecolor()) for item in (style.color, style.bgcolor))
                    value = look.measure_contrast(above.blend(below, 0.5) if style.dim else above, below)
                    if value < 4.5:
                        answer[text.strip()] = round(value, 2)
        return answer

    dialogs = {"confirm", "help"}  # what lies behind them is dimmed
    low = {name: asyncio.run(measure(keys)) for name, keys in SCREENS.items() if name not in dialogs}
    assert {name: result for name, result in low.items() if result} == {}
