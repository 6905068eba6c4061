"""Every screen at two sizes, compared with its golden screenshot (UPDATE_GOLDEN=1 writes new ones)."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from dtslurm.dashboard.app import TopApp
from tests.dashboard.samples import app_of
from tests.dashboard.screen import wait_until_stable

GOLDEN = Path(__file__).parent / "golden"
SIZES = [(80, 24), (160, 50)]
SCREENS = {
    "jobs": (),
    "jobs-tasks": ("down", "down", "down", "enter"),
    "jobs-filter": ("slash", *"fail"),
    "overview": ("enter",),
    "ranks": ("enter", "2", "o"),
    "nodes": ("enter", "3"),
    "logs": ("enter", "4", "e"),
    "verdict": ("down", "down", "down", "down", "enter"),
    "confirm": ("c",),
    "help": ("question_mark",),
}


def draw_screen(app: TopApp, size: tuple[int, int], keys: tuple[str, ...], expected_screen: str) -> str:
    """Return the screen after these keys, as soon as it is the wanted one, else what it stays at."""

    async def draw() -> str:
        async with app.run_test(size=size) as pilot:
            await wait_until_stable(pilot)
            for key in keys:
                await pilot.press(key)
                await wait_until_stable(pilot)
            for _ in range(1 if os.environ.get("UPDATE_GOLDEN") else 150):
                # The number is a checksum of what Textual draws with, no part of the picture.
                drawn = re.sub(r"terminal-\d+", "terminal", app.export_screenshot())
                if drawn == expected_screen:
                    break
                await pilot.pause(0.2)
            return drawn

    return asyncio.run(draw())


def compare_with_golden(path: Path, size: tuple[int, int], keys: tuple[str, ...]) -> None:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    drawn = draw_screen(app_of(), size, keys, text)
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(drawn, encoding="utf-8")
    else:
        assert drawn == text


def test_the_screenshot_in_the_readme_is_current() -> None:
    compare_with_golden(Path(__file__).parents[2] / "docs" / "top.svg", (104, 30), ("enter",))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", SCREENS)
def test_each_screen_matches_its_golden_screenshot(name: str, size: tuple[int, int]) -> None:
    compare_with_golden(GOLDEN / f"{name}-{size[0]}x{size[1]}.svg", size, SCREENS[name])
