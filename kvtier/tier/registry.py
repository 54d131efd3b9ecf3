"""The installed backends: entry points of the group `kvtier.backends`, never a module named in a stack file."""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import ClassVar, Generic, Protocol, Self, TypeVar, runtime_checkable

from kvtier.errors import ConfigError
from kvtier.options import TierOptions
from kvtier.tier.contract import LoadStore, SlotSpace
from kvtier.types.geometry import Geometry

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DryRun:
    """The facts of a tier if it were opened now, found without opening it.

    `space` is what an owned tier would offer for placement, None where the question does not arise. `mode` says how
    its I/O would go. Each problem is one line that names the place and says what to do, or a ConfigError whose path is
    the option to correct; with any, opening would fail. `probe_prefix` is as in `Opened`.
    """

    capacity_bytes: int | None = None
    space: SlotSpace | None = None
    mode: str = ""
    notes: tuple[str, ...] = ()
    problems: tuple[str | ConfigError, ...] = ()
    probe_prefix: bool = False


@runtime_checkable
class DryRuns(Protocol):
    """A tier that can say, before it is opened, what it would be on this machine: for `kvtier check`."""

    def dry_run(self, geometry: Geometry, probe: bool) -> DryRun:
        """The facts that opening would give.

        With `probe` false the answer is arithmetic over the options alone. With true it may read the places that the
        options name; it must be cheap, hold no lock longer than the call and leave nothing behind. Bad places (a
        missing folder, no permission, another owner) are problems of the answer, not exceptions.
        """


@runtime_checkable
class EmbedsServer(Protocol):
    """A tier on a server that can start one of its own on this machine, so that a stack can be tried out without any:
    for `kvtier replay --server embedded`."""

    def embedded(self, folder: Path, blocks: int, row_bytes: int) -> AbstractContextManager[TierOptions]:
        """Run a server until the end of the block, and give the tier's options with it in place of those of the file.

        It holds about `blocks` blocks of `row_bytes` and then evicts. `folder` is empty and this server's alone. It
        ends with this process, however that ends. Blocking. Raises ConfigError that says what to install.
        """


def _distribution(entry_point: EntryPoint) -> str:
    """Who installed an entry point, for an error."""
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "an unnamed distribution"


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word nearest to a mistyped one, or nothing."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


class Installed(ABC, Generic[T]):
    """The objects that distributions offer by name in one group of entry points. Code is imported at its first use."""

    GROUP: ClassVar[str]
    KIND: ClassVar[str]
    OPTION: ClassVar[str] = ""
    """The option that names one, for errors."""

    def __init__(self, points: Iterable[EntryPoint]) -> None:
        self._points = tuple(points)

    @classmethod
    def find(cls) -> Self:
        """The objects of this environment.

        The search reads the metadata of every installed distribution and takes longer than opening a small stack. It is
        repeated only after `sys.path` has changed.
        """
        return cls(_find_points(cls.GROUP, tuple(sys.path)))

    @property
    def names(self) -> tuple[str, ...]:
        """Every installed name, sorted; nothing is loaded."""
        return tuple(sorted({point.name for point in self._points}))

    def get(self, name: str) -> T:
        """The object of a name.

        Raises ConfigError for an unknown name (listing the known ones), a name that two distributions claim (naming
        both), and an object that cannot be loaded or does not keep the contract (naming its distribution).
        """
        points = [point for point in self._points if point.name == name]
        if not points:
            known = ", ".join(self.names) or "none is installed"
            raise ConfigError(
                f"no {self.KIND} is called {name!r}{suggest(name, self.names)} (known: {known})", self.OPTION
            )
        if len(points) > 1:
            owners = " and ".join(sorted(map(_distribution, points)))
            raise ConfigError(f"the {self.KIND} {name!r} is claimed by {owners}; uninstall all but one", self.OPTION)
        return self._load(points[0])

    def _load(self, point: EntryPoint) -> T:
        try:
            loaded: T = point.load()
        except Exception as error:
            # Foreign code runs at import and may raise anything; whatever it is, the distribution is what to mend.
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(f"{self._owner(point)} cannot be loaded: {reason}; reinstall it", self.OPTION) from error
        if fault := self._contract_fault(loaded):
            raise ConfigError(f"{self._owner(point)} does not keep the contract: {point.value} {fault}", self.OPTION)
        return loaded

    def _owner(self, point: EntryPoint) -> str:
        """The object in an error. The version is read from a file, so this is for errors alone."""
        return f"the {self.KIND} {point.name!r} of {_distribution(point)}"

    @staticmethod
    @abstractmethod
    def _contract_fault(loaded: object) -> str:
        """The reason why an object is not of this kind; empty when it is."""


@lru_cache(maxsize=4)
def _find_points(group: str, search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of the distributions on a search path, which is that of `sys.path`."""
    return tuple(entry_points(group=group))


class Backends(Installed[type[LoadStore]]):
    """The backends of one environment by type name."""

    GROUP = "kvtier.backends"
    KIND = "backend"

    @staticmethod
    def _contract_fault(loaded: object) -> str:
        if not (inspect.isclass(loaded) and issubclass(loaded, LoadStore)):
            return "is no subclass of kvtier.tier.contract.LoadStore"
        if inspect.isabstract(loaded):
            return f"leaves {', '.join(sorted(loaded.__abstractmethods__))} abstract"
        options = getattr(loaded, "Options", None)
        if not (inspect.isclass(options) and issubclass(options, TierOptions)):
            return "has no Options that are a subclass of kvtier.options.TierOptions"
        if not isinstance(getattr(loaded, "medium", None), str):
            return "names no medium"
        alignment: object = loaded.BLOCK_SIZE_ALIGNMENT
        if not isinstance(alignment, int) or alignment < 1:
            return f"has a BLOCK_SIZE_ALIGNMENT of {alignment!r}, which must be a whole number of at least 1"
        return ""


def discover() -> Backends:
    """The backends installed in this environment. See `Installed.find`."""
    return Backends.find()
