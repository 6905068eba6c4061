"""Which calls a script makes, and which variables it reads, in any case or only under a condition."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Use(NamedTuple):
    """A call, or the reading of a variable.

    Attributes:
        name: the dotted name of what is called, or the variable's name.
        function: the name of the function that it stands in, empty at the top of a file.
        conditional: whether it stands under an ``if`` or ``try``, or behind an ``if`` that may return.
    """

    name: str
    function: str
    conditional: bool


def is_certain(use: Use, calls: Sequence[Use]) -> bool:
    """Return whether a use happens in any case: its function, too, is not only called under conditions."""
    if use.conditional or not use.function:
        return not use.conditional
    callers = [call for call in calls if call.name.rpartition(".")[2] == use.function]
    return not callers or not all(call.conditional for call in callers)


class UseReader(ast.NodeVisitor):
    """Collects the calls of a file, and the variables that it reads by ``os.environ[NAME]``."""

    def __init__(self, dotted: Callable[[ast.AST], str]) -> None:
        """Take a function that returns the full name of an expression."""
        self.calls: list[Use] = []
        self.variables: list[Use] = []
        self._dotted = dotted
        self._function = ""
        self._conditional = False

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Read a function, whose conditions begin anew."""
        outside = self._function, self._conditional
        self._function, self._conditional = node.name, False
        self.generic_visit(node)
        self._function, self._conditional = outside

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        """Read the test as it stands, and the branches as conditional."""
        self.visit(node.test)
        is_main = any(isinstance(item, ast.Name) and item.id == "__name__" for item in ast.walk(node.test))
        outside = self._conditional
        self._conditional = outside or not is_main
        for child in ast.iter_child_nodes(node):
            if child is not node.test:
                self.visit(child)
        returns = any(isinstance(item, ast.Return) for item in ast.walk(node))
        self._conditional = outside or (returns and bool(self._function))

    visit_IfExp = visit_If  # noqa: N815

    def visit_Try(self, node: ast.Try) -> None:
        """Read what may fail as conditional."""
        outside, self._conditional = self._conditional, True
        self.generic_visit(node)
        self._conditional = outside

    def visit_Call(self, node: ast.Call) -> None:
        """Note a call."""
        self.calls.append(Use(self._dotted(node.func), self._function, self._conditional))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Note a variable that must be set."""
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        reads = isinstance(node.ctx, ast.Load) and self._dotted(node.value) == "os.environ"
        if reads and isinstance(key, str):
            self.variables.append(Use(key, self._function, self._conditional))
        self.generic_visit(node)
