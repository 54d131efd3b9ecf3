"""Eviction, admission and write budgets of one tier: order only; called by the control plane, touches slot numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from kvtier.errors import ConfigError
from kvtier.policy.arc import ARC
from kvtier.policy.base import EvictionPolicy, RequestModel, RequestPolicy
from kvtier.policy.lru import LRU
from kvtier.policy.reuse.journal import Journal
from kvtier.policy.reuse.journaled_policy import JournaledPolicy
from kvtier.policy.reuse.policy import Reuse
from kvtier.types.keys import OffloadKey

POLICIES: dict[str, type[EvictionPolicy]] = {"arc": ARC, "lru": LRU, "reuse": Reuse}

__all__ = [
    "ARC",
    "LRU",
    "POLICIES",
    "EvictionPolicy",
    "Journal",
    "JournaledPolicy",
    "RequestModel",
    "RequestModels",
    "RequestPolicy",
    "Reuse",
    "make_policy",
    "policy_class",
]

ModelT = TypeVar("ModelT", bound=RequestModel)


class RequestModels:
    """The models of one stack: one of each type that a policy or an admission needs. `policies`: the tiers'.

    `journal` holds the calls that they and the policies that share them have yet to make.
    """

    def __init__(self, policies: Iterable[str | type[EvictionPolicy]] = ()) -> None:
        self._models: dict[type[RequestModel], RequestModel] = {}
        self.journal = Journal()
        for kind in map(policy_class, policies):
            if issubclass(kind, RequestPolicy):
                self.of(kind.MODEL)

    def __iter__(self) -> Iterator[RequestModel]:
        return iter(self._models.values())

    def of(self, kind: type[ModelT]) -> ModelT:
        """The stack's model of this type, made at the first call."""
        model = self._models.get(kind)
        if model is None:
            model = self._models[kind] = kind()
        assert isinstance(model, kind)
        return model


def policy_class(policy: str | type[EvictionPolicy]) -> type[EvictionPolicy]:
    """The class of a policy by its name in `POLICIES`; a class is its own. Raises ConfigError for an unknown name."""
    kind = POLICIES.get(policy) if isinstance(policy, str) else policy
    if kind is None:
        raise ConfigError(f"unknown policy {policy!r}; use one of {', '.join(sorted(POLICIES))}", "policy")
    return kind


def make_policy(
    policy: str | type[EvictionPolicy],
    num_slots: int,
    keys: Sequence[OffloadKey | None],
    models: RequestModels | None = None,
) -> EvictionPolicy:
    """A new policy over slots 0 .. num_slots - 1; `keys` is the tier's own list, read but never changed.

    One that follows requests shares the model of its type in `models` with the stack's other tiers. Raises ConfigError
    for a name that is not in `POLICIES`.
    """
    kind = policy_class(policy)
    if issubclass(kind, RequestPolicy):
        return kind(num_slots, keys, (models or RequestModels()).of(kind.MODEL))
    return kind(num_slots, keys)
