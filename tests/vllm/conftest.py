"""The engine lane: tests against a real vLLM. Where it is not installed they are skipped and say so; where the lane is
asked for, with `-m engine` or `-m router`, a missing vLLM is an error."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engines import KINDS, SEED, Answer, engine, make_model, prompts

if TYPE_CHECKING:
    from support_served_stacks import ServedStacks

HAS_VLLM = importlib.util.find_spec("vllm") is not None
UNITS = [
    "test_metrics.py",
    *(
        "test_adapters.py",
        "test_contract.py",
        "test_device.py",
        "test_engine_config.py",
        "test_every_setting.py",
        "test_identity_protections.py",
        "test_idle_engines.py",
        "test_junctions.py",
        "test_model_code.py",
        "test_model_weights.py",
        "test_prefills.py",
        "test_unserved_reasons.py",
    ),
    *("test_release.py", "test_request_hints.py"),
    *("test_router_events.py", "test_secondary.py", "test_weight_files.py", "test_worker_notes.py"),
]
collect_ignore = [] if HAS_VLLM else [*UNITS, "test_service_upgrade.py"]

if HAS_VLLM:
    with warnings.catch_warnings():  # our tests treat warnings as errors; what vLLM's imports warn of is not ours
        warnings.simplefilter("ignore")
        import kvtier.engines.vllm  # noqa: F401


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_VLLM:
        return
    asked = (config.getoption("-m") or "").replace("(", " ").replace(")", " ").split()
    for item in items:
        marks = [mark for mark in ("engine", "router") if item.get_closest_marker(mark)]
        if marks:
            if marks[0] in asked:
                item.add_marker(pytest.mark.usefixtures("vllm_is_missing"))
            else:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: see docs/vllm.md for the engine lane"))


@pytest.fixture
def vllm_is_missing() -> None:
    pytest.fail("tests of engines were asked for, but vLLM is not installed")


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """The small models, each made once."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_model(kind, folder / kind) for kind in KINDS}


@pytest.fixture(scope="session")
def plain(models, tmp_path_factory) -> dict[str, Answer]:
    """What vLLM says without kvtier."""
    folder = tmp_path_factory.mktemp("plain")
    found = {}
    for kind, config in KINDS.items():
        with engine(models[kind], folder, **config) as vllm:
            found[kind] = vllm.generate(prompts(SEED))
        assert len({tuple(tokens) for tokens in found[kind].tokens}) == 24, "the model must tell prompts apart"
    return found


@pytest.fixture
def stacks(short_folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedStacks]:
    """The stack processes of the `FakeEngine`s of a test."""
    from support_served_stacks import serve_here  # which imports vLLM

    served = serve_here(short_folder, monkeypatch)
    yield served
    served.stop()


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder for the filesystem tier."""
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    return folder
