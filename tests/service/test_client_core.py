"""The state of an engine over several connections, without I/O."""

from __future__ import annotations

from errno import ESTALE

import pytest
from support_engine_client import take_results
from support_service import NAMESPACE, block_keys

from kvtier.client.core import EngineCore
from kvtier.client.request import ClientRequest
from kvtier.service import wire
from kvtier.service.wire import LEASED, Keys, Places
from kvtier.tier.contract import LookupResult
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import STORED, BlockStatus, GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GroupIndex, JobId
from kvtier.types.requests import RequestInfo

KEYS = block_keys(3)
MANIFEST = NAMESPACE.manifest().encode()


def served() -> EngineCore:
    """An engine that has joined with its greeting."""
    core = EngineCore()
    core.joins, core.manifest = True, MANIFEST
    core.take_in([wire.Notes(0, ["note"]), wire.Joined()])
    assert core.serves
    core.is_new = False
    return core


def taken(core: EngineCore, kind: type[wire.Item]) -> list[wire.Item]:
    """The items of a kind that the next step would send; all are sent."""
    found = [item for item in core.out if isinstance(item, kind)]
    core.out.clear()
    return found


def job(kind: JobKind) -> TransferJob:
    return TransferJob(JobId(9), kind, (GPUGroup(GroupIndex(0), KEYS, GPURuns.whole(range(3))),))


def leased(core: EngineCore) -> ClientRequest:
    """A request that was found three rows."""
    request = core.request("r", KEYS)
    (asked,) = taken(core, wire.Ask)
    assert isinstance(asked, wire.Ask)
    core.take_in([wire.Found(asked.number, bytes([LEASED] * 3), Places.of([5, 6, 7], [1, 1, 1]))])
    assert core.lookup(request, KEYS) == [LookupResult.HIT] * 3
    return request


def connect_again(core: EngineCore) -> None:
    core.on_connected()
    core.take_in([wire.Notes(0, ["note"])])


def test_without_a_connection_all_is_a_miss_and_stores_are_dropped() -> None:
    core = served()
    request = leased(core)
    core.take_in([wire.Lent(Places.of([8, 9, 10], [1, 1, 1]))])
    part = core.begin_store(job(JobKind.STORE), waits=True)
    assert part is not None
    core.lose()
    assert (core.serves, core.room, core.out) == (False, 0, [])
    assert core.lookup(request, KEYS) == [LookupResult.MISS] * 3
    (result,) = take_results(core)
    assert [outcome.status for outcome in result.outcomes[0]] == [BlockStatus.DROPPED] * 3
    core.end_store(part.job_id, ESTALE)
    request.end()
    assert core.out == []
    assert core.begin_store(job(JobKind.STORE)) is None


def test_it_joins_again_when_its_workers_are_there_and_asks_afresh() -> None:
    core = served()
    request = leased(core)
    core.lose()
    core.on_connected()
    assert not core.serves
    assert core.lookup(request, KEYS) == [LookupResult.MISS] * 3
    core.take_in([wire.Notes(0, ["one"], last=False)])
    assert not taken(core, wire.Join)
    core.take_in([wire.Notes(1, ["two"])])
    assert taken(core, wire.Join) == [wire.Join(MANIFEST)]
    core.take_in([wire.Joined(follows=True)])
    assert (core.serves, core.is_new, core.follows, core.notes) == (True, True, True, ["one", "two"])
    assert core.lookup(request, KEYS) == [LookupResult.RETRY] * 3
    core.ask(request, KEYS)
    assert [ask.keys for ask in taken(core, wire.Ask)] == [Keys.of(KEYS)]  # type: ignore[attr-defined]


def test_a_name_that_is_known_late_is_sent_to_the_process_that_there_is() -> None:
    core = EngineCore()
    core.join(MANIFEST)
    assert not taken(core, wire.Join)
    core.lose()
    connect_again(core)
    assert taken(core, wire.Join) == [wire.Join(MANIFEST)]
    core.join(MANIFEST)
    assert not taken(core, wire.Join)


