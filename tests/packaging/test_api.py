"""The public face: its names, their types and docstrings, and `docs/api.md` say the same."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from enum import Enum
from pathlib import Path

import pytest
import support_api
from support_paths import PROJECT

import kvtier


def test_the_page_of_the_api_is_what_the_code_says() -> None:
    command = "python tests/support/support_api.py > docs/api.md"
    assert (PROJECT / "docs" / "api.md").read_text() == support_api.render(), f"write it again: {command}"


def test_an_editor_sees_the_names_that_are_loaded_at_first_use() -> None:
    """The imports for type checkers, the lazy table and `__all__` hold the same names from the same modules."""
    tree = ast.parse(Path(kvtier.__file__).read_text())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == kvtier._MODULES
    assert sorted([*typed, "__version__"]) == sorted(kvtier.__all__)
    assert set(kvtier.__all__) <= set(dir(kvtier))


def test_public_names_are_those_of_their_modules() -> None:
    for name in set(kvtier.__all__) - {"__version__"}:
        assert getattr(kvtier, name) is getattr(importlib.import_module(kvtier._MODULES[name]), name)


def test_the_version_is_that_of_the_project() -> None:
    assert kvtier.__version__ == tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvtier' has no attribute 'nothing'"):
        kvtier.nothing  # noqa: B018


def test_importing_the_face_or_the_command_line_loads_no_torch_and_no_numpy() -> None:
    code = "import sys, kvtier, kvtier.cli, kvtier.cli.ls; print(*{'torch'} & {*sys.modules}); import kvtier"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
    code = "import sys, kvtier; print(*{'torch', 'numpy', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_a_tier_is_loaded_without_its_neighbour_and_without_what_the_tools_read() -> None:
    code = "import sys, kvtier_fs; kvtier_fs.FSBackend; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    rooms = {name.split(".")[1] for name in done.stdout.split() if name.startswith("kvtier_fs.")}
    assert rooms == {"format", "io", "local", "options", "roots"}


@pytest.mark.parametrize("tool", ["ls", "du", "fsck", "gc --old"])
def test_a_tool_that_finds_no_store_has_loaded_no_torch(tool: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    code = "import sys; from kvtier.cli import main; main(standalone_mode=False); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, *tool.split(), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "holds no store" in done.stderr
    assert done.stdout.split() == ["False"]


def test_public_signatures_are_typed_and_name_nothing_private() -> None:
    for name, function in support_api.callables():
        signature = inspect.signature(function)
        annotations = [
            parameter.annotation for each, parameter in signature.parameters.items() if each not in ("self", "cls")
        ]
        for annotation in [*annotations, signature.return_annotation]:
            assert annotation is not inspect.Signature.empty, name
            assert not re.search(r"\b_", str(annotation)), name


def test_public_functions_and_classes_have_docstrings_of_their_own() -> None:
    for name, function in support_api.callables():
        assert function.__name__ == "__init__" or support_api.first_line(function), name
    for name in support_api.public_names():
        thing = getattr(kvtier, name)
        if inspect.isclass(thing):
            assert thing.__doc__, name
            assert not issubclass(thing, Enum) or thing.__doc__ != Enum.__doc__, name


def test_types_of_public_signatures_are_in_public_modules() -> None:
    for module in support_api.further_types().values():
        assert not any(part.startswith("_") for part in module.split(".")), module
