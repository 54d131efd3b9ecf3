"""Keys keep hash and group apart; a namespace changes with every field."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.types.keys import group_runs, key_group, key_hash, make_key
from kvtier.types.namespace import DIGEST_BYTES, Namespace

GROUPS = st.integers(0, 2**32 - 1)


@given(st.binary(min_size=1, max_size=80), GROUPS)
def test_a_key_gives_back_its_hash_and_its_group(block_hash: bytes, group: int) -> None:
    key = make_key(block_hash, group)
    assert key_hash(key) == block_hash
    assert key_group(key) == group


@given(st.tuples(st.binary(min_size=1, max_size=9), GROUPS), st.tuples(st.binary(min_size=1, max_size=9), GROUPS))
def test_different_hashes_or_groups_never_make_one_key(one: tuple[bytes, int], other: tuple[bytes, int]) -> None:
    assert (make_key(*one) == make_key(*other)) == (one == other)


@given(st.lists(st.tuples(st.integers(0, 3) | GROUPS, st.integers(1, 4))))
def test_runs_of_groups_say_which_keys_follow_each_other(said: list[tuple[int, int]]) -> None:
    keys = [make_key(b"hash", group) for group, count in said for _ in range(count)]
    runs = group_runs(keys)
    assert [group for group, count in runs for _ in range(count)] == list(map(key_group, keys))
    assert all(one != other for (one, _), (other, _) in pairwise(runs))


def test_a_group_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        make_key(b"x", 2**32)


GROUP = GroupLayout((TensorRef(0, 100),), 16)
LAYOUT = KVLayout((GROUP,))
BASE = Namespace(LAYOUT, "model", "weights", "bfloat16", "sha256", "7", "blue", {"backend": "flash"})
LAYOUTS = {
    "world size": KVLayout((GROUP,), world_size=2),
    "factor": KVLayout((GROUP,), block_size_factor=2),
    "one more group": KVLayout((GROUP, GROUP)),
    "block size": KVLayout((replace(GROUP, block_size=32),)),
    "page size": KVLayout((replace(GROUP, refs=(TensorRef(0, 101),)),)),
    "tensor index": KVLayout((replace(GROUP, refs=(TensorRef(1, 100),)),)),
    "same bytes in two tensors": KVLayout((replace(GROUP, refs=(TensorRef(0, 50), TensorRef(1, 50))),)),
    "kind": KVLayout((replace(GROUP, kind=GroupKind.MAMBA),)),
    "window": KVLayout((replace(GROUP, kind=GroupKind.SLIDING_WINDOW, window_tokens=64),)),
    "wider window": KVLayout((replace(GROUP, kind=GroupKind.SLIDING_WINDOW, window_tokens=65),)),
}


def test_each_field_changed_alone_changes_the_digest() -> None:
    changed = [replace(BASE, **{field.name: "other"}) for field in fields(BASE) if field.type is str]
    assert len(changed) == len(fields(BASE)) - 2
    changed += [replace(BASE, layout=layout) for layout in LAYOUTS.values()]
    changed += [replace(BASE, extra=extra) for extra in ({}, {"backend": "other"}, {"other": "flash"})]
    digests = [namespace.digest() for namespace in (BASE, *changed)]
    assert len(set(digests)) == len(digests)


def test_a_value_moved_to_another_field_changes_the_digest() -> None:
    assert Namespace(LAYOUT, model="a").digest() != Namespace(LAYOUT, weights="a").digest()
    assert Namespace(LAYOUT, model="a,b").digest() != Namespace(LAYOUT, model="a", weights="b").digest()


def test_the_digest_is_short_and_does_not_depend_on_the_order_of_extra() -> None:
    forth, back = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert Namespace(LAYOUT, extra=forth).digest() == Namespace(LAYOUT, extra=back).digest()
    assert len(BASE.digest()) == DIGEST_BYTES


def test_the_manifest_is_readable_json_of_every_field() -> None:
    manifest = json.loads(BASE.manifest())
    assert manifest["model"] == "model"
    assert manifest["layout"]["groups"][0]["refs"][0]["page_size_bytes"] == 100
    assert set(manifest) == {field.name for field in fields(BASE)} | {"format_version"}
