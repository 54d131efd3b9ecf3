"""Rules of the code that a test can check: one owner of a class name, the field's words, short functions and files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support_paths import PROJECT

PACKAGES = ("kvtier", "backends")
SOURCES = [path for top in PACKAGES for path in sorted((PROJECT / top).rglob("*.py"))]
DOCUMENTS = [*sorted((PROJECT / "docs").rglob("*.md")), *sorted(PROJECT.glob("*.md"))]
LONGEST_FUNCTION_LINES = 50
USUAL_FUNCTION_LINES = 21  # 95 of 100
LONGEST_FILE_LINES = 600

FIRST_WORDS_REFUSED = ("what", "how", "which", "where", "whether", "when", "as", "those", "one", "that")
NOUNS = ("seed", "speed")

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


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Every source of the product, parsed."""
    return [(path, ast.parse(path.read_text())) for path in SOURCES]


@pytest.fixture(scope="module", autouse=True)
def forget_trees() -> Iterator[None]:
    """The trees go with the last test that reads them: later searches for lost objects would walk all their nodes."""
    yield
    trees.cache_clear()


def defined(kinds: tuple[type[ast.AST], ...]) -> list[tuple[Path, ast.AST]]:
    """Every definition of some kinds in the product, with its file."""
    return [(path, node) for path, tree in trees() for node in ast.walk(tree) if isinstance(node, kinds)]


def test_a_class_name_has_one_owner():
    owners = defaultdict(list)
    for path, node in defined((ast.ClassDef,)):
        assert isinstance(node, ast.ClassDef)
        owners[node.name].append(str(path.relative_to(PROJECT)))
    assert {name: places for name, places in owners.items() if len(places) > 1} == {}


def test_the_words_are_the_fields():
    words = re.compile(rf"(?<![a-zA-Z])({'|'.join(PRIVATE_WORDS)})(?![a-zA-Z])", re.IGNORECASE)
    cut_regions = re.compile(r"\bregions?\b.*\bcuts?\b|\bcuts?\b.*\bregions?\b", re.IGNORECASE)  # a region is formatted
    found = [
        f"{path.relative_to(PROJECT)}:{number}: {line.strip()}"
        for path in [*SOURCES, *DOCUMENTS]
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if words.search(line) or cut_regions.search(line)
    ]
    assert found == []


def faults_of_docstrings() -> list[str]:
    """Docstrings that begin with a question word, and those of classes and modules that begin with a participle."""
    found = []
    for path, node in defined((ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        text = ast.get_docstring(node) or ""
        word = (re.match(r"[A-Za-z]*", text) or [""])[0].lower()
        is_thing = isinstance(node, ast.Module | ast.ClassDef)
        if word in FIRST_WORDS_REFUSED or (is_thing and word.endswith("ed") and word not in NOUNS):
            found.append(f"{path.relative_to(PROJECT)}:{getattr(node, 'lineno', 1)}: {text.partition(chr(10))[0]}")
    return found


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = faults_of_docstrings()
    assert found == [], "\n".join(found)


def test_each_room_states_what_it_is_for():
    tops = [PROJECT / "kvtier", PROJECT / "kvtier" / "engines", PROJECT / "kvtier" / "tools", PROJECT / "backends"]
    rooms = [room for top in tops for room in sorted(top.glob("*/__init__.py"))]
    assert len(rooms) > 20
    lacking = [str(room.relative_to(PROJECT)) for room in rooms if not ast.get_docstring(ast.parse(room.read_text()))]
    assert lacking == []


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
