"""The attacks on servers of blocks, over object stores: the S3 gateway of a Ceph cluster, and Azure's emulator."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from faults.machine.tcp_proxy import ProxyFaults

from ..attack import Attack, Budget, Tally
from ..remote.objects import bucket, container, with_ceph, without_azurite, without_ceph
from .remote import LINKS, STOPS, Fault, faulty_servers, linked
from .remote_access import forks
from .remote_values import bytes_on_the_way, hosts_that_reset, wrong_values


def storm(status: str) -> Fault:
    """Whatever is asked is refused for now."""
    answer = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    return partial(linked, link=ProxyFaults(answer=answer.encode()))


STORMS = {"503 to all": storm("503 Slow Down"), "429 to all": storm("429 Too Many Requests")}
FAULTS = STORMS | STOPS | LINKS


def gateways(ceph: Any, budget: Budget) -> Tally:
    """What is done to a Valkey server and its network, done to the gateway and its."""
    return faulty_servers(budget, partial(bucket, ceph), FAULTS)


def objects(ceph: Any, budget: Budget) -> Tally:
    """Objects that are wrong in the bucket and on their way, and hosts that reset."""
    return wrong_objects(budget, partial(bucket, ceph))


def wrong_objects(budget: Budget, start: Any) -> Tally:
    """As on a Valkey server; one life of hosts for four values."""
    tally = Tally()
    for attack, one_in in ((wrong_values, 1), (bytes_on_the_way, 1), (hosts_that_reset, 4)):
        tally.add(attack(replace(budget, count=max(1, budget.count // one_in)), start))
    return tally


def forks_over_objects(ceph: Any, budget: Budget) -> Tally:
    """The library's runtime has threads that no child has."""
    return forks(budget, partial(bucket, ceph))


def emulators(budget: Budget) -> Tally:
    """What is done to the gateway and its network, done to the emulator and its; then what is wrong in it."""
    from support_azurite import azurite  # to be found inside an attack only

    with azurite() as one:
        tally = faulty_servers(budget, partial(container, one), FAULTS)
        tally.add(wrong_objects(replace(budget, count=2 * budget.count), partial(container, one)))
        return tally


ATTACKS = (
    Attack(
        "s3 gateway",
        "radosgw of a Ceph cluster: 503 or 429 to all by a proxy, then what is done to valkey: kill -9, SIGSTOP, a "
        "bucket that is emptied, bad networks",
        3, 130, with_ceph(gateways), minutes=5, missing=without_ceph,
    ),
    Attack(
        "objects on s3",
        "over Ceph: values as on valkey, bytes on the way as to valkey, hosts as on valkey (one life for four values)",
        8, 1000, with_ceph(objects), minutes=5, missing=without_ceph,
    ),
    Attack(
        "fork over s3",
        "as over valkey, over Ceph: the client library has threads of its own",
        2, 60, with_ceph(forks_over_objects), minutes=5, missing=without_ceph,
    ),
    Attack(
        "azure emulator",
        "Azurite, and the network before it, as the s3 gateway; then values, bytes on the way and hosts as on s3, two "
        "for each of the others",
        3, 60, emulators, minutes=8, missing=without_azurite,
    ),
)  # fmt: skip
