"""The former place of `kvtier.tier`."""

raise ImportError("kvtier.tier_api is kvtier.tier now: kvtier.tier_api.contract, for example, is kvtier.tier.contract")
