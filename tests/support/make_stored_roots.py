"""Makes the roots in tests/tiers/fs_local/data and tests/tiers/fs_shared/data: run by the release they stand for.

`PYTHONPATH=tests/support python COPY_OF_THIS_FILE FOLDER` writes FOLDER/slab.tar.xz and
FOLDER/files.tar.xz (at 91f9e2b, where the first ones were made, the support modules were in `tests`).
"""

from __future__ import annotations

import asyncio
import os
import sys
import tarfile
import tempfile
from pathlib import Path

import support_files
import support_fs

BLOCKS = 6
PAGE_BYTES = 4096


async def make(folder: Path) -> None:
    """A clean root of each layout with a few blocks in it; slab roots are sparse and stay small when packed."""
    names = support_fs.keys(BLOCKS)
    shape = support_fs.layout(PAGE_BYTES)
    async with support_fs.open_tier(support_fs.options(folder / "slab", capacity=1 << 20), shape) as tier:
        await tier.store_all(names)
    async with support_files.open_files(support_files.options(folder / "files", capacity=1 << 20), shape) as tier:
        assert all(outcome.ok for outcome in await tier.store(names))
    os.truncate(folder / "slab" / "lock", 0)  # it names the process and the host that made it


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(make(Path(scratch)))
        for layout in ("slab", "files"):
            with tarfile.open(target / f"{layout}.tar.xz", "w:xz") as archive:
                archive.add(Path(scratch) / layout, arcname=layout, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(Path(sys.argv[1]))
