"""Pages of the site that are made from the program itself: commands, schemas and causes of failure."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from benchmarks import page as benchmarks
from dtslurm.cli.main import cli
from dtslurm.config import signatures
from dtslurm.config.schema import job_schema, profile_schema
from tests import long_runs
from tests.faults import faults
from tests.gpu import page as gpu
from tests.release.dependencies import components, licence

Schema = Mapping[str, Any]
FAULTS = """# Faults that the suite makes

What goes wrong on clusters, and the tests that make it go wrong. Their names carry the number:
`pytest -k f40` runs those of F40.
"""
DEPENDENCIES = """# Dependencies

What `pip install dtslurm` brings, with versions as they were when the list was made, and licences. The same
as CycloneDX is `docs/sbom.cdx.json` in the source. Extras (`dtslurm[torch]`, `[submitit]`, `[optuna]`) bring
more.
"""
CAUSES = """# Causes of failure

What `dtslurm diagnose JOB` names, what helps, and how it looks in a log.
Signatures of your own go into `~/.config/dtslurm/signatures.yaml`.
"""
WORDS = {"array": "list", "object": "mapping", "string": "text", "boolean": "yes/no"}


def on_pre_build(config: MkDocsConfig) -> None:
    """Bring the page of benchmarks up to date; it lies among those by hand, for readers of the source."""
    del config
    benchmarks.write_page()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the made pages to those that are written by hand."""
    pages = {
        "reference/commands.md": commands(),
        "reference/profile.md": schema_page(
            "Cluster profiles",
            "A profile is a YAML file. Write only what the site says; what is unknown is left out.\n"
            "`dtslurm cluster schema` prints this as JSON Schema, for editors.",
            profile_schema(),
        ),
        "reference/job.md": schema_page(
            "Job files",
            "`dtslurm submit JOB.yaml` takes every option of `submit` by its long name, and what follows.\n"
            "`dtslurm cluster schema job` prints this as JSON Schema, for editors.",
            job_schema(),
        ),
        "reference/causes.md": causes(),
        "reference/faults.md": faults_page(),
        "reference/long-runs.md": long_runs.page(),
        "reference/gpu.md": gpu.page(),
        "reference/dependencies.md": dependencies_page(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def commands() -> str:
    """Return the page of all commands and their options, read from the command tree."""
    return "\n".join(_command(cli, click.Context(cli, info_name="dtslurm")))


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the lines about a command, and about the commands below it."""
    yield f"\n{'#' * (1 + context.command_path.count(' '))} {context.command_path}\n"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "").replace("<", "&lt;") + "\n"
    if command.epilog:
        yield "```bash\n" + "\n".join(line.strip() for line in command.epilog.splitlines()[2:]) + "\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if below := command.get_command(context, name):
                yield from _command(below, click.Context(below, info_name=name, parent=context))
        return
    yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    yield "| option | |\n|---|---|"
    for parameter in command.params:
        if record := parameter.get_help_record(context):
            yield f"| `{record[0]}` | {_cell(record[1])} |"


def faults_page() -> str:
    """Return the page of faults and the tests that make them."""
    parts = [FAULTS]
    for chapter, rows in faults().items():
        parts += [f"\n## {chapter}\n", "| | fault | made by |\n|---|---|---|"]
        for row in rows:
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.tests) or row.why
            parts.append(f"| {row.number} | {row.words} | {tests} |")
    return "\n".join(parts)


def dependencies_page() -> str:
    """Return the page of packages that are installed along, and their licences."""
    rows = [
        f"| {one['name']} | {one['version']} | {licence(one)} | {_cell(one.get('description', ''))} |"
        for _, one in sorted(components().items())
    ]
    return "\n".join([DEPENDENCIES, "| package | version | licence | |\n|---|---|---|---|", *rows])


def schema_page(title: str, introduction: str, schema: Schema) -> str:
    """Return a page with the keys of a schema, one table for each kind of mapping in it."""
    parts = [f"# {title}\n\n{introduction}\n", _keys(schema["properties"])]
    for name, part in sorted(schema.get("$defs", {}).items()):
        if "properties" in part:
            parts.append(f"\n## {name}\n\n{part.get('description', '')}\n")
            parts.append(_keys(part["properties"]))
    return "\n".join(parts)


def _keys(properties: Mapping[str, Schema]) -> str:
    rows = ["| key | takes | meaning |", "|---|---|---|"]
    for key, value in properties.items():
        meaning = _cell(str(value.get("description", "")))
        rows.append(f"| `{key}` | {', '.join(dict.fromkeys(_takes(value)))} | {meaning} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """Return text as it may stand in a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def _takes(value: Schema) -> Iterator[str]:
    """Yield the kinds of values a key takes, in words."""
    for one in value.get("anyOf", ()):
        yield from _takes(one)
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        yield f"[{name}](#{name.lower()})"
    if "enum" in value:
        yield " or ".join(f"`{one}`" for one in value["enum"])
    kinds = value.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    for kind in ["string"] if {"string", "number"} <= set(kinds) else kinds:  # any scalar is read as text
        inner = value.get("items" if kind == "array" else "additionalProperties")
        of = f" of {', '.join(dict.fromkeys(_takes(inner)))}" if isinstance(inner, Mapping) and inner else ""
        if kind != "null":
            yield WORDS.get(kind, kind) + of


def causes() -> str:
    """Return the page of the causes that ``dtslurm diagnose`` names, read from its signatures."""
    found: dict[str, list[signatures.Signature]] = defaultdict(list)
    for one in signatures.load(Path("/"), {}):
        if one.role == "cause" and one.cause:
            found[one.cause].append(one)
    parts = [CAUSES]
    for cause, group in sorted(found.items()):
        parts.append(f"\n## {cause}\n")
        parts += [f"\n- {_plain(advice)}" for advice in dict.fromkeys(one.advice for one in group) if advice]
        shown = [example for one in group for example in one.examples[:1]]
        parts.append("\n\n```text\n" + "\n".join(shown) + "\n```\n")
    return "".join(parts)


def _plain(advice: str) -> str:
    """Return advice without the parts that depend on the line found."""
    return re.sub(r"\[\[.*?\]\]", "", advice).replace("<", "&lt;")
