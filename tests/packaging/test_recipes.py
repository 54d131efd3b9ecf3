"""The code in docs/recipes.md runs: each Python block in the file that its first line names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support_paths import PROJECT

RECIPES = PROJECT / "docs" / "recipes.md"
BLOCKS = {
    text.splitlines()[0].removeprefix("# "): text
    for text in re.findall(r"^```python\n(.*?)^```$", RECIPES.read_text(), re.MULTILINE | re.DOTALL)
}

POLICY_TEST = """
import importlib.util
import sys

from test_policies import PolicyContract, filled, key_of

from kvtier import policy as policies

spec = importlib.util.spec_from_file_location("kvtier.policy.slru", "slru.py")
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
policies.POLICIES["slru"] = module.SegmentedLRU  # step 2 of the recipe


"""


def run(folder: Path, *command: str) -> str:
    """What a command says. Fails with all of it unless it ends well."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the kit and the policies need no plugin
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_tests(folder: Path, test: str, *paths: Path) -> int:
    """How many tests of a file passed, with these folders on the path."""
    (folder / "pytest.ini").write_text(
        f"[pytest]\npythonpath = . {' '.join(map(str, paths))}\nfilterwarnings = error\n"
    )
    said = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}", test)
    return int(re.search(r"^(\d+) passed", said, re.MULTILINE)[1])  # type: ignore[index]


def test_the_page_has_these_blocks() -> None:
    assert list(BLOCKS) == [
        "kvtier/policy/slru.py",
        "tests/policies/test_policies.py",
        "kvtier_ramstore/__init__.py",
        "tests/test_ramstore.py",
        "kvtier_sqlite/__init__.py",
        "tests/test_sqlite.py",
        "what_becomes_of_old_roots.py",
        "what_the_new_release_lacks.py",
    ]


def test_the_policy_keeps_the_contract_of_policies(tmp_path: Path) -> None:
    (tmp_path / "slru.py").write_text(BLOCKS["kvtier/policy/slru.py"])
    (tmp_path / "test_slru.py").write_text(POLICY_TEST.lstrip() + BLOCKS["tests/policies/test_policies.py"])
    contract = (PROJECT / "tests" / "policies" / "test_policies.py").read_text()
    assert run_tests(tmp_path, "test_slru.py", PROJECT / "tests" / "policies") > contract.count("policy, _ = filled")


@pytest.mark.parametrize(("name", "tests"), [("ramstore", 30), ("sqlite", 50)])
def test_a_tier_keeps_its_contracts(tmp_path: Path, name: str, tests: int) -> None:
    (tmp_path / f"kvtier_{name}").mkdir()
    (tmp_path / f"kvtier_{name}" / "__init__.py").write_text(BLOCKS[f"kvtier_{name}/__init__.py"])
    (tmp_path / f"test_{name}.py").write_text(BLOCKS[f"tests/test_{name}.py"])
    assert run_tests(tmp_path, f"test_{name}.py") > tests


def test_the_tier_is_announced_as_the_recipe_says() -> None:
    (announced,) = re.findall(r"^```toml\n(.*?)^```$", RECIPES.read_text(), re.MULTILINE | re.DOTALL)
    assert announced == textwrap.dedent("""\
        [project.entry-points."kvtier.backends"]
        ramstore = "kvtier_ramstore:RamStore"
    """)


@pytest.mark.parametrize("name", [name for name in BLOCKS if "/" not in name])
def test_a_script_of_a_recipe_runs(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(BLOCKS[name])
    run(tmp_path, "-W", "error", name)
