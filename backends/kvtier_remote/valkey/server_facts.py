"""Facts of a server and the rights of its user: its bounds, and the commands that a tier makes."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier_remote.answers import NUMBER_MAX, Deadline, bytes_of, digits, items_of, reading_answers
from kvtier_remote.transport import TransportInfo
from kvtier_remote.valkey.cluster_nodes import ClusterNodes, of_slot, read_slots
from kvtier_remote.valkey.glide import Glide, batch_of, connect, errno_of, library, os_error, unknown_command
from kvtier_remote.valkey.options import ValkeyOptions

FLIGHT_BYTES = 9 << 20
"""Payload in flight to one server, which moves a GiB in about a second, in one thread: what is in flight is what a
question waits for. Few calls keep its thread busy, and more of them cost more CPU time for each GiB."""
_CODE = re.compile(r"[A-Z]{3,32}")
_POLICY = re.compile(r"[a-z-]{1,32}")
_INFO_BYTES_MAX = 1 << 20
_NAMES_TRIED = 1 << 18
"""Names of which some fall on each node that has a slot, but for one of a million."""


def look_at(options: ValkeyOptions, nodes: ClusterNodes) -> TransportInfo:
    """The bounds of the server, or of all primaries of a cluster, and whether the user may do what a tier does. Stores
    nothing. `nodes` learns what there are. Blocking. Raises ConfigError with the option that is wrong.

    Some nodes of a cluster may be gone: what they have is missing then. Nodes are asked for half of the time that an
    opening has; the others count as gone.
    """
    deadline = Deadline(options.open_seconds / 2)
    try:
        with reading_answers():
            return _look_at(options, nodes, deadline)
    except (OSError, library().GlideError) as error:
        raise _silent(error) from None


def _look_at(options: ValkeyOptions, nodes: ClusterNodes, deadline: Deadline) -> TransportInfo:
    with _client_of(options) as client:
        nodes.learn(read_slots(client))
        answers = {node: _memory(client, slot, deadline) for node, slot in nodes.slots.items()}
    found = {node: facts_of(fields, options) for node, fields in answers.items() if fields is not None}
    if not found:
        raise ConfigError("the server does not answer", "servers")
    with _client_of(options) as client:  # the first one may be waiting for a node
        _check_rights(client, options.prefix, nodes, list(found))
    notes = dict.fromkeys(note for one in found.values() for note in one.notes)
    if gone := len(answers) - len(found):
        notes[f"{gone} of {len(answers)} nodes do not answer; what they have is missing"] = None
    capacity_bytes = sum(one.capacity_bytes for one in found.values())
    return TransportInfo(capacity_bytes, tuple(notes), FLIGHT_BYTES * len(answers), look_up_before_store=True)


@contextmanager
def _client_of(options: ValkeyOptions) -> Iterator[Glide]:
    client = connect(options)
    try:
        yield client
    finally:
        client.close()


def _silent(error: BaseException) -> ConfigError:
    return ConfigError(f"the server does not answer ({os_error(error).strerror})", "servers")


def info(client: Glide, section: Any, slot: int) -> dict[str, str]:
    """The fields of a section of INFO, of the node of a cluster that has a slot, or of the one server. Raises
    GlideError, and OSError for an answer that is none."""
    route = {"route": of_slot(slot)} if isinstance(client, library().GlideClusterClient) else {}
    lines = bytes_of(client.info([section], **route), _INFO_BYTES_MAX).decode("utf-8", "replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _memory(client: Glide, slot: int, deadline: Deadline) -> dict[str, str] | None:
    """The section `memory`; None if the node does not answer in time. Raises ConfigError."""
    glide = library()
    if deadline.left_seconds <= 0:
        return None
    try:
        return info(client, glide.InfoSection.MEMORY, slot)
    except glide.GlideError as error:
        if errno_of(error) != errno.EACCES:
            return None
        raise ConfigError("the server does not tell its bounds to this user; allow +info", "username") from None


class _Trial(NamedTuple):
    """A command that changes nothing, and the names that its user needs to have a right to."""

    words: tuple[str, ...]
    pattern: str


def _trials(prefix: str, block: str, tag: str) -> Iterator[_Trial]:
    """Each command of a tier, on names that nothing is stored under: SET with XX writes only over what is there."""
    pattern, split = f"~{prefix}:*", f"~{{{prefix}:*"
    for part, names in ((block, pattern), (f"{{{block}}}h", split)):
        for words in (("STRLEN", part), ("MGET", part), ("SET", part, "", "XX"), ("UNLINK", part)):
            yield _Trial(words, names)
    marker, manifest = f"{prefix}:m:{tag}", f"{prefix}:manifests:{tag}"
    for words in (("EVAL", "return 0", "1", marker), ("GET", marker), ("SET", manifest, "", "XX")):
        yield _Trial(words, pattern)


def _check_rights(client: Glide, prefix: str, nodes: ClusterNodes, tried: Sequence[str]) -> None:
    """Nodes have users of their own, so that names are tried which each of them has."""
    blocks = _names_of(nodes, tried, prefix + ":b:probe{}")
    tags = _names_of(nodes, tried, "{{probe{}}}")
    trials: list[_Trial] = []
    for node in tried:
        if node in blocks and node in tags:
            trials += _trials(prefix, blocks[node], tags[node])
    batch = batch_of(client)
    for trial in trials:
        batch.custom_command(list(trial.words))
    answers = client.exec(batch, raise_on_error=False)
    for trial, answer in zip(trials, items_of(answers, len(trials), len(trials)), strict=True):
        if isinstance(answer, Exception):
            _refuse(trial, str(answer))


def _names_of(nodes: ClusterNodes, tried: Sequence[str], spelled: str) -> dict[str, str]:
    """A name for each node, from a number."""
    found: dict[str, str] = {}
    for number in range(_NAMES_TRIED):
        name = spelled.format(number)
        found.setdefault(nodes.node_of(name), name)
        if found.keys() >= set(tried):
            break
    return found


def _refuse(trial: _Trial, text: str) -> None:
    """Raises ConfigError for an answer that is an error, unless it says that the server is full, which it may be."""
    command = trial.words[0]
    if "NOPERM" in text or "PermissionDenied" in text:
        reason = f"this user may not use {command} on {trial.pattern[1:]}; allow +{command.lower()} and {trial.pattern}"
        raise ConfigError(reason, "username")
    if "READONLY" in text:
        raise ConfigError("the server is a replica, which takes no writes; name its primary", "servers")
    if unknown := unknown_command(text):
        raise ConfigError(unknown, "servers")
    if "OOM" not in text:
        code = _CODE.search(text)
        raise ConfigError(f"the server refuses {command} ({code[0] if code else 'without a reason'})", "servers")


def facts_of(info: Mapping[str, str], options: ValkeyOptions) -> TransportInfo:
    """The facts in the section `memory` of INFO. Raises ConfigError for a server without a bound, and for one that
    evicts nothing of what is stored here; OSError for what is no number."""
    bound, policy = digits(info.get("maxmemory", "0")), info.get("maxmemory_policy", "")
    if not _POLICY.fullmatch(policy):
        policy = ""
    if policy.startswith("volatile-") and options.expire_seconds is None:
        reason = f"the server evicts only what expires ({policy}); add an expiry, or give the server an allkeys policy"
        raise ConfigError(reason, "expire")
    if bound:
        note = "maxmemory-policy is noeviction: once the server is full nothing more is stored"
        return TransportInfo(bound, (note,) if policy == "noeviction" else ())
    if not options.allow_unbounded:
        reason = "the server has no maxmemory and grows until its machine is full; set maxmemory, or write true here"
        raise ConfigError(reason, "allow_unbounded")
    memory = digits(info.get("total_system_memory", "0")) or NUMBER_MAX
    return TransportInfo(memory, ("the server has no maxmemory and grows until its machine is full",))
