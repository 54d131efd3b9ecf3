"""What a server is and what its user may do there: its bounds, and the commands that a tier makes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvtier.errors import ConfigError
from kvtier_remote.transport import Facts
from kvtier_remote.valkey.glide import Glide, batch_of, library, os_error
from kvtier_remote.valkey.options import ValkeyOptions

FLIGHT_BYTES = 9 << 20
"""Payload in flight to one server, which moves a GiB in about a second, in one thread: what is in flight is what a
question waits for. Few calls keep its thread busy, and more of them cost more CPU time for each GiB."""
_NODES_TRIED = 64
"""Names that are tried in a cluster, whose nodes have users of their own: so many reach each of a few nodes."""
_CODE = re.compile(r"[A-Z]{3,}")


def read_facts(client: Glide, options: ValkeyOptions) -> Facts:
    """The bounds of the server, or of all primaries of a cluster, and whether the user may do what a tier does. Stores
    nothing. Raises ConfigError where something does not go with the options."""
    glide = library()
    try:
        answer = client.info([glide.InfoSection.MEMORY])
    except glide.GlideError as error:
        reason = f"the server does not tell its bounds to this user ({os_error(error).strerror}); allow +info"
        raise ConfigError(reason, "username") from None
    facts = [facts_of(fields, options) for fields in by_node(answer)]
    _check_rights(client, options)
    notes = dict.fromkeys(note for one in facts for note in one.notes)
    return Facts(sum(one.capacity_bytes for one in facts), tuple(notes), FLIGHT_BYTES * len(facts))


class _Trial(NamedTuple):
    """A command that changes nothing, and the names that its user needs to have a right to."""

    words: tuple[str, ...]
    pattern: str


def _trials(options: ValkeyOptions, name: str) -> Iterator[_Trial]:
    """Each command of a tier, on names that nothing is stored under: SET with XX writes only over what is there."""
    prefix = options.prefix
    block, marker, described = (f"{prefix}:{kind}:{name}" for kind in ("b", "m", "manifests"))
    pattern, split = f"~{prefix}:*", f"~{{{prefix}:*"
    for part, names in ((block, pattern), (f"{{{block}}}h", split)):
        for words in (("STRLEN", part), ("MGET", part), ("SET", part, "", "XX"), ("UNLINK", part)):
            yield _Trial(words, names)
    for words in (("EVAL", "return 0", "1", marker), ("GET", marker), ("SET", described, "", "XX")):
        yield _Trial(words, pattern)


def _check_rights(client: Glide, options: ValkeyOptions) -> None:
    glide = library()
    names = [f"probe{number}" for number in range(_NODES_TRIED if options.mode == "cluster" else 1)]
    trials = [trial for name in names for trial in _trials(options, name)]
    batch = batch_of(client)
    for trial in trials:
        batch.custom_command(list(trial.words))
    try:
        answers = client.exec(batch, raise_on_error=False)
    except glide.GlideError as error:
        raise ConfigError(f"the server does not answer ({os_error(error).strerror})", "servers") from None
    for trial, answer in zip(trials, answers, strict=True):
        if isinstance(answer, Exception):
            _refuse(trial, str(answer))


def _refuse(trial: _Trial, text: str) -> None:
    """Raises ConfigError for an answer that is an error, unless it says that the server is full, which it may be."""
    command = trial.words[0]
    if "NOPERM" in text or "PermissionDenied" in text:
        reason = f"this user may not use {command} on {trial.pattern[1:]}; allow +{command.lower()} and {trial.pattern}"
        raise ConfigError(reason, "username")
    if "READONLY" in text:
        raise ConfigError("the server is a replica, which takes no writes; name its primary", "servers")
    if "OOM" not in text:
        code = _CODE.search(text)
        raise ConfigError(f"the server refuses {command} ({code[0] if code else 'without a reason'})", "servers")


def by_node(answer: bytes | Mapping[bytes, bytes]) -> list[dict[str, str]]:
    """The fields that INFO names, of each node of a cluster, or of the one server."""
    texts = [text.decode("utf-8", "replace") for text in (answer.values() if isinstance(answer, Mapping) else [answer])]
    return [
        {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
        for text in texts
    ]


def facts_of(info: Mapping[str, str], options: ValkeyOptions) -> Facts:
    """What the section `memory` of INFO says. Raises ConfigError for a server without a bound, and for one that evicts
    nothing of what is stored here."""
    bound, policy = int(info.get("maxmemory", "0")), info.get("maxmemory_policy", "")
    if policy.startswith("volatile-") and options.expire_seconds is None:
        reason = f"the server evicts only what expires ({policy}); add an expiry, or give the server an allkeys policy"
        raise ConfigError(reason, "expire")
    if bound:
        note = "maxmemory-policy is noeviction: once the server is full nothing more is stored"
        return Facts(bound, (note,) if policy == "noeviction" else ())
    if not options.allow_unbounded:
        reason = "the server has no maxmemory and grows until its machine is full; set maxmemory, or write true here"
        raise ConfigError(reason, "allow_unbounded")
    memory = int(info.get("total_system_memory", "0")) or 1 << 62
    return Facts(memory, ("the server has no maxmemory and grows until its machine is full",))