def test_no_connection_is_made_while_a_load_needs_the_rows_of_the_one_before() -> None:
    core = served()
    load = core.begin_load(job(JobKind.LOAD), leased(core))
    assert load is not None
    core.lose()
    assert not core.is_drained
    core.on_load_end(load.job_id)
    assert core.is_drained
    (result,) = take_results(core)
    assert [outcome.status for outcome in result.outcomes[0]] == [BlockStatus.LOADED] * 3
    core.on_load_end(load.job_id)
    assert not core.ended


def test_a_load_that_had_ended_when_the_connection_did_needs_nothing() -> None:
    core = served()
    load = core.begin_load(job(JobKind.LOAD), leased(core))
    assert load is not None
    core.on_load_end(load.job_id)
    core.lose()
    assert core.is_drained
    assert len(take_results(core)) == 1


@pytest.mark.parametrize("ended", [True, False])
def test_a_load_that_a_reset_overtook_is_loaded_for_nobody(ended: bool) -> None:
    core = served()
    load = core.begin_load(job(JobKind.LOAD), leased(core))
    assert load is not None
    core.take_in([wire.Void()])
    core.on_load_end(load.job_id)
    assert not core.ended  # the stack process will say so
    if ended:
        core.take_in([wire.Ended(load.job_id, [(3, "cancelled", "", 0)])])
    else:
        core.lose()
    (result,) = take_results(core)
    assert [outcome.status for outcome in result.outcomes[0]] == [BlockStatus.CANCELLED] * 3
    assert core.is_drained


def test_a_reset_that_no_process_made_durable_is_sent_to_the_next_one() -> None:
    core = served()
    core.reset()
    (first,) = taken(core, wire.Reset)
    core.lose()
    connect_again(core)
    assert not taken(core, wire.Reset)
    core.take_in([wire.Joined()])
    assert (core.serves, core.resetting) == (False, True)
    (second,) = taken(core, wire.Reset)
    assert isinstance(first, wire.Reset)
    assert isinstance(second, wire.Reset)
    core.take_in([wire.ResetDone(first.number)])
    assert not core.serves
    core.take_in([wire.ResetDone(second.number)])
    assert core.serves
    core.lose()
    connect_again(core)
    core.take_in([wire.Joined()])
    assert core.serves
    assert not taken(core, wire.Reset)


def test_a_reset_without_a_connection_is_sent_to_the_next_process() -> None:
    core = served()
    core.lose()
    core.reset()
    core.reset()
    assert core.out == []
    connect_again(core)
    core.take_in([wire.Weights(0, wire.CHANGED), wire.Joined()])
    (reset,) = taken(core, wire.Reset)
    assert isinstance(reset, wire.Reset)
    assert reset.loads == 1
    assert not core.serves


def test_figures_that_were_asked_for_in_vain_are_asked_for_again() -> None:
    core = served()
    core.ask_stats()
    core.lose()
    assert core.stats_pending == 0


def test_rows_go_back_in_a_rest_and_are_asked_for_with_the_next_lookup() -> None:
    core = served()
    core.want_rows()
    assert taken(core, wire.Want) == [wire.Want(64)]
    places = [(row, 1) for row in range(1500)]
    core.take_in([wire.Lent(Places.of(*zip(*places, strict=True)))])
    core.rest()
    assert core.out[0] == wire.Want(0)
    returned = taken(core, wire.Return)
    assert [pair for item in returned for pair in item.places.pairs()] == places  # type: ignore[attr-defined]
    assert len(returned) == 2, "parts that fit a message"
    core.rest()
    assert core.out == []
    core.take_in([wire.Lent(Places.of([7], [2]))])  # on its way since before
    core.rest()
    assert core.out == [wire.Return(Places.of([7], [2]))]
    core.out.clear()
    core.request("r", KEYS)
    assert [type(item) for item in core.out] == [wire.Want, wire.Ask]
    assert core.out[0] == wire.Want(64)


