"""Copy engines: what moves bytes between KV tensors and the region. One contract, one file for each device."""
