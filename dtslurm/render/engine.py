"""The template engine: sandboxed, strict about missing values, and quoting every value it prints."""

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
from dtslurm.model.shell import Sh, quote
from dtslurm.model.values import dataclass
from dtslurm.render.compiled import Compiled, TemplateCache


def _finalize(value: object) -> str:
    """Print a value as one shell word; only ``Sh`` reaches the script unquoted.

    Text that a template rendered before is ``Sh`` too: the values in it are quoted already.
    """
    if value is None:
        raise RenderError("a template prints a value that is not set")
    return quote(value)  # an undefined value raises here


LONGEST = 1 << 20  # items of one repetition
WIDEST = 10_000  # characters of white space
LARGEST = 1 << 23  # characters of a whole text; sbatch takes 4 MB
MOST_STEPS = 1 << 20  # loop iterations and calls while one template is rendered
MOST_MEMORY = 1 << 30  # bytes that rendering a user's template may allocate


def _concat(parts: Iterable[str]) -> str:
    """Join what ``super()``, ``self.block()``, macros, ``caller()`` and ``{% set %}`` render."""
    return Sh("".join(parts))


def _keeping_shell(layout: Callable[..., str]) -> Callable[..., str]:
    """Return a filter for white space that leaves rendered text unquoted.

    With a text as its argument the filter could add or remove quotes: then the result is quoted.
    """

    def filtered(text: str, *args: object, **options: object) -> str:
        result = layout(text, *args, **options)
        safe = isinstance(text, Sh) and all(isinstance(one, int) for one in (*args, *options.values()))
        return Sh(result) if safe else result

    return filtered


_WIDENS = frozenset(["ljust", "rjust", "center", "zfill", "expandtabs"])
_WIDE = re.compile(r"\d{5}|\*")  # in what `%` fills in: a width or precision that no script needs
_WIDE_FIELD = re.compile(r"\d{5}|:[^{}]*\{")  # in what `format` fills in, where a value may be one, too


def _formatted(text: str, *args: object, **values: object) -> str:
    """Return jinja's ``format`` of a text, unless it would be wider than a script can need."""
    if _WIDE.search(text):
        raise RenderError(f"a template fills in {text[:60]!r}")
    return text % (values or args)


def _narrow(name: str, layout: Callable[..., str]) -> Callable[..., str]:
    """Return a filter for white space that takes no number wider than a script can need."""

    @wraps(layout)
    def filtered(*args: object, **options: object) -> str:
        if any(isinstance(one, int) and abs(one) > WIDEST for one in (*args, *options.values())):
            raise RenderError(f"a template asks for a width of more than {WIDEST} by {name}")
        return layout(*args, **options)

    return filtered


_step_counter: ContextVar[Iterator[int]] = ContextVar("_step_counter")


def _count_step() -> None:
    """Count a loop iteration or a call.

    Raises:
        RenderError: the template exceeds `MOST_STEPS`.
    """
    if next(_step_counter.get()) > MOST_STEPS:
        raise RenderError(f"a template makes more than {MOST_STEPS} loop iterations and calls")


def _count_rounds(items: Iterable[object]) -> Iterator[object]:
    """Yield the items of a loop and count its iterations."""
    for item in items:
        _count_step()
        yield item


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which looks at what operators and methods would make before it is made."""

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
        """Tell whether a template may use an attribute: no method that makes a text as wide as it is told."""
        return attr not in _WIDENS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's own ``format``, unless it would be wider than a script can need."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FIELD.search(value.__self__):
            raise RenderError(f"a template fills in {value.__self__[:60]!r}")
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product, power or formatted text, if it is of a size that a script can need."""
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise RenderError(f"a template fills in {left[:60]!r}")
        if operator == "**" and not (abs(left) < 1 << 16 and abs(right) < 64):
            raise RenderError(f"a template computes {left} ** {right}")
        for some, times in ((left, right), (right, left)):
            if hasattr(some, "__len__") and len(some) * times > LONGEST:
                raise RenderError(f"a template repeats {len(some)} items {times} times")
        return super().call_binop(context, operator, left, right)


