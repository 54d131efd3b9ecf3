"""The names of a Mooncake pool for the tools: the master's HTTP port lists them, a client reads and removes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import islice
from typing import TypeVar

from kvtier.errors import ConfigError, RootError
from kvtier.tier.block_envelope import KEY_AT
from kvtier.tier.inspection import StoreAbout
from kvtier_remote.inspect import Listed, ServerInspector, about_server, shown_name, stated_header_bytes, stated_time
from kvtier_remote.mooncake.client_process import MISSING_CODES, ClientProcess, os_error
from kvtier_remote.mooncake.marker_object import read_marker
from kvtier_remote.mooncake.master_http import MasterHTTP
from kvtier_remote.mooncake.options import MooncakeOptions
from kvtier_remote.mooncake.transport import MooncakeTransport
from kvtier_remote.names import StoreNames
from kvtier_remote.transport import MANIFEST_BYTES_MAX, Marker

_NAMES_AT_ONCE = 500
T = TypeVar("T")


class MooncakeListing:
    """A pool, seen by one client. What it reads counts as used."""

    def __init__(self, options: MooncakeOptions) -> None:
        """Connect. Raises ConfigError with the option to correct."""
        if options.admin is None:
            raise ConfigError("a pool is listed by its master's HTTP port; name that, such as master:9003", "admin")
        self._address = f"mooncake://{options.master}/{options.prefix}"
        self.names = StoreNames(MooncakeTransport.name_format, options.prefix)
        self._http = MasterHTTP(options.admin, options.request_timeout_seconds)
        self._client = ClientProcess(options, max(options.staging, MANIFEST_BYTES_MAX))
        try:
            self._client.open()
        except BaseException:
            self._client.close()
            raise

    @property
    def about(self) -> StoreAbout:
        """The pool, and how many processes lend memory to it."""
        segments = len(self._ask(self._http.segments))
        return about_server(self._address, "mooncake", segments, "segment" if segments == 1 else "segments")

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._client.close()

    def _ask(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except OSError as error:
            raise RootError(self._address, f"the pool does not answer ({error.strerror or error})") from None

    def starting(self, prefix: str) -> Iterator[list[str]]:
        """All names that begin so, some at a time."""
        rest = self._ask(self._http.names)

        def some() -> list[str]:
            return list(islice((name for name in rest if name.startswith(prefix)), _NAMES_AT_ONCE))

        while names := self._ask(some):
            yield names

    def _call(self, call: str, names: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """A number for each name: a length, or below 0 where there is nothing."""
        codes = self._ask(lambda: self._client.ask(call, names, offsets, sizes))
        for code in codes:
            if code < 0 and code not in MISSING_CODES:
                raise RootError(self._address, f"the pool does not answer ({os_error(code).strerror})")
        return codes

    # -- names ---------------------------------------------------------------------------------------------------

    def pages(self) -> Iterator[Sequence[Listed]]:
        """Every value under the name of a block."""
        for names in self.starting(self.names.blocks):
            lengths = self._call("present", names, (), ())
            there = [(name, length) for name, length in zip(names, lengths, strict=True) if length >= 0]
            yield list(self._measure(there))

    def _measure(self, values: Sequence[tuple[str, int]]) -> Iterator[Listed]:
        """Values with the time in their headers."""
        if not values:
            return
        offsets = [KEY_AT * i for i in range(len(values))]
        sizes = [min(KEY_AT, length) for _, length in values]
        codes = self._call("fronts", [name for name, _ in values], offsets, sizes)
        for (name, length), offset, size, code in zip(values, offsets, sizes, codes, strict=True):
            if code != size:  # it went, or was replaced, meanwhile
                continue
            front = self._client.memory[offset : offset + size].data
            payload_bytes = length - stated_header_bytes(front)
            block, shown = self.names.block(name), shown_name(name)
            yield Listed(block, shown, (name,), True, payload_bytes, length, stated_time(front))

    # -- markers and manifests -----------------------------------------------------------------------------------

    def marker(self, namespace: bytes) -> Marker | None:
        """The marker of one namespace as it is now."""
        return self._ask(lambda: read_marker(self._client, self.names.marker(namespace)))

    def leases(self) -> Set[tuple[bytes, Marker]]:
        """A pool does not say how old a value is, so there are none; its markers are never evicted."""
        return frozenset()

    def manifest(self, name: str) -> bytes:
        """The manifest of this name; empty if there is none."""
        (length,) = self._call("present", [name], (), ())
        return bytes(self._read(name, length) or b"")

    # -- values --------------------------------------------------------------------------------------------------

    def read(self, values: Sequence[Listed]) -> Iterator[memoryview | None]:
        """Each value; it is written over by the next one."""
        for one in values:
            yield self._read(str(one.parts[0]), one.stored_bytes)

    def _read(self, name: str, length: int) -> memoryview | None:
        if length < 0:
            return None
        if length > len(self._client.memory):
            raise RootError(self._address, f"a value has {length} bytes; give so much memory by -o staging={length}")
        (code,) = self._call("get", [name], [0], [length])
        return self._client.memory[:length].data if code == length else None

    def remove(self, names: Sequence[bytes | str]) -> None:
        """Remove values, also those that are being read."""
        self._call("remove", list(map(str, names)), (), ())


INSPECTOR = ServerInspector(("mooncake",), lambda place: {"type": "mooncake", "master": place}, MooncakeListing)
