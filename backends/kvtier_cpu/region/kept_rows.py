"""Rows that a former process has left, by the descriptors that its service manager kept."""

from __future__ import annotations

import logging
import os

from kvtier.errors import RegionError
from kvtier_cpu.region.attaching import attach_region
from kvtier_cpu.region.opening import RegionHost, open_region
from kvtier_cpu.region.populate import map_populated
from kvtier_cpu.region.shared_region import RegionSpec, SharedRegion

_log = logging.getLogger(__name__)


def open_kept(kept: tuple[int, int], spec: RegionSpec, host: RegionHost) -> SharedRegion:
    """The region behind the descriptors of rows and control area, with its bytes as they are; a fresh one if that is
    not of these rows and blocks. Blocks. Raises as `open_region`."""
    try:
        region = attach_region(spec, *kept)
    except RegionError as error:
        _log.warning("rows of the process before are not used: %s", error)
        for fd in kept:
            os.close(fd)
        return open_region(spec, host)
    region.memfds = kept
    for fd in kept:
        region.at_close.callback(os.close, fd)
    region.populated = map_populated(region.maps[0])
    return region
