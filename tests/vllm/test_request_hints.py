"""Hints that come with vLLM's requests, under a scheduler that behaves as vLLM's does."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import PAGE, FakeEngine, Request, offloading_config, stack
from support_served_stacks import ServedStacks
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext

from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.primary.request_hints import ACTIONS_MAX, PARAMETER, RequestHints, request_info
from kvtier.engines.vllm.primary.served_requests import ServedRequest
from kvtier.types.hints import Demote, HintResult, KVHint, Pin, Prefetch, Release, Retain
from kvtier.types.requests import RequestInfo

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("stacks")]
ROWS = 40
AGENT = list(range(1000, 1008))


def hinted(name: str, **payload: Any) -> KvHintsEnvelope:
    """One action of vLLM's envelope."""
    return KvHintsEnvelope("1", "message", [KvHintAction("0", f"kvtier.{name}", "1", payload)])


def run(engine: FakeEngine, words: list[int], hints: KvHintsEnvelope | None = None) -> Request:
    request = engine.add(words, hints)
    engine.run()
    assert engine.wrong == 0
    return request


def flood(engine: FakeEngine, first: int, rows: int) -> None:
    """Prompts of eight blocks that take so many rows."""
    for number in range(first, first + rows // 8):
        run(engine, [-number, *range(7)])


def retained(stacks: ServedStacks, engine: FakeEngine) -> dict[str, int]:
    """Bytes by tier, each within its quota."""
    tiers = stacks.stats(engine).tiers
    assert all(tier.retained_bytes <= tier.retained_bytes_max for tier in tiers.values())
    return {name: tier.retained_bytes for name, tier in tiers.items()}


def without_disk(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"tiers": config["tiers"][:1]}


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("hints", [hinted("retain", seconds=300.0), hinted("pin", seconds=300.0), None])
def test_what_a_request_retains_survives_a_flood_of_four_times_the_rows_and_of_the_disk(
    stacks, root, seed, below, hints
):
    """The disk holds 256 blocks with their headers."""
    described = stack(root, ROWS, capacity="2MiB")
    config = offloading_config(described if below else without_disk(described))
    with FakeEngine(config, seed, num_blocks=256) as engine:
        run(engine, AGENT, hints)
        flood(engine, 1, 4 * ROWS if not below else 600)
        stacks.eventually(engine, lambda: (sum(retained(stacks, engine).values()) > 0) == (hints is not None))
        assert run(engine, [*AGENT, 1]).hit == (len(AGENT) if hints is not None else 0)


def test_a_quota_holds_and_what_has_no_room_is_an_ordinary_block(stacks, root, seed):
    """A quarter of 40 rows: ten of 24 blocks are retained, from the front of the first prompts on."""
    config = offloading_config(without_disk(stack(root, ROWS)))
    with FakeEngine(config, seed, num_blocks=256) as engine:
        for number in range(3):
            run(engine, [number, *AGENT[1:]], hinted("retain", seconds=300.0))
        stacks.eventually(engine, lambda: retained(stacks, engine)["cpu"] == 10 * PAGE)
        flood(engine, 1, 4 * ROWS)
        assert retained(stacks, engine)["cpu"] == 10 * PAGE
        assert [run(engine, [number, *AGENT[1:], 1]).hit for number in range(3)] == [8, 2, 0]


def test_a_session_is_prefetched_demoted_and_released_by_requests_that_know_no_keys(stacks, root, seed):
    with FakeEngine(offloading_config(stack(root, ROWS)), seed, num_blocks=256) as engine:
        request = run(engine, AGENT, hinted("retain", seconds=300.0, session="agent"))
        keys = request.keys[0]
        run(engine, [1], hinted("demote", session="agent"))
        stacks.eventually(engine, lambda: stacks.locate(engine, keys) == ["fs"] * 8)
        run(engine, [2], hinted("prefetch", session="agent"))
        stacks.eventually(engine, lambda: stacks.locate(engine, keys) == ["cpu"] * 8)
        assert stacks.stats(engine).hints.prefetched == 8
        assert retained(stacks, engine)["fs"] > 0
        run(engine, [3], hinted("release", session="agent"))
        stacks.eventually(engine, lambda: sum(retained(stacks, engine).values()) == 0)


# -- what is read of them --------------------------------------------------------------------------------------------


@pytest.fixture
def said() -> list[KVHint]:
    return []


@pytest.fixture
def hints(said) -> RequestHints:
    def say(hint: KVHint) -> HintResult:
        said.append(hint)
        return HintResult()

    return RequestHints(say)


def context(name: str = "r", session: str | None = None, **given: Any) -> ReqContext:
    made = ReqContext(name, **given)
    made.set_state(ServedRequest(SimpleNamespace(session_id=session, cache_salt="salt", priority=3), 0.0))
    return made


def test_a_session_is_the_one_named_else_vllms_else_the_requests_own(hints, said):
    for name, session, payload in (("a", "of vllm", {"session": "named"}), ("b", "of vllm", {}), ("c", None, {})):
        hints.arrived(context(name, session, kv_hints=hinted("release", **payload)))
    assert said == [Release("named"), Release("of vllm"), Release("c")]


def test_blocks_are_kept_when_they_are_stored_and_again_when_the_request_ends(hints, said):
    hints.arrived(context(kv_hints=hinted("pin", seconds=5, session="s")))
    hints.stored("other", [b"z"])
    hints.stored("r", [b"a"])
    hints.ended("r", lambda: [b"a", b"b"])
    hints.ended("r", lambda: [b"a", b"b"])
    assert said == [Pin([b"a"], 5.0, "s"), Pin([b"a", b"b"], 5.0, "s")]


def test_an_http_request_says_the_same_in_its_transfer_parameters(hints, said):
    actions = [
        {"action_type": "kvtier.release", "payload": {"session": "s"}},
        {"action_type": "kvtier.demote", "payload": {"session": "s"}},
        {"action_type": "kvtier.prefetch", "payload": {"session": "s"}},
        {"action_type": "kvtier.retain", "action_version": "1", "payload": {"session": "s", "seconds": 1.5}},
    ]
    hints.arrived(context(kv_transfer_params={PARAMETER: actions, "do_remote_prefill": False}))
    hints.ended("r", lambda: [b"a"])
    assert said == [Release("s"), Demote(session="s"), Prefetch(session="s"), Retain([b"a"], 1.5, "s")]


@pytest.mark.parametrize(
    "given",
    [
        {"action_type": "kvtier.retain", "payload": {}},
        {"action_type": "kvtier.retain", "payload": {"seconds": 0}},
        {"action_type": "kvtier.retain", "payload": {"seconds": "300"}},
        {"action_type": "kvtier.retain", "payload": {"seconds": float("nan")}},
        {"action_type": "kvtier.retain", "payload": {"seconds": 1.0, "keys": []}},
        {"action_type": "kvtier.retain", "payload": {"seconds": 1.0, "session": "s" * 257}},
        {"action_type": "kvtier.retain", "payload": {"seconds": 1.0}, "action_version": "2"},
        {"action_type": "kvtier.cherish", "payload": {"seconds": 1.0}},
        {"action_type": "kvtier.release", "payload": {"session": 7}},
        {"payload": {}},
        "retain",
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_what_cannot_be_read_is_left_out_and_the_log_has_the_first(hints, said, caplog, monkeypatch, given, whole):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for name in ("a", "b"):
        with caplog.at_level(logging.WARNING, LOGGER):
            hints.arrived(context(name, kv_transfer_params={PARAMETER: given if whole else [given]}))
        hints.ended(name, lambda: [b"a"])
    assert not said
    assert hints.unreadable == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize("wrong", [{"payload": None}, {"payload": []}, {"action_version": 1}])
def test_an_action_that_cannot_be_read_costs_neither_the_request_nor_the_others(hints, said, wrong):
    """Within one process vLLM hands an envelope on as its caller made it, of whatever types."""
    right = {"action_id": "0", "action_type": "kvtier.release", "action_version": "1", "payload": {"session": "s"}}
    for at in range(3):
        actions = [right, right]
        actions.insert(at, right | wrong)
        envelope = KvHintsEnvelope("1", "message", [KvHintAction(**each) for each in actions])
        for given in ({"kv_hints": envelope}, {"kv_transfer_params": {PARAMETER: actions}}):
            said.clear()
            hints.arrived(context(**given))
            assert said == [Release("s")] * 2
        assert hints.unreadable == 2 * (at + 1)


def test_a_request_has_so_many_actions_at_most(hints, said):
    release = {"action_type": "kvtier.release", "payload": {"session": "s"}}
    hints.arrived(context(kv_hints=hinted("release"), kv_transfer_params={PARAMETER: [release] * 2 * ACTIONS_MAX}))
    assert said == [Release("r"), *[Release("s")] * (ACTIONS_MAX - 1)]


def test_actions_of_other_components_are_theirs(hints, said):
    theirs = KvHintsEnvelope("1", "message", [KvHintAction("0", "kvcr.prefetch", "1", {"anything": 1})])
    hints.arrived(context(kv_hints=theirs))
    assert not said
    assert not hints.unreadable


def test_policies_are_told_what_vllm_knows_of_a_request():
    assert request_info(context(session="s")) == RequestInfo("s", "salt", -3)
    assert request_info(context()) == RequestInfo("", "salt", -3)
    assert request_info(ReqContext("r")) is None


@pytest.mark.parametrize(
    "action",
    [
        {"action_type": "kvtier.pin", "action_version": "2\n2026-01-01 CRITICAL root: all is lost\x1b[2J"},
        {"action_type": "kvtier.\r\nWARNING: forged\u2028x"},
        {"action_type": "kvtier.pin", "payload": {"seconds\nforged": 1}},
        {"action_type": "kvtier.pin", "action_version": "9" * 100_000},
    ],
    ids=["version", "type", "key", "length"],
)
def test_what_a_client_writes_is_one_short_line_of_the_log(hints, said, caplog, action):
    hints.arrived(context(kv_transfer_params={PARAMETER: [action]}))
    (line,) = caplog.messages
    assert said == []
    assert hints.unreadable == 1
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 700
