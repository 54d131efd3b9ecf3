"""The one inspection of every store, a folder or a server: how it is listed, checked, repaired and pruned."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvtier.errors import RootError
from kvtier.tier.inspection import CheckStep, Finding, FindingKind, ListStep, StoreAbout, StoredBlock


class PlaceContent(Protocol):
    """The content of one place of a store, as it was read."""

    @property
    def block(self) -> StoredBlock | None:
        """The block as the tools list it; None if it is none."""


C = TypeVar("C", bound=PlaceContent)


class Page(NamedTuple, Generic[C]):
    """Places that were read together: their number, and the content of those that hold something.

    `of_other_releases` are the namespaces of blocks among them that this release neither reads nor removes.
    """

    slots: int
    contents: Sequence[C]
    of_other_releases: Collection[bytes] = ()


class CheckedPage(NamedTuple, Generic[C]):
    """Places that were read with payloads: their counts, with findings of the store's own records, and the content of
    those that hold no whole block, each with its fault. That of a leftover is empty."""

    step: CheckStep
    others: Sequence[tuple[C, str]] = ()


class StoreInspection(ABC, Generic[C]):
    """A store under inspection, whatever keeps it. See `kvtier.tier.inspection.Inspection`.

    What keeps blocks implements what is abstract here. An OSError anywhere raises the RootError of `_refusal`.
    """

    about: StoreAbout

    def blocks(self) -> Iterator[ListStep]:
        """Every block that has a whole header, in the order of their places. Payloads are not read."""
        with self._refusing():
            for page in self._pages():
                yield ListStep(page.slots, [block for one in page.contents if (block := one.block) is not None])

    def check(self, repair: bool) -> Iterator[CheckStep]:
        """Verify the store's own records, and every place with its payload. Repair removes damaged blocks and restores
        the records."""
        with self._refusing():
            for page in self._check_pages(repair):
                faulty = [one for one, fault in page.others if fault]
                gone = self._remove(faulty, must=False) if repair and faulty else ()
                findings = [self._finding(one, fault, one in gone) for one, fault in page.others]
                yield page.step._replace(findings=[*findings, *page.step.findings])

    def _finding(self, one: C, fault: str, repaired: bool) -> Finding:
        where, block = self._place_in_words(one), one.block
        if fault:
            return Finding(FindingKind.CORRUPT, fault, where, repaired)
        if block is None:
            return Finding(FindingKind.UNKNOWN_FILE, "name", where)
        return Finding(FindingKind(block.state.value), block.state.value, where)

    def drop(self, chosen: Callable[[StoredBlock], bool]) -> Iterator[ListStep]:
        """Remove chosen blocks, yielding these. A namespace without any left loses its manifest, and keeps its epoch.

        Raises RootError if a block cannot be removed; what was dropped until then stays dropped.
        """
        dropped: set[bytes] = set()
        kept: set[bytes] = set()
        with self._refusing():
            for page in self._pages():
                blocks = {one: block for one in page.contents if (block := one.block) is not None}
                going = [one for one, block in blocks.items() if chosen(block)]
                gone = self._remove(going, must=True) if going else ()
                for one, block in blocks.items():
                    (dropped if one in gone else kept).add(block.namespace)
                kept.update(page.of_other_releases)
                yield ListStep(page.slots, [blocks[one] for one in going if one in gone])
            self._sync()
            for namespace in dropped - kept:
                self._forget(namespace)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._refusal(error) from error

    @abstractmethod
    def close(self) -> None:
        """Release the store. Idempotent."""

    @abstractmethod
    def _refusal(self, error: OSError) -> RootError:
        """An error of reading or changing the store, in words."""

    @abstractmethod
    def _pages(self) -> Iterator[Page[C]]:
        """Every place that holds something, in order, without payloads."""

    @abstractmethod
    def _check_pages(self, repair: bool) -> Iterator[CheckedPage[C]]:
        """The store's own records and every place, verified with payloads. With `repair` the records are restored."""

    @abstractmethod
    def _place_in_words(self, one: C) -> str:
        """A place in words."""

    @abstractmethod
    def _remove(self, contents: Sequence[C], must: bool) -> Collection[C]:
        """Remove what is still as it was read, of one page. Returns what was removed; with `must` a failure raises."""

    @abstractmethod
    def _sync(self) -> None:
        """Make removals durable. Raises RootError."""

    @abstractmethod
    def _forget(self, namespace: bytes) -> None:
        """Remove the manifest of a namespace."""
