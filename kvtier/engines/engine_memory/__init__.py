"""Lower tiers below an engine's own CPU tier; adapters call them, and they touch its memory by a `CopyPermit` alone.

An integration writes four things: where blocks are in the engine's memory, what identifies their bytes, options, and
the engine's calls. The rest is here: a tier of any type (`fs`, `shared_fs`, `valkey`, `s3`, ...) with its directory,
slots, eviction and health, which are those of `kvtier.control`.

    memory = PagedMemory([[keys_and_values]])       one list of arrays for each KV cache group, see `memory`
    namespace = Namespace(layout, model=..., tag=...)       the layout's groups are those of the memory
    tier = BlockingTier(options, namespace, memory, "name", log)        opens the tier; options: `EngineMemoryOptions`
    tier.store(keys, places, seconds)           one outcome for each block, `BlockOutcome`, within these seconds
    found = tier.find(keys, seconds)            which of the keys are here
    tier.lease(keys), tier.release(keys)        found blocks stay for `lease_seconds`, or until they are released
    tier.load(keys, places, seconds)            as `store`: a block is LOADED with the bytes that were stored, or not
    tier.reset(seconds), tier.stats(), tier.close()

`BlockingTier` serves engines whose threads wait for a call. `EngineMemoryTier`, its base, serves an engine that polls:
`lookup`, `submit` of an `EngineTransfer`, `finished`, `end_step`, `drain`.

Both promise that a block is loaded with exactly the bytes stored under its key in the namespace, or its outcome has the
reason. Every block passes through aligned memory of kvtier, `inflight_bytes` of it, where its checksum is computed or
verified: the engine's memory is not copied as a whole, and no I/O touches it. After a call has returned, or a transfer
was returned by `finished`, nothing here touches the memory it named, whatever a disk does later. After repeated errors
or late jobs the tier is left alone for five seconds, and every key is a miss meanwhile. An engine is imported in its
integration only.
"""
