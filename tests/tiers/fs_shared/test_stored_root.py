"""A root that commit 91f9e2b wrote opens today with every block. data/ was made by support/make_stored_roots.py."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from make_stored_roots import BLOCKS, PAGE_BYTES
from support_files import open_files, options
from support_fs import keys, layout

from kvtier.errors import RootError
from kvtier.tier.checksum import BODY_AT, seal
from kvtier.types.jobs import LOADED
from kvtier_fs.format.superblock import COPY_BYTES, SUPERBLOCK_MAGIC

STORED = Path(__file__).parent / "data" / "root-91f9e2b.tar.xz"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter=_owned)
    return tmp_path / "files"


def _owned(member: tarfile.TarInfo, _: str) -> tarfile.TarInfo:
    return member.replace(uid=os.geteuid(), gid=os.getegid(), deep=False)


async def test_a_root_of_an_earlier_commit_opens_with_every_block(root):
    async with open_files(options(root, capacity=1 << 20), layout(PAGE_BYTES)) as tier:
        assert tier.opened.notes == ()
        assert await tier.present(keys(BLOCKS)) == BLOCKS
        assert await tier.load(keys(BLOCKS)) == [LOADED] * BLOCKS


async def test_a_root_of_another_format_is_refused_in_one_line_that_says_how_to_remove_it(root):
    superblock = root / "superblock"
    body = bytearray(superblock.read_bytes()[BODY_AT:COPY_BYTES])
    body[0] += 1
    superblock.write_bytes(seal(SUPERBLOCK_MAGIC, bytes(body)) * 2)
    with pytest.raises(RootError, match=rf"version 2.*rm -r {root}") as refused:
        async with open_files(options(root, capacity=1 << 20), layout(PAGE_BYTES)):
            pass
    assert "\n" not in str(refused.value)
