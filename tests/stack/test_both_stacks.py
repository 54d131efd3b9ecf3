"""One trace through both stacks: policies and recorder are given the same requests, the same blocks are moved."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_driver import ServedStack, drain
from support_following import FollowingLRU, Notes
from support_service import until
from support_stack import PAGE, PLAIN, Engine, fs, keys, parts_of, run_jobs, stack_file, statuses, whole

from faults.stepped import SteppedStack
from kvtier.policy import POLICIES
from kvtier.stack.watching.stats import StackStats
from kvtier.tier.contract import LookupResult
from kvtier.traces.read import read_lines
from kvtier.types.hints import Demote, Pin, Prefetch, Release, Retain
from kvtier.types.keys import OffloadKey, RequestId
from kvtier.types.requests import RequestInfo

Face = SteppedStack | ServedStack
FACES: dict[str, type[Face]] = {"asyncio": SteppedStack, "process": ServedStack}
PROMPTS, BLOCKS, REQUESTS = 16, 8, 80
ROWS, SLOTS = 36, 64
"""A disk that is too small for what is stored, and a CPU tier for half of it."""


def chains(seed: int) -> list[list[OffloadKey]]:
    """Prompts, of which every second one shares the first half of the one before."""
    rng, found = random.Random(seed), [keys(BLOCKS, tag=str(number)) for number in range(PROMPTS)]
    for number in range(1, PROMPTS, 2):
        found[number][: BLOCKS // 2] = found[number - 1][: BLOCKS // 2]
    return [found[min(rng.randrange(PROMPTS), rng.randrange(PROMPTS))] for _ in range(REQUESTS)]


def serve(stack: Face, engine: Engine, number: int, chain: list[OffloadKey]) -> list[str]:
    """One request, as an engine serves it: what is there up to the first miss is reserved and loaded, the rest stored.
    Returns what became of each block."""
    arrived = time.monotonic()
    request = stack.request(RequestId(f"r{number}"), chain, info=RequestInfo(session=f"s{number % 4}", priority=number))
    reservation = request.reserve(chain[: request.worth_loading(chain)])
    stack.step()
    while not reservation.served:
        stack.wait(1.0)
        stack.step()
    hits = [*reservation.hits(), False].index(False)
    found: list[str] = []
    if hits:
        engine.wipe()
        result = run_jobs(stack, job := stack.submit_load(chain[:hits], request, gpu_blocks=range(hits)))[job]
        assert not engine.wrong(whole(chain[:hits]), result.outcomes[0])
        found += statuses(result)
    else:
        request.release()
    if hits < len(chain):
        engine.compute(whole(chain[hits:], hits))
        job = stack.submit_store(chain[hits:], gpu_blocks=range(hits, len(chain)))
        found += statuses(run_jobs(stack, job)[job])
    request.touch(chain[:hits])
    output = keys(1, tag=f"output {number}")
    request.extend(output)
    hashes = [key[:-4] for key in chain]
    request.end(number, input_tokens=BLOCKS * 16, prompt=[OffloadKey(each) for each in hashes], arrived=arrived)
    drain(stack)
    return found


def lived(face: type[Face], config: Any, seed: int) -> tuple[list[list[str]], StackStats]:
    """(what became of the blocks of each request, the figures at the end)."""
    engine = Engine(PLAIN, BLOCKS)
    with face(parts_of(config, engine)) as stack:
        found = [serve(stack, engine, number, chain) for number, chain in enumerate(chains(seed))]
        stack.check_integrity()
        return found, stack.stats()


def shape(tmp_path: Path, name: str, policy: str, slots: int = SLOTS, **top: object) -> Any:
    disk = fs(tmp_path / name, capacity=slots * 2 * PAGE, policy=policy)
    rows = ROWS if name == "asyncio" else ROWS * 4 // 3  # a fourth of the rows is lent ahead
    return stack_file(PLAIN, rows, disk, cpu={"policy": policy}, **top)


@pytest.mark.parametrize("policy", ["lru", "arc", "reuse"])
def test_the_same_blocks_are_found_and_moved(tmp_path, seed, policy):
    """Where there is room for all blocks on the disk and for half of them in rows."""
    found = {name: lived(face, shape(tmp_path, name, policy, slots=512), seed) for name, face in FACES.items()}
    (one, first), (other, second) = found["asyncio"], found["process"]
    assert any("loaded" in each for each in one)
    assert found_in(first) == found_in(second)
    if policy == "reuse":  # which may also refuse blocks, for which no row is lent then
        one, other = ([[each for each in of if each == "loaded"] for of in each] for each in (one, other))
    assert one == other, "what was loaded and what was stored, block by block"


@pytest.mark.parametrize("policy", ["lru", "arc", "reuse"])
def test_about_the_same_blocks_are_found_where_the_disk_evicts(tmp_path, seed, policy):
    """A row is chosen when it is lent, not when its block comes."""
    mine, theirs = (found_in(lived(face, shape(tmp_path, name, policy), seed)[1]) for name, face in FACES.items())
    print(mine, theirs)
    assert theirs[0] > 0.85 * mine[0]


def found_in(figures: StackStats) -> tuple[int, int, int]:
    """(blocks that were found in a tier, bytes that were loaded, blocks that the engine asked to load)."""
    hits = sum(tier.hits for tier in figures.tiers.values())
    return hits, figures.tiers["cpu"].load_bytes, sum(figures.group_blocks["load"].values())


def notes_of(stack: Face) -> Notes:
    """What a policy was given."""
    plane = stack.served.pool.plane if isinstance(stack, ServedStack) else stack._assembled.plane
    (model,) = plane.control.models
    return model


def test_policies_are_given_the_same_requests(tmp_path, seed, monkeypatch):
    monkeypatch.setitem(POLICIES, "following", lambda: FollowingLRU)
    given = {}
    for name, face in FACES.items():
        engine = Engine(PLAIN, BLOCKS)
        with face(parts_of(shape(tmp_path, name, "following"), engine)) as stack:
            assert stack.engine.follows_requests
            for number, chain in enumerate(chains(seed)[:20]):
                serve(stack, engine, number, chain)
            notes = notes_of(stack)
        plain = [(use.request_id, use.keys, use.group, use.new_blocks, use.info) for use in notes.uses]
        given[name] = repr((plain, notes.told("extend"), notes.told("end"))).replace("'1:r", "'r")
    assert given["asyncio"] == given["process"]


def test_the_recorder_is_given_the_same_requests(tmp_path, seed):
    salt, recorded = tmp_path / "salt", []
    for name, face in FACES.items():
        folder = tmp_path / f"{name} traces"
        record = f"{{folder: '{folder}', salt_file: '{salt}'}}"
        lived(face, shape(tmp_path, name, "lru", record=record), seed)
        (path,) = folder.glob("*.jsonl.gz")
        recorded.append([(line.hash_ids, line.input_length, line.output_length) for line in read_lines(path)])
    assert len(recorded[0]) == REQUESTS
    assert sorted(recorded[0]) == sorted(recorded[1])  # by time of arrival, as far as the process can date it


@pytest.mark.parametrize("face", FACES.values(), ids=FACES)
def test_a_prompt_without_a_whole_block_is_recorded(face, tmp_path):
    record = f"{{folder: '{tmp_path / 'traces'}'}}"
    with face(parts_of(shape(tmp_path, "disk", "lru", record=record), Engine(PLAIN, BLOCKS))) as stack:
        stack.request(RequestId("short")).end(5, input_tokens=15, prompt=[])
        stack.request(RequestId("probe")).end(5)
        stack.step()
    (path,) = (tmp_path / "traces").glob("*.jsonl.gz")
    (line,) = read_lines(path)
    assert (line.hash_ids, line.input_length, line.output_length) == ([], 15, 5)


def demote(stack: Face, chain: list[OffloadKey]) -> None:
    """Have blocks on the disk alone."""
    assert stack.hint(Demote(chain)).ok
    while stack.locate(chain) != ["fs"] * BLOCKS:
        stack.step()
        stack.wait(0.01)


@pytest.mark.parametrize(("tokens_per_second", "found"), [(1e12, 0), (1e-6, BLOCKS)])
def test_what_is_computed_sooner_is_not_loaded(tmp_path, tokens_per_second, found):
    for name, face in FACES.items():
        config = shape(tmp_path, name, "lru", prefill_tokens_per_second=tokens_per_second)
        engine, chain = Engine(PLAIN, BLOCKS), keys(BLOCKS)
        with face(parts_of(config, engine)) as stack:
            serve(stack, engine, 0, chain)
            demote(stack, chain)
            serve(stack, engine, 1, chain)  # by the first load the stack knows how slow the disk is
            demote(stack, chain)
            assert serve(stack, engine, 2, chain).count("loaded") == found, name
            assert stack.stats().tiers["fs"].computed_sooner == BLOCKS - found, name


def test_the_measured_speed_of_the_engine_is_that_of_its_prompts(tmp_path):
    for name, face in FACES.items():
        config = shape(tmp_path, name, "lru", prefill_tokens_per_second="measured")
        engine, chain = Engine(PLAIN, BLOCKS), keys(BLOCKS)
        with face(parts_of(config, engine)) as stack:
            serve(stack, engine, 0, chain)
            for number in range(1, 20):
                stack.engine.prompt_computed(100_000, float(number), number + 1e-6)
            demote(stack, chain)
            serve(stack, engine, 1, chain)  # by the first load the stack knows how slow the disk is
            demote(stack, chain)
            assert "loaded" not in serve(stack, engine, 2, chain), name
            assert stack.stats().tiers["fs"].computed_sooner == BLOCKS, name


def test_hints_have_the_same_results(tmp_path):
    hints = "{retained_sets: 2, retain_time: 60s, prefetch_blocks: 4}"
    results = []
    for name, face in FACES.items():
        config = shape(tmp_path, name, "lru", hints=hints)
        engine, chain = Engine(PLAIN, BLOCKS), keys(BLOCKS)
        with face(parts_of(config, engine)) as stack:
            serve(stack, engine, 0, chain)
            given = [stack.hint(hint) for hint in (
                Retain(chain[:4], 30.0, "a"), Pin(chain[4:6], 30.0, "b"), Retain(chain[6:], 30.0, "c"),
                Prefetch(keys(6, tag="absent")), Release("a"), Release("b"), Demote(chain[:2]),
            )]  # fmt: skip
            results.append([(each.accepted, dict(each.refused)) for each in given])
            figures = stack.stats().hints
            assert figures.retained_sets == 0
            results[-1].append(figures.refused)
    assert results[0] == results[1]
    assert any(refused for _, refused in results[0][:-1])


@pytest.mark.parametrize("name", FACES)
def test_a_block_table_may_change_once_a_job_is_submitted(tmp_path, name):
    """An engine gives its row to the next request, while the blocks that it named wait for their copy."""
    engine, chain = Engine(PLAIN, 3 * BLOCKS), keys(BLOCKS)
    with FACES[name](parts_of(shape(tmp_path, name, "lru"), engine)) as stack:
        engine.compute(whole(chain))
        table = np.arange(BLOCKS, dtype=np.int64)
        job = stack.submit_store(chain, gpu_blocks=table)
        table += BLOCKS
        assert statuses(run_jobs(stack, job)[job]) == ["stored"] * BLOCKS
        request = stack.request(RequestId("r"), chain)
        reservation = request.reserve(chain)
        while not reservation.served:
            stack.step()
            stack.wait(1.0)
        engine.wipe()
        job = stack.submit_load(chain, request, gpu_blocks=table)
        table += BLOCKS
        result = run_jobs(stack, job)[job]
        assert statuses(result) == ["loaded"] * BLOCKS
        assert not engine.wrong(whole(chain, BLOCKS), result.outcomes[0])


def test_misses_of_an_engine_whose_stack_process_ended(tmp_path):
    """Nothing is found and nothing is kept, and every job ends."""
    engine, chain = Engine(PLAIN, 2 * BLOCKS), keys(BLOCKS)
    with ServedStack(parts_of(shape(tmp_path, "process", "lru"), engine)) as stack:
        serve(stack, engine, 0, chain)
        request = stack.request(RequestId("r"))
        reservation = request.reserve(chain)
        stack.served.thread.run(stack.served.server.close, 60.0)
        jobs = [stack.submit_load(chain, gpu_blocks=range(BLOCKS)), stack.submit_store(chain, gpu_blocks=range(BLOCKS))]
        results = run_jobs(stack, *jobs)
        assert set(statuses(results[jobs[0]])) <= {"missing", "loaded"}
        assert set(statuses(results[jobs[1]])) <= {"dropped:tier_down", "stored"}
        stack.step()
        while not reservation.served:
            stack.wait(1.0)
            stack.step()
        assert stack.lookup(chain) == [LookupResult.MISS] * BLOCKS
        assert stack.locate(chain) == [None] * BLOCKS
        assert not stack.hint(Retain(chain, 5.0)).ok
        assert statuses(run_jobs(stack, job := stack.submit_store(chain, gpu_blocks=range(BLOCKS)))[job])
        request.end()
        assert not stack.has_pending_work
        assert stack.stats().backlog == 0


def test_an_engine_without_requests_and_jobs_has_no_row_ahead(tmp_path):
    engine, chain = Engine(PLAIN, BLOCKS), keys(BLOCKS)
    with ServedStack(parts_of(shape(tmp_path, "process", "lru"), engine)) as stack:

        def lent() -> int:
            return int(stack.served.run(lambda: stack.served.pool.quotas.lent))

        engine.compute(whole(chain[:4], 0))
        job = stack.submit_store(chain[:4], gpu_blocks=range(4))
        assert statuses(run_jobs(stack, job)[job]) == ["stored"] * 4
        until(lambda: not lent(), "the rows are given back without another step")
        job, seen = stack.submit_load(chain[:4], gpu_blocks=range(4)), set[int]()
        until(lambda: [seen.add(lent()), job in {each.job_id for each in stack.step()}][1], "the blocks are loaded")
        assert seen == {0}, "a load alone needs no row ahead"
        with stack.request(RequestId("r"), chain):
            stack.step()
            until(lent, "rows are lent ahead of a store")
        until(lambda: [stack.step(), lent()][1] == 0, "the rows are given back, those too that came last")
        assert set(stack.lookup(chain[:4])) <= {LookupResult.HIT, LookupResult.RETRY}
