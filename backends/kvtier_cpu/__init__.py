"""The CPU tier: a region of memory in rows; touches rows that a job names, and their checksums."""

from kvtier_cpu.backend import CPUBackend, CPUOptions
from kvtier_cpu.region.opening import RegionHost, open_region
from kvtier_cpu.region.shared_region import RegionSpec, SharedRegion, Sharing

__all__ = ["CPUBackend", "CPUOptions"]
__all__ += ["RegionHost", "open_region"]
__all__ += ["RegionSpec", "SharedRegion", "Sharing"]
