"""The template engine: sandboxed, strict about missing values, and quoting every value it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import StrictUndefined, TemplateError, TemplateNotFound, TemplateSyntaxError
from jinja2.loaders import FileSystemLoader
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dtslurm.errors import RenderError
from dtslurm.model.shell import quote


def _finalize(value: object) -> str:
    """Print a value as one shell word; only ``Sh`` reaches the script unquoted."""
    if value is None:
        raise RenderError("a template prints a value that is not set")
    return quote(value)  # an undefined value raises here


class Engine:
    """Renders templates found in ``folders``, first match first."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._environment = ImmutableSandboxedEnvironment(
            loader=FileSystemLoader([str(folder) for folder in folders]),
            undefined=StrictUndefined,
            finalize=_finalize,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # shell text, not HTML; _finalize quotes
        )

    def render(self, name: str, values: Mapping[str, object]) -> str:
        """Return the template's text with ``values`` filled in.

        Raises:
            RenderError: no such template, a mistake in it, or a value it needs is missing.
        """
        try:
            return self._environment.get_template(name).render(values)
        except TemplateNotFound as error:
            raise RenderError(f"no template {error.name}") from error
        except TemplateError as error:
            where = name
            if isinstance(error, TemplateSyntaxError):
                where = f"{error.filename or error.name}:{error.lineno}"
            raise RenderError(f"template {where}: {error.message}") from error
