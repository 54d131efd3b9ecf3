"""What attacks do to a bucket from outside, without the tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import LocalStore
from support_objects import names, write

from faults.remote import objects
from faults.remote.objects import REMOVAL_PAUSES_SECONDS, Gateway


class Outside(Gateway):
    """A folder in place of a gateway's bucket."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def store(self) -> LocalStore:
        return LocalStore(str(self.path), mkdir=True)


class Refusing:
    """The service's answer to the first removals is an error of its own."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.asked = 0
        self._delete = obstore.delete

    def __call__(self, store: Any, name: str) -> None:
        self.asked += 1
        if self.asked <= self.refusals:
            raise GenericError("DeleteObjects: UnknownError")
        self._delete(store, name)


@pytest.mark.parametrize("refusals", [0, 1, len(REMOVAL_PAUSES_SECONDS)])
def test_a_removal_is_tried_again_and_that_is_said(tmp_path, monkeypatch, capsys, refusals):
    monkeypatch.setattr(objects, "REMOVAL_PAUSES_SECONDS", (0.0,) * len(REMOVAL_PAUSES_SECONDS))
    refusing, outside = Refusing(refusals), Outside(tmp_path)
    write(outside.store, "kvtier/b/00/block", b"bytes")
    monkeypatch.setattr(obstore, "delete", refusing)
    outside.empty()
    assert names(outside.store) == []
    assert refusing.asked == refusals + 1
    assert capsys.readouterr().err.count("UnknownError") == refusals


def test_a_service_that_never_removes_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "REMOVAL_PAUSES_SECONDS", (0.0,) * len(REMOVAL_PAUSES_SECONDS))
    refusing, outside = Refusing(len(REMOVAL_PAUSES_SECONDS) + 1), Outside(tmp_path)
    write(outside.store, "kvtier/b/00/block", b"bytes")
    monkeypatch.setattr(obstore, "delete", refusing)
    with pytest.raises(GenericError, match="UnknownError"):
        outside.empty()
    assert names(outside.store) == ["kvtier/b/00/block"]
