"""The page of benchmarks: figures asked and reached, pictures beside peers, and what each printed."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.asked import Results, figures, reached
from benchmarks.figures import number

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks.json"
HEAD = """# Benchmarks

What dtslurm is measured by, and what it reached when each benchmark last ran, also where that falls short.
Ratios beside other tools of the same run are what counts: they took turns, so that a busy moment hit all.

```text
make bench                          # all, from a fresh clone: installs, measures, writes docs/benchmarks.json
python -m benchmarks startup top    # some; the others' results stay
```

How long each took is said with it. Every benchmark brings up what it needs by itself: a
Slurm with its accounting, an SSH server, the tools next door in environments of their own
(`benchmarks/peers`, versions pinned). A tool that does not install or run is shown as failed, with its own
words.
"""
YES, NO, UNKNOWN = "yes", "**no**", ""
# Two that are told apart by eyes that see few colours, and on light and dark ground.
DRAWN = {"scale": "scale.svg"}  # pictures that benchmarks draw by themselves
OURS, THEIRS = "#d1603d", "#5b7fa6"


def results() -> dict[str, dict[str, Any]]:
    """Return what benchmarks told when they last ran, by name."""
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    return found


def page(found: Results) -> str:
    """Return the page in Markdown."""
    return "\n".join([HEAD, *_table(found), *_charts(found), *_outputs(found)])


def _table(found: Results) -> Iterator[str]:
    yield "\n## Asked and reached\n"
    rows = {chapter: [reached(one, found) for one in below] for chapter, below in figures().items()}
    known = [row for below in rows.values() for row in below if row.enough is not None]
    enough = sum(row.enough is True for row in known)
    yield f"{enough} of the {len(known)} that benchmarks measured are reached.\n"
    for chapter, below in rows.items():
        yield f"\n### {chapter}\n\n| figure | asked | reached | enough |\n|---|---|---|---|"
        for row in below:
            said = UNKNOWN if row.enough is None else YES if row.enough else NO
            yield f"| {row.figure.replace('|', '&#124;')} | {row.asked} | {row.reached} | {said} |"


def _charts(found: Results) -> Iterator[str]:
    yield "\n## Beside other tools\n"
    for name, result in found.items():
        for place, chart in enumerate(result.get("charts", ())):
            yield f"\n### {chart['title']}\n\n![{chart['title']}](benchmarks/{name}-{place}.svg)\n"
            beside = f"of {chart['beside']}" if chart["beside"] else ""
            yield f"| | {chart['unit']} | middle half | {beside} | middle half |\n|---|---|---|---|---|"
            yield from (_row(bar) for bar in chart["bars"])


def _row(bar: Mapping[str, Any]) -> str:
    if bar["value"] is None:
        return f"| {bar['name']} | failed: {bar['note'].replace('|', ' ')} | | | |"
    ratio = "" if bar["ratio"] is None else f"{number(bar['ratio'])} x"
    return (
        f"| {bar['name']} | {number(bar['value'])} | {_spread(bar['low'], bar['high'])} "
        f"| {ratio} | {_spread(bar['ratio_low'], bar['ratio_high'])} |"
    )


def _spread(low: float | None, high: float | None) -> str:
    return "" if low is None or low == high else f"{number(low)} to {number(high)}"


def _outputs(found: Results) -> Iterator[str]:
    yield "\n## What each benchmark printed\n"
    for name, result in found.items():
        about = (ast.get_docstring(ast.parse(source(name))) or "").partition("\n")[0]
        where = f"{result['machine']}; {result['date']}, commit {result['commit']}, {result['seconds']} s"
        if "load" in result:
            where += f"; load of the machine when it began {result['load']}"
        yield f"\n### {name}\n\n{about}\n\n*{where}*\n\n```text\n{result['output'].strip()}\n```\n"
        if name in DRAWN and (ROOT / "docs" / DRAWN[name]).exists():
            yield f"\n![{name}]({DRAWN[name]})\n"


def source(benchmark: str) -> str:
    """Return the text of a benchmark's module."""
    path = ROOT / "benchmarks" / f"{benchmark}.py"
    return (path if path.exists() else path.with_suffix("") / "__main__.py").read_text()


def write() -> None:
    """Write page and pictures into the documentation, as far as they are not there already."""
    found, docs = results(), ROOT / "docs"
    texts = {docs / "benchmarks.md": page(found)}
    texts |= {docs / name: text for name, text in pictures(found).items()}
    for path in (docs / "benchmarks").glob("*.svg"):
        if path not in texts:
            path.unlink()
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def pictures(found: Results) -> dict[str, str]:
    """Return the charts as SVG, by the file names that the page uses."""
    return {
        f"benchmarks/{name}-{place}.svg": picture(chart)
        for name, result in found.items()
        for place, chart in enumerate(result.get("charts", ()))
    }


def picture(chart: Mapping[str, Any]) -> str:
    """Return a chart as SVG without scripts: a bar for each, the middle half of its rounds drawn on it."""
    import pygal
    from pygal.etree import etree
    from pygal.style import Style

    # Its finder of plugins is of a kind that Python warns of, or does not know, at each import that fails.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "pygal"]

    etree.to_etree()  # lxml, where it is there, writes it otherwise

    bars: Sequence[Mapping[str, Any]] = list(reversed(chart["bars"]))
    values = [bar["value"] for bar in bars if bar["value"]]
    far_apart = bool(values) and min(values) > 0 and max(values) / min(values) > 100
    style = Style(
        background="transparent", plot_background="transparent", foreground="#808080",
        foreground_strong="#808080", foreground_subtle="#80808055", colors=(THEIRS,),
        font_family="sans-serif", transition="0s",
    )  # fmt: skip
    drawn = pygal.HorizontalBar(
        style=style, js=[], no_prefix=True, show_legend=False, disable_xml_declaration=True,
        print_values=True, logarithmic=far_apart, height=90 + 30 * len(bars), width=800, margin=8,
        value_formatter=number, x_title=chart["unit"] + (" (logarithmic)" if far_apart else ""),
    )  # fmt: skip
    drawn.x_labels = [bar["name"] + ("" if bar["value"] is not None else " (failed)") for bar in bars]
    drawn.add(chart["unit"], [_drawn(bar) for bar in bars])
    # What it has for a browser's pointer is not ours to run, and the day it was drawn is another every day.
    return (
        re.sub(r"<script.*?</script>|<!--.*?-->", "", drawn.render(is_unicode=True), flags=re.DOTALL) + "\n"
    )


def _drawn(bar: Mapping[str, Any]) -> dict[str, Any] | None:
    if bar["value"] is None or not math.isfinite(bar["value"]):
        return None
    drawn: dict[str, Any] = {"value": bar["value"]}
    if bar["name"].startswith(("dtslurm", "import dtslurm")):
        drawn["color"] = OURS
    if bar["low"] is not None and bar["low"] != bar["high"]:
        drawn["ci"] = {"low": bar["low"], "high": bar["high"]}
    return drawn
