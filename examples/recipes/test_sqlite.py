"""The conformance suite over the tier of this folder."""

import sqlite3
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvtier_sqlite import SqliteOptions, SqliteTier, SqliteTransport

from kvtier.testing.conformance import LoadStoreTests
from kvtier_remote.conformance import TransportTests


def options(path: Path, timeout: float = 20.0) -> SqliteOptions:
    times = {"request_timeout_seconds": timeout, "job_timeout_seconds": 40.0}
    return SqliteOptions(path=str(path), capacity="128MiB", **times)


@contextmanager
def changing(path):
    """A connection of its own to a file, to change it from outside."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        yield db
    finally:
        db.close()


class TestSqliteTransport(TransportTests):
    """The protocol of transports."""

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path_factory):
        self.path = tmp_path_factory.mktemp("file") / "kv.db"

    def make(self, place):
        return SqliteTransport(options(self.path))

    def make_unreachable(self, place):
        return SqliteTransport(options(place / "no folder" / "kv.db"))

    def make_hurried(self, place):
        return SqliteTransport(options(self.path, timeout=0.2))

    @contextmanager
    def frozen(self):  # another connection has the file locked
        with changing(self.path) as db:
            db.execute("BEGIN EXCLUSIVE")
            yield

    def lose_markers(self, place):
        with changing(self.path) as db:
            db.execute("DELETE FROM markers")
        return True


class TestSqliteTier(LoadStoreTests):
    """The contract of tiers, over the same transport."""

    survives_reopen = True
    machine_examples = 5

    def make(self, place):
        if not place.parent.exists():
            place.parent.mkdir()
        return SqliteTier(options(place))

    def damage(self, place):
        with changing(place) as db:
            db.execute("UPDATE blocks SET payload = zeroblob(length(payload))")
        return True
