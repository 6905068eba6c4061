"""The page of the benchmarks: targets and measured values, charts beside other tools, and printed output."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.charts import Bar, Chart, format_charts, format_number
from benchmarks.targets import Measurement, Results, compare_with_target, load_targets

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks.json"
HEAD = """# Benchmarks

This page lists the performance targets of dtslurm and the values that its benchmarks last measured, beside
bare Slurm commands and other tools: submitit, simple-slurm, clusterscope, torchx and nemo-run. It first shows
all targets, then [where dtslurm falls short](#where-dtslurm-falls-short), and then each benchmark with its
method, charts and output.

All benchmarks ran on a machine with two CPUs, which is also every node of the Slurm cluster that a benchmark
starts. Nothing was measured on a production cluster, and no value includes the latency of a network; only
`planner` uses measurements that others published. Compare the ratios, not the absolute values: dtslurm and
the other tools ran alternately, so that the load of the machine affects all of them. The benchmarks were run
on different days and commits, which are stated with the output of each benchmark.

```text
make bench                          # installs the other tools, runs all, writes docs/benchmarks.json
python -m benchmarks startup top    # runs two benchmarks, and keeps the results of the others
```

Each benchmark starts the services that it needs: a Slurm with accounting, an SSH server, and the other tools,
which are installed in separate environments with pinned versions (`benchmarks/peers`). A tool that cannot be
installed or started is shown as failed, with its error message.
"""
TARGETS_HEAD = """
## Targets and measured values

{met} of {count} targets are met. If a benchmark prints several values, the worst counts.
"""
MISSED_HEAD = """
## Where dtslurm falls short

These targets are not met:

| measure | target | measured | reason |
|---|---|---|---|"""
# Comparisons without a target in which dtslurm is slower or larger; the output of the benchmark shows each.
DISADVANTAGES = """
In comparisons without a target, dtslurm is slower or larger in these cases:

- `startup`: `import dtslurm.api` takes longer than the import of submitit, simple-slurm, clusterscope or
  torchx.
- `install`: an installation of dtslurm needs more space and files than submitit, simple-slurm, clusterscope
  or torchx.
- `submission`: one submission takes longer than in submitit if the pause that submitit makes between two
  submissions is not counted. A sweep needs several times as long as an array script written by hand until its
  last trial ends.
- `results`: `submit()` takes longer than in submitit, and a cancelled job is reported as done later.
- `remote`: `dtslurm status` is not faster if the queue is cached.
- `snapshot`: the first transfer of a code tree takes longer than `rsync -a`, and so does every later one.
- `logs`: a line arrives later than with `tail`, and one `tail` over all files, which does not label lines by
  rank, has a higher throughput. `tail` needs more CPU time on the local machine.
- `diagnose`: a diagnosis takes about twice as long as one `grep` over the same logs.
- `recovery`: torchrun restarts a killed rank slightly earlier. In the comparison of whole jobs, training with
  the supervisor was slower than in a bare script, with a large spread; the target above is checked by the
  comparison of steps within one job.
- `overhead`: on a busy machine (a load average of 7 on two CPUs, 2026-11-26), the first training step began
  1.8 to 2.0 s after sbatch, and with the supervisor 2.8 to 3.1 s, instead of 0.6 to 0.7 s in the bare script.
  The chart shows a machine without other load, on which the bare script was always the first of a round.
- `train`: an asynchronous checkpoint blocks training for a shorter time than `torch.save`, but is complete on
  disk later.
- `discover` and `scale`: the listing commands of Slurm take much less time, because they do not build a
  profile or join the queue with the records of runs.
"""
YES, NO, UNKNOWN = "yes", "**no**", ""
# Of the targets with a comparison, those that the README shows: also where dtslurm is slower.
README = ROOT / "README.md"
README_BEGIN, README_END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
README_FIGURES = {
    "`dtslurm --help`: time, ratio to `cscope --help`": (
        "`dtslurm --help`: time compared with `cscope --help`"
    ),
    "100 submissions in one process: time, ratio to `ssh X sbatch` with a new connection each": (
        "100 submissions over SSH from Python: time compared with as many `ssh X sbatch`"
    ),
    "submissions with one `dtslurm submit` each: time, ratio to `ssh X sbatch` with a new connection each": (
        "one `dtslurm submit` over SSH: time compared with `ssh X sbatch`"
    ),
    "re-submission after a change of one line in 10,000 files: time, ratio to `rsync -a`": (
        "submission of 10,000 files after a change of one line: time compared with `rsync -a`"
    ),
    "`map_array` of 100 functions: time until all results are available, ratio to submitit": (
        "`map_array` of 100 functions until all results are there: time compared with submitit"
    ),
    "one function: time until its result is available, ratio to submitit": (
        "one function until its result is there: time compared with submitit"
    ),
    "staging of 2 GB in 20,000 files to four nodes: speed, ratio to a script with `tar` and `sbcast`": (
        "2 GB in 20,000 files to four nodes: speed compared with a script with `tar` and `sbcast`"
    ),
    "`dtslurm exec JOB true`: time, ratio to `ssh X srun --overlap true` with a new connection": (
        "`dtslurm exec JOB true`: time compared with `ssh X srun --overlap true`"
    ),
    "node lost, with a spare node: time until training continues": (
        "a lost node with a spare one: time until training continues"
    ),
    "CPU time of a training step, ratio to the same step with the supervisor stopped": (
        "CPU time of a training step compared with the same step without the supervisor"
    ),
    "generated failures with correct cause and rank, held-out half: fraction": (
        "generated failures, held-out half: share with the right cause and rank"
    ),
    "throughput, error without the row's laboratory and without vTrain: median": (
        "`plan` compared with published runs of unseen laboratories: median error of the throughput"
    ),
}
FIGURES = {"scale": "scale.svg"}  # figures that benchmarks draw themselves
DOCSTRINGS = {"planner": "planner/score.py", "scale": "scale/__main__.py"}  # benchmarks that are packages
# These two colors are distinguishable with color blindness, and on light and dark backgrounds.
DTSLURM_COLOR, PEER_COLOR = "#d1603d", "#5b7fa6"


def load_results() -> dict[str, dict[str, Any]]:
    """Return the last result of each benchmark, by name."""
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    return results


def render_page(results: Results) -> str:
    """Return the page in Markdown."""
    sections = {
        title: [compare_with_target(row, results) for row in rows] for title, rows in load_targets().items()
    }
    return "\n".join(
        [HEAD, *_target_tables(sections), *_missed_targets(sections), DISADVANTAGES, *_benchmarks(results)]
    )


def _target_tables(sections: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    known_results = [row.met for rows in sections.values() for row in rows if row.met is not None]
    yield TARGETS_HEAD.format(met=sum(known_results), count=len(known_results))
    for title, rows in sections.items():
        yield f"\n### {title}\n\n| measure | target | measured | met |\n|---|---|---|---|"
        for row in rows:
            met = UNKNOWN if row.met is None else YES if row.met else NO
            yield f"| {_cell(row.figure)} | {row.target} | {row.measured} | {met} |"


def render_readme(text: str, results: Results) -> str:
    """Return the text of the README with the present figures in it."""
    rows = [row for rows in load_targets().values() for row in rows]
    by_name = {row.figure: row for row in (compare_with_target(row, results) for row in rows)}
    lines = ["| measure | target | measured |", "|---|---|---|"]
    for name, shown in README_FIGURES.items():
        row = by_name[name]
        mark = "" if row.met else " (missed)"
        lines.append(f"| {shown} | {row.target} | {row.measured}{mark} |")
    before, _, rest = text.partition(README_BEGIN)
    _, _, after = rest.partition(README_END)
    return "".join([before, README_BEGIN, "\n".join(lines), "\n", README_END, after])


def _missed_targets(sections: Mapping[str, Sequence[Measurement]]) -> Iterator[str]:
    yield MISSED_HEAD
    for row in (row for rows in sections.values() for row in rows):
        if row.met is False:
            yield f"| {_cell(row.figure)} | {row.target} | {row.measured} | {_cell(row.reason)} |"


def _benchmarks(results: Results) -> Iterator[str]:
    yield "\n## Results by benchmark\n"
    for name, result in results.items():
        conditions = f"{result['date']}, commit {result['commit']}, duration {result['seconds']} s"
        if "load" in result:
            conditions += f", load average at the start {result['load']}"
        yield f"\n### {name}\n\n{describe_benchmark(name)}\n"
        yield f"Measured on {result['machine']}; {conditions}.\n"
        charts = [
            Chart(**{**chart, "bars": tuple(Bar(**bar) for bar in chart["bars"])})
            for chart in result.get("charts", ())
        ]
        for index, chart in enumerate(charts):
            yield from _chart(chart, f"benchmarks/{name}-{index}.svg")
        if output := result["output"].removeprefix(format_charts(charts)).strip("\n"):
            yield f"\n```text\n{output}\n```\n"
        if name in FIGURES and (ROOT / "docs" / FIGURES[name]).exists():
            yield f"\n![Figure of the benchmark {name}]({FIGURES[name]})\n"


def _chart(chart: Chart, path: str) -> Iterator[str]:
    yield f"\n#### {chart.title}\n\n![{chart.title}]({path})\n"
    has_quartiles = any(bar.low != bar.high for bar in chart.bars)
    columns = ["", f"median, {chart.unit}", "quartiles"] if has_quartiles else ["", chart.unit]
    if chart.beside:
        columns += (
            [f"ratio to {chart.beside}", "quartiles"] if has_quartiles else [f"ratio to {chart.beside}"]
        )
    yield f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    for bar in chart.bars:
        cells = _cells(bar, has_quartiles=has_quartiles)
        yield f"| {' | '.join(cells + [''] * (len(columns) - len(cells)))} |"


def _cells(bar: Bar, *, has_quartiles: bool) -> list[str]:
    if bar.value is None:
        return [bar.name, f"failed: {bar.note.replace('|', ' ')}"]
    cells = [bar.name + (f" ({bar.note})" if bar.note else ""), format_number(bar.value)]
    cells += [_quartiles(bar.low, bar.high)] * has_quartiles
    if bar.ratio is not None:
        cells.append(f"{format_number(bar.ratio)} x")
        cells += [_quartiles(bar.ratio_low, bar.ratio_high)] * has_quartiles
    return cells


def _quartiles(low: float | None, high: float | None) -> str:
    return "" if low is None or low == high else f"{format_number(low)} to {format_number(high)}"


def _cell(text: str) -> str:
    return text.replace("|", "&#124;")


def describe_benchmark(name: str) -> str:
    """Return the docstring of a benchmark's module in Markdown."""
    path = ROOT / "benchmarks" / DOCSTRINGS.get(name, f"{name}.py")
    return (ast.get_docstring(ast.parse(path.read_text())) or "").replace("``", "`")


def write_page() -> None:
    """Write the page and the charts into the documentation if they have changed."""
    results, docs = load_results(), ROOT / "docs"
    texts = {
        docs / "benchmarks.md": render_page(results),
        README: render_readme(README.read_text(), results),
    }
    texts |= {docs / name: text for name, text in draw_charts(results).items()}
    for path in (docs / "benchmarks").glob("*.svg"):
        if path not in texts:
            path.unlink()
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def draw_charts(results: Results) -> dict[str, str]:
    """Return the charts as SVG, by the file names that the page uses."""
    return {
        f"benchmarks/{name}-{index}.svg": draw_chart(chart)
        for name, result in results.items()
        for index, chart in enumerate(result.get("charts", ()))
    }


def draw_chart(chart: Mapping[str, Any]) -> str:
    """Return a chart as SVG without scripts, with a bar and the quartiles for each measured command."""
    import pygal
    from pygal.etree import etree
    from pygal.style import Style

    # pygal installs an import hook that makes Python print a warning for each import that fails.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "pygal"]

    etree.to_etree()  # lxml, if it is installed, writes other bytes

    bars: Sequence[Mapping[str, Any]] = list(reversed(chart["bars"]))
    values = [bar["value"] for bar in bars if bar["value"]]
    is_logarithmic = bool(values) and min(values) > 0 and max(values) / min(values) > 100
    style = Style(
        background="transparent", plot_background="transparent", foreground="#808080",
        foreground_strong="#808080", foreground_subtle="#80808055", colors=(PEER_COLOR,),
        font_family="sans-serif", transition="0s",
    )  # fmt: skip
    drawing = pygal.HorizontalBar(
        style=style, js=[], no_prefix=True, show_legend=False, disable_xml_declaration=True,
        print_values=True, logarithmic=is_logarithmic, height=90 + 30 * len(bars), width=800, margin=8,
        value_formatter=format_number, x_title=chart["unit"] + (" (logarithmic)" if is_logarithmic else ""),
    )  # fmt: skip
    drawing.x_labels = [bar["name"] + ("" if bar["value"] is not None else " (failed)") for bar in bars]
    drawing.add(chart["unit"], [_bar(bar) for bar in bars])
    # pygal adds scripts for the pointer, and a comment with the date, which would change the file every day.
    svg = re.sub(r"<script.*?</script>|<!--.*?-->", "", drawing.render(is_unicode=True), flags=re.DOTALL)
    return svg + "\n"


def _bar(bar: Mapping[str, Any]) -> dict[str, Any] | None:
    if bar["value"] is None or not math.isfinite(bar["value"]):
        return None
    drawn: dict[str, Any] = {"value": bar["value"]}
    if bar["name"].startswith(("dtslurm", "import dtslurm")):
        drawn["color"] = DTSLURM_COLOR
    if bar["low"] is not None and bar["low"] != bar["high"]:
        drawn["ci"] = {"low": bar["low"], "high": bar["high"]}
    return drawn
