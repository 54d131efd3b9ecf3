"""Rules of the code that a test can check: one owner of a class name, the field's words, short functions and files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from support_paths import PROJECT

PACKAGES = ("kvtier", "backends")
SOURCES = [path for top in PACKAGES for path in sorted((PROJECT / top).rglob("*.py"))]
DOCUMENTS = [*sorted((PROJECT / "docs").rglob("*.md")), *sorted(PROJECT.glob("*.md"))]
LONGEST_FUNCTION_LINES = 50
USUAL_FUNCTION_LINES = 21  # 95 of 100
LONGEST_FILE_LINES = 600

PRIVATE_WORDS = (
    "bell",
    "board",
    "duty",
    "duties",
    "owe",
    "owes",
    "owed",
    "owing",
    "settle",
    "settles",
    "settled",
    "outlast",
    "outlasts",
    "weather",
    "inhabit",
    "inhabits",
    "seams",
    "dice",
    "outstanding",
    "asking",
    "told",
    "untold",
    "recut",
    "uncut",
    "somebody",
    "nobody",
    "everybody",
    "whoever",
)
"""Words that once had a meaning of kvtier's own; the glossary has the field's."""


def defined(kinds: tuple[type[ast.AST], ...]) -> list[tuple[Path, ast.AST]]:
    """Every definition of some kinds in the product, with its file."""
    return [
        (path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)
    ]


def test_a_class_name_has_one_owner():
    owners = defaultdict(list)
    for path, node in defined((ast.ClassDef,)):
        assert isinstance(node, ast.ClassDef)
        owners[node.name].append(str(path.relative_to(PROJECT)))
    assert {name: places for name, places in owners.items() if len(places) > 1} == {}


@pytest.mark.parametrize("path", [*SOURCES, *DOCUMENTS], ids=lambda path: str(path.relative_to(PROJECT)))
def test_the_words_are_the_fields(path: Path):
    words = re.compile(rf"(?<![a-zA-Z])({'|'.join(PRIVATE_WORDS)})(?![a-zA-Z])", re.IGNORECASE)
    cut_regions = re.compile(r"\bregions?\b.*\bcuts?\b|\bcuts?\b.*\bregions?\b", re.IGNORECASE)  # a region is formatted
    lines = path.read_text().split("\n")
    found = [(number, line) for number, line in enumerate(lines, 1) if words.search(line) or cut_regions.search(line)]
    assert [f"{number}: {line.strip()}" for number, line in found] == []


def test_functions_and_files_stay_small():
    lengths = sorted(
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(PROJECT)}:{node.name}")
        for path, node in defined((ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    )
    assert lengths[-1][0] <= LONGEST_FUNCTION_LINES, lengths[-1]
    assert lengths[len(lengths) * 95 // 100][0] <= USUAL_FUNCTION_LINES
    files = {str(path.relative_to(PROJECT)): path.read_text().count("\n") for path in SOURCES}
    assert {name: lines for name, lines in files.items() if lines > LONGEST_FILE_LINES} == {}
