"""The conformance suite over the tier of this folder."""

from kvtier_ramstore import Pool, RamOptions, RamStore

from kvtier.testing.conformance import LoadStoreTests


class TestRamStore(LoadStoreTests):
    survives_reopen = True  # the next tier over the same pool finds what was stored
    machine_examples = 5
    pools: dict = {}

    def make(self, place):
        return RamStore(RamOptions(capacity="16MiB"), self.pools.setdefault(place, Pool()))

    def damage(self, place):
        for _, payload in self.pools[place].blocks.values():
            payload[0] ^= 1
        return True
