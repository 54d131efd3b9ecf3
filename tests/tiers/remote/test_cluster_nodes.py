"""Which node of a cluster has a name, and which nodes are left alone."""

from __future__ import annotations

import pytest
from support_valkey import valkey_cluster

from kvtier_remote.valkey.cluster_nodes import PAUSE_SECONDS, SLOTS, ClusterNodes, slot_of

NAMES = ("kvtier:b:1", "{kvtier:b:1}h", "{}h", "a{b}{c}", "a{b", "}{", "{{x}}", "")


def nodes(*ids: str) -> ClusterNodes:
    """A cluster that these share in equal parts."""
    found = ClusterNodes()
    found.learn(slots(*ids))
    return found


def slots(*ids: str) -> list[list[object]]:
    return [
        [SLOTS * i // len(ids), SLOTS * (i + 1) // len(ids) - 1, [b"host", 1, node.encode(), {}], [b"replica", 2, b"r"]]
        for i, node in enumerate(ids)
    ]


def test_slots_are_those_of_the_server():
    with valkey_cluster() as servers:
        for name in NAMES:
            assert slot_of(name) == servers[0].client.execute_command("CLUSTER", "KEYSLOT", name), name


def test_both_names_of_a_split_value_lie_on_the_node_of_its_name():
    assert slot_of("kvtier:b:1") == slot_of("{kvtier:b:1}h") == slot_of("{kvtier:b:1}b")


def test_one_server_is_one_node_that_is_never_left_alone():
    one = ClusterNodes()
    assert {one.node_of(name) for name in NAMES} == {""}
    assert not any(one.judge("", False, 0.0) for _ in range(5))
    assert not one.is_down("")


def test_names_go_to_the_nodes_that_have_their_slots():
    two = nodes("a", "b")
    assert two.slots == {"a": 0, "b": SLOTS // 2}
    assert all(two.node_of(name) == ("a" if slot_of(name) < SLOTS // 2 else "b") for name in NAMES)
    assert sorted(name for some in two.by_node(NAMES).values() for name in some) == sorted(NAMES)
    assert [two.number_of(node) for node in ("a", "b", "gone")] == [0, 1, 0]


def test_a_node_that_fails_twice_in_a_row_is_left_alone_and_tried_now_and_then():
    two = nodes("a", "b")
    assert not two.judge("b", False, 0.0)
    two.judge("b", True, 1.0)
    assert not two.judge("b", False, 2.0)
    assert two.judge("b", False, 3.0)
    assert not two.judge("b", False, 4.0), "it is left alone already"
    assert (two.is_down("a"), two.is_down("b")) == (False, True)
    assert two.due(3.0 + PAUSE_SECONDS / 2) is None
    assert two.due(3.0 + PAUSE_SECONDS) == "b"
    assert two.due(3.0 + PAUSE_SECONDS) is None, "it is being tried"
    two.judge("b", True, 20.0)
    assert not two.is_down("b")


def test_once_none_answers_all_are_asked():
    two = nodes("a", "b")
    for node in ("a", "b", "a", "b"):
        two.judge(node, False, 0.0)
    assert not two.is_down("a")
    assert not two.is_down("b")


def test_a_node_whose_slots_another_one_took_is_forgotten():
    two = nodes("a", "b")
    for _ in range(2):
        two.judge("b", False, 0.0)
    two.learn(slots("a", "c"))
    assert two.due(100.0) is None
    assert not any(two.is_down(node) for node in ("a", "c"))
    assert "b" not in two.slots


@pytest.mark.parametrize("answer", [[], slots("a", "b")], ids=["nothing", "the same"])
def test_what_is_known_stays(answer):
    two = nodes("a", "b")
    two.learn(answer)
    assert two.slots == {"a": 0, "b": SLOTS // 2}
