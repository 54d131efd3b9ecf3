"""Hints that come with vLLM's requests: from its `KvHintsEnvelope`, or from `kv_transfer_params` of an HTTP request.

A request that retains or pins is about its own blocks, prompt and output. The other hints are about what a session
retains, so that who sends them needs to know no keys. Actions of other types are other components'.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.v1.kv_offload.base import ReqContext

from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.primary.served_requests import ServedRequest
from kvtier.types.hints import Demote, KVHint, Pin, Prefetch, Release, Retain
from kvtier.types.keys import OffloadKey
from kvtier.types.requests import RequestInfo

PREFIX = "kvtier."
VERSION = "1"
PARAMETER = "kvtier_hints"
"""The key of `kv_transfer_params`: a list of actions, each with `action_type` and `payload`."""
ACTIONS_MAX = 16
_log = logging.getLogger(LOGGER)


class _OfSession(BaseModel):
    """The payload of an action; without `session` it is about the request's own."""

    model_config = ConfigDict(strict=True, extra="forbid")
    session: str | None = Field(default=None, min_length=1, max_length=256)


class _ForSeconds(_OfSession):
    """The payload of an action that ends by itself."""

    seconds: float = Field(gt=0, allow_inf_nan=False)


class _Action(BaseModel):
    """An action of a request's `kv_transfer_params`."""

    model_config = ConfigDict(strict=True, extra="forbid")
    action_type: str
    action_version: str = VERSION
    action_id: str = ""
    payload: dict[str, Any] = Field(default_factory=dict)


_Kept: TypeAlias = type[Retain] | type[Pin]
_KEPT: Mapping[str, _Kept] = {"retain": Retain, "pin": Pin}
_AT_ONCE: Mapping[str, Callable[[str], KVHint]] = {
    "prefetch": lambda session: Prefetch(session=session),
    "demote": lambda session: Demote(session=session),
    "release": Release,
}


@dataclass(frozen=True, slots=True)
class _Wish:
    """A request's blocks are to be kept for so long after its end."""

    kind: _Kept
    seconds: float
    session: str


class RequestHints:
    """Follows the hints of requests, with `hint` of a stack. A hint that cannot be read is left out, with a warning.

    What is retained is so from the moment it is stored. The time counts anew from the end of the request.
    """

    def __init__(self, hint: Callable[[KVHint], object]) -> None:
        self._hint = hint
        self._wishes: dict[str, list[_Wish]] = {}
        self.unreadable = 0

    def arrived(self, context: ReqContext) -> None:
        """A request has come: what its hints say of sessions is done now."""
        actions = self._actions(context)
        if not actions:
            return
        own, wishes = _session(context), []
        for action in actions:
            name = action.action_type.removeprefix(PREFIX)
            try:
                if action.action_version != VERSION:
                    raise ValueError(f"version {action.action_version} of {action.action_type} is not known")
                if (kind := _KEPT.get(name)) is not None:
                    kept = _ForSeconds.model_validate(action.payload)
                    wishes.append(_Wish(kind, kept.seconds, kept.session or own))
                elif (make := _AT_ONCE.get(name)) is not None:
                    self._hint(make(_OfSession.model_validate(action.payload).session or own))
                else:
                    raise ValueError(f"{action.action_type} is not known")
            except ValueError as error:
                self._unreadable(error)
        if wishes:
            self._wishes[context.req_id] = wishes

    def stored(self, request_id: str, keys: Sequence[OffloadKey]) -> None:
        """These blocks of a request are in rows, or on their way there."""
        for wish in self._wishes.get(request_id, ()):
            self._hint(wish.kind(keys, wish.seconds, wish.session))

    def ended(self, request_id: str, keys: Callable[[], Iterable[OffloadKey]]) -> None:
        """A request has ended; `keys` are all that it used."""
        if (wishes := self._wishes.pop(request_id, None)) is not None:
            used = list(keys())
            for wish in wishes:
                self._hint(wish.kind(used, wish.seconds, wish.session))

    def _actions(self, context: ReqContext) -> Sequence[_Action]:
        """The actions of the envelope and of the parameters, as far as they are kvtier's and can be read."""
        envelope = getattr(context, "kv_hints", None)
        given = (context.kv_transfer_params or {}).get(PARAMETER)
        if envelope is None and given is None:
            return ()
        said: list[Any] = [
            {"action_type": each.action_type, "action_version": each.action_version, "payload": each.payload}
            for each in (envelope.actions if envelope is not None else ())
            if each.action_type.startswith(PREFIX)
        ]
        if isinstance(given, list):
            said += given[:ACTIONS_MAX]
        elif given is not None:
            self._unreadable(ValueError(f"{PARAMETER} is a list of actions, not {type(given).__name__}"))
        found = []
        for each in said[:ACTIONS_MAX]:
            try:
                found.append(_Action.model_validate(each))
            except ValueError as error:
                self._unreadable(error)
        return found

    def _unreadable(self, error: ValueError) -> None:
        """Every client can send these, so the log has the first alone, in one line of ASCII."""
        self.unreadable += 1
        if self.unreadable == 1:
            text = str(error) if not isinstance(error, ValidationError) else str(error.errors(include_url=False))
            _log.warning("a hint of a request cannot be read, and others may follow: %.500a", text)


def request_info(context: ReqContext) -> RequestInfo | None:
    """The facts of a vLLM request for the policies that follow requests."""
    served = context.get_state(ServedRequest)
    if served is None:
        return None
    request = served.request
    return RequestInfo(
        session=getattr(request, "session_id", None) or "",
        tenant=getattr(request, "cache_salt", None) or "",
        priority=-getattr(request, "priority", 0),  # vLLM serves the lower value first
    )


def _session(context: ReqContext) -> str:
    """The request's own session: vLLM's `session_id`, or else one of this request alone."""
    info = request_info(context)
    return info.session if info is not None and info.session else str(context.req_id)
