"""The bound of an object store, and its cost: for `kvtier check` and for opening."""

from kvtier.options import count_text, size_text
from kvtier.types.geometry import Geometry
from kvtier_remote.answers import reading_answers
from kvtier_remote.objects.library import Store, ended, library, refusal
from kvtier_remote.objects.lifecycle import check_rules
from kvtier_remote.objects.options import ObjectOptions
from kvtier_remote.objects.rights import check_rights
from kvtier_remote.transport import Facts

DOLLARS_PER_PUT = 5.0e-6
DOLLARS_PER_GET = 0.4e-6
"""Requests of S3 Standard in most regions, November 2026; docs/remote.md says where they are from."""
_UNBOUNDED_BYTES = 1 << 62
_GIB = 1 << 30


def look_into(store: Store, options: ObjectOptions) -> Facts:
    """Look into the bucket once, at its rules, and at what may be done there. Blocking; leaves nothing behind. Raises
    ConfigError with the option that is wrong."""

    async def look() -> None:
        async for _ in library().list(store, f"{options.prefix}/m", chunk_size=1):
            return

    try:
        with reading_answers():
            ended(options.request_timeout_seconds, look)
    except (OSError, library().exceptions.BaseError) as error:
        raise refusal(options, error) from None
    facts = facts_of(options)
    notes = facts.notes + check_rules(options)
    check_rights(store, options)
    return Facts(facts.capacity_bytes, notes)


def facts_of(options: ObjectOptions) -> Facts:
    """The bound as the options state it. Raises ConfigError with the option that it lacks."""
    options.check_bound()
    bound = options.bound_bytes
    if bound is None or options.write_bytes_per_day is None:
        return Facts(_UNBOUNDED_BYTES, ("nothing bounds what is kept in the store",))
    daily = size_text(options.write_bytes_per_day)
    said = f"{options.hosts} x {daily} a day x {options.expire_days} days = {size_text(bound)} at most in the store"
    return Facts(bound, (said,))


def cost_notes(options: ObjectOptions, geometry: Geometry) -> tuple[str, ...]:
    """Requests and dollars, for blocks of the groups' mean size."""
    groups = range(geometry.num_groups)
    size = sum(geometry.aligned_bytes(group) for group in groups) // geometry.num_groups
    requests = -(-_GIB // size)
    notes = [
        f"1 GiB is {count_text(requests)} requests of {size_text(size)}: {requests * DOLLARS_PER_PUT:.4f} $ to write, "
        f"{requests * DOLLARS_PER_GET:.4f} $ to read"
    ]
    if options.write_bytes_per_day is not None:
        daily = -(-options.write_bytes_per_day // size)
        spent = daily * DOLLARS_PER_PUT
        notes.append(f"writing all that is allowed is {count_text(daily)} requests and {spent:.2f} $ a day and process")
    return tuple(notes)
