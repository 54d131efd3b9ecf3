"""A backend of somebody else: built, installed, found by its entry point, in a stack, and held to the contract."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from support_counts import fully
from support_stack import PLAIN, Engine, keys, load, opened, parts_of, stack_file, statuses, store, whole

from kvtier.errors import ConfigError
from kvtier.testing.conformance import LoadStoreTests
from kvtier.tier.registry import discover

SOURCE = Path(__file__).parent / "example_backend"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder the example package is installed into, as `pip install` does it."""
    work = tmp_path_factory.mktemp("example")
    shutil.copytree(SOURCE, work / "source", ignore=shutil.ignore_patterns("__pycache__"))
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *isolation, "--target", work / "site"]
    done = subprocess.run([*command, work / "source"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return work / "site"


@pytest.fixture
def installed(site, monkeypatch):
    """The example's class, found as the stack finds it, in an environment that holds the package."""
    with pytest.raises(ConfigError, match="no backend is called 'dirstore'"):
        discover().get("dirstore")
    monkeypatch.syspath_prepend(site)
    yield discover().get("dirstore")
    for name in [name for name in sys.modules if name.split(".")[0] == "kvtier_dirstore"]:
        del sys.modules[name]


@fully
def test_the_package_is_found_by_its_entry_point(installed, site):
    assert Path(sys.modules[installed.__module__].__file__).is_relative_to(site)
    (found,) = [each for each in distributions(path=[str(site)]) if each.name == "kvtier-dirstore"]
    assert [point.name for point in found.entry_points] == ["dirstore"]


async def test_it_serves_in_a_stack_that_is_described_in_yaml(installed, tmp_path):
    names, engine = keys(12), Engine(PLAIN, 12)
    config = stack_file(PLAIN, 4, {"type": "dirstore", "folder": tmp_path / "blocks"})
    for life in range(2):
        async with opened(parts_of(config, engine)) as stack:
            if not life:
                for start in range(0, 12, 4):
                    await store(stack, engine, whole(names[start : start + 4], start))
                    assert await stack.drain(20)
            engine.wipe()
            assert statuses(await load(stack, engine, whole(names))) == ["loaded"] * 12
            assert stack.stats().tiers["dirstore"].hits >= 8


class TestDirStore(LoadStoreTests):
    """What the package's own tests would say."""

    survives_reopen = True
    machine_examples = 5

    @pytest.fixture(autouse=True)
    def _package(self, installed):
        self.backend = installed

    def make(self, place):
        return self.backend(self.backend.Options(type="dirstore", folder=str(place)))

    def damage(self, place):
        for path in (path for path in place.rglob("*") if path.is_file() and path.stat().st_size):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        return True
