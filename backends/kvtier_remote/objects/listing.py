"""The objects below a prefix for the tools: by their names alone, a page at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from kvtier.errors import RootError
from kvtier.tier.inspection import StoreAbout
from kvtier_remote.answers import reading_answers
from kvtier_remote.inspect import Listed, ServerInspector, about_server, shown_name
from kvtier_remote.names import StoreNames
from kvtier_remote.objects.library import Store, library, os_error, store_of
from kvtier_remote.objects.options import AzureOptions, GCSOptions, ObjectOptions, S3Options
from kvtier_remote.objects.transport import ObjectTransport, precedence, stated_marker
from kvtier_remote.transport import MANIFEST_BYTES_MAX, Marker

_NAMES_AT_ONCE = 1000
"""Names in one answer of a store, and in one request to remove some."""
_READS_AT_ONCE = 8
_FOLDERS = 256

T = TypeVar("T")


class ObjectListing:
    """A bucket. Listing and removing cost a request for a thousand objects, reading one for each."""

    def __init__(self, options: ObjectOptions, store: Store) -> None:
        self._address = f"{options.type}://{options.bucket_name}/{options.prefix}"
        self._type = options.type
        self.names = StoreNames(ObjectTransport.name_format, options.prefix)
        self._store = store
        self._threads = ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="kvtier-objects-inspect")

    @property
    def about(self) -> StoreAbout:
        """The bucket; its folders are where names begin."""
        return about_server(self._address, self._type, _FOLDERS, "folders")

    def close(self) -> None:
        """End the reads in flight. Idempotent."""
        self._threads.shutdown(cancel_futures=True)

    def _ask(self, request: Callable[[], T]) -> T:
        try:
            with reading_answers():
                return request()
        except (OSError, library().exceptions.BaseError) as error:
            raise RootError(self._address, f"the store does not answer ({os_error(error).strerror})") from None

    def _list_pages(self, prefix: str) -> Iterator[Sequence[Mapping[str, object]]]:
        pages = library().list(self._store, prefix.rstrip("/"), chunk_size=_NAMES_AT_ONCE)
        while (page := self._ask(lambda: next(pages, None))) is not None:
            yield page

    def pages(self) -> Iterator[Sequence[Listed]]:
        """Every object below the blocks' folder."""
        for page in self._list_pages(self.names.blocks):
            yield [self._of(one) for one in page]

    def _of(self, one: Mapping[str, object]) -> Listed:
        path, size = str(one["path"]), int(one["size"])  # type: ignore[call-overload]
        stored_at = one["last_modified"].timestamp()  # type: ignore[attr-defined]
        return Listed(self.names.block(path), shown_name(path), (path,), True, size, size, stored_at)

    def starting(self, prefix: str) -> Iterator[Sequence[str]]:
        """The names of all objects that begin so."""
        for page in self._list_pages(prefix):
            yield [str(one["path"]) for one in page]

    def marker(self, namespace: bytes) -> Marker | None:
        """The marker of one namespace as it is now."""
        listed = (
            stated_marker(str(one["path"])) for page in self._list_pages(self.names.marker(namespace)) for one in page
        )
        return min((marker for marker in listed if marker is not None), key=precedence, default=None)

    def leases(self) -> Set[tuple[bytes, Marker]]:
        """The leases that were written lately."""
        listed = (one for page in self._list_pages(self.names.leases) for one in page)
        since = time.time() - ObjectTransport.lease_seconds
        paths = [str(one["path"]) for one in listed if one["last_modified"].timestamp() > since]  # type: ignore[attr-defined]
        return {leased for path in paths if (leased := self.names.parse_lease(path)) is not None}

    def manifest(self, name: str) -> bytes:
        """The manifest of this name; empty if there is none."""
        return bytes(self._get(name, MANIFEST_BYTES_MAX) or b"")

    def read(self, values: Sequence[Listed]) -> Iterator[memoryview | None]:
        """Each object, a few at once."""
        rest = iter(values)
        while some := list(islice(rest, _READS_AT_ONCE)):
            parts = [(str(one.parts[0]), one.stored_bytes) for one in some]
            yield from self._threads.map(lambda part: self._get(*part), parts)

    def _get(self, path: str, most_bytes: int) -> memoryview | None:
        """The first `most_bytes` of an object, and one more of a longer one."""

        def request() -> memoryview | None:
            try:
                for read in library().get(self._store, path).stream(most_bytes + 1):
                    return memoryview(read)[: most_bytes + 1]
            except FileNotFoundError:
                return None
            return memoryview(b"")

        return self._ask(request)

    def remove(self, names: Sequence[bytes | str]) -> None:
        """Remove objects, many in a request."""

        def request() -> None:
            with suppress(FileNotFoundError):
                library().delete(self._store, list(names))

        self._ask(request)


def _inspector(of: type[ObjectOptions]) -> ServerInspector:
    return ServerInspector(
        of.SCHEMES, lambda place: {of.BUCKET_KEY: place}, lambda options: ObjectListing(options, store_of(options))
    )


S3, GCS, AZURE = _inspector(S3Options), _inspector(GCSOptions), _inspector(AzureOptions)
