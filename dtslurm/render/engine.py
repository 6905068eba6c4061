"""The template engine: a jinja sandbox that rejects missing values and quotes every printed value."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, StrictUndefined, TemplateError, TemplateNotFound, TemplateSyntaxError, nodes
from jinja2 import Environment as JinjaEnvironment
from jinja2.loaders import split_template_path
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dtslurm import assets
from dtslurm.config import files
from dtslurm.config.trust import HINT, Trust
from dtslurm.errors import RenderError
from dtslurm.model import shell
from dtslurm.model.shell import RawShell, quote
from dtslurm.model.values import dataclass
from dtslurm.render.compiled import Compiled, TemplateCache


def _finalize(value: object) -> str:
    """Return a value as one quoted shell word; only ``RawShell`` text is not quoted.

    Text that a template has rendered is ``RawShell`` too, because the values in it are quoted already.
    """
    if value is None:
        raise RenderError("a template prints a value that is not set")
    return quote(value)  # raises for an undefined value


LONGEST = 1 << 20  # items that a repetition may produce
WIDEST = 10_000  # largest width that a filter may take, in characters
LARGEST = 1 << 23  # characters of a rendered text; sbatch accepts 4 MB
MOST_STEPS = 1 << 20  # loop iterations and calls while one template is rendered
MOST_MEMORY = 1 << 30  # bytes that rendering a user's template may allocate


def _concat(parts: Iterable[str]) -> str:
    """Join the text rendered by ``super()``, ``self.block()``, macros, ``caller()`` and ``{% set %}``."""
    return RawShell("".join(parts))


def _keep_shell_text(layout: Callable[..., str]) -> Callable[..., str]:
    """Wrap a white-space filter so that rendered text stays unquoted.

    With a string argument, the filter could add or remove quotes, so its output is quoted again.
    """

    def shell_filter(text: str, *args: object, **options: object) -> str:
        result = layout(text, *args, **options)
        stays_shell = isinstance(text, RawShell) and all(
            isinstance(argument, int) for argument in (*args, *options.values())
        )
        return RawShell(result) if stays_shell else result

    return shell_filter


_PADDING_METHODS = frozenset(["ljust", "rjust", "center", "zfill", "expandtabs"])
# In a `%` format, a width or precision that is larger than any script needs, or given by a value.
_EXCESSIVE_WIDTH = re.compile(r"\d{5}|\*")
# The same in a `format` string.
_EXCESSIVE_FORMAT_WIDTH = re.compile(r"\d{5}|:[^{}]*\{")


def _limited_format(text: str, *args: object, **values: object) -> str:
    """Format a text like jinja's ``format`` filter, but reject excessive widths."""
    if _EXCESSIVE_WIDTH.search(text):
        raise RenderError(f"a template formats {text[:60]!r}")
    return text % (values or args)


def _limit_width(name: str, layout: Callable[..., str]) -> Callable[..., str]:
    """Wrap a white-space filter so that it rejects numbers above `WIDEST`."""

    @wraps(layout)
    def limited_filter(*args: object, **options: object) -> str:
        if any(
            isinstance(argument, int) and abs(argument) > WIDEST for argument in (*args, *options.values())
        ):
            raise RenderError(f"a template requests a width of more than {WIDEST} with {name}")
        return layout(*args, **options)

    return limited_filter


_step_counter: ContextVar[Iterator[int]] = ContextVar("_step_counter")


def _count_step() -> None:
    """Count a loop iteration or a call.

    Raises:
        RenderError: the template exceeds `MOST_STEPS`.
    """
    if next(_step_counter.get()) > MOST_STEPS:
        raise RenderError(f"a template needs more than {MOST_STEPS} loop iterations and calls")


def _count_iterations(items: Iterable[object]) -> Iterator[object]:
    """Yield the items of a loop, and count each iteration."""
    for item in items:
        _count_step()
        yield item


