"""What a seed of engines at a stack process consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from kvtier.control.settings import StackSettings
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.types.keys import OffloadKey, make_key


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """The layout, the tiers, the engines and what goes wrong in a seed.

    `chains` are prompts: the keys of each group from the first block on. `models` are the namespaces that engines have,
    one drawn for each life.
    """

    layout: KVLayout
    rows: int
    policy: str
    watermark: float
    lower_slots: int
    write_policy: str
    settings: StackSettings
    chains: tuple[tuple[OffloadKey, ...], ...]
    models: tuple[str, ...]
    lives: int
    engines: int
    steps: int
    kills: float
    cuts: float
    resets: float
    service_kills: int
    weights: float
    errors: float
    slow: float
    hints: bool = False
    late_worker: float = 0.5
    notes: bool = field(default=False)


def draw_service_plan(rng: Random) -> ServicePlan:
    """A plan by one random generator. The order of draws must not change."""
    groups = tuple(
        GroupLayout((TensorRef(at, rng.choice((64, 96))),), kind=GroupKind.FULL)
        for at in range(rng.choice((1, 1, 1, 2)))
    )
    layout = KVLayout(
        groups,
        world_size=rng.choice((1, 1, 2, 3)),
        block_size_factor=rng.choice((1, 1, 2)),
        replicated=rng.random() < 0.15,
    )
    chains = []
    for number in range(rng.randint(2, 8)):
        length = rng.randint(1, 8)
        chain = [
            make_key(bytes((number, at)) * rng.choice((4, 4, 4, 6)), group)
            for at in range(length)
            for group in range(len(groups))
        ]
        chains.append(tuple(chain))
    speed = rng.choice((0.0, 0.0, 0.0, 1e6, 1e3))
    settings = StackSettings(
        reservation_seconds=rng.choice((0.05, 0.5, 5.0)),
        patience_seconds=rng.choice((0.0, 0.01, 0.2)),
        lease_seconds=rng.choice((0.05, 5.0)),
        gather_seconds=rng.choice((0.0, 0.01)),
        prefill_tokens_per_second=speed,
        close_timeout_seconds=5.0,
        events_max=rng.choice((64, 65536)),
        curves=rng.random() < 0.2,
    )
    return ServicePlan(
        layout=layout,
        rows=rng.choice((2, 4, 8, 16, 32, 64)),
        policy=rng.choice(("lru", "lru", "arc", "reuse")),
        watermark=rng.choice((0.0, 0.0, 0.2)),
        lower_slots=rng.choice((0, 4, 16, 64)),
        write_policy=rng.choice(("write_through", "on_evict")),
        settings=settings,
        chains=tuple(chains),
        models=rng.choice((("a",), ("a",), ("a", "b"), ("a", "b", "c"))),
        lives=rng.randint(1, 6),
        engines=rng.randint(1, 4),
        steps=rng.choice((10, 30, 60, 100)),
        kills=rng.choice((0.0, 0.3, 0.6)),
        cuts=rng.choice((0.0, 0.0, 0.02, 0.08)),
        resets=rng.choice((0.0, 0.0, 0.01, 0.05)),
        service_kills=rng.choice((0, 0, 0, 1, 2)),
        weights=rng.choice((0.0, 0.0, 0.0, 0.0, 0.03)),
        errors=rng.choice((0.0, 0.05)),
        slow=rng.choice((0.0, 0.0, 0.1)),
        hints=rng.random() < 0.3,
        notes=rng.random() < 0.3,
    )
