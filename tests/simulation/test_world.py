"""The parts of the simulated world: time, disks and system calls do what the simulator's documentation says."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace

import pytest
from support_counts import full_alone

from simulator.disk import BLOCK_BYTES, SECTOR_BYTES, DiskFile, Disks, SimulatedRoot
from simulator.engine import InFlightRequest, RequestFault
from simulator.loop import VirtualLoop
from simulator.seed_run import Simulator
from simulator.syscalls import Killed, SimulatedSystem


def loop_of(seed: int = 0) -> VirtualLoop:
    return VirtualLoop(Random(seed))


def test_time_passes_at_once_and_timers_are_never_early():
    loop, woken = loop_of(), []

    async def main() -> None:
        for seconds in (5.0, 0.5, 100.0):
            before = loop.time()
            await asyncio.sleep(seconds)
            woken.append(loop.time() - before >= seconds)

    assert loop.run(main())
    assert woken == [True] * 3
    assert 105.5 <= loop.time() < 106.0
    loop.close()


def test_callbacks_run_in_the_order_they_were_asked_for():
    loop, ran = loop_of(), []

    async def main() -> None:
        for number in range(100):
            loop.call_soon(ran.append, number)
        await asyncio.sleep(0)

    assert loop.run(main())
    assert ran == list(range(100))
    loop.close()


def test_a_wait_for_what_never_comes_is_a_hang():
    loop = loop_of()

    async def main() -> None:
        await loop.create_future()

    assert not loop.run(main())
    assert "no event is pending" in loop.hang
    loop.close()


def test_a_wait_for_too_long_is_a_hang():
    loop = VirtualLoop(Random(0), seconds_max=10)
    assert not loop.run(asyncio.sleep(11))
    assert "not done after 10 s" in loop.hang
    loop.close()


def test_what_is_flushed_survives_a_power_loss_and_of_the_rest_any_subset():
    seen = set()
    for seed in range(200):
        file = DiskFile()
        file.write(0, b"a" * 2 * SECTOR_BYTES)
        file.flush()
        file.write(0, b"b" * 2 * SECTOR_BYTES)
        file.lose_power(Random(seed), 0.5)
        seen.add(bytes(file.data[::SECTOR_BYTES]))
    assert seen == {b"aa", b"ab", b"ba", b"bb"}


def test_names_not_flushed_may_be_lost_and_removed_ones_may_be_back():
    seen = set()
    for seed in range(100):
        folder = SimulatedRoot("/root", 1 << 20)
        folder.names["old"] = DiskFile()
        folder.flush()
        del folder.names["old"]
        folder.names["new"] = DiskFile()
        folder.lose_power(Random(seed), 0.5)
        seen.add(tuple(sorted(folder.names)))
    assert seen == {(), ("new",), ("old",), ("new", "old")}


@pytest.fixture
def system() -> Iterator[SimulatedSystem]:
    """A process on a folder that is there and empty."""
    folder = SimulatedRoot("/root", 1 << 20)
    folder.exists = True
    loop = loop_of()
    yield SimulatedSystem(Disks([folder]), loop, Random(0), pid=7)
    loop.close()


def test_a_system_call_that_is_not_simulated_is_an_error_that_names_it(system):
    with pytest.raises(AttributeError, match=r"os\.fork"):
        system.fork()
    assert system.O_RDWR == os.O_RDWR


def test_a_dead_process_calls_nothing_and_holds_no_lock(system):
    top = system.open("/root", os.O_RDONLY)
    fd = system.open("lock", os.O_RDWR | os.O_CREAT, dir_fd=top)
    system.flock(fd, 2)
    other = SimulatedSystem(system.disks, system.loop, Random(0), pid=8)
    mine = other.open("lock", os.O_RDWR, dir_fd=other.open("/root", os.O_RDONLY))
    with pytest.raises(BlockingIOError) as error:
        other.flock(mine, 2)
    assert error.value.errno == errno.EWOULDBLOCK
    system.kill()
    with pytest.raises(Killed):
        system.pread(fd, 1, 0)
    other.flock(mine, 2)


def test_a_folder_over_its_bound_is_named():
    folder = SimulatedRoot("/root", 8192)
    disks = Disks([folder])
    folder.names["a"] = file = DiskFile()
    file.reserve(0, 4096)
    assert disks.over_bound() == ""
    file.write(4096, b"x")
    assert disks.over_bound() == "/root takes 12288 bytes of 8192"


def test_a_temporary_of_the_same_block_is_its_place_and_no_other_is():
    def file(final_name: str, payload: bytes) -> DiskFile:
        made = DiskFile()
        made.final_name = final_name
        made.write(0, bytes(BLOCK_BYTES) + payload)
        return made

    named, first = file("block", b"a" * 512), BLOCK_BYTES // SECTOR_BYTES
    assert named.is_place(first, (named, first))
    assert named.is_place(first, (file("block", b"b" * 512), first)), "replaced under one name"
    assert named.is_place(first, (file("", b"a" * 512), first)), "never got its name"
    assert not named.is_place(first, (file("", b"b" * 512), first))
    assert not named.is_place(first, (file("other", b"a" * 512), first))
    assert not named.is_place(first, (named, 0))
    assert not file("", b"a" * 512).is_place(first, (file("", b"a" * 512), first)), "a slab has no name of a block"


@pytest.mark.parametrize(("payload", "same"), [(b"a", True), (b"b", False)])
def test_a_misplaced_write_of_the_same_block_is_no_other_place(payload, same):
    """A temporary's write that lands in the file of its block, and never in the temporary itself."""
    named, temporary = DiskFile(), DiskFile()
    named.write(0, b"h" * BLOCK_BYTES + b"a" * SECTOR_BYTES)
    named.final_name = "block"
    temporary.reserve(0, BLOCK_BYTES + SECTOR_BYTES)
    block = b"H" * BLOCK_BYTES + payload * SECTOR_BYTES
    named.write(0, block[:SECTOR_BYTES], (temporary, 0))
    named.write(SECTOR_BYTES, block[SECTOR_BYTES:], (temporary, SECTOR_BYTES))
    assert named.is_place(0, named.meant_for(0)) is same
    named.write(0, b"h" * BLOCK_BYTES)
    assert named.is_place(0, named.meant_for(0)), "written over, as it should be"


