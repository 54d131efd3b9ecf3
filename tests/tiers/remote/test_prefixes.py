"""Two prefixes on one store, a server or a bucket, share nothing."""

from __future__ import annotations

import pytest
import support_objects
import support_valkey
from support_hits import hits, stored


@pytest.mark.parametrize("store", ["server", "bucket"])
async def test_prefixes_share_nothing(store, request, tmp_path):
    if store == "server":
        made, place = support_valkey.Blocks, request.getfixturevalue("server")
    else:
        made, place = support_objects.Blocks, support_objects.Folder(tmp_path / "bucket")
    async with made(place, prefix="team-a").opened(tmp_path) as one:
        await stored(one)
        async with made(place, prefix="team-b").opened(tmp_path) as other:
            assert await hits(other) == 0
        assert await hits(one) == 4
