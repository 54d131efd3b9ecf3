"""GPU tier: the engine's own KV tensors on any torch device."""

from kvtier_gpu.backend import GPUBackend, GPUOptions

__all__ = ["GPUBackend", "GPUOptions"]
