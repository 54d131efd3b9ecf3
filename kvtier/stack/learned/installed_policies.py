"""Eviction policies by name: kvtier's own, and those of other packages, by their entry points."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from kvtier.errors import ConfigError
from kvtier.policy import POLICIES, EvictionPolicy, RequestModel, RequestPolicy
from kvtier.tier.registry import distribution, suggest

GROUP = "kvtier.policies"


def find_policy(name: str, points: Iterable[EntryPoint] | None = None) -> type[EvictionPolicy]:
    """The policy of a name, kvtier's own before all others; its code is imported now. `points`: the installed ones.

    Raises ConfigError for an unknown name (listing all names), for one that two distributions claim, and for a class
    that cannot be loaded or does not keep the contract; the message has the distributions.
    """
    if name in POLICIES:
        return POLICIES[name]
    installed = _installed(tuple(sys.path)) if points is None else tuple(points)
    found = [point for point in installed if point.name == name]
    if not found:
        known = sorted({*POLICIES, *(point.name for point in installed)})
        raise ConfigError(f"no policy is called {name!r}{suggest(name, known)} (known: {', '.join(known)})", "policy")
    if len(found) > 1:
        owners = " and ".join(sorted(map(distribution, found)))
        raise ConfigError(f"the policy {name!r} is claimed by {owners}; uninstall all but one", "policy")
    return _load(found[0])


def find_model(name: str) -> type[RequestModel] | None:
    """The model of a name, of kvtier's own policies or an installed one's; None if no policy has it.

    The code of all installed policies is imported. Raises ConfigError as `find_policy` does.
    """
    own = list(POLICIES.values())
    installed = (find_policy(point.name) for point in _installed(tuple(sys.path)))
    models = (kind.MODEL for kinds in (own, installed) for kind in kinds if issubclass(kind, RequestPolicy))
    return next((model for model in models if name == model.NAME), None)


@lru_cache(maxsize=1)
def _installed(search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of the distributions on a search path, which is that of `sys.path`. Reads all their metadata."""
    return tuple(entry_points(group=GROUP))


def _load(point: EntryPoint) -> type[EvictionPolicy]:
    owner = f"the policy {point.name!r} of {distribution(point)}"
    try:
        policy = point.load()
    except Exception as error:  # foreign code may raise anything at import
        reason = " ".join(str(error).split())
        fault = f"{owner} cannot be loaded: {type(error).__name__}: {reason}; reinstall it"
        raise ConfigError(fault, "policy") from error
    if fault := _contract_fault(policy):
        raise ConfigError(f"{owner} does not keep the contract: {point.value} {fault}", "policy")
    loaded: type[EvictionPolicy] = policy
    return loaded


def _contract_fault(policy: object) -> str:
    """Reason why an object is no policy's class; empty if it is one."""
    if not (inspect.isclass(policy) and issubclass(policy, EvictionPolicy)):
        return "is no subclass of kvtier.policy.EvictionPolicy"
    if inspect.isabstract(policy):
        return f"leaves {', '.join(sorted(policy.__abstractmethods__))} abstract"
    model = getattr(policy, "MODEL", None)
    if issubclass(policy, RequestPolicy) and not (inspect.isclass(model) and issubclass(model, RequestModel)):
        return "has no MODEL that is a subclass of kvtier.policy.RequestModel"
    return ""
