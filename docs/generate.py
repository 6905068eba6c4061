"""The pages in docs/reference, which `make docs` generates: commands, schemas, causes, faults and others."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import BuildError

from benchmarks import page as benchmarks
from dtslurm.cli.main import cli
from dtslurm.config import signatures
from dtslurm.config.schema import job_schema, profile_schema
from tests import long_runs
from tests.faults import faults
from tests.gpu import page as gpu
from tests.release.dependencies import components, licence

Schema = Mapping[str, Any]
REFERENCE = Path(__file__).parent / "reference"
FAULTS = """# Faults that the tests inject

This page lists faults of clusters and the tests that inject them. The name of a test contains the number of
its fault: `pytest -k f40` runs the tests of F40.
"""
DEPENDENCIES = """# Dependencies

These packages are installed by `pip install dtslurm`. The versions are those at the time when the list was
generated. The source has the same list in CycloneDX format in `docs/sbom.cdx.json`. Extras (`dtslurm[torch]`,
`[submitit]`, `[optuna]`, `[notify]`) install more packages.
"""
CAUSES = """# Causes of failure

This page lists the causes that `dtslurm diagnose JOB` reports, with advice and example log lines. You can add
signatures in `~/.config/dtslurm/signatures.yaml`.
"""
WORDS = {"array": "list", "object": "mapping", "string": "text", "boolean": "yes/no"}


def on_pre_build(config: MkDocsConfig) -> None:
    """Update the page of the benchmarks, and check that docs/reference is up to date.

    Raises:
        BuildError: a page in docs/reference differs from the page that is generated now.
    """
    del config
    benchmarks.write_page()
    if pages := changed_pages():
        names = ", ".join(f"docs/reference/{path.name}" for path in pages)
        raise BuildError(
            f"generated pages are out of date: {names}. Run `make docs` and commit docs/reference."
        )


def write_reference() -> None:
    """Write the pages in docs/reference that have changed."""
    REFERENCE.mkdir(exist_ok=True)
    for path, text in changed_pages().items():
        path.write_text(text, "utf-8")


def changed_pages() -> dict[Path, str]:
    """Return the generated pages that differ from their files."""
    return {
        path: text
        for path, text in reference_pages().items()
        if not path.exists() or path.read_text("utf-8") != text
    }


def reference_pages() -> dict[Path, str]:
    """Return the texts of the generated pages by their paths."""
    pages = {
        "commands": commands(),
        "profile": schema_page(
            "Cluster profiles",
            "A cluster profile is a YAML file. Write the keys that you know, and omit the others.\n"
            "`dtslurm cluster schema` prints the JSON Schema of profiles for editors.",
            profile_schema(),
        ),
        "job": schema_page(
            "Job files",
            "The job file of `dtslurm submit JOB.yaml` can contain each option of `submit` by its long name, "
            "and these keys.\n`dtslurm cluster schema job` prints the JSON Schema of job files for editors.",
            job_schema(),
        ),
        "causes": causes(),
        "faults": faults_page(),
        "long-runs": long_runs.page(),
        "gpu": gpu.page(),
        "dependencies": dependencies_page(),
    }
    return {REFERENCE / f"{name}.md": f"{text.strip()}\n" for name, text in pages.items()}


def commands() -> str:
    """Return the page of all commands and their options."""
    return "\n".join(_command(cli, click.Context(cli, info_name="dtslurm")))


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the lines of a command and of its subcommands."""
    yield f"\n{'#' * (1 + context.command_path.count(' '))} {context.command_path}\n"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "").replace("<", "&lt;") + "\n"
    if command.epilog:
        yield "```bash\n" + "\n".join(line.strip() for line in command.epilog.splitlines()[2:]) + "\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if subcommand := command.get_command(context, name):
                child = click.Context(subcommand, info_name=name, parent=context)
                yield from _command(subcommand, child)
        return
    yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    yield "| option | description |\n|---|---|"
    for parameter in command.params:
        if record := parameter.get_help_record(context):
            yield f"| `{record[0]}` | {_cell(record[1])} |"


def faults_page() -> str:
    """Return the page of faults and the tests that inject them."""
    parts = [FAULTS]
    for section, rows in faults().items():
        parts += [f"\n## {section}\n", "| number | fault | injected by |\n|---|---|---|"]
        for row in rows:
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.tests) or row.why
            parts.append(f"| {row.number} | {row.words} | {tests} |")
    return "\n".join(parts)


def dependencies_page() -> str:
    """Return the page of the packages that dtslurm depends on, with their licenses."""
    rows = [
        f"| {package['name']} | {package['version']} | {licence(package)} "
        f"| {_cell(package.get('description', ''))} |"
        for _, package in sorted(components().items())
    ]
    return "\n".join(
        [DEPENDENCIES, "| package | version | license | description |\n|---|---|---|---|", *rows]
    )


def schema_page(title: str, introduction: str, schema: Schema) -> str:
    """Return a page with a table of keys for each kind of mapping in a schema."""
    parts = [f"# {title}\n\n{introduction}\n", _keys(schema["properties"])]
    for name, part in sorted(schema.get("$defs", {}).items()):
        if "properties" in part:
            parts.append(f"\n## {name}\n\n{part.get('description', '')}\n")
            parts.append(_keys(part["properties"]))
    return "\n".join(parts)


def _keys(properties: Mapping[str, Schema]) -> str:
    rows = ["| key | type | description |", "|---|---|---|"]
    for key, value in properties.items():
        description = _cell(str(value.get("description", "")))
        rows.append(f"| `{key}` | {', '.join(dict.fromkeys(_types(value)))} | {description} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """Return text that is escaped for a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def _types(value: Schema) -> Iterator[str]:
    """Yield the types of values of a key, in words."""
    for alternative in value.get("anyOf", ()):
        yield from _types(alternative)
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        yield f"[{name}](#{name.lower()})"
    if "enum" in value:
        yield " or ".join(f"`{choice}`" for choice in value["enum"])
    kinds = value.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    for kind in ["string"] if {"string", "number"} <= set(kinds) else kinds:  # any scalar is accepted as text
        inner = value.get("items" if kind == "array" else "additionalProperties")
        of = f" of {', '.join(dict.fromkeys(_types(inner)))}" if isinstance(inner, Mapping) and inner else ""
        if kind != "null":
            yield WORDS.get(kind, kind) + of


def causes() -> str:
    """Return the page of the causes that ``dtslurm diagnose`` reports, read from its signatures."""
    by_cause: dict[str, list[signatures.Signature]] = defaultdict(list)
    for signature in signatures.load(Path("/"), {}):
        if signature.role == "cause" and signature.cause:
            by_cause[signature.cause].append(signature)
    parts = [CAUSES]
    for cause, group in sorted(by_cause.items()):
        parts.append(f"\n## {cause}\n")
        parts += [
            f"\n- {_plain(advice)}"
            for advice in dict.fromkeys(signature.advice for signature in group)
            if advice
        ]
        examples = [example.rstrip() for signature in group for example in signature.examples[:1]]
        parts.append("\n\n```text\n" + "\n".join(examples) + "\n```\n")
    return "".join(parts)


def _plain(advice: str) -> str:
    """Return advice without the parts that depend on the log line."""
    return re.sub(r"\[\[.*?\]\]", "", advice).replace("<", "&lt;")


if __name__ == "__main__":
    write_reference()
