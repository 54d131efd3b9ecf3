"""What an embedder may say of the request that a call of the stack serves."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Describes the request behind a lookup, load, store or reservation. Every field is optional.

    `session` groups the requests of one conversation, `tenant` those of one customer. `priority` orders requests, the
    higher the more urgent. `retain_until` is a time on the stack's clock (that of `time.monotonic`) until which the
    request's blocks are likely to be used again.

    No policy reads it today: calls accept it so that embedders can pass what they know now, and a later version can
    use it without a change of the calls.
    """

    session: str = ""
    tenant: str = ""
    priority: int = 0
    retain_until: float | None = None
