"""Which backends are installed: entry points of the group `kvtier.backends`, never a module named in a stack file."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, runtime_checkable

from kvtier.errors import ConfigError
from kvtier.geometry import Geometry
from kvtier.loadstore import LoadStore, SlotSpace
from kvtier.options import TierOptions

GROUP = "kvtier.backends"


@dataclass(frozen=True, slots=True)
class Preview:
    """What a tier would be if it were opened now, found without opening it.

    `space` is what an owned tier would offer for placement, None where the question does not arise. `mode` says how
    its I/O would go. Each problem is one line that names the place and says what to do; with any, opening would fail.
    """

    capacity_bytes: int | None = None
    space: SlotSpace | None = None
    mode: str = ""
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@runtime_checkable
class Previews(Protocol):
    """A backend that can say, before it is opened, what it would be on this machine.

    `kvtier check` asks. With `look` false the answer is arithmetic over the options alone. With `look` true it may look
    at the places the options name; it must be cheap, hold no lock longer than the call, leave nothing behind, and
    report bad places (a missing folder, no permission, another owner) as problems instead of raising.
    """

    def preview(self, geometry: Geometry, look: bool) -> Preview: ...


def _distribution(entry_point: EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "an unnamed distribution"


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word nearest to a mistyped one, or nothing."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


class Backends:
    """The backends of one environment by type name. Loads a backend's code when it is first asked for, not before."""

    def __init__(self, points: Iterable[EntryPoint]) -> None:
        self._points: dict[str, list[EntryPoint]] = {}
        for point in points:
            same = self._points.setdefault(point.name, [])
            if not any(point.value == other.value and _same_distribution(point, other) for other in same):
                same.append(point)
        self._loaded: dict[str, type[LoadStore]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every installed type name, sorted; nothing is loaded."""
        return tuple(sorted(self._points))

    def get(self, name: str) -> type[LoadStore]:
        """The backend class of a type name.

        Raises ConfigError for an unknown name (listing the known ones), a name that two distributions claim (naming
        both), and a backend that cannot be loaded or does not keep the contract (naming its distribution).
        """
        if name not in self._loaded:
            self._loaded[name] = _load(self._point(name))
        return self._loaded[name]

    def _point(self, name: str) -> EntryPoint:
        points = self._points.get(name)
        if not points:
            known = ", ".join(self.names) or "none is installed"
            raise ConfigError(f"no backend is called {name!r}{suggest(name, self.names)} (known: {known})")
        if len(points) > 1:
            owners = " and ".join(sorted(_distribution(point) for point in points))
            raise ConfigError(f"the backend {name!r} is claimed by {owners}; uninstall all but one")
        return points[0]


def discover() -> Backends:
    """The backends installed in this environment."""
    return Backends(entry_points(group=GROUP))


def _same_distribution(one: EntryPoint, other: EntryPoint) -> bool:
    return one.dist is not None and other.dist is not None and one.dist.name == other.dist.name


def _load(point: EntryPoint) -> type[LoadStore]:
    owner = f"the backend {point.name!r} of {_distribution(point)}"
    try:
        backend = point.load()
    except Exception as error:
        # Foreign code runs at import and may raise anything; whatever it is, the distribution is what to mend.
        reason = " ".join(str(error).split())
        raise ConfigError(f"{owner} cannot be loaded: {type(error).__name__}: {reason}; reinstall it") from error
    fault = _contract_fault(backend)
    if fault:
        raise ConfigError(f"{owner} does not keep the contract: {point.value} {fault}")
    loaded: type[LoadStore] = backend
    return loaded


def _contract_fault(backend: object) -> str:
    """What keeps an object from being a backend class; empty when nothing does."""
    if not (inspect.isclass(backend) and issubclass(backend, LoadStore)):
        return "is no subclass of kvtier.loadstore.LoadStore"
    if inspect.isabstract(backend):
        return f"leaves {', '.join(sorted(backend.__abstractmethods__))} abstract"
    options = getattr(backend, "Options", None)
    if not (inspect.isclass(options) and issubclass(options, TierOptions)):
        return "has no Options that are a subclass of kvtier.options.TierOptions"
    if not isinstance(getattr(backend, "medium", None), str):
        return "names no medium"
    alignment: object = backend.BLOCK_SIZE_ALIGNMENT
    if not isinstance(alignment, int) or alignment < 1:
        return f"has a BLOCK_SIZE_ALIGNMENT of {alignment!r}, which must be a whole number of at least 1"
    return ""
