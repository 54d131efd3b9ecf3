"""The releases of an engine that an integration fits: decided by what its classes offer, and by which were tested."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtier.errors import ConfigError

UNTESTED_KEY = "allow_untested_engine"


@dataclass(frozen=True)
class EngineRelease:
    """The releases of one engine: its name for people, its distributions, the integration, and what was tested.

    `options` is where an operator gives options. `supported` states in words what the expression `tested` matches.
    `needed` are classes and their members by module. `logger` is one that the engine shows.
    """

    name: str
    distributions: tuple[str, ...]
    integration: str
    options: str
    supported: str
    tested: str
    needed: Mapping[str, Mapping[str, Sequence[str]]]
    logger: str = __name__

    def require_supported(self) -> None:
        """Raise ConfigError unless the installed engine has the interface that the integration was written for."""
        try:
            modules = [(importlib.import_module(name), classes) for name, classes in self.needed.items()]
        except ImportError as error:
            raise ConfigError(f"{self.integration} needs {self.supported}; {self._installed()}: {error}") from error
        self.refuse([name for module, classes in modules for name in _lacking(module, classes)])

    def refuse(self, lacks: Sequence[str]) -> None:
        """Raise ConfigError if the engine lacks any of its interface."""
        if lacks:
            found = f"{self._installed()} has another interface: it lacks {', '.join(lacks)}"
            raise ConfigError(f"{self.integration} needs {self.supported}; {found}")

    def require_tested(self, allowed: bool) -> None:
        """Raise ConfigError for a release that kvtier was not tested with, unless the operator allows it.

        The names of an interface do not show its behaviour: a method called at another moment is found by tests
        only.
        """
        if re.fullmatch(self.tested, self.version):
            return
        found = f"{self.name} {self.version} is installed, and kvtier is tested with {self.supported} only"
        if not allowed:
            raise ConfigError(f"{found}; true in {self.options} serves from an untested release", UNTESTED_KEY)
        logging.getLogger(self.logger).warning("%s", found)

    @property
    def version(self) -> str:
        """The version of the installed engine."""
        return importlib.metadata.version(self.distributions[0])

    def _installed(self) -> str:
        for name in self.distributions:
            with suppress(importlib.metadata.PackageNotFoundError):
                return f"the installed {name} {importlib.metadata.version(name)}"
        return f"no {self.name} is installed"


def _lacking(module: object, needed: Mapping[str, Sequence[str]]) -> list[str]:
    """The needed classes that a module lacks, and the members that its classes lack."""
    names = []
    for name, members in needed.items():
        found = getattr(module, name, None)
        if found is None:
            names.append(name)
        else:
            names += [f"{name}.{member}" for member in members if not hasattr(found, member)]
    return names