class _LimitedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox that checks the size of the result of operators and methods before computing it."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "count_rounds", [], [], None, None, lineno=loop.lineno)
        return tree

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:
        """Call a macro or function, and count the call, because macros can be recursive."""
        _count_step()
        return super().call(context, function, *args, **options)

    concat = staticmethod(_concat)
    intercepted_binops = frozenset(["*", "**", "%"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute; methods that pad text to a width are forbidden."""
        return attr not in _PADDING_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's ``format`` method, but reject excessive widths."""
        method = super().wrap_str_format(value)
        if method is not None and _EXCESSIVE_FORMAT_WIDTH.search(value.__self__):
            raise RenderError(f"a template formats {value.__self__[:60]!r}")
        return method

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product, power or formatted text, but reject excessive sizes."""
        if operator == "%" and isinstance(left, str) and _EXCESSIVE_WIDTH.search(left):
            raise RenderError(f"a template formats {left[:60]!r}")
        if operator == "**" and not (abs(left) < 1 << 16 and abs(right) < 64):
            raise RenderError(f"a template computes {left} ** {right}")
        for sequence, count in ((left, right), (right, left)):
            if hasattr(sequence, "__len__") and len(sequence) * count > LONGEST:
                raise RenderError(f"a template repeats {len(sequence)} items {count} times")
        return super().call_binop(context, operator, left, right)


@contextlib.contextmanager
def _limit_memory() -> Iterator[None]:
    """Limit the memory that the process can allocate in this context to `MOST_MEMORY` (Linux only)."""
    try:
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        old_limits = resource.getrlimit(resource.RLIMIT_AS)
        finite_limits = [limit for limit in old_limits if limit != resource.RLIM_INFINITY]
        resource.setrlimit(
            resource.RLIMIT_AS, (min([used_bytes + MOST_MEMORY, *finite_limits]), old_limits[1])
        )
    except (OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old_limits)


class _TrustedLoader(BaseLoader):
    """A template loader that rejects untrusted files, because templates determine the commands of a job."""

    def __init__(self, folders: Sequence[Path], untrusted_files: Sequence[Path], trust: Trust | None) -> None:
        self._folders, self._untrusted_files, self._trust = folders, untrusted_files, trust

    def get_source(self, environment: JinjaEnvironment, template: str) -> tuple[str, str, Callable[[], bool]]:
        """Return a template's text, its path, and a function that returns whether the file is unchanged.

        Raises:
            TemplateNotFound: no folder contains the template.
            ProfileInvalid: other users may have written the template.
            RenderError: the user has not trusted this template of a project; or it is not UTF-8 text.
        """
        del environment
        names = split_template_path(template)
        candidates = ((folder, folder.joinpath(*names)) for folder in self._folders)
        folder, path = next(((folder, path) for folder, path in candidates if path.is_file()), (None, Path()))
        if folder is None:
            raise TemplateNotFound(template)
        is_packaged = folder == assets.templates()
        stamp = path.stat()
        data = files.read(path, f"template {path}", packaged=is_packaged)
        if (
            folder in self._untrusted_files
            and not is_packaged
            and self._trust
            and not self._trust.has(path, data)
        ):
            message = f"you have not trusted this project's template {path}"
            raise RenderError(message, hint=f"{HINT} {quote(str(path))}")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise RenderError(f"template {path} is not UTF-8 text") from None

        def is_unchanged() -> bool:
            with contextlib.suppress(OSError):
                current = path.stat()
                return (current.st_mtime_ns, current.st_size) == (stamp.st_mtime_ns, stamp.st_size)
            return False

        return text, str(path), is_unchanged


class Engine:
    """A renderer of the templates in ``folders``; the first folder that contains a template is used.

    ``keeper`` caches compiled templates. The user must have trusted the templates in ``foreign`` folders.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        template_cache: TemplateCache | None = None,
        untrusted_files: Sequence[Path] = (),
        trust: Trust | None = None,
    ) -> None:
        self._has_user_templates = list(folders) != [assets.templates()]
        self._environment = _LimitedSandbox(
            loader=_TrustedLoader(folders, untrusted_files, trust),
            undefined=StrictUndefined,
            finalize=_finalize,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # shell text, not HTML; _finalize quotes
            bytecode_cache=Compiled(template_cache, [__file__, shell.__file__]) if template_cache else None,
        )
        filters = self._environment.filters
        filters.update({name: _keep_shell_text(filters[name]) for name in ("indent", "trim")})
        filters["format"], filters["count_rounds"] = _limited_format, _count_iterations
        for name in ("center", "indent", "wordwrap", "truncate"):
            filters[name] = _limit_width(name, filters[name])

    def render(self, name: str, values: Mapping[str, object]) -> str:
        """Render a template with ``values``.

        Raises:
            RenderError: the template is missing or invalid, a value is missing, or a limit is exceeded.
        """
        _step_counter.set(itertools.count())
        try:
            with _limit_memory() if self._has_user_templates else contextlib.nullcontext():
                return self._render_chunks(name, values)
        except MemoryError:
            raise RenderError(f"template {name} needs more than {MOST_MEMORY >> 30} GiB of memory") from None
        except RecursionError:
            raise RenderError(f"template {name}: the recursion of its macros or loops is too deep") from None
        except TemplateNotFound as error:
            raise RenderError(f"no template {error.name}") from error
        except TemplateError as error:
            location = name
            if isinstance(error, TemplateSyntaxError):
                location = f"{error.filename or error.name}:{error.lineno}"
            raise RenderError(f"template {location}: {error.message}") from error

    def _render_chunks(self, name: str, values: Mapping[str, object]) -> str:
        chunks, length = [], 0
        for chunk in self._environment.get_template(name).generate(values):
            length += len(chunk)
            if length > LARGEST:
                raise RenderError(f"template {name} prints more than {LARGEST} characters")
            chunks.append(chunk)
        return "".join(chunks)


@dataclass(frozen=True, kw_only=True)
class Templates:
    """The folders of templates.

    Attributes:
        folders: folders in order of priority; the first that contains a template is used.
        keeper: the cache of compiled templates, which later processes reuse.
        foreign: the folders whose templates the user must have trusted, as recorded in ``trust``.
    """

    folders: tuple[Path, ...]
    keeper: TemplateCache | None = None
    foreign: tuple[Path, ...] = ()
    trust: Trust | None = None


@cache
def engine_of(templates: Templates) -> Engine:
    """Return the cached engine of some folders, which compiles a template again only if its file changes."""
    return Engine(templates.folders, templates.keeper, templates.foreign, templates.trust)
