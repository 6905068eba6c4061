"""Render HTML pages as single files with cleaned and escaped values, which load nothing from a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dtslurm import assets
from dtslurm.logs.clean import safe


def page(name: str, values: Mapping[str, object]) -> str:
    """Render ``templates/report/<name>`` with ``values``; styles and scripts are embedded."""
    folder = assets.templates() / "report"
    environment = Environment(
        loader=FileSystemLoader([str(folder)]),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data"] = _script_json
    environment.globals["embedded"] = lambda file: Markup(_read_text(folder / str(file)))  # noqa: S704 - dtslurm's own files
    return environment.get_template(name).render(values)


def _read_text(path: Path) -> str:
    return path.read_text("utf-8")


def _clean(value: object) -> object:
    """Remove terminal control sequences from a value, because a browser shows them as noise."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(map(safe, value.split("\n")))


def _script_json(value: object) -> Markup:
    """Return a value as JSON, escaped so that it cannot end the script element that contains it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped above
