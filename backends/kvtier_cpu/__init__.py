"""The CPU tier: a page-aligned region of shared memory, and the backend that fills and empties its rows."""

from kvtier_cpu.backend import CPUBackend, CPUOptions
from kvtier_cpu.region.opening import RegionHost, attach_region, open_region
from kvtier_cpu.region.shared_region import RegionSpec, SharedRegion, Sharing

__all__ = ["CPUBackend", "CPUOptions"]
__all__ += ["RegionHost", "attach_region", "open_region"]
__all__ += ["RegionSpec", "SharedRegion", "Sharing"]
