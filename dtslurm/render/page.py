"""Pages for a browser, in one file each: values are cleaned and escaped, and no network is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dtslurm import assets
from dtslurm.logs.clean import safe


def page(name: str, values: Mapping[str, object]) -> str:
    """Return ``templates/report/<name>`` with ``values`` filled in, its styles and scripts embedded."""
    folder = assets.templates() / "report"
    environment = Environment(
        loader=FileSystemLoader([str(folder)]),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data"] = _data
    environment.globals["embedded"] = lambda file: Markup(_text(folder / str(file)))  # noqa: S704 - our own files
    return environment.get_template(name).render(values)


def _text(path: Path) -> str:
    return path.read_text("utf-8")


def _clean(value: object) -> object:
    """Return a value without what a terminal would act on: a browser shows that as boxes and noise."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(map(safe, value.split("\n")))


def _data(value: object) -> Markup:
    """Return a value as JSON that may stand in a script element: nothing in it can end that."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)  # noqa: S704 - escaped above
