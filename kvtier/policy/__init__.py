"""Eviction, admission and write budgets of one tier: order only; called by the control plane, touches slot numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvtier.errors import ConfigError
from kvtier.options import AdmissionName
from kvtier.policy.base import EvictionPolicy, RequestModel, RequestPolicy
from kvtier.policy.lru import LRU
from kvtier.types.keys import OffloadKey

if TYPE_CHECKING:
    from kvtier.policy.admission import Admission
    from kvtier.policy.reuse.admission import BudgetedAdmission

__all__ = [
    "LRU",
    "POLICIES",
    "EvictionPolicy",
    "RequestModel",
    "RequestModels",
    "RequestPolicy",
    "make_admission",
    "make_budgeted_admission",
    "make_policy",
    "policy_class",
]


def _arc() -> type[EvictionPolicy]:
    from kvtier.policy.arc import ARC

    return ARC


def _reuse() -> type[EvictionPolicy]:
    from kvtier.policy.reuse.policy import Reuse

    return Reuse


POLICIES: dict[str, Callable[[], type[EvictionPolicy]]] = {"arc": _arc, "lru": lambda: LRU, "reuse": _reuse}
"""The policies by name. A policy's code is imported when a tier has it."""

ModelT = TypeVar("ModelT", bound=RequestModel)


class RequestModels:
    """The models of one stack: one of each type that a policy or an admission needs. `policies`: the tiers'."""

    def __init__(self, policies: Iterable[str | type[EvictionPolicy]] = ()) -> None:
        self._models: dict[type[RequestModel], RequestModel] = {}
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
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ConfigError(f"unknown policy {policy!r}; use one of {', '.join(sorted(POLICIES))}", "policy")
    return POLICIES[policy]()


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


def make_admission(name: AdmissionName, models: RequestModels, followed: bool = False) -> Admission | None:
    """A new admission without a write budget, by the name in a tier's options; None for a tier that takes every block.

    `models` are those of the stack; `predicted` uses the one of `reuse`, whatever the policies of its tiers.
    `followed`: the tier's policy follows requests.
    """
    if name == "always":
        return None
    if name == "second_use":
        from kvtier.policy.admission import SecondUse

        return SecondUse()
    from kvtier.policy.reuse.admission import Predicted

    return Predicted(models, followed)


def make_budgeted_admission(
    models: RequestModels, bytes_per_day: int, block_bytes: int, rows: int = 0
) -> BudgetedAdmission:
    """A new admission `predicted` of a tier that has a limit of bytes written a day, in blocks of `block_bytes`.

    It may decide late about blocks that lie in this many `rows`.
    """
    from kvtier.policy.reuse.admission import BudgetedAdmission
    from kvtier.policy.write_budget import WriteBudget

    return BudgetedAdmission(models, WriteBudget(bytes_per_day, block_bytes), rows)
