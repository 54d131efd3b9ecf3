"""Attacks on what is stored: flipped bits, wrong files in the place of right ones, another namespace or version."""

from __future__ import annotations

from ..attack import Attack, Budget, Tally


def bit_flips(budget: Budget) -> Tally:
    """One random bit at a time; see `content/flips.py`."""
    from ..content import flips  # the test modules it rests on are to be found inside an attack only

    return flips.bit_flips(budget)


ATTACKS = (
    Attack(
        name="bit flips",
        how="one random bit of a block in its mapped file, shown to the verification of loads, recovery and fsck; a "
        "tenth in superblock, region header, snapshot, epoch, account, lease; 3 % through a whole tier, 0.1 % through "
        "roots opened anew",
        normal=2_000,
        long=1_000_000,
        attack=bit_flips,
        shards=8,
    ),
)
