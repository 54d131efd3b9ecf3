"""Handlers that end a defect where nobody sees it are few: at the border of a task, with an outcome and a counter."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
PACKAGES = ("kvtier", "backends")
PER_1000_LINES_MAX = 0.4
BROAD = {"Exception", "BaseException"}
Place = tuple[str, int]


def _names(node: ast.expr | None) -> set[str]:
    """The names of the exceptions that a handler catches; one without a type catches everything."""
    if node is None:
        return {"BaseException"}
    if isinstance(node, ast.Tuple):
        return {name for each in node.elts for name in _names(each)}
    return {node.id} if isinstance(node, ast.Name) else {node.attr} if isinstance(node, ast.Attribute) else set()


def _leaves(statement: ast.AST) -> bool:
    """True if a way out of the handler other than a raise is in this statement."""
    if isinstance(statement, ast.Return | ast.Break | ast.Continue):
        return True
    inner = ast.iter_child_nodes(statement)
    return any(_leaves(each) for each in inner if not isinstance(each, ast.FunctionDef | ast.Lambda))


def _raises(body: Sequence[ast.stmt]) -> bool:
    """True if every path through these statements ends with a raise."""
    if not body or any(_leaves(statement) for statement in body):
        return False
    last = body[-1]
    if isinstance(last, ast.If):
        return _raises(last.body) and _raises(last.orelse)
    if isinstance(last, ast.With | ast.AsyncWith):
        return _raises(last.body)
    if isinstance(last, ast.Try):
        return _raises(last.finalbody) or (_raises(last.body) and all(_raises(each.body) for each in last.handlers))
    return isinstance(last, ast.Raise)


def _swallows(node: ast.AST) -> bool:
    """True for a broad handler that does not raise on every path, and for what has the same effect."""
    if isinstance(node, ast.ExceptHandler):
        return bool(_names(node.type) & BROAD) and not _raises(node.body)
    if isinstance(node, ast.Call):
        return "suppress" in _names(node.func) and any(_names(each) & BROAD for each in node.args)
    if isinstance(node, ast.keyword):
        return node.arg == "return_exceptions" and not (isinstance(node.value, ast.Constant) and not node.value.value)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in ("__exit__", "__aexit__"):
        found = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value is not None]
        return any(not isinstance(value, ast.Constant) or value.value for value in found)
    return False


def handlers(source: str) -> Iterator[int]:
    """The lines of the handlers of a file that swallow."""
    for node in ast.walk(ast.parse(source)):
        if _swallows(node):
            yield node.value.lineno if isinstance(node, ast.keyword) else node.lineno  # type: ignore[attr-defined]


def test_broad_handlers_that_swallow_are_few() -> None:
    sources = [(path, path.read_text()) for package in PACKAGES for path in sorted((TREE / package).rglob("*.py"))]
    lines = sum(source.count("\n") for _, source in sources)
    found: list[Place] = [(str(path.relative_to(TREE)), at) for path, source in sources for at in handlers(source)]
    figure = 1000 * len(found) / lines
    print(*(f"{path}:{at}" for path, at in found), sep="\n")
    print(f"{len(found)} broad handlers that swallow in {lines:,} lines: {figure:.2f} a 1,000 lines")
    assert figure <= PER_1000_LINES_MAX


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("try: f()\nexcept Exception: pass", 1),
        ("try: f()\nexcept: return_code = 1", 1),
        ("try: f()\nexcept (OSError, BaseException) as e: log(e)", 1),
        ("try: f()\nexcept OSError: pass", 0),
        ("try: f()\nexcept BaseException:\n    undo()\n    raise", 0),
        ("try: f()\nexcept Exception as e:\n    if e: raise\n    log(e)", 1),
        ("try: f()\nexcept Exception as e:\n    if e: raise\n    else: raise ValueError from e", 0),
        ("def g():\n  try: f()\n  except Exception as e:\n    if e: return\n    raise", 1),
        ("with suppress(Exception): f()", 1),
        ("with contextlib.suppress(OSError): f()", 0),
        ("gather(f(), return_exceptions=True)", 1),
        ("class A:\n  def __exit__(self, *error): return True", 1),
        ("class A:\n  def __exit__(self, *error): self.close()", 0),
    ],
)
def test_what_counts_as_one(source: str, counts: int) -> None:
    assert len(list(handlers(source))) == counts
