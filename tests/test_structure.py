"""Limits on the structure of the package: files per folder, names, parameters, import cycles."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

import dtslurm

PACKAGE = Path(dtslurm.__file__).parent
MOST_FILES = 20  # of Python in one folder
MOST_PARAMETERS = 6
# Classes, functions and modules whose name says nothing without the code around it.
VAGUE = {
    *(
        "case",
        "found",
        "heard",
        "keeper",
        "kept",
        "made",
        "need",
        "outcome",
        "partly",
        "piece",
        "place",
        "seen",
    ),
    *("step", "told", "wanted"),
}
# Parameters whose name says nothing about their value: participles, adverbs, pronouns.
VAGUE_PARAMETERS = set(
    re.findall(
        r"\w+",
        """
        above act after also amount asked before below case ended expected foreign found given heard hidden
        idle ignored joined keeper kept known least listed loaded looked made most odd one others over own
        parcel pulse read remark remarks rest said saved seen shown sieve since told trouble until used usual
        visited wanted what where whole why writing written
        """,
    )
)
# A user's script calls this function, with options that are all independent of each other.
MANY_PARAMETERS = {"session"}


def parsed_sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), ast.parse(path.read_text("utf-8"))


def iterate_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameter_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    return [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def count_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len([name for name in parameter_names(function) if name not in {"self", "cls"}])


def test_no_folder_contains_too_many_python_files() -> None:
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    counts = {str(path.relative_to(PACKAGE)): len(list(path.glob("*.py"))) for path in folders}
    assert {name: count for name, count in counts.items() if count > MOST_FILES} == {}


def test_every_class_name_is_unique() -> None:
    places = defaultdict(list)
    for path, tree in parsed_sources():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    assert {name: result for name, result in places.items() if len(result) > 1} == {}


def test_no_class_or_module_has_a_vague_name() -> None:
    names = set()
    for path, tree in parsed_sources():
        names.add(path.stem)
        names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    vague = {name for name in names if name.lstrip("_").lower() in VAGUE}
    assert vague <= {"step", "place"}  # modules: a step of Slurm, and where a process stands


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a click command, whose options name its parameters."""
    return any(
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Attribute)
        and decorator.func.attr in {"command", "group"}
        for decorator in function.decorator_list
    )


def test_no_parameter_has_a_vague_name() -> None:
    vague = {
        f"{path}: {function.name}({name})"
        for path, tree in parsed_sources()
        for function in iterate_functions(tree)
        if not is_command(function)
        for name in parameter_names(function)
        if name in VAGUE_PARAMETERS
    }
    assert vague == set()


def test_functions_take_few_parameters() -> None:
    many = {
        function.name
        for path, tree in parsed_sources()
        if path.parts[0] != "cli"
        for function in iterate_functions(tree)
        if count_parameters(function) > MOST_PARAMETERS and function.name != "__init__"
    }
    assert many <= MANY_PARAMETERS


@pytest.fixture(scope="module")
def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph("dtslurm", exclude_type_checking_imports=True, cache_dir=None)


def test_there_are_no_import_cycles(import_graph: grimp.ImportGraph) -> None:
    cycles = {
        module
        for module in import_graph.modules
        if any(import_graph.chain_exists(importer=other, imported=module)
               for other in import_graph.find_modules_directly_imported_by(module))
    }  # fmt: skip
    assert cycles == set()


def test_copied_programs_import_the_same_names_in_both_forms() -> None:
    """Type checkers see only the first of the two imports."""
    for path in (PACKAGE / "worker").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Try):
                handlers = [statement for handler in node.handlers for statement in handler.body]
                packaged, beside = imported_names(node.body), imported_names(handlers)
                assert not beside or packaged == beside, path


def imported_names(statements: list[ast.stmt]) -> set[str]:
    return {
        name.name
        for statement in statements
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }
