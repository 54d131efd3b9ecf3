"""The meaning of Mooncake's error codes for blocks, and for calls without blocks."""

import errno
import os

from kvtier.types.jobs import MISSING, BlockOutcome, DropReason, dropped, failed

MISSING_CODES = frozenset((-703, -704, -710, -712))
"""Not there, not complete yet, or without a replica."""
NO_SPACE = -200
_IN_PROGRESS = frozenset((-601, -705, -706, -708))
"""Another client writes the same name at this moment."""
_LEASE_EXPIRED = -707
_ERRNO = {
    NO_SPACE: errno.ENOSPC,
    -101: errno.EHOSTDOWN,
    -103: errno.EHOSTDOWN,
    -600: errno.EINVAL,
    -900: errno.ECONNREFUSED,
    -901: errno.ETIMEDOUT,
    _LEASE_EXPIRED: errno.EBUSY,
    **dict.fromkeys(_IN_PROGRESS, errno.EBUSY),
}


def outcome_of(code: int) -> BlockOutcome:
    """The outcome of a block whose request ended with a code below 0."""
    if code in MISSING_CODES:
        return MISSING
    if code == NO_SPACE:
        return dropped(DropReason.DISK_FULL)
    if code in _IN_PROGRESS:
        return dropped(DropReason.IN_FLIGHT)
    return failed(errno_of(code))


def errno_of(code: int) -> int:
    """The errno nearest to a code."""
    return _ERRNO.get(code, errno.EIO)


def os_error(code: int) -> OSError:
    """A code as an OSError."""
    number = errno_of(code)
    return OSError(number, f"{os.strerror(number)}, code {code} of the library")
