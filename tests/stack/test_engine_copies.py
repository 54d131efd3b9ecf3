"""Copies that the engine carries out itself end when it says so, before or after they begin here, and at close."""

from __future__ import annotations

import asyncio
import errno

import pytest
from support_gpu import MmapRows, context, job, transfer
from support_gpu_worker import TWO_WORKERS

from kvtier.errors import UsageError
from kvtier.stack.workers import EngineCopies
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import LOADED, STORED, failed

ONE = job(transfer(0, GPURuns.whole([3, 1, 4, 0], 4), [2]), job_id=7)


async def opened() -> EngineCopies:
    copies = EngineCopies()
    with pytest.raises(UsageError):
        await copies.load(ONE)
    await copies.open(context(TWO_WORKERS, [], MmapRows(TWO_WORKERS, 4)))
    with pytest.raises(UsageError):
        await copies.open(context(TWO_WORKERS, [], MmapRows(TWO_WORKERS, 4)))
    return copies


@pytest.mark.parametrize("reason", [0, errno.EIO])
async def test_a_job_ends_by_the_engines_word_whichever_comes_first(reason: int) -> None:
    copies = await opened()
    await asyncio.to_thread(copies.end, [ONE.job_id], reason)
    await asyncio.sleep(0)
    assert (await copies.load(ONE)).outcomes == ((failed(reason) if reason else LOADED,),)
    waiting = asyncio.create_task(copies.store(ONE))
    await asyncio.sleep(0)
    assert not waiting.done()
    copies.end([ONE.job_id], reason)
    assert (await waiting).outcomes == ((failed(reason) if reason else STORED,),)


async def test_a_cancelled_job_ends_only_when_the_engine_says_so() -> None:
    copies = await opened()
    waiting = asyncio.create_task(copies.store(ONE))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    copies.end([ONE.job_id])
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_has_not_ended_at_close_has_failed_and_so_has_what_comes_later() -> None:
    copies = await opened()
    waiting = asyncio.create_task(copies.store(ONE))
    await asyncio.sleep(0)
    await copies.close()
    copies.end([ONE.job_id])
    assert (await waiting).outcomes == ((failed(errno.ECANCELED),),)
    assert (await copies.load(ONE)).outcomes == ((failed(errno.ECANCELED),),)
