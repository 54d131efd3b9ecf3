"""Copy engines between KV tensors and region: contract, host memory, CUDA with its parts; called by the GPU tier."""
