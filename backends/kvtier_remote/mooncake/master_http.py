"""The HTTP port of a Mooncake master: the names in its pool, and the memory of the pool. Blocking calls."""

from __future__ import annotations

import errno
import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvtier_remote.answers import Deadline, bytes_of, items_of, number, reading_answers
from kvtier_remote.bounded_http import TimedHTTP
from kvtier_remote.reachable import address_of, look_up

_ANSWER_BYTES_MAX = 4 << 20
_SEGMENTS_MAX = 1 << 16
_NAME_BYTES_MAX = 4096
_NOT_A_MASTER = "this is no HTTP port of a Mooncake master"


class MasterHTTP:
    """Each call makes a connection of its own. Raises OSError."""

    def __init__(self, address: str, seconds: float) -> None:
        self._address = address
        self._seconds = seconds

    def names(self) -> Iterator[str]:
        """All names in the pool, of everyone; the answer is read as it is needed."""
        connection = http.client.HTTPConnection(*address_of(self._address), timeout=self._seconds)
        with self._answer("/get_all_keys", connection) as answer:
            while line := answer.readline(_NAME_BYTES_MAX):
                yield line.decode("utf-8", "replace").rstrip("\n")

    def segments(self) -> list[Mapping[str, Any]]:
        """The segments that the store processes lend."""
        host, port = address_of(self._address)
        with self._answer("/get_segments_detail", TimedHTTP(host, port, deadline=Deadline(self._seconds))) as answer:
            text = bytes_of(answer.read(_ANSWER_BYTES_MAX + 1), _ANSWER_BYTES_MAX)
        try:
            with reading_answers():
                found: object = json.loads(text)["segments"]
                return [dict(one) for one in items_of(found, 0, _SEGMENTS_MAX)]
        except OSError:
            raise OSError(errno.EBADMSG, _NOT_A_MASTER) from None

    def pool_bytes(self) -> int:
        """The memory of the pool."""
        return number(sum(number(segment.get("size_bytes", 0)) for segment in self.segments()))

    @contextmanager
    def _answer(self, path: str, connection: http.client.HTTPConnection) -> Iterator[http.client.HTTPResponse]:
        look_up([self._address], self._seconds)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise OSError(errno.EBADMSG, f"the master's HTTP port says status {answer.status}")
            yield answer
        except http.client.HTTPException:
            raise OSError(errno.EBADMSG, _NOT_A_MASTER) from None
        finally:
            connection.close()