def test_a_read_of_another_file_is_foreign_unless_it_brings_the_page_that_stands_in_its_place():
    def file(at: int, page: bytes) -> DiskFile:
        made = DiskFile()
        made.write(at, page * BLOCK_BYTES + b"payload" * 10)
        return made

    def read(aim: DiskFile, got: DiskFile, at: int, end: RequestFault = RequestFault.MISPLACED) -> bool:
        request = SimpleNamespace(offset=BLOCK_BYTES)
        length = 2 * BLOCK_BYTES
        return InFlightRequest(request, True, aim, got, at, length, length, end, []).is_foreign(0)

    aim = file(BLOCK_BYTES, b"a")
    assert not read(aim, aim, BLOCK_BYTES, RequestFault.WHOLE)
    assert not read(aim, file(BLOCK_BYTES, b"a"), BLOCK_BYTES), "the file whose name a power loss took"
    assert read(aim, file(BLOCK_BYTES, b"b"), BLOCK_BYTES)
    assert read(aim, file(2 * BLOCK_BYTES, b"b"), 2 * BLOCK_BYTES)
    hit = file(BLOCK_BYTES, b"a")
    hit.write(BLOCK_BYTES, b"a" * BLOCK_BYTES, (aim, 7 * BLOCK_BYTES))
    assert read(hit, hit, BLOCK_BYTES, RequestFault.WHOLE), "what stands there was written for another place"
    assert read(hit, file(BLOCK_BYTES, b"a"), BLOCK_BYTES)


@pytest.mark.parametrize(
    ("layout", "covers"),
    [
        ("slab", ["reads whole", "writes whole", "blocks recovered", "blocks evicted from disk", "reads misplaced"]),
        pytest.param(
            "files",
            ["reads whole", "writes whole", "fs evicted", "fs bucket.scanned", "fs mismatch.payload"],
            marks=full_alone(),
        ),
    ],
)
def test_blocks_come_from_simulated_disks(layout: str, covers: list[str]) -> None:
    """A tier that does not open has every seed hold: its blocks are misses."""
    covered = Counter[str]()
    for seed in range(40):
        covered.update(Simulator(layout=layout).run(seed).covered)
    assert not [name for name in covers if not covered[name]], covered
