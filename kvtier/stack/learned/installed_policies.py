"""Eviction policies by name: kvtier's own, and those of other packages, by their entry points."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib.metadata import EntryPoint

from kvtier.policy import POLICIES, EvictionPolicy, RequestModel, RequestPolicy
from kvtier.tier.registry import Installed


class Policies(Installed[type[EvictionPolicy]]):
    """The policies that other packages bring, by name. `names` has kvtier's own too, which come before them."""

    GROUP = "kvtier.policies"
    KIND = "policy"
    OPTION = "policy"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*POLICIES, *super().names}))

    @staticmethod
    def _contract_fault(loaded: object) -> str:
        if not (inspect.isclass(loaded) and issubclass(loaded, EvictionPolicy)):
            return "is no subclass of kvtier.policy.EvictionPolicy"
        if inspect.isabstract(loaded):
            return f"leaves {', '.join(sorted(loaded.__abstractmethods__))} abstract"
        model = getattr(loaded, "MODEL", None)
        if issubclass(loaded, RequestPolicy) and not (inspect.isclass(model) and issubclass(model, RequestModel)):
            return "has no MODEL that is a subclass of kvtier.policy.RequestModel"
        return ""


def find_policy(name: str, points: Iterable[EntryPoint] | None = None) -> type[EvictionPolicy]:
    """The policy of a name; its code is imported now. `points`: the installed ones. Raises ConfigError."""
    if name in POLICIES:
        return POLICIES[name]()
    return (Policies.find() if points is None else Policies(points)).get(name)


def find_model(name: str) -> type[RequestModel] | None:
    """The model of a name, of kvtier's own policies or an installed one's; None if no policy has it.

    The code of all installed policies is imported. Raises ConfigError as `find_policy` does.
    """
    names = sorted(Policies.find().names, key=lambda each: each not in POLICIES)
    models = (kind.MODEL for kind in map(find_policy, names) if issubclass(kind, RequestPolicy))
    return next((model for model in models if name == model.NAME), None)
