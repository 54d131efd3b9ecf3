"""The code of docs/recipes.md, in `examples/recipes`: policies and tiers keep their contracts, scripts end well."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support_counts import full_alone
from support_paths import PROJECT

PAGE = PROJECT / "docs" / "recipes.md"
CODE = PROJECT / "examples" / "recipes"
SCRIPTS = sorted(path for path in CODE.glob("what_*.py"))


def run(folder: Path, *command: str) -> str:
    """The output of a command. Fails with all of it unless it ends well."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the kits need no plugin
    environment.pop("PYTEST_ADDOPTS", None)  # it selects tests of this suite, by markers that the kits lack
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_names_every_file_of_the_folder() -> None:
    named = set(re.findall(r"\(\.\./(examples/recipes/[\w/.]+)\)", PAGE.read_text()))
    assert named == {str(path.relative_to(PROJECT)) for path in CODE.rglob("*.py")}
    assert len(SCRIPTS) == 2


@pytest.mark.parametrize(
    ("name", "tests"), [("slru", 8), ("ramstore", 30), pytest.param("sqlite", 50, marks=full_alone())]
)
def test_the_code_keeps_its_contracts(tmp_path: Path, name: str, tests: int) -> None:
    shutil.copytree(CODE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nfilterwarnings = error\n")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tmp'}", f"test_{name}.py")
    passed = re.search(r"^(\d+) passed", run(tmp_path, *command), re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) > tests


def test_the_page_shows_how_a_tier_is_registered() -> None:
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown == textwrap.dedent("""\
        [project.entry-points."kvtier.backends"]
        ramstore = "kvtier_ramstore:RamStore"
    """)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_of_a_recipe_runs(tmp_path: Path, path: Path) -> None:
    run(tmp_path, "-W", "error", str(path))
