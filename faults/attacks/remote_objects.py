"""The attacks on servers of blocks, over the S3 gateway of a Ceph cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvtier.testing import ProxyFaults

from ..attack import Attack, Budget, Tally
from ..remote.gateway import bucket, without_ceph
from .remote import LINKS, STOPS, faulty_servers, linked
from .remote_values import bytes_on_the_way, hosts_that_reset, wrong_values

STORM = ProxyFaults(answer=b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
FAULTS = {"503 to all": partial(linked, link=STORM)} | STOPS | LINKS


def gateways(budget: Budget) -> Tally:
    """What is done to a Valkey server and its network, done to the gateway and its."""
    from support_ceph import ceph_cluster  # to be found inside an attack only

    with ceph_cluster() as ceph:
        return faulty_servers(budget, partial(bucket, ceph), FAULTS)


def objects(budget: Budget) -> Tally:
    """Objects that are wrong in the bucket and on their way, and hosts that reset."""
    from support_ceph import ceph_cluster

    tally = Tally()
    with ceph_cluster() as ceph:
        for attack, one_in in ((wrong_values, 1), (bytes_on_the_way, 1), (hosts_that_reset, 4)):
            part = replace(budget, count=max(1, budget.count // one_in))
            tally.add(attack(part, partial(bucket, ceph)))
    return tally


ATTACKS = (
    Attack(
        "s3 gateway",
        "radosgw of a Ceph cluster: 503 to all by a proxy, then what is done to valkey: kill -9, SIGSTOP, a bucket "
        "that is emptied, bad networks",
        2, 130, gateways, minutes=5, missing=without_ceph,
    ),
    Attack(
        "objects on s3",
        "over Ceph: values as on valkey, bytes on the way as to valkey, hosts as on valkey (one life for four values)",
        8, 1000, objects, minutes=5, missing=without_ceph,
    ),
)  # fmt: skip
