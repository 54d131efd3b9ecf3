"""Hashing on the event loop: no turn takes more than its share, nothing is forgotten, the first come first."""

import asyncio

from kvtier.aio.loop_budget import ByteBudget


async def turns_of(sizes: list[int], bytes_per_turn: int) -> list[list[int]]:
    """Which of those who asked, all at once, had room in each turn of the loop."""
    budget = ByteBudget(bytes_per_turn)
    done: list[int] = []

    async def hash_one(number: int, size: int) -> None:
        await budget.reserve(size)
        done.append(number)

    tasks = [asyncio.create_task(hash_one(number, size)) for number, size in enumerate(sizes)]
    by_turn: list[list[int]] = []
    while len(done) < len(sizes) or not by_turn:
        by_turn.append(done[sum(map(len, by_turn)) :])
        await asyncio.sleep(0)
        assert len(by_turn) < 10 * len(sizes)
    by_turn.append(done[sum(map(len, by_turn)) :])
    await asyncio.gather(*tasks)
    return [turn for turn in by_turn if turn]


async def test_what_fits_is_done_at_once() -> None:
    assert await turns_of([1, 2, 3], 10) == [[0, 1, 2]]


async def test_a_turn_ends_with_the_call_that_reaches_its_budget() -> None:
    assert await turns_of([6, 6, 6, 6, 6], 10) == [[0, 1], [2, 3], [4]]


async def test_more_than_a_turn_holds_is_done_alone() -> None:
    assert await turns_of([50, 50, 1], 10) == [[0], [1], [2]]


async def test_room_is_given_in_the_order_of_the_calls_and_a_cancelled_one_holds_up_no_other() -> None:
    budget = ByteBudget(1)
    order: list[int] = []

    async def hash_one(number: int) -> None:
        await budget.reserve(1)
        order.append(number)

    tasks = [asyncio.create_task(hash_one(number)) for number in range(6)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 2, 4, 5]
    assert tasks[3].cancelled()


async def test_a_later_turn_begins_anew() -> None:
    budget, done = ByteBudget(1), []
    for number in range(3):
        await budget.reserve(1)
        done.append(number)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert done == list(range(number + 1))
