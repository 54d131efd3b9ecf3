"""The GPU tier: copies between the engine's KV tensors and rows; touches nothing that no job names."""

from kvtier_gpu.backend import GPUBackend, GPUOptions

__all__ = ["GPUBackend", "GPUOptions"]
