"""The built wheel runs from an empty environment: nothing of the source tree is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from support_counts import fully
from support_paths import PROJECT

ROOT = PROJECT
LIBRARY = "kvtier_gpu/engines/native_copy.native.so"
PACKAGES = ("kvtier", "kvtier_cpu", "kvtier_fs", "kvtier_gpu", "kvtier_remote")
STACK = """
tiers:
  - type: gpu
  - {type: cpu, cpu_bytes_to_use: 1GiB}
  - {type: fs, roots: [/mnt/disk/kvtier], capacity: 100GiB}
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command in an environment that says nothing of this one. Fails with what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """The wheel, and an environment that holds it and, read-only, the dependencies of this one."""

    wheel: Path
    bin: Path
    site: Path
    elsewhere: Path

    def python(self, code: str) -> str:
        return run(self.bin / "python", "-c", code, cwd=self.elsewhere)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    work = tmp_path_factory.mktemp("packaging")
    isolation = ["--no-isolation"] if importlib.util.find_spec("hatchling") else []
    run(sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", work / "dist", ROOT, cwd=work)
    (wheel,) = (work / "dist").glob("*.whl")
    venv.create(work / "venv", with_pip=False)
    bin_folder = work / "venv" / "bin"
    python = bin_folder / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=work).strip())
    # The dependencies come from this environment, and from one that it lies over. A .pth file adds the folders but runs
    # none of the .pth files in them, so an editable install of this tree does not come along.
    paths = dict.fromkeys(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in paths))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=work)
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    return Installed(wheel, bin_folder, site, elsewhere)


@fully
def test_the_wheel_holds_the_packages_their_types_and_the_licence_and_nothing_else(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    for package in PACKAGES:
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.endswith((".pyc", ".yaml")) for name in names)


@fully
def test_without_a_compiler_the_wheel_is_for_every_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Installed
) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert (LIBRARY in names) == (not installed.wheel.name.endswith("-py3-none-any.whl"))
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.so")
    shutil.copytree(ROOT, tree, ignore=ignored)
    monkeypatch.setenv("CC", "/bin/false")
    isolation = ["--no-isolation"] if importlib.util.find_spec("hatchling") else []
    run(sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", tmp_path / "dist", tree, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*-py3-none-any.whl")
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()


NEED_ENGINES = ("kvtier.engines.vllm", "kvtier.engines.sglang", "kvtier.engines.lmcache")


@fully
def test_every_module_of_the_wheel_imports_from_the_wheel(installed: Installed) -> None:
    code = f"""
import importlib, pkgutil
for package in {PACKAGES!r}:
    module = importlib.import_module(package)
    assert module.__file__.startswith({str(installed.site)!r}), module.__file__
    for found in pkgutil.walk_packages(module.__path__, package + ".", onerror=lambda name: None):
        # The others say at once which engine they need, see test_engines_absent.
        if found.name not in {NEED_ENGINES!r}:
            importlib.import_module(found.name)
        print(found.name)
"""
    modules = installed.python(code).split()
    assert {"kvtier.types.geometry", "kvtier.cli.check", "kvtier.config.load", *NEED_ENGINES} <= set(modules)


@fully
def test_a_configuration_with_the_former_module_gets_what_the_present_one_has(installed: Installed) -> None:
    """vLLM, SGLang and LMCache import the module that a configuration names, and take a class from it by name."""
    code = """
import importlib
found = importlib.import_module("kvtier.integrations.transformers").PrefixCache
print(found.__module__, found is importlib.import_module("kvtier.engines.transformers").PrefixCache)
"""
    assert installed.python(code).split() == ["kvtier.engines.transformers.prefix_cache", "True"]


@fully
def test_the_backends_are_found_by_their_entry_points(installed: Installed) -> None:
    code = """
from kvtier.tier.registry import discover
backends = discover()
print(*(f"{name}={backends.get(name).__module__.partition('.')[0]}" for name in ("cpu", "fs", "gpu")))
"""
    assert installed.python(code).split() == ["cpu=kvtier_cpu", "fs=kvtier_fs", "gpu=kvtier_gpu"]


@fully
def test_the_command_runs_from_another_folder_without_the_source_tree(installed: Installed) -> None:
    (installed.elsewhere / "stack.yaml").write_text(STACK)
    kvtier = installed.bin / "kvtier"
    assert run(kvtier, "--version", cwd=installed.elsewhere).startswith("kvtier, version ")
    plan = json.loads(run(kvtier, "check", "stack.yaml", "--no-probe", "--json", cwd=installed.elsewhere))
    assert [tier["type"] for tier in plan["tiers"]] == ["gpu", "cpu", "fs"]
    assert plan["tiers"][1]["num_blocks"] == (1 << 30) // plan["row_bytes"]
    schema = json.loads(run(kvtier, "check", "--schema", cwd=installed.elsewhere))
    assert schema["required"] == ["tiers"]