def test_what_a_revoke_names_beyond_a_message_goes_back_in_parts() -> None:
    core = served()
    places = [(row, 1) for row in range(9000)]
    for first in range(0, 9000, 1000):
        core.take_in([wire.Lent(Places.of(*zip(*places[first : first + 1000], strict=True)))])
    core.take_in([wire.Revoke([], 8000)])
    assert sum(len(message) for message in wire.FROM_ENGINE.encode(core.out, 0)) > wire.MESSAGE_BYTES_MAX
    returned = [pair for item in taken(core, wire.Return) for pair in item.places.pairs()]  # type: ignore[attr-defined]
    assert returned == places[:8000]
    assert core.room == 1000


def test_a_lease_that_is_asked_back_at_once_holds_for_a_step_of_lookups() -> None:
    core = served()
    core.begin_turn()
    request = leased(core)
    core.take_in([wire.Revoke(["r"])])
    core.begin_turn()
    assert core.lookup(request, KEYS) == [LookupResult.HIT] * 3
    assert not taken(core, wire.Drop)
    core.begin_turn()
    assert taken(core, wire.Drop) == [wire.Drop("r")]
    assert core.lookup(request, KEYS) == [LookupResult.RETRY] * 3
    core.begin_turn()
    assert not core.out


def test_a_lease_that_has_held_for_a_step_is_given_back_at_once() -> None:
    core = served()
    leased(core)
    core.begin_turn()
    core.begin_turn()
    core.take_in([wire.Revoke(["r"])])
    assert taken(core, wire.Drop) == [wire.Drop("r")]


def test_a_load_of_what_is_asked_back_goes_on_and_the_next_lease_of_its_request_is_not_given_back() -> None:
    core = served()
    request = leased(core)
    core.take_in([wire.Revoke(["r"])])
    core.begin_turn()
    assert core.begin_load(job(JobKind.LOAD), request) is not None
    core.ask(request, KEYS)
    (asked,) = taken(core, wire.Ask)
    assert isinstance(asked, wire.Ask)
    core.take_in([wire.Found(asked.number, bytes([LEASED] * 3), Places.of([5, 6, 7], [1, 1, 1]))])
    for _ in range(3):
        core.begin_turn()
    assert not taken(core, wire.Drop)
    assert core.lookup(request, KEYS) == [LookupResult.HIT] * 3


def test_what_was_stored_since_it_was_asked_for_is_asked_for_anew() -> None:
    """As for a request that waited, or was preempted. A row that is gone by then is a miss, once for all."""
    core = served()
    request = core.request("r", KEYS)
    (asked,) = taken(core, wire.Ask)
    assert isinstance(asked, wire.Ask)
    core.take_in([wire.Found(asked.number, bytes([wire.MISSING] * 3), Places.of([], []))])
    assert core.lookup(request, KEYS) == [LookupResult.MISS] * 3
    core.take_in([wire.Lent(Places.of([8, 9, 10], [1, 1, 1]))])
    part = core.begin_store(job(JobKind.STORE))
    assert part is not None
    assert core.lookup(request, KEYS) == [LookupResult.MISS] * 3
    core.take_in([wire.Ended(part.job_id, [(3, BlockStatus.STORED.value, "", 0)])])
    assert core.lookup(request, KEYS) == [LookupResult.RETRY] * 3
    core.ask(request, KEYS)
    (again,) = taken(core, wire.Ask)
    assert isinstance(again, wire.Ask)
    assert again.keys == Keys.of(KEYS)
    states = bytes([LEASED, wire.MISSING, LEASED])
    core.take_in([wire.Found(again.number, states, Places.of([8, 10], [1, 1]))])
    hit, miss = LookupResult.HIT, LookupResult.MISS
    assert [core.lookup(request, KEYS) for _ in range(2)] == [[hit, miss, hit]] * 2


