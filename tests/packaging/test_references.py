"""Every file, module and function that the documentation names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from support_paths import PROJECT

DOCUMENTS = [
    *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    PROJECT / "benchmarks" / "README.md",
    *sorted((PROJECT / "docs").glob("*.md")),
]
PLANNED: set[str] = set()
"""Rooms that have a name and no code yet. One that gets code leaves this set."""

ROOMS = "kvtier|backends|simulator|tests|docs|faults|benchmarks|configs|examples"
PATH = re.compile(rf"(?<![\w/.-])(?:{ROOMS})/[\w./*{{}},-]*(?::{{1,2}}[A-Za-z_][\w.]*)?")
FILE = re.compile(r"`(\w+\.(?:py|c))((?::[A-Za-z_][\w.]*)?)`")
MODULE = re.compile(
    r"(?<![\w/.])(?:kvtier|kvtier_fs|kvtier_cpu|kvtier_gpu|kvtier_remote|simulator|faults|benchmarks)(?:\.\w+)+"
)
SOURCE_ROOTS = [PROJECT, PROJECT / "backends"]
GROUPS = ("backends", "policies", "commands", "inspectors")
HINTS = ("retain", "pin", "prefetch", "demote", "release")
OTHER_NAMES = {"kvtier/transformers/1"} | {f"kvtier.{name}" for name in GROUPS + HINTS}
"""Names that look like a module or a path: groups of entry points, what every hash of token ids begins with, and the
types of actions in vLLM's envelope of hints."""


def expanded(token: str) -> Iterator[str]:
    """`a/{b,c}.py` as `a/b.py` and `a/c.py`."""
    parts = re.split(r"\{([^}]*)\}", token)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ("".join(choice) for choice in product(*choices))


@cache
def names_in(path: Path) -> frozenset[str]:
    """What a Python file defines: functions, classes, methods as `Class.method`, and names it binds or imports."""
    found: set[str] = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.If):
                walk(node.body, prefix)  # as in `if TYPE_CHECKING:`
            if isinstance(node, ast.Assign):
                found.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)
            if isinstance(node, ast.Import | ast.ImportFrom):
                found.update((alias.asname or alias.name) for alias in node.names)

    walk(ast.parse(path.read_text()).body, "")
    return frozenset(found)


def fault_of_path(token: str) -> str:
    """What is wrong with a path such as `kvtier/errors.py:KVTierError`; empty if nothing is."""
    name, _, member = token.replace("::", ":").partition(":")
    name = name.rstrip("./,-")
    if name in PLANNED:
        return f"{name} exists: it is no longer planned" if (PROJECT / name).exists() else ""
    if "*" in name:
        return "" if any(PROJECT.glob(name)) else f"no file matches {name}"
    path = PROJECT / name
    if not path.exists():
        return f"{name} does not exist"
    if member and member.rstrip(".") not in names_in(path):
        return f"{name} has no {member}"
    return ""


def fault_of_module(token: str) -> str:
    """What is wrong with a dotted name such as `kvtier.errors.KVTierError`; empty if nothing is."""
    parts = token.split(".")
    for length in range(len(parts), 0, -1):
        for root in SOURCE_ROOTS:
            folder = root.joinpath(*parts[:length])
            path = folder.with_suffix(".py") if folder.with_suffix(".py").is_file() else folder / "__init__.py"
            rest = parts[length:]
            if path.is_file():
                return "" if not rest or ".".join(rest) in names_in(path) else f"{path.name} has no {'.'.join(rest)}"
    return f"no module is called {token}"


def fault_of_file(name: str, member: str) -> str:
    """What is wrong with a file named without its folder, such as `plane.py:ControlPlane`; empty if nothing is."""
    folders = [PROJECT / room for room in ROOMS.split("|")]
    paths = [*PROJECT.glob(name), *(path for folder in folders for path in folder.rglob(name))]
    if not paths:
        return "there is no such file"
    return "" if not member or any(member in names_in(path) for path in paths) else f"it has no {member}"


def text_of(document: Path) -> str:
    """The text without the Python in it, which other tests run."""
    return re.sub(r"^```python\n.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def prose(document: Path) -> str:
    """The text without addresses, and without the names of documents, which look like modules."""
    return re.sub(r"https?://\S+|[\w-]+\.md\b", "", text_of(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_and_function_a_document_names_exists(document: Path) -> None:
    faults = [
        f"{token}: {fault}" for found in PATH.findall(text_of(document)) for token in expanded(found)
        if token not in OTHER_NAMES and (fault := fault_of_path(token))
    ]  # fmt: skip
    for name, member in FILE.findall(text_of(document)):
        if fault := fault_of_file(name, member.removeprefix(":")):
            faults.append(f"{name}{member}: {fault}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_module_a_document_names_exists(document: Path) -> None:
    tokens = [token for token in MODULE.findall(prose(document)) if token not in OTHER_NAMES]
    faults = [f"{token}: {fault}" for token in tokens if (fault := fault_of_module(token))]
    assert not faults, "\n".join(faults)
