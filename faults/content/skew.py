"""Another namespace, one identity field at a time, and other format versions: a clean miss, never an exception.

The fields are found by walking `Namespace`, so that a field that is added later is attacked as well.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import kvtier.types.namespace
from kvtier.errors import GeometryError
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.types.namespace import Namespace

from ..attack import Budget, Tally
from .stored import LAYOUTS, Found, Stored, found_in, held, load, opened, run, store, stored
from .wrong_files import CASES, Case, Scene, attack_with, renew

BLOCKS = 8
BASE = Namespace(
    KVLayout(
        (
            GroupLayout((TensorRef(0, 6000), TensorRef(1, 4000))),
            GroupLayout((TensorRef(2, 4000),), kind=GroupKind.SLIDING_WINDOW, window_tokens=128, padding_bytes=96),
        )
    ),
    model="some/model",
    weights="0f" * 16,
    dtype="bfloat16",
    hash_algorithm="sha256",
    hash_seed="7",
    tag="mine",
    extra={"attention": "flash", "kv_layout": "NHD"},
)
SAME = tuple(dataclasses.replace(BASE, dtype=dtype) for dtype in ("BFLOAT16", "torch.bfloat16", "bf16"))
"""The base with its element type spelled in other ways: the same namespace, so the same blocks."""


class Skewed(NamedTuple):
    """A namespace that differs in one field."""

    field: str
    namespace: Namespace


def changes(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The same value with one thing changed in it, for every thing there is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            for inner, changed in changes(getattr(value, field.name), f"{path}.{field.name}"):
                try:
                    yield inner, dataclasses.replace(value, **{field.name: changed})
                except GeometryError:
                    continue  # no layout there is, so no engine will ever name it
    elif isinstance(value, Enum):
        yield from ((f"{path}={other.value}", other) for other in type(value) if other is not value)
    elif isinstance(value, bool):
        yield path, not value
    elif isinstance(value, int):
        yield f"{path} more", value + 1
        yield f"{path} less", value - 1
    elif isinstance(value, str):
        yield f"{path} longer", f"{value}x"
        yield f"{path} empty", ""
        yield f"{path} in other letters", value.swapcase() if value.swapcase() != value else f"{value}\u0130"
    elif isinstance(value, Mapping):
        yield f"{path} more", {**value, "another": ""}
        for key in value:
            yield f"{path} without {key}", {other: one for other, one in value.items() if other != key}
            yield from ((inner, {**value, key: changed}) for inner, changed in changes(value[key], f"{path}[{key}]"))
    elif isinstance(value, tuple):
        yield f"{path} turned", value[::-1]
        yield f"{path} more", (*value, value[-1])
        yield f"{path} less", value[:-1]
        for number, item in enumerate(value):
            rest = (value[:number], value[number + 1 :])
            for inner, changed in changes(item, f"{path}[{number}]"):
                yield inner, (*rest[0], changed, *rest[1])
    else:
        raise TypeError(f"{path}: no rule says how to change {value!r}")


def skewed() -> list[Skewed]:
    """Every namespace that differs from the base in one thing."""
    found = [Skewed(path, changed) for path, changed in changes(BASE, "namespace")]
    found.append(Skewed("namespace.dtype another", dataclasses.replace(BASE, dtype="float16")))
    return [one for one in found if one.namespace not in (BASE, *SAME)]


def untouched_fields(found: list[Skewed]) -> set[str]:
    """Fields of the namespace that none of these differs in."""
    return {
        field.name
        for field in dataclasses.fields(Namespace)
        if all(getattr(one.namespace, field.name) == getattr(BASE, field.name) for one in found)
    }


def namespace_skew(budget: Budget) -> Tally:
    """Each field on each layout, then each version of a format; then all over again."""
    tally, fields = Tally(), skewed()
    roots = {layout: stored(layout, budget.folder / layout / "root", BLOCKS, BASE) for layout in LAYOUTS}
    others = {layout: stored(layout, budget.folder / layout / "other", BLOCKS) for layout in LAYOUTS}
    bases = {layout: stored(layout, budget.folder / layout / "plain", BLOCKS) for layout in LAYOUTS}
    digests = {BASE.digest()} | {one.namespace.digest() for one in fields}
    tally.expect(len(digests) == len(fields) + 1, "two namespaces have one digest")
    tally.expect({one.digest() for one in SAME} == {BASE.digest()}, "a spelling of a type makes another namespace")
    tally.expect(not untouched_fields(fields), f"never changed: {untouched_fields(fields)}")
    formats = [case for case in CASES if "format" in case.what]
    cases: list[tuple[str, Skewed | Namespace | int | Case]]
    cases = [(layout, one) for one in (*fields, *SAME) for layout in LAYOUTS]
    cases += [(layout, version) for version in (0, 2) for layout in LAYOUTS]
    cases += [(case.layout, case) for case in formats]
    random.Random(budget.seed).shuffle(cases)
    for number in range(budget.count):
        layout, case = cases[number % len(cases)]
        if isinstance(case, Case):
            rng = random.Random(f"{number}/{budget.seed}")
            attack_with(tally, case, Scene(bases[layout], others[layout], budget.folder / "victim", rng))
        elif isinstance(case, int):
            _format_of_namespaces(tally, roots[layout], case)
        elif isinstance(case, Namespace):
            _same(tally, roots[layout], case)
        else:
            _differing(tally, roots[layout], case.field, case.namespace)
        tally.iterations += 1
    tally.notes["cases there are"] = len(cases)
    tally.notes["namespaces that differ"] = len(fields)
    tally.notes["formats that differ"] = len(formats) + 4
    return tally


def _format_of_namespaces(tally: Tally, root: Stored, version: int) -> None:
    """The namespace as a release with another format names it."""
    kept = kvtier.types.namespace.FORMAT_VERSION
    kvtier.types.namespace.FORMAT_VERSION = version
    try:
        _differing(tally, root, f"format version {version}", BASE, back=False)
    finally:
        kvtier.types.namespace.FORMAT_VERSION = kept


def _differing(tally: Tally, root: Stored, field: str, namespace: Namespace, back: bool = True) -> None:
    """Nothing of the base is found under another namespace; what that stores under the same keys is its own; and under
    the base nothing of the other is found."""
    where, before = f"{root.layout}: {field}", held()
    there = _other_side(root, namespace)
    tally.expect(there.loaded == set(root.names[:4]), f"{where}: its own blocks: {there}")
    again = found_in(root.layout, root.root, root.names, BASE) if back else Found()
    for found in (there, again):
        tally.hangs += found.hung
        tally.wrong_bytes += len(found.wrong)
        tally.expect(not (found.refused or found.broken or found.hung or found.wrong), f"{where}: {found}")
    tally.wrong_bytes += len(there.known)
    tally.expect(not there.known, f"{where}: {len(there.known)} blocks of the base are known")
    tally.notes["blocks of the base that were there afterwards"] += len(again.loaded)
    left = [now - was for now, was in zip(held(), before, strict=True)]
    tally.leaks += sum(max(0, more) for more in left)
    renew(root)


def _same(tally: Tally, root: Stored, namespace: Namespace) -> None:
    """Every block of the base is found and right under another spelling of it."""
    found = found_in(root.layout, root.root, root.names, namespace)
    tally.hangs += found.hung
    tally.wrong_bytes += len(found.wrong)
    tally.expect(found.loaded == set(root.names), f"{root.layout}: {namespace.dtype}: {found}")
    renew(root)


def _other_side(root: Stored, namespace: Namespace) -> Found:
    """Look up the blocks of the base under another namespace; then store some of the same keys and load those."""
    found = Found()

    async def work() -> None:
        async with opened(root.layout, root.root, namespace) as tier:
            asked = Found()
            found.known |= set(await tier.known(root.names))
            if root.layout == "files":
                await load(tier, root.names, asked)
                found.known |= asked.loaded | asked.wrong
            await store(tier, root.names[:4])
            await load(tier, root.names[:4], found)

    run(found, work)
    return found
