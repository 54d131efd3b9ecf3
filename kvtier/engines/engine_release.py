"""The releases of an engine that an integration fits: decided by what its classes offer, and by which were tested."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError

UNTESTED_KEY = "allow_untested_engine"
_log = logging.getLogger(__name__)


def lacking(module: object, needed: Mapping[str, Sequence[str]]) -> list[str]:
    """The classes that a module lacks of those that are needed, and of their members."""
    names = []
    for name, members in needed.items():
        found = getattr(module, name, None)
        if found is None:
            names.append(name)
        else:
            names += [f"{name}.{member}" for member in members if not hasattr(found, member)]
    return names


@dataclass(frozen=True)
class EngineRelease:
    """The releases of one engine: its name for people, its distribution, the integration, and what was tested.

    `supported` says in words what the expression `tested` matches. `needed` are classes of `module` and their members.
    """

    name: str
    distribution: str
    integration: str
    supported: str
    tested: str
    module: str
    needed: Mapping[str, Sequence[str]]

    def require_supported(self) -> None:
        """Raise ConfigError unless the installed engine has the interface that the integration was written for."""
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise ConfigError(f"{self.integration} needs {self.supported}; {self._installed()}: {error}") from error
        if names := lacking(module, self.needed):
            raise ConfigError(
                f"{self.integration} needs {self.supported}; {self._installed()} has another storage interface: "
                f"it lacks {', '.join(sorted(names))}"
            )

    def require_tested(self, allowed: bool) -> None:
        """Raise ConfigError for a release that kvtier was not tested with, unless the operator allows it.

        The names of an interface say nothing of its behaviour: a method called at another moment is found by tests
        only.
        """
        if re.fullmatch(self.tested, self.version):
            return
        found = f"{self.name} {self.version} is installed, and kvtier is tested with {self.supported} only"
        if not allowed:
            raise ConfigError(f"{found}; true serves from an untested release all the same", UNTESTED_KEY)
        _log.warning("%s", found)

    @property
    def version(self) -> str:
        """The version of the installed engine."""
        return importlib.metadata.version(self.distribution)

    def _installed(self) -> str:
        try:
            return f"the installed {self.name} is {self.version}"
        except importlib.metadata.PackageNotFoundError:
            return f"no {self.name} is installed"
