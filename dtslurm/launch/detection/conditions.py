"""Calls and environment variable reads of a script, each marked as conditional or unconditional."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Use(NamedTuple):
    """A call, or a read of an environment variable.

    Attributes:
        name: the dotted name of the called function, or the variable's name.
        function: the name of the enclosing function, empty at module level.
        conditional: whether the use is inside an ``if`` or ``try``, or after an ``if`` that may return.
    """

    name: str
    function: str
    conditional: bool


def is_certain(use: Use, calls: Sequence[Use]) -> bool:
    """Return whether a use always happens: the use is unconditional, and so is a call of its function."""
    if use.conditional or not use.function:
        return not use.conditional
    callers = [call for call in calls if call.name.rpartition(".")[2] == use.function]
    return not callers or not all(call.conditional for call in callers)


class UseReader(ast.NodeVisitor):
    """Collects the calls of a file and the variables that it reads with ``os.environ[NAME]``."""

    def __init__(self, dotted: Callable[[ast.AST], str]) -> None:
        """Store ``dotted``, a function that returns the full name of an expression."""
        self.calls: list[Use] = []
        self.variables: list[Use] = []
        self._dotted = dotted
        self._function = ""
        self._conditional = False

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visit a function body, which starts as unconditional."""
        enclosing = self._function, self._conditional
        self._function, self._conditional = node.name, False
        self.generic_visit(node)
        self._function, self._conditional = enclosing

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        """Visit the test with the current condition, and the branches as conditional."""
        self.visit(node.test)
        is_main = any(
            isinstance(expression, ast.Name) and expression.id == "__name__"
            for expression in ast.walk(node.test)
        )
        enclosing = self._conditional
        self._conditional = enclosing or not is_main
        for child in ast.iter_child_nodes(node):
            if child is not node.test:
                self.visit(child)
        may_return = any(isinstance(expression, ast.Return) for expression in ast.walk(node))
        self._conditional = enclosing or (may_return and bool(self._function))

    visit_IfExp = visit_If  # noqa: N815

    def visit_Try(self, node: ast.Try) -> None:
        """Visit a ``try`` statement as conditional."""
        enclosing, self._conditional = self._conditional, True
        self.generic_visit(node)
        self._conditional = enclosing

    def visit_Call(self, node: ast.Call) -> None:
        """Record a call."""
        self.calls.append(Use(self._dotted(node.func), self._function, self._conditional))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Record a variable that must be set."""
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        is_environment_read = isinstance(node.ctx, ast.Load) and self._dotted(node.value) == "os.environ"
        if is_environment_read and isinstance(key, str):
            self.variables.append(Use(key, self._function, self._conditional))
        self.generic_visit(node)
