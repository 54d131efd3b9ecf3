"""All that the author of a tier reads: the contract, discovery, inspection and checksums."""