def test_a_request_of_the_same_id_ends_the_one_before() -> None:
    """The stack process knows both by one name: what is leased to the first would be dropped with the second."""
    core = served()
    first = leased(core)
    second = core.request("r", KEYS)
    assert first.ended
    assert [type(item) for item in core.out] == [wire.Drop, wire.Ask]
    assert core.lookup(first, KEYS) == [LookupResult.MISS] * 3
    core.out.clear()
    core.reserve(first, KEYS)
    core.ask(first, KEYS)
    assert not core.out
    assert core.free_id("r") not in ("r", core.free_id("r"))
    second.end()
    assert core.free_id("r") == "r"


def test_a_reset_that_waits_for_the_engine_to_join_is_not_over() -> None:
    core = served()
    core.lose()
    core.on_connected()
    core.reset()
    assert (core.resetting, core.resets_later) == (False, True)
    core.take_in([wire.Notes(0, ["note"]), wire.Joined()])
    assert (core.resetting, core.resets_later) == (True, False)
    (reset,) = taken(core, wire.Reset)
    assert isinstance(reset, wire.Reset)
    core.take_in([wire.ResetDone(reset.number, "")])
    assert (core.resetting, core.resets_later) == (False, False)


def test_a_store_of_an_own_worker_ends_with_its_copy() -> None:
    core = EngineCore(own_worker=True)
    core.joins, core.manifest = True, MANIFEST
    core.take_in([wire.Notes(0, ["note"]), wire.Joined(), wire.Lent(Places.of([8, 9, 10], [1, 1, 1]))])
    part = core.begin_store(job(JobKind.STORE))
    assert part is not None
    core.lose()
    core.take_in([wire.Ended(part.job_id, [(3, "failed", "", ESTALE)])])
    assert take_results(core) == []
    core.on_copied_alone(part.job_id, [STORED] * 3)
    (result,) = take_results(core)
    assert [outcome.status for outcome in result.outcomes[0]] == [BlockStatus.DROPPED] * 3


def test_an_engine_of_other_weights_is_held_back_by_each_process_that_it_joins() -> None:
    core = served()
    core.hold_back("the weights were replaced")
    core.hold_back("a later reason")
    assert taken(core, wire.HoldBack) == [wire.HoldBack("the weights were replaced")] * 2
    core.lose()
    core.hold_back("without a connection")
    connect_again(core)
    core.reset()
    assert not taken(core, wire.HoldBack)
    core.take_in([wire.Joined()])
    assert [type(item) for item in core.out] == [wire.Reset, wire.HoldBack]


def test_what_no_tier_was_asked_for_is_asked_for_later() -> None:
    core = served()
    looks = core.request("looks")
    core.look(looks, KEYS, asks=False)
    (look,) = taken(core, wire.Look)
    assert isinstance(look, wire.Look)
    core.take_in([wire.Found(look.number, bytes([wire.UNKNOWN, wire.MISSING, wire.IN_ROW]), Places.of([], []))])
    assert core.lookup(looks, KEYS) == [LookupResult.RETRY, LookupResult.MISS, LookupResult.HIT]
    assert list(looks.states) == list(KEYS[1:])
    core.ask(looks, KEYS)
    assert [ask.keys for ask in taken(core, wire.Ask)] == [Keys.of(KEYS[:1])]  # type: ignore[attr-defined]


def test_facts_of_a_request_come_with_the_last_of_its_keys() -> None:
    core = served()
    info = RequestInfo("s" * 600, "t" * 400, priority=1 << 70)
    core.request("r", info=info).extend(block_keys(wire.ITEM_KEYS_MAX + 1))
    first, last = taken(core, wire.Begin)
    assert isinstance(first, wire.Begin)
    assert isinstance(last, wire.Begin)
    assert (first.more, first.info, last.more) == (True, {}, False)
    assert (last.info["tenant"], last.info["priority"]) == ("t" * 400, (1 << 53) - 1)
    assert str(last.info["session"]).startswith("sha256:")
