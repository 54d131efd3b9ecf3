"""Attacks on what is stored: flipped bits, wrong files in the place of right ones, another namespace or version."""

from __future__ import annotations

from ..attack import Attack, Budget, Tally


def bit_flips(budget: Budget) -> Tally:
    """One random bit at a time; see `content/flips.py`."""
    from ..content import flips  # the test modules it rests on are to be found inside an attack only

    return flips.bit_flips(budget)


def wrong_file(budget: Budget) -> Tally:
    """Something else in the place of a file; see `content/wrong_files.py`."""
    from ..content import wrong_files

    return wrong_files.wrong_file(budget)


def lying_roots(budget: Budget) -> Tally:
    """Records that lie under a checksum that holds; see `content/lies.py`."""
    from ..content import lies

    return lies.lying_roots(budget)


def namespace_skew(budget: Budget) -> Tally:
    """Another namespace or format version; see `content/skew.py`."""
    from ..content import skew

    return skew.namespace_skew(budget)


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
    Attack(
        name="wrong file",
        how="superblock, slab, snapshot, lock, slot, block, epoch, account, folder: truncated, extended, zeroed, gone, "
        "of another root, key, namespace, epoch, format, owner, mode; link, pipe, socket, folder: a miss or a refusal",
        normal=128,
        long=2_560,
        attack=wrong_file,
    ),
    Attack(
        name="lying records",
        how="fields of every record (superblock, region, slot and block headers, snapshot, epoch, account, lease, "
        "lock, manifest) set to limits, powers of two, random and other records' values, JSON to 1e999, NaN, nesting, "
        "shorter records, before opening or in use, the checksum recomputed; then tools, a stack with 50 operations, "
        "repair: typed errors only, 20 s a step, 256 MiB above an undamaged root, nothing left open",
        normal=2_000,
        long=100_000,
        attack=lying_roots,
        minutes=10.0,
        shards=4,
    ),
    Attack(
        name="namespace skew",
        how="every field of the namespace changed, one at a time, and the version of every format: nothing is found, "
        "what is stored under the same keys is kept apart, only a refusal of another format is raised",
        normal=142,
        long=1_420,
        attack=namespace_skew,
    ),
)