@contextlib.contextmanager
def _limit_memory() -> Iterator[None]:
    """Limit the memory that the process can allocate in this context to `MOST_MEMORY`, on Linux."""
    try:
        has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        before = resource.getrlimit(resource.RLIMIT_AS)
        own = [limit for limit in before if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([has + MOST_MEMORY, *own]), before[1]))
    except (OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class _Templates(BaseLoader):
    """Reads templates, each of which decides what runs: none that others may have written, unless trusted."""

    def __init__(self, folders: Sequence[Path], foreign: Sequence[Path], trust: Trust | None) -> None:
        self._folders, self._foreign, self._trust = folders, foreign, trust

    def get_source(self, environment: JinjaEnvironment, template: str) -> tuple[str, str, Callable[[], bool]]:
        """Return a template's text, its path, and what tells whether the file is as it was.

        Raises:
            TemplateNotFound: no folder has it.
            ProfileInvalid: others may have written it.
            RenderError: it is a project's, and the user has not trusted it; or it is no text.
        """
        del environment
        names = split_template_path(template)
        found = ((folder, folder.joinpath(*names)) for folder in self._folders)
        folder, path = next(((folder, path) for folder, path in found if path.is_file()), (None, Path()))
        if folder is None:
            raise TemplateNotFound(template)
        packaged = folder == assets.templates()
        stamp = path.stat()
        data = files.read(path, f"template {path}", packaged=packaged)
        if folder in self._foreign and not packaged and self._trust and not self._trust.has(path, data):
            message = f"you have not trusted this project's template {path}"
            raise RenderError(message, hint=f"{HINT} {quote(str(path))}")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise RenderError(f"template {path} is not UTF-8 text") from None

        def is_as_it_was() -> bool:
            with contextlib.suppress(OSError):
                now = path.stat()
                return (now.st_mtime_ns, now.st_size) == (stamp.st_mtime_ns, stamp.st_size)
            return False

        return text, str(path), is_as_it_was


class Engine:
    """Renders templates found in ``folders``, first match first; ``keeper`` keeps them compiled.

    Those found in ``foreign`` folders the user must have trusted.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        keeper: TemplateCache | None = None,
        foreign: Sequence[Path] = (),
        trust: Trust | None = None,
    ) -> None:
        self._has_user_templates = list(folders) != [assets.templates()]
        self._environment = _Environment(
            loader=_Templates(folders, foreign, trust),
            undefined=StrictUndefined,
            finalize=_finalize,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # shell text, not HTML; _finalize quotes
            bytecode_cache=Compiled(keeper, [__file__, shell.__file__]) if keeper else None,
        )
        filters = self._environment.filters
        filters.update({name: _keeping_shell(filters[name]) for name in ("indent", "trim")})
        filters["format"], filters["count_rounds"] = _formatted, _count_rounds
        for name in ("center", "indent", "wordwrap", "truncate"):
            filters[name] = _narrow(name, filters[name])

    def render(self, name: str, values: Mapping[str, object]) -> str:
        """Return the template's text with ``values`` filled in.

        Raises:
            RenderError: no such template, a mistake in it, or a value it needs is missing.
        """
        _step_counter.set(itertools.count())
        try:
            with _limit_memory() if self._has_user_templates else contextlib.nullcontext():
                return self._joined(name, values)
        except MemoryError:
            raise RenderError(f"template {name} needs more than {MOST_MEMORY >> 30} GiB of memory") from None
        except RecursionError:
            raise RenderError(f"template {name}: the recursion of its macros or loops is too deep") from None
        except TemplateNotFound as error:
            raise RenderError(f"no template {error.name}") from error
        except TemplateError as error:
            where = name
            if isinstance(error, TemplateSyntaxError):
                where = f"{error.filename or error.name}:{error.lineno}"
            raise RenderError(f"template {where}: {error.message}") from error

    def _joined(self, name: str, values: Mapping[str, object]) -> str:
        parts, length = [], 0
        for part in self._environment.get_template(name).generate(values):
            length += len(part)
            if length > LARGEST:
                raise RenderError(f"template {name} prints more than {LARGEST} characters")
            parts.append(part)
        return "".join(parts)


@dataclass(frozen=True, kw_only=True)
class Templates:
    """Where templates are.

    Attributes:
        folders: the first that has a template counts.
        keeper: what keeps compiled templates for the next process.
        foreign: those of the folders whose templates the user must have trusted, as ``trust`` says.
    """

    folders: tuple[Path, ...]
    keeper: TemplateCache | None = None
    foreign: tuple[Path, ...] = ()
    trust: Trust | None = None


@cache
def engine_of(templates: Templates) -> Engine:
    """Return the engine for these: templates are compiled once, and again when their files change."""
    return Engine(templates.folders, templates.keeper, templates.foreign, templates.trust)
